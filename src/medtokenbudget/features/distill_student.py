"""The student of a distillation: how it is built, how it starts from its teacher, and what it is asked to match.

Starting from the teacher: the teacher's residual stream is projected onto its main directions, and evenly spaced blocks, their
strongest heads and their strongest hidden units are carried over in that basis. The rest is learnt.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import DistillConfig
from medtokenbudget.errors import RequestError
from medtokenbudget.features.attention import QueryKeyTap
from medtokenbudget.features.backbone import Backbone, build
from medtokenbudget.features.zoo import Recipe

_BASE = "vit_tiny_patch16_224"


def recipe(config: DistillConfig, teacher: Backbone, licence: str) -> Recipe:
    """How to build the student again."""
    size = teacher.preprocessing.image_size
    if any(side * config.patch_size != size for side in teacher.grid):
        raise RequestError(
            f"the teacher has {teacher.grid[0]} x {teacher.grid[1]} tokens at {size} pixels, a student with patches of "
            f"{config.patch_size} pixels has not. Take --patch_size {size // teacher.grid[0]}."
        )
    if config.width % config.heads:
        raise RequestError(f"--width {config.width} is not a multiple of --heads {config.heads}.")
    arguments: dict[str, Any] = {
        "patch_size": config.patch_size,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "class_token": teacher.has_cls,
        "global_pool": "token" if teacher.has_cls else "avg",
        "fc_norm": False,
    }
    if config.init == "teacher":
        _check_start(config, teacher)
    preprocessing = teacher.preprocessing.to_dict()
    del preprocessing["image_size"]
    return Recipe(_BASE, arguments, preprocessing, licence)


def _check_start(config: DistillConfig, teacher: Backbone) -> None:
    """Whether the teacher's weights can be carried over; asked before its tokens are computed, which takes long."""
    source: Any = teacher.model
    plain = isinstance(source, VisionTransformer) and getattr(source, "num_reg_tokens", 0) == 0 and config.width <= teacher.dim
    block = source.blocks[0]
    if not plain or not isinstance(getattr(block, "attn", None), Attention) or not isinstance(block.attn.q_norm, nn.Identity):
        raise RequestError("a student starts only from a plain, wider vision transformer without registers. Take --init random.")
    size, units = config.width // config.heads, 4 * config.width
    if size != block.attn.head_dim or config.heads > block.attn.num_heads or units > block.mlp.fc1.out_features:
        raise RequestError(
            f"a student starts only from a teacher with heads of its size ({size}; the teacher's are {block.attn.head_dim}), "
            f"as many heads and at least {units} hidden units. Change --width and --heads, or take --init random."
        )


class Student(nn.Module):
    """The small transformer and its adapter to the teacher's width, which is dropped afterwards."""

    def __init__(self, model: Any, teacher_dim: int) -> None:
        super().__init__()
        self.model = model
        self.adapter = nn.Linear(model.num_features, teacher_dim)
        self._tap = QueryKeyTap(model.blocks[-1], _BASE)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images [B, 3, S, S] to predicted `patches` [B, N, D], and `cls` [B, D] and `cls_attention` [B, N] with a class token."""
        tokens = self.model.forward_features(images)
        predicted = self.adapter(tokens)
        prefix = self.model.num_prefix_tokens
        found = {"patches": predicted[:, prefix:]}
        q, k = self._tap.query_key()
        if prefix:
            found["cls"] = predicted[:, 0]
            found["cls_attention"] = torch.einsum("bhd,bhtd->bht", q[:, :, 0], k).softmax(-1).mean(1)[:, prefix:]
        return found


class Objective:
    """Cosine plus smooth-L1 on standardised tokens, and cross-entropy on the class attention over the patches.

    mean, std  [D] of the teacher's patch tokens; the class token has its own.
    """

    def __init__(self, statistics: dict[str, Tensor], config: DistillConfig) -> None:
        self.statistics = statistics
        self.config = config

    def __call__(self, predicted: dict[str, Tensor], target: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parts of the loss and their weighted sum `loss`."""
        parts = {"patches": token_loss(predicted["patches"], self.standardised(target, "patches"))}
        total = parts["patches"]
        if "cls" in predicted:
            parts["cls"] = token_loss(predicted["cls"], self.standardised(target, "cls"))
            parts["attention"] = attention_loss(predicted["cls_attention"], target["cls_attention"].float())
            total = total + self.config.cls_weight * parts["cls"] + self.config.attention_weight * parts["attention"]
        return {**parts, "loss": total}

    def standardised(self, target: dict[str, Tensor], name: str) -> Tensor:
        """The teacher's tokens called `name` with mean 0 and deviation 1 in each dimension."""
        return (target[name].float() - self.statistics[f"{name}_mean"]) / self.statistics[f"{name}_std"]


def token_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean of 1 - cosine over tokens plus mean smooth-L1 over values; both [..., D]."""
    return (1 - F.cosine_similarity(predicted, target, dim=-1)).mean() + F.smooth_l1_loss(predicted, target)


def attention_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Kullback-Leibler divergence of class attention, [B, N] each, made to sum to one over the patches."""
    p = target / target.sum(1, keepdim=True)
    q = predicted / predicted.sum(1, keepdim=True)
    return (torch.special.xlogy(p, p) - p * q.clamp_min(1e-8).log()).sum(1).mean()


def create(config: DistillConfig, plan: Recipe, teacher: Backbone, sample: dict[str, Tensor], objective: Objective) -> Student:
    """A student at its start; `sample` (stored views: pixels and tokens) shows the teacher's main directions."""
    torch.manual_seed(config.seed)
    student = Student(build(plan.architecture, teacher.preprocessing.image_size, plan), teacher.dim).to(teacher.device)
    if config.init == "teacher":
        images = teacher.normalise(sample["pixels"])
        start_from_teacher(student.model, teacher, images)
        fit_adapter(student, images, objective.standardised(sample, "patches"))
    return student


@torch.no_grad()
def fit_adapter(student: Student, images: Tensor, target: Tensor) -> None:
    """Ridge regression of the standardised patches [B, N, D] on the student's, so that learning does not start by undoing it."""
    tokens = student.model.forward_features(images)[:, student.model.num_prefix_tokens :].flatten(0, 1).double()
    values = target.flatten(0, 1).double()
    center, mean = tokens.mean(0), values.mean(0)
    tokens, values = tokens - center, values - mean
    gram = tokens.T @ tokens / len(tokens)
    ridge = 1e-2 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    weight = torch.linalg.solve(gram + ridge, tokens.T @ values / len(tokens)).T
    student.adapter.weight.copy_(weight)
    student.adapter.bias.copy_(mean - weight @ center)


@torch.no_grad()
def start_from_teacher(model: Any, teacher: Backbone, images: Tensor) -> None:
    """Carry the teacher's weights over into the narrower and shallower `model`."""
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


def _main_directions(source: Any, layer: int, images: Tensor, width: int) -> tuple[Tensor, float]:
    """Orthonormal [D, width] basis of the normalised residual stream, and the factor that layer norm loses by the projection."""
    streams = source.forward_intermediates(
        images, indices=list(range(layer + 1)), norm=False, stop_early=True, output_fmt="NLC", intermediates_only=True
    )
    rows = torch.cat([F.layer_norm(x, x.shape[-1:]).flatten(0, 1) for x in streams])
    values, vectors = torch.linalg.eigh((rows.T @ rows).double() / len(rows))
    kept = float(values[-width:].sum() / values.sum())
    # A random turn within the subspace spreads the energy, so that layer norm's mean removal costs one direction of many.
    turn = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    basis = (vectors[:, -width:] @ turn).float()
    return basis, (kept * source.num_features / width) ** 0.5


def _carry_block(block: Any, source: Any, basis: Tensor, scale: float) -> None:
    """One block in the new basis: layer norms folded into the projections, layer scale into the outputs."""
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


def _layer_scale(module: Any) -> Tensor:
    return module.gamma if hasattr(module, "gamma") else torch.ones(1)
