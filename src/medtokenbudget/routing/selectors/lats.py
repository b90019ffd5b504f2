"""LATS, the lesion-aware token scorer of the paper: patch embedding and three weak signals through an MLP to one score per patch.

`LATSSelector` keeps the patches with the highest smoothed score. `LATS.forward` is the paper's network, equation by equation.
`LATS.logits` computes the same function in fewer operations, and is what training and inference call: the concatenation is never
built, and the input layer, which no nonlinearity follows, is multiplied into the first hidden layer before it meets the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import SIGNALS, LATSConfig, RouterConfig, TrainConfig
from medtokenbudget.errors import MissingSignalError, RequestError, ShapeError, UnknownNameError
from medtokenbudget.routing.base import register_selector
from medtokenbudget.routing.signals import feature_norm, local_contrast
from medtokenbudget.routing.trainable import ScoredRanker, with_options
from medtokenbudget.routing.trainable import dropout as drop
from medtokenbudget.tokens import TokenBatch

CONTRAST_REDUCTION = 16
"""The contrast projection maps D to D / 16."""


class LATS(nn.Module):
    """Scores [B, N] in [0, 1] of a `TokenBatch`; 512,049 parameters at D = 768. Signals that are left out have none."""

    def __init__(self, dim: int, config: LATSConfig | None = None) -> None:
        super().__init__()
        config = config or LATSConfig()
        if dim < 1:
            raise RequestError(f"`dim` must be at least 1, got {dim}.")
        self.dim = dim
        # In the paper's order, whatever order they were given in: it is that of the columns of the input layer.
        self.config = replace(config, signals=ordered_signals(config.signals, SIGNALS))
        self.signals, hidden, layers = self.config.signals, config.hidden, config.layers
        self.scalars = [name for name in ("attention", "norm") if name in self.signals]
        projected = max(1, dim // CONTRAST_REDUCTION) if "contrast" in self.signals else 0
        self.contrast = nn.Linear(dim, projected) if projected else None
        self.input = nn.Linear(dim + len(self.scalars) + projected, hidden)
        self.hidden = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.output = nn.Linear(hidden, 1)

    def forward(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        """Compute the scores [B, N] in [0, 1], as the paper writes them."""
        self._check(tokens)
        tokens = tokens.float()
        z = tokens.patches  # [B, N, D]
        inputs = [z]
        if "attention" in self.signals:
            inputs.append(self._scalar(tokens, "attention").unsqueeze(-1))  # s_attn = 1 - H / log N (Eq. 1)
        if "norm" in self.signals:
            inputs.append(self._scalar(tokens, "norm").unsqueeze(-1))  # s_norm = |z_i| / max_j |z_j| (Eq. 2)
        if self.contrast is not None:
            c = local_contrast(z, tokens.grid, self.config.neighborhood)  # c_i, the mean dissimilarity to the neighbors (Eqs. 3, 4)
            inputs.append(c.unsqueeze(-1) * self.contrast(z))  # f_contrast = c_i W_freq z_i (Eq. 5)
        x = self.input(torch.cat(inputs, dim=-1))  # [z; s_attn; s_norm; f_contrast]
        for linear, norm in zip(self.hidden, self.norms):
            x = drop(F.gelu(norm(linear(x))), self.config.dropout if self.training else 0.0, generator)
        return torch.sigmoid(self.output(x).squeeze(-1).float())

    def logits(
        self,
        tokens: TokenBatch,
        generator: torch.Generator | None = None,
        signals: Sequence[str] | None = None,
        dropout: float | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """Compute the scores before the sigmoid, [B, N] in fp32: the fused form of `forward`.

        `signals` stay on, the others enter as zeros. `dropout` is by default that of the settings in training mode and 0
        otherwise. `at` [B, T] are the numbers of the patches to score, giving [B, T].
        """
        self._check(tokens)
        tokens = tokens.float()
        active = self.signals if signals is None else ordered_signals(signals, self.signals)
        if dropout is None:
            dropout = self.config.dropout if self.training else 0.0
        x = self._first_layer(tokens, active, at)
        for i, (linear, norm) in enumerate(zip(self.hidden, self.norms)):
            x = linear(x) if i else x
            x = drop(F.gelu(norm(x)), dropout, generator)
        return self.output(x).squeeze(-1).float()

    def _check(self, tokens: TokenBatch) -> None:
        if tokens.dim != self.dim:
            raise ShapeError(f"This scorer reads tokens of dimension {self.dim}, but the batch has {tokens.dim}.")

    def _first_layer(self, tokens: TokenBatch, active: Sequence[str], at: Tensor | None) -> Tensor:
        """Apply input and first hidden layer, multiplied into one, to [z; attention; norm; contrast]: [B, N or T, hidden]."""
        first: nn.Linear = self.hidden[0]  # type: ignore[assignment]
        # In fp32 also under autocast: bf16 would round the product of two weights once more.
        with torch.autocast(tokens.patches.device.type, enabled=False):
            weight = first.weight @ self.input.weight
            bias = F.linear(self.input.bias, first.weight, first.bias)
        on_z, on_scalars, on_contrast = weight.split(
            [self.dim, len(self.scalars), weight.shape[1] - self.dim - len(self.scalars)], dim=1
        )
        patches = _taken(tokens.patches, at)
        if self.contrast is None or "contrast" not in active:
            x = F.linear(patches, on_z, bias)
        else:
            # One product for the embedding and its projection W_freq z, which the contrast then gates.
            both = F.linear(patches, torch.cat([on_z, self.contrast.weight]), torch.cat([bias, self.contrast.bias]))
            x, projected = both.split([on_z.shape[0], self.contrast.out_features], dim=-1)
            # Of all patches, also where a sample is scored: contrast needs the neighbors.
            gate = local_contrast(tokens.patches, tokens.grid, self.config.neighborhood).unsqueeze(-1)
            x = x + F.linear(projected * _taken(gate, at), on_contrast)
        used = [(name, i) for i, name in enumerate(self.scalars) if name in active]
        if used:
            values = torch.stack([self._scalar(tokens, name) for name, _ in used], dim=-1)
            x = x + F.linear(_taken(values, at), on_scalars[:, [i for _, i in used]])
        return x

    def _scalar(self, tokens: TokenBatch, name: str) -> Tensor:
        if name == "norm":
            return feature_norm(tokens.patches)
        if tokens.attention_entropy is None:
            raise MissingSignalError(
                "LATS reads attention_entropy, which this batch does not have. Extract tokens with a backbone that exposes its "
                "attention, or build the scorer without the 'attention' signal."
            )
        return tokens.attention_entropy


def _taken(values: Tensor, at: Tensor | None) -> Tensor:
    """Take the patches `at` [B, T] of [B, N, D]: [B, T, D]."""
    return values if at is None else values.take_along_dim(at.unsqueeze(-1), 1)


def ordered_signals(signals: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return `signals` in the paper's order; a name that is not in `known` is an error."""
    for name in signals:
        if name not in known:
            raise UnknownNameError.of("signal", name, known)
    return tuple(name for name in SIGNALS if name in signals)


@register_selector("lats")
class LATSSelector(ScoredRanker):
    """Keeps the patches with the highest smoothed LATS score; the paper pads with zeros.

    `options` replace fields of `config` or `router`: `create_selector("lats", dim=384, neighborhood="grid8", smooth=1)`.
    """

    title = "LATS (paper)"
    description = "The paper's method: a small network scores every patch."
    color, marker = "#3a9bd0", "H"
    line = "--"
    ablations = ("no-attention", "no-norm", "no-contrast", "no-signals", "attention-only", "norm-only", "contrast-only")

    def __init__(self, dim: int, config: LATSConfig | None = None, router: RouterConfig | None = None, **options: Any) -> None:
        scorer, smoothing = with_options(self.name, options, config or LATSConfig(), router or RouterConfig())
        super().__init__(smoothing)
        self.scorer = LATS(dim, scorer)
        self.active: tuple[str, ...] | None = None
        self.requires = ("attention_entropy",) if "attention" in self.scorer.signals else ()

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> LATSSelector:
        return cls(dim, config.lats, config.router)

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        padding = ("router.padding",) if config.router.smooth > 1 else ()
        return (*super().settings(config), "lats", "router.smooth", *padding, "patches")

    def options(self) -> dict[str, Any]:
        return {**vars(self.scorer.config), **vars(self.router), "signals": list(self.scorer.signals)}

    def toggle(self, signals: Sequence[str] | None) -> LATSSelector:
        """Keep only `signals` on at call time (the others enter as zeros); None switches all on again."""
        self.active = None if signals is None else ordered_signals(signals, self.scorer.signals)
        return self

    def ablate(self, name: str | None) -> LATSSelector:
        """Switch off one signal ('no-norm', ...), all but one ('norm-only') or all ('no-signals') after training; None: none."""
        if name is None:
            return self.toggle(None)
        if name not in self.ablations:
            raise UnknownNameError.of("ablation", name, self.ablations)
        if name.endswith("-only"):
            return self.toggle([signal for signal in self.scorer.signals if signal == name.removesuffix("-only")])
        off = name.removeprefix("no-")
        return self.toggle([signal for signal in self.scorer.signals if off not in (signal, "signals")])

    def logits(self, tokens: TokenBatch, generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        return self.scorer.logits(tokens, generator, self.active, at=at)
