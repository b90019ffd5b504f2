"""The table of routings: its columns, and what the rows of images with a mask measure.

Its own file because a table in one piece and a table in shards have the same columns and measure the same.
"""

from __future__ import annotations

from array import array
from functools import lru_cache

import numpy as np
import torch

from medtokenbudget.metrics import Retention, retention_of_counts
from medtokenbudget.model import Routing
from medtokenbudget.model.table import Column, routing_columns
from medtokenbudget.routing import create_selector
from medtokenbudget.tokens import TokenBatch


def columns() -> list[Column]:
    """Columns of the table of routings: those of a routing, and the lesion patches that the control `center` keeps."""
    center = Column("center_lesion", "count", center_lesion)
    *first, kept, scores = routing_columns()
    return [*first, center, kept, scores]


def center_lesion(answer: Routing) -> int | None:
    """Lesion patches that keeping the middle of the image would keep; None without a mask."""
    return None if answer.lesion is None else int(answer.lesion[_center(answer.grid)[: answer.k]].sum())


@lru_cache
def _center(grid: tuple[int, int]) -> np.ndarray:
    tokens = TokenBatch(torch.zeros(1, grid[0] * grid[1], 1), grid)
    indices = create_selector("center").select(tokens, tokens.n).indices
    assert indices is not None
    return indices[0].numpy()


class Measured:
    """Counts of the images with a mask: a few bytes per image, whatever the number of patches."""

    def __init__(self) -> None:
        self.masks = 0  # also those of methods that merge patches, which measure nothing
        self.lesion, self.kept, self.center, self.k = array("i"), array("i"), array("i"), array("i")

    def add(self, answer: Routing) -> None:
        """Count an image, if it has a mask and its method keeps patches."""
        self.add_counts(
            None if answer.lesion is None else int(answer.lesion.sum()), answer.kept_lesion, center_lesion(answer), answer.k
        )

    def add_counts(self, lesion: int | None, kept: int | None, center: int | None, k: int) -> None:
        """Count an image by the cells of its row."""
        self.masks += lesion is not None
        if lesion is not None and kept is not None and center is not None:
            for values, value in ((self.lesion, lesion), (self.kept, kept), (self.center, center), (self.k, k)):
                values.append(value)

    def retention(self, grid: tuple[int, int]) -> dict[str, Retention]:
        """Retention of the router and of the controls on the same images; empty if none has a mask."""
        if not self.lesion:
            return {}
        lesion, k = np.asarray(self.lesion), np.asarray(self.k)
        n = np.full(len(lesion), grid[0] * grid[1])
        kept = {"router": np.asarray(self.kept), "center": np.asarray(self.center), "random": lesion * k / n}
        return {name: retention_of_counts(values, lesion, k, n) for name, values in kept.items()}
