"""How fast the routing core is: ratios against the plainest implementation of the same mathematics, on the same tensors.

`PlainLATS` is the paper's scorer written down word for word; the tests also use it as the independent reference for the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.measuring import in_turns, ratio
from medtokenbudget.config import BUDGETS, LossWeights, TrainConfig
from medtokenbudget.routing import TokenBatch, budget_to_k, create_selector
from medtokenbudget.routing.losses import scorer_terms
from medtokenbudget.training import MLPHead, RoutedClassifier, classification_loss, total_loss


class PlainLATS(nn.Module):
    """The scorer as the paper writes it: concatenate, then a straight `nn.Sequential`."""

    def __init__(self, dim: int, hidden: int = 256, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        projected = dim // 16
        self.contrast = nn.Linear(dim, projected)
        blocks: list[nn.Module] = [nn.Linear(dim + 2 + projected, hidden)]
        for _ in range(layers):
            blocks += [nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Dropout(dropout)]
        self.mlp = nn.Sequential(*blocks, nn.Linear(hidden, 1), nn.Sigmoid())

    def forward(self, tokens: TokenBatch) -> Tensor:
        z = tokens.patches.float()
        norm = z.norm(dim=-1)
        norm = norm / norm.max(dim=1, keepdim=True).values
        delta = 1 - nn.functional.cosine_similarity(z[:, :-1], z[:, 1:], dim=-1)
        contrast = torch.zeros_like(norm)
        neighbors = torch.zeros_like(norm)
        contrast[:, 1:] += delta
        contrast[:, :-1] += delta
        neighbors[:, 1:] += 1
        neighbors[:, :-1] += 1
        gated = (contrast / neighbors).unsqueeze(-1) * self.contrast(z)
        assert tokens.attention_entropy is not None
        signals = [tokens.attention_entropy.unsqueeze(-1), norm.unsqueeze(-1), gated]
        return self.mlp(torch.cat([z, *signals], dim=-1)).squeeze(-1)

    def load_from(self, state: dict[str, Tensor]) -> PlainLATS:
        """Take the weights of a `routing.LATS`."""
        layers = sum(isinstance(part, nn.LayerNorm) for part in self.mlp)
        places = {"input": 0, "output": len(self.mlp) - 2}
        places |= {f"hidden.{i}": 1 + 4 * i for i in range(layers)} | {f"norms.{i}": 2 + 4 * i for i in range(layers)}
        renamed = {}
        for name, value in state.items():
            part, kind = name.rsplit(".", 1)
            renamed[name if part == "contrast" else f"mlp.{places[part]}.{kind}"] = value
        self.load_state_dict(renamed)
        return self


def plain_step(scorer: PlainLATS, head: nn.Module, optimizer: torch.optim.Optimizer, tokens: TokenBatch, budget: float) -> None:
    """One training step by the paper's text: Gumbel noise, straight-through mask over the full matrix, five losses."""
    scores = scorer(tokens)
    smooth = nn.functional.avg_pool2d(scores.view(-1, 1, *tokens.grid), 3, stride=1, padding=1).flatten(1)
    uniform = torch.rand_like(smooth).clamp(1e-9, 1 - 1e-7)
    perturbed = (torch.logit(smooth.clamp(1e-6, 1 - 1e-6)) - torch.log(-torch.log(uniform))) / 0.5
    k = budget_to_k(budget, tokens.n)
    hard = torch.zeros_like(perturbed).scatter(1, perturbed.topk(k, dim=1).indices, 1.0)
    soft = (k * perturbed.softmax(1)).clamp(0, 1)
    mask = hard + soft - soft.detach()
    pooled = (tokens.patches * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    known = {name: getattr(tokens, name) for name in ("lesion", "has_mask", "cls_attention")}
    known["score_logits"] = torch.logit(scores)
    _descend(head(pooled), scorer_terms(scores, k=k, budget=budget, weights=LossWeights(), **known), optimizer, tokens)


def routed_step(
    model: RoutedClassifier, optimizer: torch.optim.Optimizer, tokens: TokenBatch, budget: float, seed: int = 0
) -> None:
    """The same step with this package."""
    logits, step = model.training_pass(tokens, budget, TrainConfig(), torch.Generator().manual_seed(0))
    _descend(logits, step.terms, optimizer, tokens)


def _descend(logits: Tensor, terms: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, tokens: TokenBatch) -> None:
    assert tokens.label is not None
    loss = total_loss({"classification": classification_loss(logits, tokens.label), **terms}, vars(LossWeights()))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def random_tokens(batch: int = 64, side: int = 16, dim: int = 768, seed: int = 0) -> TokenBatch:
    """A batch with every field, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    n = side * side

    def uniform() -> Tensor:
        return torch.rand(batch, n, generator=generator)

    return TokenBatch(
        patches=torch.randn(batch, n, dim, generator=generator),
        grid=(side, side),
        attention_entropy=uniform(),
        cls_attention=uniform(),
        luminance=uniform(),
        label=torch.randint(8, (batch,), generator=generator),
        lesion=uniform() > 0.7,
        has_mask=torch.rand(batch, generator=generator) > 0.5,
    )


def main(arguments: list[str] | None = None) -> None:
    """Print seconds and ratios, and what they were measured on."""
    tokens = random_tokens()
    shape = " x ".join(map(str, tokens.patches.shape))
    print(f"routing on tokens {shape}, {torch.get_num_threads()} threads, torch {torch.__version__}, medians")
    torch.manual_seed(0)
    model = RoutedClassifier(create_selector("lats", dim=tokens.dim), MLPHead(tokens.dim, 8))
    plain = PlainLATS(tokens.dim).load_from(model.selector.scorer.state_dict())  # type: ignore[attr-defined]
    head, norm = MLPHead(tokens.dim, 8), create_selector("norm")
    plain_optimizer = torch.optim.AdamW([*plain.parameters(), *head.parameters()], lr=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for what, calls in {
        "LATS training step, as the paper writes it": {
            "plain": lambda: plain_step(plain, head, plain_optimizer, tokens, 0.3),
            "ours": lambda: routed_step(model, optimizer, tokens, 0.3),
        },
        "ten budgets, one selection each": {
            "plain": lambda: [norm.select_budget(tokens, budget).pooled() for budget in BUDGETS],
            "ours": lambda: norm.pooled(tokens, BUDGETS),
        },
    }.items():
        seconds = in_turns(calls, rounds=7)
        plain_seconds, our_seconds = (median(seconds[name]) for name in ("plain", "ours"))
        print(f"{what}: {plain_seconds:.3f} s, ours {our_seconds:.3f} s: {ratio(seconds, 'plain', 'ours'):.2f}x")


if __name__ == "__main__":
    main()
