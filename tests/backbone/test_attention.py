"""The reduced attention against the weights that timm's blocks really use, and against formulas worked by hand."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.errors import RequestError, UnknownNameError

SMALL: dict[str, Any] = {"depth": 3, "embed_dim": 48, "num_heads": 3, "num_classes": 0, "pretrained": False}
MODELS = {
    "plain": ("vit_tiny_patch16_224", {"img_size": 64}),
    "reg4": ("vit_small_patch14_reg4_dinov2", {"img_size": 56}),
    "siglip": ("vit_base_patch16_siglip_224", {"img_size": 64}),
    "query-key norm": ("vit_tiny_patch16_224", {"img_size": 64, "qk_norm": True}),
    "rotary (DINOv3)": ("vit_small_patch16_dinov3", {"img_size": 64}),
    "rotary, projections apart (EVA-02)": ("eva02_tiny_patch14_224", {"img_size": 56}),
    "rotary and register": ("vit_medium_patch16_rope_reg1_gap_256", {"img_size": 64}),
    "relative positions": ("vit_relpos_small_patch16_224", {"img_size": 64}),
    "relative positions and class token (BEiT)": ("beit_base_patch16_224", {"img_size": 64}),
    "parallel block": ("vit_base_patch16_xp_224", {"img_size": 64}),
}
NO_CLASS_TOKEN = ("siglip", "rotary and register", "relative positions")


def make(kind: str) -> Any:
    """A small model with weights large enough that its attention is far from uniform."""
    torch.manual_seed(0)
    name, extra = MODELS[kind]
    model = timm.create_model(name, **SMALL, **extra)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def images(model: Any, n: int = 3) -> Tensor:
    return torch.randn(n, 3, *model.patch_embed.img_size, generator=torch.Generator().manual_seed(1))


def timm_attention(model: Any, x: Tensor, layer: int) -> Tensor:
    """[B, H, T, T]: what timm's own attention hands to its dropout when it is not fused."""
    seen = []
    attention = getattr(model.blocks[layer], "attn", model.blocks[layer])
    attention.fused_attn = False
    handle = attention.attn_drop.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach()))
    with torch.inference_mode():
        model.forward_features(x)
    handle.remove()
    attention.fused_attn = True
    return seen[0]


def entropy_by_hand(weights: Tensor, prefix: int) -> Tensor:
    """Eq. 1 as a plain loop over images, patches and patches."""
    mean = weights.double().mean(1)[:, prefix:, prefix:]
    b, n, _ = mean.shape
    rows = [[1 + sum(float(w) * math.log(float(w)) for w in mean[i, j]) / math.log(n) for j in range(n)] for i in range(b)]
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize("layer", [1, -1])
@pytest.mark.parametrize("kind", list(MODELS))
def test_attention_equals_the_weights_that_timm_uses(kind: str, layer: int) -> None:
    model = make(kind)
    x = images(model)
    expected = timm_attention(model, x, layer)
    tokens = Backbone.from_model(model, kind, layer=layer)(x)
    prefix = model.num_prefix_tokens
    assert expected.shape[-1] == prefix + tokens.n
    torch.testing.assert_close(tokens.attention_entropy, entropy_by_hand(expected, prefix), rtol=1e-4, atol=1e-5)
    if kind in NO_CLASS_TOKEN:
        assert tokens.cls is None
        assert tokens.cls_attention is None
    else:
        torch.testing.assert_close(tokens.cls_attention, expected.mean(1)[:, 0, prefix:], rtol=1e-4, atol=1e-6)


def test_an_earlier_layer_gives_that_blocks_output_under_the_final_norm_and_runs_no_later_block() -> None:
    model = make("plain")
    x = images(model)
    with torch.inference_mode():
        hidden = model._pos_embed(model.patch_embed(x))
        expected = model.norm(model.blocks[1](model.blocks[0](hidden)))
    ran = []
    model.blocks[2].register_forward_hook(lambda *_: ran.append(2))
    tokens = Backbone.from_model(model, "plain", layer=1)(x)
    torch.testing.assert_close(tokens.patches, expected[:, 1:])
    assert ran == []


def test_a_block_of_several_attentions_is_rejected_and_served_only_as_pseudo() -> None:
    model = timm.create_model("vit_small_patch16_18x2_224", **SMALL, img_size=64).eval()
    with pytest.raises(RequestError, match=r"ParallelThingsBlock computes 2. Use `attention=.pseudo.`"):
        Backbone.from_model(model, "vit_small_patch16_18x2_224")
    tokens = Backbone.from_model(model, "vit_small_patch16_18x2_224", attention="pseudo")(images(model, 2))
    assert tokens.grid == (4, 4)
    unit = torch.nn.functional.normalize(tokens.patches.double(), dim=-1)
    for i in range(2):
        for j in range(tokens.n):
            similarity = [math.exp(float(unit[i, j] @ unit[i, other]) / 0.1) for other in range(tokens.n)]
            weights = [value / sum(similarity) for value in similarity]
            by_hand = 1 + sum(w * math.log(w) for w in weights) / math.log(tokens.n)
            assert float(tokens.attention_entropy[i, j]) == pytest.approx(by_hand, abs=1e-5)
    torch.testing.assert_close(tokens.cls_attention.sum(1), torch.ones(2))


def test_two_threads_do_not_see_each_others_attention() -> None:
    model = make("plain")
    backbone = Backbone.from_model(model, "plain")
    inputs = [torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    expected = [backbone(x).attention_entropy for x in inputs]
    wrong = []

    def work(which: int) -> None:
        for _ in range(20):
            if not torch.equal(backbone(inputs[which]).attention_entropy, expected[which]):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Signals -------------------------------------------------------------------------------------------------------------

EXTRA = ("received_attention", "value_norm", "mean_key", "rollout")


def qkv(model: Any, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, T, d] of a plain block, from its own projection."""
    seen = []
    attention = model.blocks[layer].attn
    handle = attention.qkv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.inference_mode():
        model.forward_features(x)
    handle.remove()
    b, t, width = seen[0].shape
    _, key, value = seen[0].reshape(b, t, 3, attention.num_heads, width // 3 // attention.num_heads).permute(2, 0, 3, 1, 4)
    return key, value


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "reg4"])
def test_signals_are_what_the_blocks_compute(kind: str, layer: int) -> None:
    model = make(kind)
    x, prefix = images(model, 2), model.num_prefix_tokens
    weights = [timm_attention(model, x, block).mean(1) for block in range(layer + 1)]
    key, value = qkv(model, x, layer)
    tokens = Backbone.from_model(model, kind, layer=layer)(x, EXTRA)
    t = weights[0].shape[-1]
    for row in range(2):
        received = [np.mean([float(weights[layer][row, i, j]) for i in range(prefix, t)]) for j in range(prefix, t)]
        norms = [sum(float(v) ** 2 for v in value[row, :, j].flatten()) ** 0.5 for j in range(prefix, t)]
        product = torch.eye(t)
        for block in weights:
            product = (0.5 * block[row] + 0.5 * torch.eye(t)) @ product
        torch.testing.assert_close(tokens.received_attention[row], torch.tensor(received, dtype=torch.float32))
        torch.testing.assert_close(tokens.value_norm[row], torch.tensor(norms), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tokens.mean_key[row], key[row].mean(0)[prefix:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tokens.rollout[row], product[0, prefix:], rtol=1e-3, atol=1e-6)
    assert tokens.attention_entropy is None
    assert tokens.cls_attention is None


def test_signals_that_a_backbone_cannot_give_are_rejected_by_name() -> None:
    without_class_token = Backbone.from_model(make("siglip"), "siglip")
    with pytest.raises(RequestError, match="cls_attention, rollout needs a class token"):
        without_class_token(images(without_class_token.model), ("value_norm", "cls_attention", "rollout"))
    pseudo = Backbone.from_model(make("plain"), "plain", attention="pseudo")
    with pytest.raises(RequestError, match="value_norm needs the attention of the backbone itself"):
        pseudo(images(pseudo.model), ("value_norm",))
    assert pseudo(images(pseudo.model), ("received_attention",)).received_attention.sum(1).tolist() == pytest.approx([1, 1, 1])
    with pytest.raises(UnknownNameError, match="Did you mean 'rollout'"):
        pseudo.check_signals(("rolout",))
