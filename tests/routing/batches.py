"""Small batches of tokens with every field, from a seed, and the plain arithmetic that published formulas are checked with."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
        segmentation=uniform(),
        label=torch.randint(8, (batch,), generator=generator),
        lesion=uniform() > 0.6,
        has_mask=torch.ones(batch, dtype=torch.bool),
        image_id=tuple(f"image-{i}" for i in range(batch)),
    )
    return replace(tokens, **changes)


def selector_of(name: str, dim: int = 32) -> Selector:
    torch.manual_seed(0)
    return create_selector(name, dim=dim) if selector_class(name).learns else create_selector(name)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clustered() -> TokenBatch:
    """Two images of 4 x 5 patches, each near one of five centers."""
    noise, n = seeded(3), 20
    centers = torch.randn(2, 5, 6, generator=noise)[:, torch.arange(n) % 5]
    return replace(tokens_of(2, (4, 5), 6), patches=centers + 0.4 * torch.randn(2, n, 6, generator=noise))


def each(tokens: TokenBatch) -> Iterator[tuple[int, list[torch.Tensor], list[float]]]:
    """Row, patches and class attention of each image."""
    for row in range(len(tokens)):
        yield row, list(tokens.patches[row]), tokens.cls_attention[row].tolist()


def mean(vectors: list[torch.Tensor], weights: list[float] | None = None) -> torch.Tensor:
    weights = weights or [1.0] * len(vectors)
    return sum(w * v for w, v in zip(weights, vectors)) / sum(weights)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b) / float(a.norm() * b.norm())


def ranked(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def same_groups(assignment: torch.Tensor, groups: list[set[int]]) -> bool:
    members: dict[int, set[int]] = {}
    for patch, group in enumerate(assignment.tolist()):
        if group >= 0:
            members.setdefault(group, set()).add(patch)
    return sorted(map(sorted, members.values())) == sorted(map(sorted, groups))


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    shares = [math.exp(value - top) for value in values]
    return [share / sum(shares) for share in shares]
