"""Reads `routing.safetensors`: the order in which each method keeps the patches of each image, and the scores behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from medtokenbudget.errors import RequestError
from medtokenbudget.metrics import kept_lesion_counts, ratio, reachable


@dataclass(frozen=True)
class PatchOrders:
    """Patch orders and scores of the validation images as they are (without off-center views).

    Attributes:
        image_ids: Ids of the n images.
        grid: Rows and columns of the patch grid; N is their product.
        order: (method, seed) -> `[n, N]` patch numbers, best first.
        scores: (method, seed) -> `[n, N]` scores; only for methods that learn to score.
        lesion: `[n, N]` bool, the lesion patches.
        has_mask: `[n]` bool.
        covered: `[n, N]` share of each patch that the mask covers; None if the run did not record it.
    """

    image_ids: list[str]
    grid: tuple[int, int]
    order: dict[tuple[str, int], np.ndarray]
    scores: dict[tuple[str, int], np.ndarray]
    lesion: np.ndarray
    has_mask: np.ndarray
    covered: np.ndarray | None = None

    @classmethod
    def read(cls, path: Path) -> PatchOrders:
        """Reads the file of a run.

        Raises:
            RequestError: If the file is damaged or has another format.
        """
        try:
            with safe_open(str(path), framework="numpy") as file:
                about = json.loads((file.metadata() or {})["routing"])
                names = sorted(file.keys())
                order = {_unit(k): file.get_tensor(k).astype(np.int64) for k in names if k.startswith("order/")}
                scores = {_unit(k): file.get_tensor(k).astype(np.float64) for k in names if k.startswith("scores/")}
                lesion, has_mask = (file.get_tensor(name).astype(bool) for name in ("lesion", "has_mask"))
                covered = file.get_tensor("covered") / 255.0 if "covered" in names else None
            ids, (rows, columns) = about["image_ids"]["as-is"], about["grid"]
            return cls(ids, (int(rows), int(columns)), order, scores, lesion, has_mask, covered)
        except (KeyError, ValueError, TypeError, OSError, RecursionError, SafetensorError) as error:
            raise RequestError(f"Cannot read {path} ({error}). Create it again with `mtb sweep`.") from None

    def kept(self, method: str, seed: int, k: int) -> np.ndarray:
        """`[n, N]` bool: the `k` best patches of each image."""
        order = self.order[method, seed]
        kept = np.zeros(order.shape, bool)
        np.put_along_axis(kept, order[:, :k], True, axis=1)
        return kept

    def share_of_possible(self, method: str, seed: int, k: int) -> np.ndarray:
        """`[n]` kept lesion patches as a share of what `k` patches could cover; NaN for images without a lesion patch."""
        lesion = self.lesion & self.has_mask[:, None]
        kept = kept_lesion_counts(self.order[method, seed], lesion, [k])[:, 0]
        return ratio(kept, reachable(lesion.sum(1), k))

    def seed_of(self, method: str) -> int | None:
        """The first seed with a patch order of this method."""
        return min((seed for name, seed in self.order if name == method), default=None)


def _unit(key: str) -> tuple[str, int]:
    """`order/METHOD/SEED` -> (METHOD, SEED)."""
    _, *method, seed = key.split("/")
    return "/".join(method), int(seed)
