"""The student of a distillation: how it is built and what it is asked to match; how it may start is in `distill_start`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import DistillConfig
from medtokenbudget.errors import RequestError
from medtokenbudget.features.attention import QueryKeyTap
from medtokenbudget.features.backbone import Backbone, build
from medtokenbudget.features.distill_start import check_start, ridge_regression, start_from_teacher
from medtokenbudget.features.zoo import Recipe

_BASE = "vit_tiny_patch16_224"


def recipe(config: DistillConfig, teacher: Backbone, license: str) -> Recipe:
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
        check_start(config, teacher)
    preprocessing = teacher.preprocessing.to_dict()
    del preprocessing["image_size"]
    return Recipe(_BASE, arguments, preprocessing, license)


class Student(nn.Module):
    """The small transformer and its linear adapters to the teacher's width, which are dropped afterwards."""

    def __init__(self, model: Any, teacher_dim: int) -> None:
        super().__init__()
        self.model = model
        names = ("patches", "cls") if model.num_prefix_tokens else ("patches",)
        self.adapters = nn.ModuleDict({name: nn.Linear(model.num_features, teacher_dim) for name in names})
        self._tap = QueryKeyTap(model.blocks[-1], _BASE)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images [B, 3, S, S] to predicted `patches` [B, N, D], and `cls` [B, D] and `cls_attention` [B, N] with a class token."""
        tokens = self.model.forward_features(images)
        prefix = self.model.num_prefix_tokens
        found = {"patches": self.adapters["patches"](tokens[:, prefix:])}
        q, k, _ = self._tap.query_key()
        if prefix:
            found["cls"] = self.adapters["cls"](tokens[:, 0])
            found["cls_attention"] = torch.einsum("bhd,bhtd->bht", q[:, :, 0], k).softmax(-1).mean(1)[:, prefix:]
        return found


class Objective:
    """Cosine plus smooth-L1 on standardized tokens, and cross-entropy on the class attention over the patches.

    mean, std  [D] of the teacher's patch tokens; the class token has its own.
    """

    def __init__(self, statistics: dict[str, Tensor], config: DistillConfig) -> None:
        self.statistics = statistics
        self.config = config

    def __call__(self, predicted: dict[str, Tensor], target: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parts of the loss and their weighted sum `loss`."""
        parts = {"patches": token_loss(predicted["patches"], self.standardized(target, "patches"))}
        total = parts["patches"]
        if "cls" in predicted:
            parts["cls"] = token_loss(predicted["cls"], self.standardized(target, "cls"))
            parts["attention"] = attention_loss(predicted["cls_attention"], target["cls_attention"].float())
            total = total + self.config.cls_weight * parts["cls"] + self.config.attention_weight * parts["attention"]
        return {**parts, "loss": total}

    def standardized(self, target: dict[str, Tensor], name: str) -> Tensor:
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
        images = teacher.normalize(sample["pixels"])
        start_from_teacher(student.model, teacher, images)
        fit_adapters(student, images, {name: objective.standardized(sample, name) for name in student.adapters})
    return student


@torch.no_grad()
def fit_adapters(student: Student, images: Tensor, targets: dict[str, Tensor]) -> None:
    """Ridge regression of the standardized tokens on the student's, so that learning does not start by undoing its start."""
    tokens = student.model.forward_features(images)
    prefix = student.model.num_prefix_tokens
    for name, target in targets.items():
        inputs = tokens[:, prefix:] if name == "patches" else tokens[:, 0]
        weight, bias = ridge_regression(inputs.flatten(0, -2), target.flatten(0, -2))
        adapter: Any = student.adapters[name]
        adapter.weight.copy_(weight)
        adapter.bias.copy_(bias)
