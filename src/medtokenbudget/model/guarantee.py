"""`Guarantee`: a calibrated promise about the lesion, stored with a model. Pass it wherever a model takes a budget.

The statistics of the calibration are in `routing/conformal.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from medtokenbudget.errors import RequestError
from medtokenbudget.routing.conformal import Promise, kept_counts


@dataclass(frozen=True)
class Guarantee:
    """A threshold on the scores of one method, and the promise that it keeps on images like those it was calibrated on.

    Attributes:
        retention: Promised share of the lesion patches.
        coverage: None: on average. Otherwise the promised share of the images that keep at least `retention` of their lesion.
        cap: Largest share of the patches that an image may keep; None for no cap. The promise holds with it.
        threshold: Patches with this score or a higher one are kept.
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
    """

    retention: float
    coverage: float | None
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

    @property
    def promise(self) -> Promise:
        """What is promised."""
        return Promise(self.retention, self.coverage)

    def counts(self, scores: ArrayLike) -> np.ndarray:
        """Count the patches `[n]` to keep of images with scores `[n, N]`."""
        return kept_counts(scores, self.threshold, self.minimum, self.most)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for `config.json`."""
        return asdict(self)

    def __str__(self) -> str:
        cap = "" if self.cap is None else f", at most {100 * self.cap:g}% of the patches"
        return f"{self.promise}{cap}"


def read_guarantees(values: Sequence[dict[str, Any]]) -> tuple[Guarantee, ...]:
    """Read guarantees from the checked values of a `config.json`."""
    names = [entry.name for entry in fields(Guarantee)]
    return tuple(Guarantee(**{name: value[name] for name in names}) for value in values)


def with_guarantee(known: Sequence[Guarantee], new: Guarantee) -> tuple[Guarantee, ...]:
    """Add the guarantee of a calibration to those of a model: a new one replaces that of the same promise and method."""
    kept = [one for one in known if (one.promise, one.selector) != (new.promise, new.selector)]
    return tuple(sorted([*kept, new], key=lambda one: (one.selector, one.retention, one.coverage or 0)))


def find_guarantee(known: Sequence[Guarantee], promise: Promise, selector: str, fingerprint: str) -> Guarantee:
    """Find the guarantee of a promise for a method of the model with this fingerprint.

    Raises:
        RequestError: It was not calibrated, or the model was trained again since.
    """
    asked = f"--retention {promise.retention:g}" + ("" if promise.coverage is None else f" --coverage {promise.coverage:g}")
    command = f"`mtb calibrate MODEL MANIFEST {asked}`"
    of_method = [one for one in known if one.selector == selector]
    guarantee = next((one for one in of_method if one.promise == promise), None)
    if guarantee is None:
        have = "; ".join(map(str, of_method)) or "nothing"
        raise RequestError(
            f"'{selector}' of this model is not calibrated for {promise}. Calibrated: {have}. Use a budget, or calibrate it on "
            f"images with masks that it was not trained on: {command}."
        )
    if guarantee.model != fingerprint:
        raise RequestError(
            f"The guarantee of {promise} was calibrated for another version of this model and does not hold. Run {command} again."
        )
    return guarantee
