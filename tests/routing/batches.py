"""Small batches of tokens with every field, from a seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from medtokenbudget.routing import Selector, TokenBatch, create_selector, selector_class


def tokens_of(batch: int = 3, grid: tuple[int, int] = (5, 7), dim: int = 32, seed: int = 0, **changes: Any) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    n = grid[0] * grid[1]

    def uniform() -> torch.Tensor:
        return torch.rand(batch, n, generator=generator)

    tokens = TokenBatch(
        patches=torch.randn(batch, n, dim, generator=generator),
        grid=grid,
        cls=torch.randn(batch, dim, generator=generator),
        attention_entropy=uniform(),
        cls_attention=uniform(),
        received_attention=uniform(),
        value_norm=0.5 + uniform(),
        mean_key=torch.randn(batch, n, 8, generator=generator),
        rollout=uniform(),
        luminance=uniform(),
        label=torch.randint(8, (batch,), generator=generator),
        lesion=uniform() > 0.6,
        has_mask=torch.ones(batch, dtype=torch.bool),
        image_id=tuple(f"image-{i}" for i in range(batch)),
    )
    return replace(tokens, **changes)


def selector_of(name: str, dim: int = 32) -> Selector:
    torch.manual_seed(0)
    return create_selector(name, dim=dim) if selector_class(name).learns else create_selector(name)
