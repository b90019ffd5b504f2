"""The student of a distillation: how it is built, and its losses. Its initial weights are in `distill_start`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import DistillConfig
from medtokenbudget.errors import RequestError
from medtokenbudget.features.attention import AttentionTap
from medtokenbudget.features.backbone import Backbone, build
from medtokenbudget.features.distill_start import check_start, ridge_regression, start_from_teacher
from medtokenbudget.features.zoo import Recipe

_BASE = "vit_tiny_patch16_224"


def recipe(config: DistillConfig, teacher: Backbone, license: str) -> Recipe:
    """The recipe from which the student can be built again."""
    size = teacher.preprocessing.image_size
    if any(side * config.patch_size != size for side in teacher.grid):
        raise RequestError(
            f"The teacher has {teacher.grid[0]} x {teacher.grid[1]} tokens for images of {size} pixels. With patches of "
            f"{config.patch_size} pixels the student does not. Use --patch-size {size // teacher.grid[0]}."
        )
    if config.width % config.heads:
        raise RequestError(f"--width {config.width} must be a multiple of --heads {config.heads}.")
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
    """The small transformer, and linear adapters to the width of the teacher that are dropped after training."""

    def __init__(self, model: Any, teacher_dim: int) -> None:
        super().__init__()
        self.model = model
        names = ("patches", "cls") if model.num_prefix_tokens else ("patches",)
        self.adapters = nn.ModuleDict({name: nn.Linear(model.num_features, teacher_dim) for name in names})
        self._tap = AttentionTap(model.blocks[-1], _BASE)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Predict `patches` [B, N, D], and with a class token `cls` [B, D] and `cls_attention` [B, N], of images [B, 3, S, S]."""
        tokens = self.model.forward_features(images)
        prefix = self.model.num_prefix_tokens
        found = {"patches": self.adapters["patches"](tokens[:, prefix:])}
        q, k, _, _ = self._tap.inputs()
        if prefix:
            found["cls"] = self.adapters["cls"](tokens[:, 0])
            found["cls_attention"] = torch.einsum("bhd,bhtd->bht", q[:, :, 0], k).softmax(-1).mean(1)[:, prefix:]
        return found


class Objective:
    """The loss: cosine plus smooth-L1 on standardized tokens, and the divergence of the class attention.

    Attributes:
        statistics: Mean and standard deviation [D] of the patch and class tokens of the teacher.
        config: The weights of the parts.
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
        """Tokens of the teacher with mean 0 and standard deviation 1 in each dimension; `name` is 'patches' or 'cls'."""
        return (target[name].float() - self.statistics[f"{name}_mean"]) / self.statistics[f"{name}_std"]


def token_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean of 1 - cosine over tokens plus mean smooth-L1 over values. Both inputs are [..., D]."""
    return (1 - F.cosine_similarity(predicted, target, dim=-1)).mean() + F.smooth_l1_loss(predicted, target)


def attention_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Kullback-Leibler divergence of class attention [B, N], scaled to sum to one over the patches."""
    p = target / target.sum(1, keepdim=True)
    q = predicted / predicted.sum(1, keepdim=True)
    return (torch.special.xlogy(p, p) - p * q.clamp_min(1e-8).log()).sum(1).mean()


def create(config: DistillConfig, plan: Recipe, teacher: Backbone, sample: dict[str, Tensor], objective: Objective) -> Student:
    """A new student; `sample` (pixels and tokens of stored views) gives the main directions of the teacher."""
    torch.manual_seed(config.seed)
    student = Student(build(plan.architecture, teacher.preprocessing.image_size, plan), teacher.dim).to(teacher.device)
    if config.init == "teacher":
        images = teacher.normalize(sample["pixels"])
        start_from_teacher(student.model, teacher, images)
        fit_adapters(student, images, {name: objective.standardized(sample, name) for name in student.adapters})
    return student


@torch.no_grad()
def fit_adapters(student: Student, images: Tensor, targets: dict[str, Tensor]) -> None:
    """Fit the adapters by ridge regression, so that training does not start by undoing the initial weights."""
    tokens = student.model.forward_features(images)
    prefix = student.model.num_prefix_tokens
    for name, target in targets.items():
        inputs = tokens[:, prefix:] if name == "patches" else tokens[:, 0]
        weight, bias = ridge_regression(inputs.flatten(0, -2), target.flatten(0, -2))
        adapter: Any = student.adapters[name]
        adapter.weight.copy_(weight)
        adapter.bias.copy_(bias)
