"""Families of vision transformers: one small adapter says how each embeds patches, runs its blocks and reads out its result.

`Encoder` is any timm model with one grid of patch tokens. Its subclasses also run on a part of the patches, in any order, and give
the kept patches what the whole pass would give them if the others were masked out of the attention. A new family is one subclass.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from timm.layers import PatchEmbed
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from medtokenbudget.errors import RequestError, ShapeError

Model = Any
"""A vision transformer; its attributes have no static types."""


class Normalization(NamedTuple):
    """What a model expects of images in [0, 1], and how they are resized."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"


class Places(NamedTuple):
    """The patches that go on, by their places on the grid.

    Attributes:
        indices: The patches [B, K], in the order of their tokens.
        real: False for tokens that only fill an image up to the K of its batch, [B, K]; None if there are none.
        dropped: 1 for each patch that is part of the background token, [B, 1, N]; None without a background token.
    """

    indices: Tensor
    real: Tensor | None = None
    dropped: Tensor | None = None

    def take(self, tokens: Tensor) -> Tensor:
        """Gather [B, K, D] of [B, N, D] (or [1, N, D]), with the mean of the dropped patches behind them, if it is wanted."""
        tokens = tokens.expand(self.indices.shape[0], -1, -1)
        kept = take(tokens, self.indices)
        if self.dropped is None:
            return kept
        return torch.cat([kept, self.dropped.to(tokens.dtype) @ tokens / self._size.unsqueeze(-1).clamp(min=1)], 1)

    def bias(self, tokens: Tensor, prefix: int) -> Tensor | None:
        """What is added to the attention logits of every query, [B, 1, 1, P + K (+ 1)]; None if nothing is.

        The background token counts as often as there are dropped patches, tokens that only fill up do not count.
        """
        if self.real is None and self.dropped is None:
            return None
        real = torch.ones_like(self.indices, dtype=torch.bool) if self.real is None else self.real
        kept = torch.zeros(real.shape, dtype=tokens.dtype, device=tokens.device).masked_fill(~real, -torch.inf)
        parts = [kept.new_zeros(kept.shape[0], prefix), kept]
        if self.dropped is not None:
            # A softmax counts a token n times if log n is added to its logit; log 0 = -inf takes away one that stands for none.
            parts.append(self._size.to(tokens.dtype).log())
        return torch.cat(parts, 1)[:, None, None]

    @property
    def _size(self) -> Tensor:
        assert self.dropped is not None
        return self.dropped.sum(-1)


def take(tokens: Tensor, indices: Tensor) -> Tensor:
    """Gather the tokens [B, N, D] at `indices` [B, K], in that order: [B, K, D]."""
    return tokens.gather(1, indices.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


class Encoder:
    """A timm model with one grid of patch tokens in every block.

    Attributes:
        model: The model itself; nothing of it is changed.
        name: How messages call it.
        prefix: Number of tokens before the patches (class token, registers).
        has_cls: Whether the first of them is a class token.
        dim: Dimension D of a token.
    """

    pool: nn.Module | None = None
    """The attention pooling of the model, if it has one."""

    def __init__(self, model: Model, name: str) -> None:
        self.model, self.name = model, name
        self.prefix = int(getattr(model, "num_prefix_tokens", 0))
        self.has_cls = bool(getattr(model, "has_class_token", getattr(model, "cls_token", None) is not None))
        self.dim = int(model.num_features)

    @property
    def blocks(self) -> Any:
        """The blocks, in the order in which they run."""
        return self.model.blocks

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        p, q = self.model.patch_embed.feat_ratio(as_scalar=False)  # for hybrids: patch of the feature map times its reduction
        return int(p), int(q)

    def reasons(self) -> list[str]:
        """Why the model cannot run on a part of its patches; empty if it can."""
        return [f"timm's {type(self.model).__name__} relates patches in a way of its own"]

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the patches of images of this size, or raise a ShapeError."""
        (h, w), (p, q) = self.model.patch_embed.grid_size, self.patch
        if getattr(self.model, "dynamic_img_size", False):
            h, w = height // p, width // q
        return _checked((height, width), (h * p, w * q), (int(h), int(w)))

    def normalization(self) -> Normalization | None:
        """Return mean and standard deviation that the model expects; None if it does not say."""
        about: Mapping[str, Any] = getattr(self.model, "pretrained_cfg", None) or {}
        if not about.get("mean") or not about.get("std"):
            return None
        return Normalization(tuple(about["mean"]), tuple(about["std"]), about.get("interpolation") or "bicubic")

    def tokens(self, images: Tensor, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return normed patch tokens [B, N, D] and prefix tokens [B, P, D] of a block; later blocks do not run."""
        options = {"norm": True, "stop_early": True, "output_fmt": "NLC", "intermediates_only": True}
        [found] = self.model.forward_intermediates(images, indices=[layer], return_prefix_tokens=self.prefix > 0, **options)
        return found if isinstance(found, tuple) else (found, None)


class PlainViT(Encoder):
    """Plain ViTs of timm: with registers, without a class token, without positions, distilled ones. Other families change parts."""

    def __init__(self, model: Model, name: str) -> None:
        super().__init__(model, name)
        self.pool = getattr(model, "attn_pool", None)
        # The same model without dropout of the embedding, which is applied where all tokens are there.
        self._bare = swapped(model, {model.pos_drop: nn.Identity()})

    def reasons(self) -> list[str]:
        reasons, embed = [], self.model.patch_embed
        if not self._plain_attention():
            reasons.append("its attention has a form of its own")
        if type(embed) is not PatchEmbed or embed.proj.kernel_size != embed.proj.stride:
            reasons.append("its patch embedding is not one linear map per patch")
        if not isinstance(getattr(self.model, "patch_drop", None), (nn.Identity, type(None))):
            reasons.append("it drops patches at random itself (`patch_drop_rate`)")
        return reasons

    def embed(self, images: Tensor, indices: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return prefix tokens and embedded patches, [B, P + K, D], and the positions that blocks read, of all patches.

        Only the patches `indices` [B, K] are computed, None means all.
        """
        part = self.model.patch_embed
        if indices is None:
            x, positions = self._positioned(part(images))
        else:
            patches = part.norm(embed_patches(part.proj, images, indices))
            # Positions do not depend on the pixels: those of one blank image serve the whole batch.
            d, (h, w) = patches.shape[-1], self.grid(*images.shape[-2:])
            # Which prefix tokens there are, in which order and with which positions, differs: the model itself says it.
            dynamic = getattr(self.model, "dynamic_img_size", False)
            tokens, positions = self._positioned(patches.new_zeros((1, h, w, d) if dynamic else (1, h * w, d)))
            x = _placed(tokens, patches, indices, self.prefix)
        return self._normed_first(self.model.pos_drop(x)), positions

    def run(
        self, x: Tensor, first: int, end: int, positions: Any = None, places: Places | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Run the model's own blocks `first` to `end` - 1 on tokens at `places` (None means all patches)."""
        again = getattr(self.model, "grad_checkpointing", False) and torch.is_grad_enabled()
        for number in range(first, end):
            options = self._options(number, positions, places, bias)
            block = self.blocks[number]
            # The reentrant form takes no keywords, which carry positions and bias.
            x = checkpoint(block, x, use_reentrant=False, **options) if again else block(x, **options)
        return x

    def norm(self, x: Tensor) -> Tensor:
        """Apply the last norm of the model."""
        return self.model.norm(x)

    def output(self, x: Tensor, counts: list[int] | None = None, **options: Any) -> Any:
        """Return what the model itself returns of the tokens [B, P + K, D] that its last block gave.

        With `counts`, image i has only its first counts[i] patches; the others fill up.
        """
        if options:
            raise RequestError(f"A timm model takes images alone, not {', '.join(options)}.")
        x, model = self.norm(x), self.model
        if counts is not None:
            first = 0 if getattr(model, "pool_include_prefix", False) else self.prefix
            x = filled(x, [self.prefix + k for k in counts], first)
            if self.pool is not None:
                extra = 0 if isinstance(model, VisionTransformer) and first else self.prefix
                model = swapped(model, {self.pool: _EachAlone(self.pool, [extra + k for k in counts])})
        return model.forward_head(x)

    def _plain_attention(self) -> bool:
        return all(isinstance(getattr(block, "attn", None), Attention) for block in self.blocks)

    def _positioned(self, patches: Tensor) -> tuple[Tensor, Any]:
        return self._bare._pos_embed(patches), None

    def _normed_first(self, x: Tensor) -> Tensor:
        return self.model.norm_pre(x)

    def _options(self, number: int, positions: Any, places: Places | None, bias: Tensor | None) -> dict[str, Any]:
        """Return what block `number` gets with its tokens."""
        return {} if bias is None else {"attn_mask": bias}


class RotaryViT(PlainViT):
    """timm's `Eva`: EVA-02, DINOv3, Perception Encoder and other ViTs with rotary positions, also one per block and head."""

    def _plain_attention(self) -> bool:
        return True  # both kinds take a mask and one rotation per token

    def _positioned(self, patches: Tensor) -> tuple[Tensor, Any]:
        x, rope = self._bare._pos_embed(patches)
        return x, rope

    def _options(self, number: int, positions: Any, places: Places | None, bias: Tensor | None) -> dict[str, Any]:
        if positions is not None and getattr(self.model, "rope_mixed", False):
            positions = positions[number]  # [heads, N, d]
        if positions is not None and places is not None:
            # To [B, heads or 1, K, d]. The rotation of the background token is the mean of those that it stands for.
            table = positions if positions.ndim == 3 else positions.unsqueeze(0)
            heads, n, d = table.shape
            taken = places.take(table.transpose(0, 1).reshape(1, n, heads * d))
            positions = taken.unflatten(2, (heads, d)).transpose(1, 2)
        return {"rope": positions, "attn_mask": bias}


class BeitViT(PlainViT):
    """BEiT and BEiT v2 of timm: a bias of the attention for each pair of patches, by the way from one to the other."""

    def _plain_attention(self) -> bool:
        return True

    def _positioned(self, patches: Tensor) -> tuple[Tensor, Any]:
        x = torch.cat([self.model.cls_token.expand(patches.shape[0], -1, -1), patches], 1)
        return (x if self.model.pos_embed is None else x + self.model.pos_embed), None

    def _normed_first(self, x: Tensor) -> Tensor:
        return x

    def run(
        self, x: Tensor, first: int, end: int, positions: Any = None, places: Places | None = None, bias: Tensor | None = None
    ) -> Tensor:
        shared = None if self.model.rel_pos_bias is None else self.model.rel_pos_bias().unsqueeze(0)
        if places is None:
            for block in self.blocks[first:end]:
                x = block(x, shared_rel_pos_bias=shared)
            return x
        for block in self.blocks[first:end]:
            pairs = shared
            if block.attn.relative_position_bias_table is not None:
                own = block.attn._get_rel_pos_bias()
                pairs = own if pairs is None else own + pairs
            both = bias if pairs is None else self._pairs(pairs, places) + (0.0 if bias is None else bias)
            scale_1, scale_2 = (1.0, 1.0) if block.gamma_1 is None else (block.gamma_1, block.gamma_2)
            # The block's own forward, but its attention would add the bias of all pairs.
            x = x + block.drop_path1(scale_1 * _beit_attention(block.attn, block.norm1(x), both))
            x = x + block.drop_path2(scale_2 * block.mlp(block.norm2(x)))
        return x

    def _pairs(self, pairs: Tensor, places: Places) -> Tensor:
        """Take the bias of the pairs of the tokens at `places`, [1, H, P + N, P + N] to [B, H, P + K, P + K]."""
        p = self.prefix
        for _ in range(2):  # the keys, then the queries
            b, heads, rows, columns = pairs.shape
            flat = pairs.permute(0, 3, 1, 2).reshape(b, columns, heads * rows)
            flat = torch.cat([flat[:, :p].expand(places.indices.shape[0], -1, -1), places.take(flat[:, p:])], 1)
            pairs = flat.reshape(flat.shape[0], -1, heads, rows).transpose(1, 2)
        return pairs


def _beit_attention(attn: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    b, t, _ = x.shape
    qkv_bias = None if attn.q_bias is None else torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    query, key, value = F.linear(x, attn.qkv.weight, qkv_bias).reshape(b, t, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    dropout = attn.attn_drop.p if attn.training else 0.0
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    return attn.proj_drop(attn.proj(out.transpose(1, 2).reshape(b, t, -1)))


_LAYOUTS = {
    "ViTModel": ("layers", "layernorm"),
    "Dinov2Model": ("encoder.layer", "layernorm"),
    "Dinov2WithRegistersModel": ("encoder.layer", "layernorm"),
    "DINOv3ViTModel": ("model.layer", "norm"),
    "SiglipVisionModel": ("encoder.layers", "post_layernorm"),
    "CLIPVisionModel": ("encoder.layers", "post_layernorm"),
}
"""Where the vision transformers of transformers have their blocks and their last norm."""
_AROUND = ("ForImageClassification", "WithProjection")
"""Ends of the names of models around them that read out tokens in any number and order."""
_UNKNOWN = ("output_hidden_states", "output_attentions", "attention_mask", "bool_masked_pos", "interpolate_pos_encoding")
"""Options of their forward that a pass over a part of the patches cannot serve."""
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


class TransformersViT(PlainViT):
    """ViT, DINOv2 (with registers), DINOv3, SigLIP and CLIP vision models of transformers, alone or with their heads.

    What comes after the blocks is the model's own forward, which gets the tokens in place of images and has no blocks left.
    """

    def __init__(self, model: Model, name: str) -> None:
        self.model, self.name, self.base = model, name, vision_tower(model)
        config, embeddings = self.base.config, self.base.embeddings
        layers, norm = _LAYOUTS[_family(self.base)]
        self._layers, self._norm = self.base.get_submodule(layers), self.base.get_submodule(norm)
        self._conv = next(part for part in embeddings.modules() if isinstance(part, nn.Conv2d))
        self._rope = getattr(self.base, "rope_embeddings", None)
        self._first_norm = getattr(self.base, "pre_layrnorm", nn.Identity())
        self._dropout = getattr(embeddings, "dropout", nn.Identity())
        self.has_cls = hasattr(embeddings, "cls_token") or hasattr(embeddings, "class_embedding")
        self.prefix = int(self.has_cls) + int(getattr(config, "num_register_tokens", 0))
        self.dim = int(config.hidden_size)
        self.pool = getattr(self.base, "head", None)
        self._blank = swapped(embeddings, {self._conv: _Blank(self._conv), self._dropout: nn.Identity()})
        # CLIP returns tokens that are not normed.
        self._raw = _family(self.base) == "CLIPVisionModel"
        passed = {embeddings: _Passed(embeddings), self._layers: nn.ModuleList(), self._first_norm: nn.Identity()}
        passed |= {} if self._raw else {self._norm: nn.Identity()}
        passed |= {} if self._rope is None else {self._rope: nn.Identity()}
        self._tail = swapped(model, passed)

    @property
    def blocks(self) -> Any:
        return self._layers

    @property
    def patch(self) -> tuple[int, int]:
        # Their patches do not overlap: kernel and stride are equal.
        p, q = self._conv.kernel_size
        return int(p), int(q)

    def reasons(self) -> list[str]:
        if self.model is self.base or type(self.model).__name__.endswith(_AROUND):
            return []
        return [f"{type(self.model).__name__} reads out a whole grid, or texts too (use its vision model)"]

    def grid(self, height: int, width: int) -> tuple[int, int]:
        p, q = self.patch
        fits = (height // p * p, width // q * q)
        if _family(self.base) in ("ViTModel", "SiglipVisionModel", "CLIPVisionModel"):  # the others interpolate their positions
            size = self.base.config.image_size
            fits = (size, size) if isinstance(size, int) else tuple(size)
        return _checked((height, width), fits, (fits[0] // p, fits[1] // q))

    def normalization(self) -> Normalization | None:
        from transformers import AutoImageProcessor

        try:
            about = AutoImageProcessor.from_pretrained(self.model.name_or_path).to_dict()
        except (OSError, ValueError):  # none was published with the model, or it was not loaded from a folder
            return None
        if not about.get("do_rescale", True) or abs(about.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-3:
            return None
        mean, std = (about["image_mean"], about["image_std"]) if about.get("do_normalize") else ((0.0,) * 3, (1.0,) * 3)
        return Normalization(tuple(mean), tuple(std), _RESAMPLE.get(about.get("resample") or 3, "bicubic"))

    def tokens(self, images: Tensor, layer: int) -> tuple[Tensor, Tensor | None]:
        x, positions = self.embed(images)
        x = self.norm(self.run(x, 0, layer + 1, positions))
        return x[:, self.prefix :], x[:, : self.prefix]

    def embed(self, images: Tensor, indices: Tensor | None = None) -> tuple[Tensor, Any]:
        images = images.to(self._conv.weight.dtype)
        if indices is None:
            x = self.base.embeddings(images)
        else:
            patches = embed_patches(self._conv, images, indices)
            x = self._dropout(_placed(self._blank(images[:1]), patches, indices, self.prefix))
        return self._first_norm(x), None if self._rope is None else torch.cat(self._rope(images), -1)

    def norm(self, x: Tensor) -> Tensor:
        return self._norm(x)

    def output(self, x: Tensor, counts: list[int] | None = None, **options: Any) -> Any:
        asked = {name: getattr(self.base.config, name, None) for name in _UNKNOWN[:2]} | options
        if unknown := [name for name in _UNKNOWN if asked.get(name) not in (None, False)]:
            raise RequestError(f"A model that runs on a part of its patches has no {', '.join(unknown)}. Leave it out.")
        x, tail = x if self._raw else self.norm(x), self._tail
        if counts is not None:
            lengths = [self.prefix + k for k in counts]
            x = filled(x, lengths, self.prefix)
            tail = tail if self.pool is None else swapped(tail, {self.pool: _EachAlone(self.pool, lengths)})
        return tail(pixel_values=x, **options)

    def _options(self, number: int, positions: Any, places: Places | None, bias: Tensor | None) -> dict[str, Any]:
        kind = getattr(self.base.config, "_attn_implementation", "sdpa")
        if bias is not None and kind not in ("sdpa", "eager"):
            raise RequestError(f"Attention of the kind '{kind}' takes no bias. Load the model with `attn_implementation=\"sdpa\"`.")
        options = {"attention_mask": bias}
        if positions is None:
            return options
        table = positions if places is None else places.take(positions.unsqueeze(0)).unsqueeze(1)
        return options | {"position_embeddings": table.chunk(2, -1)}


class _Blank(nn.Module):
    """Stands in for the convolution of patches: every patch is zero, so that only positions are left."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.stride = conv.weight, conv.stride

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = images.shape[2] // self.stride[0], images.shape[3] // self.stride[1]
        return self.weight.new_zeros(images.shape[0], self.weight.shape[0], rows, columns)


class _Passed(nn.Module):
    """Stands in for the embedding of a model that gets tokens in place of images."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self._modules.update(embeddings._modules)  # models ask their dtype

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        return tokens


def _family(model: Any) -> str:
    """Return which of `_LAYOUTS` a model is; empty for any other."""
    kinds = (kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
    return next((kind for kind in kinds if kind in _LAYOUTS), "")


def vision_tower(model: Any) -> Any:
    """Return the vision model of transformers that a model is or contains; None for any other model."""
    return next((part for part in (model, *model.children()) if _family(part)), None)


def encoder_of(model: Model, name: str) -> Encoder:
    """Return the adapter of a model.

    Raises:
        RequestError: The model has no fixed grid of patch tokens.
    """
    for kind, adapter in {Beit: BeitViT, Eva: RotaryViT, VisionTransformer: PlainViT}.items():
        if isinstance(model, kind):
            return adapter(model, name)
    if vision_tower(model) is not None:
        return TransformersViT(model, name)
    intermediates = getattr(model, "forward_intermediates", None)
    one_grid = hasattr(model, "blocks") and hasattr(getattr(model, "patch_embed", None), "grid_size")
    if one_grid and intermediates is not None and "return_prefix_tokens" in inspect.signature(intermediates).parameters:
        return Encoder(model, name)
    raise no_grid(name)


def no_grid(name: str) -> RequestError:
    """Return the error for a model that is no plain vision transformer."""
    return RequestError(
        f"'{name}' does not have one fixed grid of patch tokens in every block: convolutions, windows and hierarchies mix or merge "
        "patches, and NaFlex pads them. Choose a plain vision transformer: ViT, DINOv2, DINOv3, EVA-02, BEiT, SigLIP or CLIP."
    )


def partial_encoder(model: Model, name: str) -> PlainViT:
    """Return the adapter of a model that can run on a part of its patches, or say why it cannot."""
    encoder = encoder_of(model, name)
    if reasons := encoder.reasons():
        raise RequestError(
            f"'{name}' cannot run on a part of its patches: {'; '.join(reasons)}. Route after the backbone (leave out `route`), "
            "or choose a plain vision transformer: ViT, DINOv2, DINOv3, EVA-02, BEiT, SigLIP or CLIP."
        )
    assert isinstance(encoder, PlainViT)
    return encoder


# Parts ---------------------------------------------------------------------------------------------------------------


def embed_patches(conv: nn.Conv2d, images: Tensor, indices: Tensor) -> Tensor:
    """Apply a convolution without overlap to the patches `indices` [B, K], as a product: [B, K, D]."""
    height, width = conv.kernel_size
    b, c = images.shape[:2]
    h, w = images.shape[2] // height, images.shape[3] // width
    cut = images.reshape(b, c, h, height, w, width).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w, c * height * width)
    return F.linear(take(cut, indices), conv.weight.flatten(1), conv.bias)


def _placed(blank: Tensor, patches: Tensor, indices: Tensor, prefix: int) -> Tensor:
    """Add positions to patches [B, K, D] and put prefix tokens in front, both of the tokens [1, P + N, D] of blank patches."""
    blank = blank.expand(patches.shape[0], -1, -1)
    return torch.cat([blank[:, :prefix], patches + take(blank[:, prefix:], indices)], 1)


def _checked(given: tuple[int, int], fits: tuple[int, int], grid: tuple[int, int]) -> tuple[int, int]:
    if given != fits:
        raise ShapeError(f"It takes images of {fits[0]} x {fits[1]} pixels, not of {given[0]} x {given[1]}. Resize them.")
    return grid


def filled(x: Tensor, lengths: list[int], first: int) -> Tensor:
    """Replace the tokens behind the length of each image by the mean of those before it, from `first` on.

    The mean over all tokens is then the mean over the real ones, and so is the maximum.
    """
    rows = []
    for row, length in zip(x, lengths):
        mean = row[first:length].mean(0, keepdim=True)
        rows.append(torch.cat([row[:length], mean.expand(len(row) - length, -1)]))
    return torch.stack(rows)


class _EachAlone(nn.Module):
    """Applies an attention pooling to each image alone, without the tokens that only fill up."""

    def __init__(self, pool: nn.Module, lengths: list[int]) -> None:
        super().__init__()
        self.pool, self.lengths = pool, lengths

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.pool(row[:, :length]) for row, length in zip(x.split(1), self.lengths)])


def swapped(module: Any, parts: Mapping[nn.Module, nn.Module]) -> Any:
    """Return a view of a module with other `parts`; it shares everything else, also what is trained or loaded later."""
    if module in parts:
        return parts[module]
    children = {name: child and swapped(child, parts) for name, child in module._modules.items()}
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    # A shallow copy: parameters and buffers stay the same objects.
    view = copy.copy(module)
    view._modules = children
    return view
