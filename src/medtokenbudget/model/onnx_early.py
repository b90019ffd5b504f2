"""The ONNX graph of a model whose backbone is routed early: image to logits and kept patches.

Its own file because the router is inside this graph: it looks, K patches are chosen, and only those run through the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.model.routed import MedTokenBudget


class EarlyGraph(nn.Module):
    """Images [B, 3, S, S], RGB in [0, 1], to logits [B, C] and the kept patches [B, K]: router, chosen patches, blocks, head."""

    signals: tuple[str, ...] = ()
    mean: Tensor
    std: Tensor

    def __init__(self, model: MedTokenBudget, head: nn.Module) -> None:
        super().__init__()
        self.head, self.backbone = head, model.backbone
        self.parts = nn.ModuleList(_networks(model))
        preprocessing = model.backbone.preprocessing
        self.register_buffer("mean", torch.tensor(preprocessing.mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(preprocessing.std).view(1, 3, 1, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.backbone.tokens((image - self.mean) / self.std)
        assert tokens.places is not None
        return self.head(tokens.patches.mean(1)), tokens.places


def _networks(model: MedTokenBudget) -> list[nn.Module]:
    """Everything with parameters that the graph runs: the backbone, and the router's network and selector."""
    scout = model.scout
    assert scout is not None
    selector: Any = scout.classifier().selector
    networks: list[nn.Module] = [model.backbone.model, selector] if isinstance(selector, nn.Module) else [model.backbone.model]
    return networks if model.backbone_fingerprint["route"]["way"] == "inside" else [*networks, scout.backbone.model]


def early_graph(model: MedTokenBudget, part: str, method: str) -> nn.Module | None:
    """The graph of an early routed model; None for other models.

    Raises:
        RequestError: There is no such part.
    """
    if model.fixed_budget is None:
        return None
    if part != "whole":
        raise RequestError("The patches of this model are chosen before or inside the backbone. Use --part whole.")
    head = model.classifier(method).required_head
    if head.reads == "tokens":
        raise RequestError(
            f"Head '{head.name}' reads tokens, so it cannot be exported. Export a method with the head mlp or linear."
        )
    return EarlyGraph(model, head)


def check_early(graph: nn.Module, inputs: dict[str, Tensor], run: Callable[[dict[str, Any]], Any], tolerance: float) -> None:
    """Raise an error unless the exported file gives what the graph gives in PyTorch: the same patches, numbers within tolerance."""
    with torch.inference_mode():
        values, indices = graph(*inputs.values())
    found, found_indices = (torch.from_numpy(value) for value in run({name: value.numpy() for name, value in inputs.items()}))
    same = bool((found_indices.sort(1).values == indices.sort(1).values).all())
    difference = (found - values).abs().max().item()
    if not same or difference > tolerance:
        kept = "the same" if same else "other"
        raise WorkError(f"The exported graph keeps {kept} patches and differs by {difference:.1e}, so nothing was written.")
