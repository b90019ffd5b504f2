"""The base of every head. A head reads the mean of the kept tokens; third-party heads build on this class."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medtokenbudget.errors import RequestError, ShapeError


class Head(nn.Module, ABC):
    """Pooled tokens to class logits.

    Subclasses take `dim` and `classes` first, keep their other options as attributes, and write `logits`.

    Attributes:
        name: Set by `register_head`.
        dim: Embedding dimension D of the tokens.
        classes: Number of classes C.
    """

    name: ClassVar[str] = ""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        if min(dim, classes) < 1:
            raise RequestError(f"`dim` and `classes` must be at least 1, got {dim} and {classes}.")
        self.dim, self.classes = dim, classes

    @abstractmethod
    def logits(self, pooled: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Logits [..., C] of pooled tokens [..., D]; `generator` feeds the dropout in training mode."""

    def forward(self, pooled: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Logits [..., C] of pooled tokens [..., D]."""
        if pooled.shape[-1] != self.dim:
            raise ShapeError(f"This head reads tokens of dimension {self.dim}, got {pooled.shape[-1]}.")
        return self.logits(pooled.to(next(self.parameters()).dtype), generator)

    def options(self) -> dict[str, Any]:
        """Arguments that build this head again beside `dim` and `classes`, as JSON values."""
        names = [name for name in inspect.signature(type(self)).parameters if name not in ("dim", "classes")]
        lost = [name for name in names if not hasattr(self, name)]
        if lost:
            raise RequestError(f"Head '{self.name}' must keep its options as attributes to be saved; missing: {', '.join(lost)}.")
        return {name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in names}
