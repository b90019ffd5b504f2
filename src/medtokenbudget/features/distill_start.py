"""Initial weights of a student from its teacher, which save most of the training.

The residual stream of the teacher is projected onto its main directions. Evenly spaced blocks, with their strongest heads and
hidden units, are copied in that basis; then the outputs of each block are refitted by least squares.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import DistillConfig
from medtokenbudget.errors import RequestError
from medtokenbudget.features.backbone import Backbone


def check_start(config: DistillConfig, teacher: Backbone) -> None:
    """Raise a RequestError if the weights of the teacher cannot be copied; called before its tokens are computed."""
    source: Any = teacher.model
    plain = isinstance(source, VisionTransformer) and isinstance(source.patch_embed, PatchEmbed)
    plain = plain and getattr(source, "num_reg_tokens", 0) == 0 and config.width <= teacher.dim
    block = source.blocks[0]
    if not plain or not isinstance(getattr(block, "attn", None), Attention) or not isinstance(block.attn.q_norm, nn.Identity):
        raise RequestError(
            "The teacher must be a plain vision transformer without registers and not narrower than the student. Use --init random."
        )
    size, units = config.width // config.heads, 4 * config.width
    if size != block.attn.head_dim or config.heads > block.attn.num_heads or units > block.mlp.fc1.out_features:
        raise RequestError(
            f"The teacher must have heads of the student's size ({size}, not {block.attn.head_dim}), at least as many of them, "
            f"and at least {units} hidden units. Change --width and --heads, or use --init random."
        )


@torch.no_grad()
def start_from_teacher(model: Any, teacher: Backbone, images: Tensor) -> None:
    """Copy the weights of the teacher into the narrower and shallower `model`, and refit it on images [B, 3, S, S]."""
    source: Any = teacher.model
    chosen = torch.linspace(0, teacher.layer, len(model.blocks)).round().long().tolist()
    basis, scale = _main_directions(source, teacher.layer, images, model.num_features)
    model.patch_embed.proj.weight.copy_(torch.einsum("do,dijk->oijk", basis, source.patch_embed.proj.weight))
    model.patch_embed.proj.bias.copy_(source.patch_embed.proj.bias @ basis)
    model.pos_embed.copy_(source.pos_embed @ basis)
    if model.cls_token is not None:
        model.cls_token.copy_(source.cls_token @ basis)
    for block, index in zip(model.blocks, chosen):
        _carry_block(block, source.blocks[index], basis, scale)
    _refit(model, source, chosen, basis, images)


def _main_directions(source: Any, layer: int, images: Tensor, width: int) -> tuple[Tensor, float]:
    """An orthonormal basis [D, width] of the normalized residual stream, and the scale that layer norm loses by the projection."""
    streams = source.forward_intermediates(
        images, indices=list(range(layer + 1)), norm=False, stop_early=True, output_fmt="NLC", intermediates_only=True
    )
    rows = torch.cat([F.layer_norm(x, x.shape[-1:]).flatten(0, 1) for x in streams])
    values, vectors = torch.linalg.eigh((rows.T @ rows).double() / len(rows))
    kept = float(values[-width:].sum() / values.sum())
    # A random rotation in the subspace spreads the energy, so that removing the mean in layer norm costs one direction of many.
    turn = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    basis = (vectors[:, -width:] @ turn).float()
    return basis, (kept * source.num_features / width) ** 0.5


def _carry_block(block: Any, source: Any, basis: Tensor, scale: float) -> None:
    """Copy one block to the new basis: layer norms are folded into the projections, layer scale into the outputs."""
    heads, size = block.attn.num_heads, block.attn.head_dim
    width_in = source.attn.qkv.weight * source.norm1.weight
    bias_in = source.attn.qkv.bias + source.attn.qkv.weight @ source.norm1.bias
    q, k, v = (width_in @ basis * scale).unflatten(0, (3, -1, size)).unbind(0)
    out = (basis.T @ (_layer_scale(source.ls1)[:, None] * source.attn.proj.weight)).unflatten(1, (-1, size))
    strength = torch.stack([(out[:, head] @ v[head]).norm() for head in range(out.shape[1])])
    best = strength.topk(heads).indices.sort().values
    block.attn.qkv.weight.copy_(torch.cat([part[best].flatten(0, 1) for part in (q, k, v)]))
    block.attn.qkv.bias.copy_(bias_in.unflatten(0, (3, -1, size))[:, best].flatten())
    block.attn.proj.weight.copy_(out[:, best].flatten(1))
    block.attn.proj.bias.copy_(_layer_scale(source.ls1) * source.attn.proj.bias @ basis)
    hidden = source.mlp.fc1.weight * source.norm2.weight @ basis * scale
    hidden_bias = source.mlp.fc1.bias + source.mlp.fc1.weight @ source.norm2.bias
    down = basis.T @ (_layer_scale(source.ls2)[:, None] * source.mlp.fc2.weight)
    units = (hidden.norm(dim=1) * down.norm(dim=0)).topk(block.mlp.fc1.out_features).indices.sort().values
    block.mlp.fc1.weight.copy_(hidden[units])
    block.mlp.fc1.bias.copy_(hidden_bias[units])
    block.mlp.fc2.weight.copy_(down[:, units])
    block.mlp.fc2.bias.copy_(_layer_scale(source.ls2) * source.mlp.fc2.bias @ basis)


def _refit(model: Any, source: Any, chosen: list[int], basis: Tensor, images: Tensor) -> None:
    """Block by block, fit the two output projections so that the student's stream follows the projected stream of the teacher.

    Each fit uses the actual stream of the student, so it also corrects the errors of earlier blocks.
    """
    goals = _streams(source, chosen, basis, images)
    stream = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    for block, (after_attention, after_mlp) in zip(model.blocks, goals):
        stream = _refit_layer(block.attn.proj, nn.Sequential(block.norm1, block.attn), stream, after_attention)
        stream = _refit_layer(block.mlp.fc2, nn.Sequential(block.norm2, block.mlp), stream, after_mlp)


def _streams(source: Any, chosen: list[int], basis: Tensor, images: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The projected stream of the teacher after attention and after the MLP of the chosen blocks, each [B, T, width]."""
    middle: dict[int, Tensor] = {}
    after: dict[int, Tensor] = {}

    def tap(block: Any, index: int) -> list[Any]:
        return [
            block.norm2.register_forward_pre_hook(lambda _, x: middle.update({index: x[0] @ basis})),
            block.register_forward_hook(lambda _, x, y: after.update({index: y @ basis})),
        ]

    handles = [handle for index in chosen for handle in tap(source.blocks[index], index)]
    source.forward_intermediates(images, indices=[max(chosen)], stop_early=True, output_fmt="NLC", intermediates_only=True)
    for handle in handles:
        handle.remove()
    return [(middle[index], after[index]) for index in chosen]


def _refit_layer(layer: nn.Linear, branch: nn.Module, stream: Tensor, goal: Tensor) -> Tensor:
    """Fit the last linear layer of a branch so that stream + branch(stream) is close to `goal`; returns the new stream."""
    inputs: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    output = branch(stream)
    handle.remove()
    # Fits a correction, not the layer: where the images give no information, the copied weights stay.
    weight, bias = ridge_regression(inputs[0].flatten(0, 1), (goal - stream - output).flatten(0, 1))
    layer.weight.add_(weight)
    layer.bias.add_(bias)
    return stream + output + F.linear(inputs[0], weight, bias)


def ridge_regression(inputs: Tensor, targets: Tensor, ridge: float = 1e-2) -> tuple[Tensor, Tensor]:
    """Weight [O, I] and bias [O] of a linear map from rows [n, I] to rows [n, O]; `ridge` is relative to the mean variance."""
    center, mean = inputs.mean(0), targets.mean(0)
    x, y = inputs - center, targets - mean
    gram = (x.T @ x).double() / len(x)
    damped = gram + ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    weight = torch.linalg.solve(damped, (x.T @ y).double() / len(x)).T.to(inputs.dtype)
    return weight, mean - weight @ center


def _layer_scale(module: Any) -> Tensor:
    return module.gamma if hasattr(module, "gamma") else torch.ones(1)
