"""`Guarantee`: a calibrated promise about the lesion, stored with a model. Pass it wherever a model takes a budget.

The statistics of the calibration are in `routing/conformal.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from medtokenbudget.errors import RequestError
from medtokenbudget.escaping import markdown_text
from medtokenbudget.routing.conformal import Promise, groups_needed, kept_counts, relative_scores


@dataclass(frozen=True, kw_only=True)
class Guarantee(Promise):
    """A promise (`retention`, `coverage`), and the threshold on a method's scores that keeps it on images like the calibrated ones.

    Attributes:
        cap: Largest share of the patches that an image may keep; None for no cap. The promise holds with it.
        threshold: Patches with this score or a higher one are kept.
        relative: Whether it is a threshold on `relative_scores`, as for lesion probabilities.
        minimum: Fewest patches of an image.
        most: Most patches of an image.
        selector: The method that gives the scores.
        bound: Risk on the calibration images with the finite-sample correction, at most 1 - retention (1 - coverage).
        kept: Retention of the calibration images, mean over groups.
        tokens: Number of patches that they keep, mean over groups.
        images: Calibration images with a lesion patch.
        groups: Their groups, the exchangeable units.
        dataset: Name of the calibration data.
        data: Hash of the calibration images, their masks and groups.
        model: Fingerprint of the model that was calibrated.
        by: What the promise is kept for each value of, such as 'class'; None for all images together.
        parts: With `by`, a row for each value: `value`, `images`, `groups`, what they `kept` in the calibration, their mean
            `tokens`, and whether the promise covers it (`promised`); too few groups cannot be promised anything.
    """

    cap: float | None
    threshold: float
    minimum: int
    most: int
    selector: str
    bound: float
    kept: float
    tokens: float
    images: int
    groups: int
    dataset: str
    data: str
    model: str
    relative: bool = False
    by: str | None = None
    parts: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.minimum <= self.most or not math.isfinite(self.threshold):
            raise RequestError(f"No rule keeps {self.minimum} to {self.most} patches above a score of {self.threshold}.")

    def counts(self, scores: ArrayLike) -> np.ndarray:
        """Count the patches `[n]` to keep of images with scores `[n, N]`."""
        return kept_counts(relative_scores(scores) if self.relative else scores, self.threshold, self.minimum, self.most)

    def keeps(self, promise: Promise, selector: str) -> bool:
        """Tell whether this is the guarantee of a promise for a method."""
        return (self.retention, self.coverage, self.selector) == (promise.retention, promise.coverage, selector)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for `config.json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Guarantee:
        """Read the checked values of a `config.json`; what a later version added is ignored."""
        known = {entry.name: values[entry.name] for entry in fields(cls) if entry.name in values}
        return cls(**{**known, "parts": tuple(values.get("parts", ()))})

    def __str__(self) -> str:
        each = "" if self.by is None else f", for each {self.by}"
        return super().__str__() + each + ("" if self.cap is None else f", at most {100 * self.cap:g}% of the patches")

    def table(self) -> list[list[str]]:
        """Return the rows of `parts` as text, with a head."""
        needed = groups_needed(self)
        rows = [[str(self.by), "groups", "images", "kept", "patches", "promised"]]
        for row in self.parts:
            counts, promised = (f"{row['groups']:,}", f"{row['images']:,}"), row["promised"]
            measured = (f"{row['kept']:.1%}", f"{row['tokens']:.0f}")
            rows.append([str(row["value"]), *counts, *measured, "yes" if promised else f"no, {needed} groups are needed"])
        return rows

    def on_card(self, card: str) -> str:
        """Return a model card with the table of this guarantee in place of an earlier one of the same promise."""
        title = f"## Promise of {self.selector}: {self}"
        before, _, after = card.partition(f"{title}\n")
        rest = after[after.find("\n## ") + 1 :] if "\n## " in after else ""
        head, *rows = [f"| {' | '.join(map(markdown_text, row))} |" for row in self.table()]
        lines = [title, "", f"Calibrated on {self.dataset}.", "", head, "|" + " --- |" * len(self.table()[0]), *rows, ""]
        return "\n".join([before.rstrip("\n"), "", *lines]) + (f"\n{rest}" if rest else "")


def with_guarantee(known: Sequence[Guarantee], new: Guarantee) -> tuple[Guarantee, ...]:
    """Add the guarantee of a calibration to a model's; it replaces an earlier one of the same promise and method."""
    others = [guarantee for guarantee in known if not guarantee.keeps(new, new.selector)]
    return tuple(sorted([*others, new], key=lambda one: (one.selector, one.retention, one.coverage or 0)))
