"""What a model says about one image. Its own file because the table writer, the overlay and the service all read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prediction:
    """The answer for one image at one budget.

    image          the path, or 'image 3' for one that came from memory
    probabilities  class name to probability, in the order of the model's classes
    label          the class with the highest probability
    scores         [N] float32 what the patches were ranked by (for LATS the smoothed scores), in raster order; None for mergers
    kept           [K] int64 kept patches, best first; None for mergers, which keep no patch as it was
    tokens         [K, D] float32 tokens in the order of `kept`
    assignment     [N] int64 output token each patch went to, -1 for dropped
    """

    image: str
    probabilities: dict[str, float]
    label: str
    scores: np.ndarray | None
    kept: np.ndarray | None
    tokens: np.ndarray
    assignment: np.ndarray
    budget: float
    k: int
    grid: tuple[int, int]
    selector: str = "lats"

    @property
    def probability(self) -> float:
        """Probability of `label`."""
        return self.probabilities[self.label]

    @property
    def kept_mask(self) -> np.ndarray | None:
        """[h, w] bool, True where a patch stayed; None for mergers."""
        if self.kept is None:
            return None
        mask = np.zeros(self.grid[0] * self.grid[1], dtype=bool)
        mask[self.kept] = True
        return mask.reshape(self.grid)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the tokens."""
        return {
            "image": self.image,
            "label": self.label,
            "probabilities": self.probabilities,
            "budget": self.budget,
            "k": self.k,
            "grid": list(self.grid),
            "selector": self.selector,
            "kept": None if self.kept is None else self.kept.tolist(),
            "scores": None if self.scores is None else [float(score) for score in self.scores],
        }
