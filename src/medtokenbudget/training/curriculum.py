"""The training budget over the epochs: cosine from 0.5 to 0.25 over 20 epochs, then constant; or fixed.

The curriculum ablation swaps nothing but this.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from medtokenbudget.config import CurriculumConfig
from medtokenbudget.errors import BudgetError, RequestError, UnknownNameError


class BudgetCurriculum:
    """`budget(epoch)` for epochs counted from 0. Options are the fields of `CurriculumConfig`."""

    def __init__(self, config: CurriculumConfig | None = None, **changes: Any) -> None:
        try:
            self.config = replace(config or CurriculumConfig(), **changes)
        except TypeError as error:
            raise RequestError(f"Unknown curriculum option: {error}.") from None
        if self.config.kind not in ("cosine", "fixed"):
            raise UnknownNameError.of("curriculum", self.config.kind, ("cosine", "fixed"))
        for value in (self.config.start, self.config.end):
            if not 0 < value <= 1:
                raise BudgetError(f"A curriculum budget must be in (0, 1], got {value}.")
        if self.config.epochs < 1:
            raise RequestError(f"A curriculum needs at least one epoch, got {self.config.epochs}.")

    @classmethod
    def from_config(cls, config: CurriculumConfig) -> BudgetCurriculum:
        return cls(config)

    @classmethod
    def fixed(cls, budget: float) -> BudgetCurriculum:
        """The same budget in every epoch."""
        return cls(kind="fixed", start=budget)

    def budget(self, epoch: int) -> float:
        if epoch < 0:
            raise RequestError(f"Epochs are counted from 0, got {epoch}.")
        start, end = self.config.start, self.config.end
        if self.config.kind == "fixed":
            return start
        if epoch >= self.config.epochs:
            return end
        share = (1 + math.cos(math.pi * epoch / self.config.epochs)) / 2
        # Twelve digits: a budget that is 0.3749999... by rounding would cost a patch.
        return round(end + (start - end) * share, 12)
