"""Selectors of one line: the paper's baselines by a single signal, its references, and controls without a learned part.

A learned router must beat the controls (`center`, `darkness`, `border-contrast`, `segmenter`, `random`). `oracle` and `box-prior`
read the mask of the image that they select from, so they are bounds, never methods.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.config import Neighborhood
from medtokenbudget.routing.base import Ranker, kept_at, register_selector
from medtokenbudget.routing.signals import border_contrast, feature_norm, local_contrast
from medtokenbudget.routing.topk import budget_to_k, smooth_scores
from medtokenbudget.tokens import Selection, TokenBatch


class StoredSignal(Ranker):
    """Ranks by a number that is stored with each patch: the first field of `requires`, the largest first."""

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return getattr(tokens, self.requires[0]).float()


@register_selector("no-pruning")
class NoPruning(Ranker):
    """All patches, in raster order: the full-token reference of the paper. A valid k or budget is accepted and has no effect.

    Of tokens that were routed before or inside the backbone it keeps all K, in the order of the router.
    """

    title = "NoPruning"
    description = "Keeps all patches: the reference without a budget."
    color, marker = "#3d4a57", ""
    line = "-."
    reference = True
    reads_routed = True

    def count(self, budget: float | str, n: int) -> int:
        budget_to_k(budget, n, self.minimum)
        return n

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return torch.zeros(len(tokens), tokens.n, device=tokens.patches.device)

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        if tokens.places is None:
            return super().choose(tokens, tokens.n, generator)
        return kept_at(tokens.patches, tokens.places, tokens.grid[0] * tokens.grid[1])


@register_selector("random")
class Random(Ranker):
    """Uniformly drawn patches; the budgets of one draw are nested. `seed` is for calls without a generator."""

    reads_patches = False
    title = "Random"
    description = "Keeps randomly drawn patches."
    color, marker = "#7a828a", "x"
    line = "--"
    stochastic = True

    def __init__(self, seed: int = 0, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.seed = seed

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed) if generator is None else generator
        # float64: with 24-bit uniforms two of some hundred patches tie now and then, and ties favor low indices.
        draw = torch.rand(len(tokens), tokens.n, generator=generator, device=generator.device, dtype=torch.float64)
        return draw.to(tokens.patches.device)


@register_selector("norm")
class Norm(Ranker):
    """Largest feature norm first; backbones with high-norm artifact tokens confound it, which is part of what it shows."""

    title = "NormBased"
    description = "Keeps the patches with the largest feature norm."
    color, marker = "#c98a00", "^"

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return feature_norm(tokens.patches)


@register_selector("attention-entropy")
class AttentionEntropy(StoredSignal):
    """Most focused attention first, `1 - H / log N`; the entropy is stored, so that no N x N attention is."""

    title = "AttnEntropy"
    description = "Keeps the patches with the most focused attention."
    color, marker = "#009e73", "v"
    requires = ("attention_entropy",)


@register_selector("local-contrast")
class LocalContrast(Ranker):
    """Largest mean cosine dissimilarity to the neighbors first, by default in the paper's 1D raster order."""

    title = "LocalContrast"
    description = "Keeps the patches that differ most from their neighbors."
    color, marker = "#8c8000", "<"

    def __init__(self, neighborhood: Neighborhood = "raster", minimum: int = 16) -> None:
        super().__init__(minimum)
        self.neighborhood = neighborhood

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return local_contrast(tokens.patches, tokens.grid, self.neighborhood)


@register_selector("class-attention")
class ClassAttention(StoredSignal):
    """Largest head-averaged attention of the class token first: the teacher of the paper's distillation loss by itself."""

    title = "ClassAttention"
    description = "Keeps the patches that the class token attends to most."
    color, marker = "#2a7f7f", ">"
    requires = ("cls_attention",)


@register_selector("rollout")
class Rollout(StoredSignal):
    """Largest rolled-out attention of the class token first (Abnar and Zuidema, ACL 2020).

    Computed when the tokens are extracted with the signal `rollout`: the attention of the heads is averaged, half of it is
    replaced by the identity for the residual connection, and the matrices of all blocks up to the chosen one are multiplied.
    """

    title = "Rollout"
    description = "Keeps what the class token attends to, followed back through all blocks."
    color, marker = "#8a6d3b", "4"
    requires = ("rollout",)


@register_selector("center")
class Center(Ranker):
    """Smallest distance to the center of the grid first, ties by index.

    Dermoscopy is taken with the lesion in the middle, so this control does well without looking at the image.
    """

    title = "Center"
    description = "Keeps the patches nearest the image center, without looking at the image."
    color, marker = "#d55e00", "s"
    reads_patches = False

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        h, w = tokens.grid
        # Twice the distance from the center: whole numbers, so that equal distances tie exactly.
        rows = 2 * torch.arange(h, device=tokens.patches.device) - (h - 1)
        columns = 2 * torch.arange(w, device=tokens.patches.device) - (w - 1)
        squared = rows.square().unsqueeze(1) + columns.square().unsqueeze(0)
        return -squared.flatten().double().expand(len(tokens), -1)


@register_selector("darkness")
class Darkness(StoredSignal):
    """Lowest luminance first: pigment is dark, and the distance to `lats` tells what learning adds to the gray value."""

    title = "Darkness"
    description = "Keeps the darkest patches. No model."
    color, marker = "#a8577e", "D"
    reads_patches = False
    requires = ("luminance",)

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return -super().score(tokens, generator)


@register_selector("border-contrast")
class BorderContrast(Ranker):
    """Least similar to the image border first, smoothed over 3 x 3 patches: skin reaches the border, most lesions do not.

    Needs neither masks nor training. On original dermoscopic images it comes close to routers that learned from masks; of a lesion
    near the border it takes the skin for the lesion.
    """

    title = "Border contrast"
    description = "Keeps the patches that are least similar to the image border. No training."
    color, marker = "#6c9a1f", "p"

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return smooth_scores(border_contrast(tokens.patches, tokens.grid), tokens.grid)


@register_selector("segmenter")
class Segmenter(StoredSignal):
    """Highest score of a trained segmenter first.

    The scores are stored with the tokens (`mtb extract` with `segmenter`). A learned router that reads tokens should keep as much
    of the lesion as this small network that reads pixels.
    """

    reads_patches = False
    title = "Segmenter"
    description = "Keeps the patches that a trained segmenter takes for lesion."
    color, marker = "#5a5a9c", "X"
    requires = ("segmentation",)


@register_selector("oracle")
class Oracle(StoredSignal):
    """Lesion patches first, both groups in raster order: its retention is the ceiling. Needs a mask for every image."""

    reads_patches = False
    title = "Oracle"
    description = "Keeps the true lesion patches first, using the mask: the ceiling."
    color, marker = "#1c2733", "_"
    line = "--"
    reference = True
    requires = ("lesion", "has_mask")


@register_selector("box-prior")
class BoxPrior(Ranker):
    """Patches by their distance to the lesion's bounding box, measured in box sizes from its center, nearest first.

    The distance is `max(|dx| / (width / 2), |dy| / (height / 2))`: at most 1 inside the box. An image without a lesion patch has
    the whole image as its box. Needs a mask for every image.

    A bound for box-prompted methods; PrATo (Dutta et al., 2025) prunes with such a box inside a promptable segmentation model.
    """

    reads_patches = False
    title = "Box prior"
    description = "Keeps the patches nearest the lesion's bounding box, using the mask."
    color, marker = "#1c2733", "s"
    line = ":"
    reference = True
    requires = ("lesion", "has_mask")

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        assert tokens.lesion is not None
        h, w = tokens.grid
        field = tokens.lesion.bool().view(-1, h, w)
        rows, columns = _offset(field.any(2)), _offset(field.any(1))
        return -torch.maximum(rows.unsqueeze(2), columns.unsqueeze(1)).flatten(1)


def _offset(inside: Tensor) -> Tensor:
    """Measure the distance of each place from the middle of the interval that spans `inside` [B, n], in half lengths of it."""
    n = inside.shape[1]
    inside = inside | ~inside.any(1, keepdim=True)
    places = torch.arange(n, device=inside.device, dtype=torch.float64)
    low = torch.where(inside, places, n).amin(1, keepdim=True)
    high = torch.where(inside, places, -1).amax(1, keepdim=True)
    return (2 * places - low - high).abs() / (high - low + 1)
