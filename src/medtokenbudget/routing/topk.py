"""From scores to kept patches: the budget's K, the smoothing of the score grid, hard and straight-through top-K.

Every selector counts and ranks through these functions, so that K and ties are handled the same way everywhere.
"""

from __future__ import annotations

from fractions import Fraction
from typing import get_args

import torch
from torch import Tensor

from medtokenbudget.config import Padding, read_share
from medtokenbudget.errors import CountError, NonFiniteError, RequestError, UnknownNameError
from medtokenbudget.tokens import check_axes, check_grid

# Scores are held this far from 0 and 1 before the logit, which is then within about +-14.
LOGIT_MARGIN = 1e-6


def budget_to_k(budget: float | str, n: int, minimum: int = 16) -> int:
    """Count the patches kept at a budget: K = min(n, max(minimum, floor(budget n))), exact for the decimal that was written."""
    budget = read_share("budget", budget)
    # The shortest decimal of a float is what its author meant: 0.3 is 3/10, not 0.299999999999999988898.
    share = Fraction(str(budget))
    if n < 1 or minimum < 1:
        raise CountError(f"The number of patches and the minimum must be at least 1, got {n} and {minimum}.")
    return min(n, max(minimum, int(share * n)))


def check_k(k: int, n: int) -> int:
    if isinstance(k, bool) or int(k) != k or not 1 <= k <= n:
        raise CountError(f"Cannot keep {k} of {n} patches. Choose a number from 1 to {n}.")
    return int(k)


def rank(scores: Tensor) -> Tensor:
    """Order patches from best to worst, ties by index: [B, N] to int64 [B, N]."""
    # Not `torch.topk`, which leaves the order of ties open: it differs between devices.
    return torch.argsort(_scores(scores), dim=1, descending=True, stable=True)


def hard_topk(scores: Tensor, k: int) -> Tensor:
    """Mark the k best patches of each image: [B, N] to [B, N], a bool mask with exactly k True in a row, ties by index."""
    best = rank(scores)[:, : check_k(k, scores.shape[1])]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)


def straight_through_topk(scores: Tensor, k: int, temperature: float = 0.5, generator: torch.Generator | None = None) -> Tensor:
    """Take the top-K of the training pass, differentiably: scores [B, N] in [0, 1] to a mask [B, N] of exactly k ones an image.

    Forward: the hard top-K of `(logit(s) + g) / temperature` with Gumbel noise g from `generator` (no generator, no noise).
    Backward: the gradient of `clip(k softmax(...), 0, 1)`.
    """
    if not temperature > 0:
        raise RequestError(f"The temperature must be above 0, got {temperature}.")
    k = check_k(k, _scores(scores).shape[1])
    logits = torch.logit(scores.float(), eps=LOGIT_MARGIN)
    if generator is not None:
        logits = logits + gumbel_noise(tuple(scores.shape), generator).to(scores.device)
    logits = logits / temperature
    hard = hard_topk(logits.detach(), k).float()
    soft = (k * torch.softmax(logits, dim=1)).clamp(0, 1)
    # In these brackets: the difference is exactly 0, so the mask is exactly 0 or 1.
    return hard + (soft - soft.detach())


def masked_mean(patches: Tensor, mask: Tensor) -> Tensor:
    """Divide the sum of the patches [B, N, D] under a mask [B, N] by the mass of the mask: [B, D] in fp32."""
    # In fp32 whatever the precision of the pass: sums of some hundred patches lose digits in bf16.
    with torch.autocast(patches.device.type, enabled=False):
        total = torch.bmm(mask.float().unsqueeze(1), patches.float()).squeeze(1)
        return total / mask.float().sum(1, keepdim=True)


def gumbel_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw standard Gumbel noise on the generator's device, so that a CPU generator gives a GPU run the same noise."""
    # Gumbel noise is -log of an exponential draw, which may be 0.
    exponential = torch.empty(shape, device=generator.device).exponential_(generator=generator)
    return -exponential.clamp_min(torch.finfo(torch.float32).tiny).log()


def smooth_scores(scores: Tensor, grid: tuple[int, int], kernel: int = 3, padding: Padding = "exclude") -> Tensor:
    """Apply an average filter to the score grid, [B, N] to [B, N].

    The padding 'exclude' averages over the patches that exist; 'zero' counts zeros beyond the border, as plain pooling does, and so
    pulls border patches down.
    """
    check_grid(grid, check_axes("scores", "[B, N]", scores)[1])
    if kernel < 1 or kernel % 2 == 0:
        raise RequestError(f"The side of the smoothing filter must be odd, got {kernel}.")
    if padding not in get_args(Padding):
        raise UnknownNameError.of("padding", str(padding), get_args(Padding))
    if kernel == 1:
        return scores.float()
    field = scores.float().reshape(-1, 1, *grid)
    smooth = torch.nn.functional.avg_pool2d(field, kernel, stride=1, padding=kernel // 2, count_include_pad=padding == "zero")
    return smooth.flatten(1)


def _scores(scores: Tensor) -> Tensor:
    check_axes("scores", "[B, N]", scores)
    if not bool(torch.isfinite(scores).all()):
        raise NonFiniteError("Scores contain NaN or infinite values, so patches cannot be ranked by them.")
    return scores
