"""`wrap`: anybody's vision transformer as the same function of images, run on the patches that a router keeps.

The model's own weights, blocks and head do the work, on K tokens instead of N. It is not changed, and `unwrap` gives it back. The
pass is that of early routing (`backbone/partial.py`), so every family of `backbone/encoders.py` works in both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from medtokenbudget.backbone.attention import REGISTRY, fuse
from medtokenbudget.backbone.encoders import Normalization, PlainViT, partial_encoder
from medtokenbudget.backbone.partial import Chosen, Seen, resize, resize_scores, routed_pass
from medtokenbudget.config import DEFAULT_BUDGET, BackboneConfig, read_share
from medtokenbudget.errors import NonFiniteError, RequestError, ShapeError
from medtokenbudget.model.early import INSIDE, EarlyRouting, find_router, is_untrained_router, ranking
from medtokenbudget.model.inference import read_statistics
from medtokenbudget.model.model import DEFAULT_MODEL, MedTokenBudget
from medtokenbudget.routing import budget_to_k, create_selector, selector_class
from medtokenbudget.routing.conformal import Guarantee

Router = MedTokenBudget | Path | str | Callable[[Tensor], Tensor] | None
Scores = Callable[[Tensor, Seen | None], Tensor]
"""From the images and, inside, what makes the tokens of the block before, to scores [B, n] or [B, h, w]."""
_count: Callable[[Any, int, int], int] = torch.compiler.assume_constant_result(budget_to_k)
_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
_FAR = 4.0
"""No image in [0, 1] is that bright, not even with noise from augmentation; pixels from 0 to 255 are."""


class Kept(NamedTuple):
    """What a wrapped model kept of the images of its last call.

    Attributes:
        kept: bool [B, N], True for kept patches.
        scores: float [B, N], what the patches were ranked by; None if masks said what to keep.
        indices: int64 [B, K], the kept patches in the order of their tokens.
        grid: (h, w) of the patches, N = h * w.
    """

    kept: Tensor
    scores: Tensor | None
    indices: Tensor
    grid: tuple[int, int]


class Wrapped(nn.Module):
    """A model that runs on the patches that a router keeps; made by `wrap`.

    `parameters()` and `state_dict()` belong to the model, under `model.`; the router is frozen and part of neither. To save a
    fine-tuned model, save `mtb.unwrap(fast)`: its keys equal the original ones.

    Attributes:
        model: The model itself.
        routing: What was kept of the last images, as `Kept`; None before the first call.
    """

    routing: Kept | None

    def __init__(
        self,
        model: nn.Module,
        router: Router,
        budget: float | str | None,
        retention: float | str | None,
        at: str,
        wanted: Normalization | None,
    ) -> None:
        super().__init__()
        self.model, self.routing = model, None
        self.encoder: PlainViT = partial_encoder(model, type(model).__name__)
        self.channels = next(part.in_channels for part in model.modules() if isinstance(part, nn.Conv2d))  # embeds the patches
        places = [f"block:{number}" for number in range(len(self.encoder.blocks))]
        if at not in places:
            raise RequestError(f"`at` must be {places[0]} (before the blocks) to {places[-1]}, got '{at}'.")
        self.block = places.index(at)
        self._wanted = wanted or self.encoder.normalization()
        self._reads: tuple[str, ...] = ()  # signals of the model's own tokens
        # Not a submodule: it is frozen and no part of `parameters()` and `state_dict()`. A function, because copies share it.
        self._router: Callable[[], MedTokenBudget | None] = lambda: None
        self._guarantee: Guarantee | None = None
        self._score = self._scorer(router)
        if budget is not None and retention is not None:
            raise RequestError("`budget` and `retention` both say how much is kept. Leave out one of them.")
        if retention is None:
            self.budget = DEFAULT_BUDGET if budget is None else budget
        else:
            self.retention = retention

    @property
    def budget(self) -> float | None:
        """Share of the patches that is kept; None with a `retention`. Setting it changes the next call."""
        return self._budget

    @budget.setter
    def budget(self, value: float | str) -> None:
        self._budget: float | None = read_share("budget", value)
        self._share = str(self._budget)  # a text, because compiled graphs take a float that changes for a tensor
        self._guarantee = None

    @property
    def retention(self) -> float | None:
        """Share of the lesion that the router was calibrated to keep on average; None with a `budget`."""
        return None if self._guarantee is None else self._guarantee.retention

    @retention.setter
    def retention(self, value: float | str) -> None:
        if (router := self._router()) is None:
            raise RequestError("`retention` needs a router that was calibrated with `mtb calibrate`. Use a `budget`.")
        self._guarantee, self._budget = router.guarantee(value), None

    def forward(self, images: Any = None, *, keep: Tensor | None = None, **options: Any) -> Any:
        """Return what the model returns of images [B, 3, H, W], normalized as the model expects them.

        Args:
            images: The images; models of transformers also take them as `pixel_values`.
            keep: Patches to keep, bool [B, N] or [B, h, w], in place of the router's choice.
            options: What the model's own forward takes, such as `labels`.
        """
        images = options.pop("pixel_values", None) if images is None else images
        floats = isinstance(images, Tensor) and images.is_floating_point()
        if not floats or images.ndim != 4 or images.shape[0] < 1 or images.shape[1] != self.channels:
            given = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            wanted = f"float [B, {self.channels}, H, W], normalized as the model expects them"
            raise ShapeError(f"Images must be {wanted}, got {given}.")
        grid, scores = self.encoder.grid(*images.shape[-2:]), None

        def choose(seen: Seen | None) -> Chosen:
            nonlocal scores
            if keep is not None:
                return _from_masks(keep, images.shape[0], grid)
            with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
                given = _checked(self._score(images, seen))
                scores = _on_grid(given, images.shape[0], grid)
                return self._chosen(given.flatten(1), scores)

        x, places = routed_pass(self.encoder, images, choose, self.block, len(self.encoder.blocks), self._reads)
        if not _exporting():
            kept = torch.zeros(images.shape[0], grid[0] * grid[1], dtype=torch.bool, device=images.device)
            real = torch.ones_like(places.indices, dtype=torch.bool) if places.real is None else places.real
            self.routing = Kept(kept.scatter(1, places.indices, real), scores, places.indices, grid)
        counts = None if places.real is None else places.real.sum(1).tolist()
        return self.encoder.output(x, counts, **options)

    def _chosen(self, given: Tensor, scores: Tensor) -> Chosen:
        """Choose the patches to keep from scores on the grid [B, N], and those that the router gave on its own grid [B, n]."""
        n = scores.shape[1]
        if self._guarantee is None:
            return scores.topk(_count(self._share, n, 1), dim=1).indices, None
        # The threshold says how much of the router's grid is kept; the model keeps the same share of its own.
        counts = torch.from_numpy(self._guarantee.counts(given.double().cpu().numpy())).to(scores.device)
        counts = -(-counts * n // given.shape[1])
        indices = scores.topk(int(counts.max()), dim=1).indices
        return indices, _real(counts, indices)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Everything that moves a module (`to`, `cuda`, `cpu`) ends here; the router is no submodule and follows by hand.
        super()._apply(fn, recurse)
        if (router := self._router()) is not None:
            router.to(next(self.model.parameters()).device)
        return self

    def _scorer(self, router: Router) -> Scores:
        """Return the function that scores the patches, which knows nothing of this module: a copy has the same."""
        if router is None:
            return _nothing
        if not isinstance(router, (MedTokenBudget, Path, str)):
            if not callable(router):
                kind = type(router).__name__
                raise RequestError(f"`router` must be a name, a model, a function, or None with `keep` in each call, got {kind}.")
            scores_of = router
            return lambda images, _: scores_of(images)
        if isinstance(router, str) and is_untrained_router(router):
            inside = self.block > 0 and not selector_class(router).learns
            if inside and all(name in INSIDE for name in create_selector(router).requires):
                return self._own_tokens(router)
        model = router if isinstance(router, MedTokenBudget) else find_router(str(router), "scout", BackboneConfig())
        score, grid = EarlyRouting(model, "scout").image_scores(), model.grid
        size = int(model.backbone_fingerprint["image_size"])
        if self._wanted is None:
            raise RequestError(
                f"{type(self.model).__name__} does not say how its images are normalized, and the router sees the same images. "
                "Pass `mean` and `std`, three numbers each for images in [0, 1]."
            )
        if self.channels != 3:
            raise RequestError(f"The router reads RGB, but the model has {self.channels} channels. Use a function as `router`.")
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in self._wanted[:2])
        model.to(next(self.model.parameters()).device)
        self._router = lambda: model

        def scores(images: Tensor, _: Seen | None) -> Tensor:
            # Resized first: the fewer pixels are the same colors, because the weights of resizing sum to one.
            colors = resize(images.float(), (size, size)) * std.to(images.device) + mean.to(images.device)
            if not torch.compiler.is_compiling() and bool((colors.abs() > _FAR).any()):
                raise RequestError(
                    "The images are not normalized as the model expects them: in [0, 1] they are far outside. Normalize them."
                )
            return score(colors).unflatten(1, grid)

        return scores

    def _own_tokens(self, name: str) -> Scores:
        """Score by a selector that does not learn and reads the tokens of the model itself."""
        selector = create_selector(name)
        score = ranking(selector)
        if score is None or selector.stochastic:
            raise RequestError(f"The selector '{name}' does not rank patches, so it cannot be the `router`. Use one that does.")
        if classless := [field for field in selector.requires if REGISTRY[field].needs_cls and not self.encoder.has_cls]:
            raise RequestError(
                f"The selector '{name}' reads {', '.join(classless)}, but the model has no class token. Use another."
            )
        self._reads = tuple(selector.requires)
        if self._reads:
            fuse(self.encoder.blocks[self.block - 1])

        def scores(_: Tensor, seen: Seen | None) -> Tensor:
            assert seen is not None
            return score(seen())

        return scores


def wrap(
    model: nn.Module,
    router: Router = DEFAULT_MODEL,
    budget: float | str | None = None,
    retention: float | str | None = None,
    at: str = "block:0",
    mean: tuple[float, float, float] | None = None,
    std: tuple[float, float, float] | None = None,
) -> Wrapped:
    """Make a vision transformer run where the lesion is: same images in, same output, fewer tokens.

    Args:
        model: A plain vision transformer of timm or transformers, with or without its head, trained or to be trained. It is not
            changed; replace its head before you wrap it.
        router: What chooses the patches: 'dermoscopy', a run or model of your own, a selector that does not learn (such as
            'center'), a function from the images (as the model gets them) to scores [B, N] or [B, h, w], or None to pass masks with
            each call.
        budget: Share of the patches that is kept, such as 0.3 or '30%'; 0.3 by default.
        retention: In place of a budget, the share of the lesion that the router was calibrated to keep: each image keeps its own
            number of patches, and shorter ones are filled up and masked.
        at: 'block:0' embeds only the kept patches; 'block:4' runs four blocks on all patches first, and keeps the mean of the
            dropped ones as a token.
        mean: Mean of the images that the model expects, if it does not say it itself.
        std: Their standard deviation.

    Returns:
        A module to use in place of the model.

    Raises:
        RequestError: The model cannot run on a part of its patches, or router and model do not fit.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=8)
        >>> fast = mtb.wrap(model, router="dermoscopy", budget=0.3)
        >>> fast(torch.zeros(2, 3, 224, 224)).shape, int(fast.routing.kept[0].sum())
        (torch.Size([2, 8]), 58)
    """
    if isinstance(model, Wrapped):
        raise RequestError("The model is wrapped already. Set its `budget`, or wrap `mtb.unwrap(model)`.")
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise RequestError(f"`wrap` takes a model, such as `timm.create_model(...)` returns, got {kind}.")
    for inside in ("module", "_orig_mod"):
        if isinstance(getattr(model, inside, None), nn.Module):
            raise RequestError(f"Wrap the model in this {kind} (`model.{inside}`). Compile or distribute what `wrap` returns.")
    if (mean is None) is not (std is None):
        raise RequestError("`mean` and `std` belong together. Pass both, or none.")
    wanted = None if mean is None else Normalization(*read_statistics("Check `mean` and `std`", (mean, std)))
    return Wrapped(model, router, budget, retention, at, wanted)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model that was wrapped: the same object, without anything of the router."""
    if not isinstance(model, Wrapped):
        raise RequestError(f"`unwrap` takes what `wrap` returned, got {type(model).__name__}.")
    return model.model


def _nothing(*_: Any) -> Tensor:
    raise RequestError("The model was wrapped without a router. Pass `keep`, the patches to keep: bool [B, N] or [B, h, w].")


def _checked(scores: Any) -> Tensor:
    if not isinstance(scores, Tensor) or scores.ndim not in (2, 3):
        given = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ShapeError(f"The `router` must return scores [B, N] or [B, h, w], got {given}.")
    if not torch.compiler.is_compiling() and not bool(torch.isfinite(scores).all()):
        raise NonFiniteError("The `router` returned NaN or infinite scores, so patches cannot be ranked by them.")
    return scores


def _on_grid(scores: Tensor, b: int, grid: tuple[int, int]) -> Tensor:
    """Bring scores [B, N] or [B, h, w] to the patches of the model, [B, N]."""
    h, w = grid
    if scores.shape[0] != b or (scores.ndim == 2 and scores.shape[1] != h * w):
        raise ShapeError(
            f"The `router` returned scores {list(scores.shape)} for {b} images of {h} x {w} patches. Return [B, h, w]."
        )
    own = grid if scores.ndim == 2 else (scores.shape[1], scores.shape[2])
    return resize_scores(scores.float().flatten(1), own, grid)


def _from_masks(keep: Tensor, b: int, grid: tuple[int, int]) -> Chosen:
    """Return the patches of masks; images with fewer than others are filled up."""
    if keep.dtype != torch.bool or tuple(keep.shape) not in ((b, grid[0] * grid[1]), (b, *grid)):
        given = f"{str(keep.dtype).removeprefix('torch.')} {list(keep.shape)}"
        raise ShapeError(f"`keep` must be bool [{b}, {grid[0] * grid[1]}] or [{b}, {grid[0]}, {grid[1]}], got {given}.")
    flat = keep.flatten(1)
    counts = flat.sum(1)
    if int(counts.min()) == 0:
        raise RequestError(f"`keep` keeps no patch of image {int(counts.argmin())}. Keep at least one of each.")
    indices = torch.argsort(flat.to(torch.uint8), dim=1, descending=True, stable=True)[:, : int(counts.max())]
    return indices, _real(counts, indices)


def _real(counts: Tensor, indices: Tensor) -> Tensor | None:
    """Tell the first `counts` [B] patches of each image from those that only fill up; None if nothing fills up."""
    real = torch.arange(indices.shape[1], device=indices.device) < counts.unsqueeze(1)
    return None if bool(real.all()) else real
