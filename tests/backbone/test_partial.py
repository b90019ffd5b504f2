"""The routed pass against the dense one: the equalities that must hold, with a class token, with registers and with neither."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from medtokenbudget.backbone import partial
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.encoders import partial_encoder, take
from medtokenbudget.backbone.partial import EarlyBackbone, EarlyRoute
from medtokenbudget.errors import RequestError
from medtokenbudget.tokens import TokenBatch

SIZE, N, DEPTH, LAYER = 32, 16, 5, 4
KINDS = {
    "plain": {},
    "registers": {"reg_tokens": 4, "no_embed_class": True},
    "no class token": {"class_token": False, "global_pool": "avg", "fc_norm": False},
}


@pytest.fixture(params=KINDS, ids=list(KINDS))
def model(request: pytest.FixtureRequest) -> VisionTransformer:
    """A tiny ViT with LayerScale and random weights that are large enough for attention to matter."""
    torch.manual_seed(1)
    made = VisionTransformer(
        img_size=SIZE, patch_size=8, embed_dim=24, depth=DEPTH, num_heads=2, num_classes=0, init_values=0.5, **KINDS[request.param]
    )
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.25)
    return made.eval().requires_grad_(False)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))


def some(k: int, seed: int = 3) -> Tensor:
    """k different patches for each of three images, in random order."""
    return torch.rand(3, N, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :k]


def dense(model: VisionTransformer, images: Tensor, mask_from: int = DEPTH, kept: Tensor | None = None) -> Tensor:
    """The dense pass, [B, P + N, D]; from block `mask_from` on, patches that are not kept are masked out as keys."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    bias = None
    if kept is not None:
        prefix = model.num_prefix_tokens
        seen = torch.zeros(len(images), x.shape[1], dtype=torch.bool)
        seen[:, :prefix] = True
        seen[:, prefix:] = torch.zeros(len(images), N, dtype=torch.bool).scatter(1, kept, True)
        bias = torch.zeros(len(images), 1, 1, x.shape[1]).masked_fill(~seen[:, None, None], -torch.inf)
    for number, block in enumerate(model.blocks):
        x = block(x, attn_mask=bias) if number >= mask_from and bias is not None else block(x)
    return model.norm(x)


def routed(model: VisionTransformer, images: Tensor, indices: Tensor, block: int = 0, layer: int = LAYER) -> tuple[Tensor, Tensor]:
    """Normed tokens of the kept patches and prefix tokens, routed at a block; 0 is before the blocks."""
    encoder = partial_encoder(model, "model")
    x, places = partial.routed_pass(encoder, images, lambda _: (indices, None), block, layer + 1)
    assert places.indices is indices
    x = encoder.norm(x)
    return x[:, encoder.prefix :], x[:, : encoder.prefix]


def patches_of(model: VisionTransformer, x: Tensor, indices: Tensor) -> Tensor:
    return take(x[:, model.num_prefix_tokens :], indices)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_reference_of_these_tests_is_timms_own_pass(model: VisionTransformer, images: Tensor) -> None:
    close(dense(model, images), model.forward_features(images))


def test_a_scout_pass_is_the_dense_pass_with_dropped_keys_masked_from_the_first_block(
    model: VisionTransformer, images: Tensor
) -> None:
    indices = some(5)
    patches, prefix = routed(model, images, indices)
    expected = dense(model, images, 0, indices)
    close(patches, patches_of(model, expected, indices))
    close(prefix, expected[:, : model.num_prefix_tokens])
    assert (patches - patches_of(model, model.forward_features(images), indices)).abs().max() > 1e-2


@pytest.mark.parametrize("block", [1, 3])
def test_a_background_token_for_one_dropped_patch_is_dense_attention_with_it(
    model: VisionTransformer, images: Tensor, block: int
) -> None:
    indices = some(N - 1)
    patches, prefix = routed(model, images, indices, block)
    expected = model.forward_features(images)
    close(patches, patches_of(model, expected, indices))
    close(prefix, expected[:, : model.num_prefix_tokens])
    without = dense(model, images, block, indices)
    assert (patches_of(model, without, indices) - patches).abs().max() > 1e-3


def test_the_background_token_is_the_mean_of_the_dropped_patches_of_each_image() -> None:
    x = torch.randn(3, 2 + N, 4, generator=torch.Generator().manual_seed(5))
    indices = some(6)
    tokens, places = partial.prune(x, indices, None, 2)
    bias = places.bias(tokens, 2)
    assert tokens.shape == (3, 2 + 6 + 1, 4)
    for image in range(3):
        dropped = [2 + patch for patch in range(N) if patch not in indices[image].tolist()]
        close(tokens[image, -1], x[image, dropped].mean(0))
    close(bias[..., -1].exp(), torch.full((3, 1, 1), float(N - 6)))
    assert bool((bias[..., :-1] == 0).all())


def test_a_background_token_for_equal_patches_counts_as_often_as_there_are(model: VisionTransformer) -> None:
    """Six dropped copies of one token and one token of size six attract the same attention."""
    torch.manual_seed(4)
    prefix = model.num_prefix_tokens
    x = torch.randn(1, prefix + N, 24)
    indices = torch.arange(N - 6).unsqueeze(0)
    x[:, prefix + N - 6 :] = x[:, -1:]
    kept, places = partial.prune(x, indices, None, prefix)
    whole = model.blocks[0](x)
    pruned = partial_encoder(model, "model").run(kept, 0, 1, None, places, places.bias(kept, prefix))
    close(pruned[:, : prefix + N - 6], whole[:, : prefix + N - 6])
    close(pruned[:, -1], whole[:, -1])


@pytest.mark.parametrize("block", [0, 2])
def test_the_order_of_the_kept_patches_changes_nothing(model: VisionTransformer, images: Tensor, block: int) -> None:
    indices, shuffle = some(6), torch.tensor([3, 0, 5, 1, 4, 2])
    one, other = (routed(model, images, kept, block) for kept in (indices, indices[:, shuffle]))
    close(other[0], one[0][:, shuffle])
    close(other[1], one[1])


def test_an_earlier_layer_gives_the_tokens_of_that_block(model: VisionTransformer, images: Tensor) -> None:
    indices = some(N)
    [(patches, *_)] = [
        found if isinstance(found, tuple) else (found,)
        for found in model.forward_intermediates(images, indices=[2], norm=True, output_fmt="NLC", intermediates_only=True)
    ]
    close(routed(model, images, indices, layer=2)[0], take(patches, indices))


SHAPE = {"img_size": SIZE, "patch_size": 8, "embed_dim": 24, "depth": DEPTH, "num_heads": 2}
ROUTABLE = {
    "vit_tiny_patch16_224": "plain",
    "vit_base_patch16_224_miil": "no bias of the queries",
    "vit_small_patch14_dinov2": "DINOv2",
    "vit_giant_patch14_dinov2": "DINOv2 with a gated MLP",
    "vit_small_patch14_reg4_dinov2": "registers without positions",
    "vit_base_patch14_reg1_tipsv2": "one register",
    "vit_so150m_patch16_reg4_map_256": "registers with positions, no class token",
    "vit_base_patch16_reg4_gap_256": "registers without positions, no class token",
    "vit_base_patch16_gap_224": "no prefix token",
    "vit_base_patch16_siglip_224": "SigLIP",
    "vit_base_patch16_siglip_gap_224": "SigLIP without its pooling",
    "vit_base_patch16_clip_224": "CLIP, a norm before the blocks",
    "vit_base_patch16_rpn_224": "norms after attention and MLP",
    "vit_intern300m_patch14_448": "any image size",
    "aimv2_large_patch14_224": "RMS norms, a norm of the embedding",
    "beit3_base_patch16_224": "BEiT-3, absolute positions",
    "eva_large_patch14_196": "EVA, absolute positions",
    "flexivit_small": "FlexiViT",
    "deit_tiny_patch16_224": "DeiT",
    "deit_tiny_distilled_patch16_224": "class token and distillation token",
    "deit3_small_patch16_224": "DeiT-3, no position of the class token",
    "eva02_tiny_patch14_224": "EVA-02, rotary and absolute positions",
    "vit_small_patch16_dinov3": "DINOv3",
    "vit_small_patch16_rope_224": "rotary positions",
    "vit_small_patch16_rope_mixed_224": "rotary positions of each block and head",
    "vit_pe_core_tiny_patch16_384": "Perception Encoder, attention pooling",
    "vit_pe_spatial_tiny_patch16_512": "Perception Encoder without pooling",
    "beit_base_patch16_224": "BEiT, biases of pairs in each block",
    "beitv2_base_patch16_224": "BEiT v2",
}
"""One model of every kind of timm's vision transformers that may run on a part of its patches."""
REFUSED = {
    "vit_relpos_small_patch16_224": "relates patches in a way of its own",
    "vit_srelpos_small_patch16_224": "relates patches in a way of its own",
    "vit_base_patch16_xp_224": "a form of its own",
    "vit_pwee_patch16_reg1_gap_256": "a form of its own",
    "vit_dwee_patch16_reg1_gap_256": "a form of its own",
    "vit_small_patch16_18x2_224": "a form of its own",
}
"""One model of every kind that the package takes as a backbone, but that cannot run on a part of its patches; and the reason."""


def tiny(name: str) -> VisionTransformer:
    """A model of a family with few and small blocks, all of whose parameters are random: a zero would hide a token that is lost."""
    torch.manual_seed(1)
    made = timm.create_model(name, pretrained=False, num_classes=0, **SHAPE)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.25)
    made.eval().requires_grad_(False).double()
    if getattr(made, "rope_mixed", False):  # timm multiplies them with frequencies that it casts to fp32
        made.rope.t_x, made.rope.t_y = made.rope.t_x.float(), made.rope.t_y.float()
    return made


@pytest.mark.parametrize("name", ROUTABLE)
def test_attention_inside_is_that_of_the_dense_pass_for_every_family(name: str, images: Tensor) -> None:
    signals = ("attention_entropy", "received_attention", "value_norm")
    seen: list[TokenBatch] = []

    def score(tokens: TokenBatch) -> Tensor:
        seen.append(tokens)
        return tokens.received_attention if tokens.received_attention is not None else tokens.patches[..., 0]

    dense = Backbone.from_model(tiny(name), name, layer=1)(images.double(), signals)
    route = EarlyRoute(2, 5, score, dense.grid, SIZE, {}, requires=signals)
    EarlyBackbone(Backbone.from_model(tiny(name), name), route)(images.double())
    for signal in ("patches", *signals):
        close(getattr(seen[0], signal), getattr(dense, signal))


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_run_on_a_part_of_its_patches_is_refused_with_the_reason(name: str) -> None:
    model = timm.create_model(name, pretrained=False, num_classes=0, **SHAPE)
    with pytest.raises(RequestError, match=rf"cannot run on a part of its patches: .*{REFUSED[name]}.*Choose a plain"):
        partial_encoder(model, name)


def test_an_embedding_that_mixes_patches_is_refused() -> None:
    name = "vit_small_r26_s32_224"
    dense = Backbone.from_model(timm.create_model(name, pretrained=False, num_classes=0), name)
    with pytest.raises(RequestError, match=r"its patch embedding is not one linear map per patch.*leave out `route`"):
        EarlyBackbone(dense, EarlyRoute(0, 5, torch.clone, dense.grid, SIZE, {}))


@pytest.mark.parametrize("size", [(13, 17), (13, 40), (40, 40)])
def test_a_resize_is_that_of_pillow_also_in_a_graph(size: tuple[int, int]) -> None:
    torch._dynamo.reset()
    pixels = torch.rand(1, 1, 24, 30, generator=torch.Generator().manual_seed(0))
    resized = Image.fromarray(pixels[0, 0].numpy()).resize(size[::-1], Image.Resampling.BILINEAR)
    for resize in (partial.resize, torch.compile(partial.resize, fullgraph=True, backend="eager")):
        np.testing.assert_allclose(resize(pixels, size)[0, 0], np.asarray(resized), rtol=1e-5, atol=1e-6)
