"""The training loops against plain ones, written here from the paper's equations: the weights that they end with are equal.

The networks are the package's (their own tests compare them with the formulas) and so are the seeded generators. Everything between
a batch and a step, and between an epoch and the weights that are kept, is written again. Without dropout nothing else draws.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.config import CurriculumConfig, LATSConfig, TrainConfig
from medtokenbudget.heads import create_head
from medtokenbudget.metrics import accuracy
from medtokenbudget.routing import create_selector
from medtokenbudget.runs.method import Method
from medtokenbudget.tokens import TokenBatch
from medtokenbudget.training.rows import TrainingRows, generator
from medtokenbudget.training.trainer import _Stage
from tests.drawn import Drawn, fit, quick

K_MIN, TAU = 16, 0.5


@dataclass
class Reference:
    """What a plain training ends with: weights by module, and the numbers of each epoch."""

    kept: dict[str, dict[str, Tensor]]
    best_epoch: int
    rows: list[dict[str, float]]


def cosine(high: float, low: float, epoch: int, epochs: int) -> float:
    return low + (high - low) * (1 + math.cos(math.pi * epoch / epochs)) / 2


def rows_of(drawn: Drawn, part: str) -> np.ndarray:
    return drawn.store.rows(drawn.manifest.part(part).ids)


def orders(rows: np.ndarray, config: TrainConfig, epoch: int) -> Iterator[np.ndarray]:
    order = rows[torch.randperm(len(rows), generator=generator(config.seed, "order", epoch)).numpy()]
    yield from (order[start : start + config.batch_size] for start in range(0, len(order), config.batch_size))


def smoothed(scores: Tensor, grid: tuple[int, int]) -> Tensor:
    """The mean of a 3 x 3 window, with zeros beyond the border."""
    return F.conv2d(scores.reshape(-1, 1, *grid), torch.full((1, 1, 3, 3), 1 / 9), padding=1).flatten(1)


def top_k(values: Tensor, k: int) -> Tensor:
    return torch.zeros_like(values).scatter(1, values.topk(k, dim=1).indices, 1.0)


def patches_kept(budget: float, n: int) -> int:
    return max(K_MIN, math.floor(round(budget * n, 6)))


def objective(batch: TokenBatch, scores: Tensor, head: nn.Module, budget: float, noise: torch.Generator) -> dict[str, Tensor]:
    """The terms of the paper's objective for raw scores [B, N]."""
    b, n = scores.shape
    k = patches_kept(budget, n)
    gumbel = -torch.empty(b, n).exponential_(generator=noise).log()
    logits = (torch.logit(smoothed(scores, batch.grid), eps=1e-6) + gumbel) / TAU
    soft = (k * logits.softmax(1)).clip(0, 1)
    mask = top_k(logits, k) + soft - soft.detach()
    pooled = (mask[:, :, None] * batch.patches).sum(1) / mask.sum(1)[:, None]
    similar = F.cosine_similarity(scores[:, None], scores[None], dim=-1).clip(min=0)
    target = batch.lesion.float()
    known = batch.has_mask
    cross_entropy = -(target * scores.log() + (1 - target) * (1 - scores).log()).mean(1)
    teacher = batch.cls_attention / batch.cls_attention.amax(1, keepdim=True)
    return {
        "classification": F.cross_entropy(head(pooled), batch.label),
        "budget_deviation": torch.tensor(abs(k / n - budget)),
        "diversity": similar[~torch.eye(b, dtype=torch.bool)].mean() if b > 1 else scores.sum() * 0,
        "lesion": cross_entropy[known].mean() if known.any() else scores.sum() * 0,
        "distillation": (scores - teacher).square().mean(),
    }


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, lr: float, clip: float) -> None:
    """One step at a rate, with the gradient scaled down to norm `clip` where it is longer."""
    parameters = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["lr"] = lr
    optimizer.zero_grad()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters))
    for parameter in parameters:
        parameter.grad.mul_(min(1.0, clip / norm))
    optimizer.step()


def adamw(modules: dict[str, nn.Module], config: TrainConfig) -> torch.optim.AdamW:
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, foreach=False)


def state(modules: dict[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    return {name: copy.deepcopy(module.state_dict()) for name, module in modules.items()}


def train_jointly(drawn: Drawn, config: TrainConfig) -> Reference:
    """The paper's recipe under its protocol: 50 epochs at most, the best by validation accuracy at budget 0.5 is kept."""
    store = drawn.store
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        selector = create_selector("lats", dim=store.dim, **vars(config.lats))
        head = create_head("linear", store.dim, len(drawn.manifest.classes))
    modules = {"selector": selector, "head": head}
    optimizer, scorer = adamw(modules, config), selector.scorer
    validation = store.read(rows_of(drawn, "val"))
    weights = {"classification": 1.0, "budget_deviation": 0.01, "diversity": 0.05, "lesion": 0.1, "distillation": 0.1}
    best, found = -math.inf, Reference({}, -1, [])
    for epoch in range(config.epochs):
        noise = generator(config.seed, "noise", epoch)
        lr = cosine(config.lr, 0.0, epoch, config.epochs)
        budget = cosine(0.5, 0.25, min(epoch, config.curriculum.epochs), config.curriculum.epochs)
        sums: dict[str, float] = {}
        rows = rows_of(drawn, "train")
        for picked in orders(rows, config, epoch):
            batch = store.read(picked)
            terms = objective(batch, scorer(batch), head, budget, noise)
            loss = sum(weights[name] * term for name, term in terms.items())
            descend(optimizer, loss, lr, config.clip)
            for name, term in {**terms, "loss": loss}.items():
                sums[name] = sums.get(name, 0.0) + term.item() * len(picked) / len(rows)
        found.rows.append({"lr": lr, "budget": budget, **sums})
        if (epoch + 1) % config.evaluate_every and epoch + 1 < config.epochs:
            continue
        with torch.no_grad():
            keep = top_k(smoothed(scorer(validation), validation.grid), patches_kept(0.5, validation.n))
            pooled = (keep[:, :, None] * validation.patches).sum(1) / keep.sum(1)[:, None]
            value = float((head(pooled).argmax(1) == validation.label).double().mean())
        found.rows[-1]["selection"] = value
        if value > best + 0.002 or found.best_epoch < 0:
            best, found.best_epoch, found.kept = value, epoch, state(modules)
        if epoch - found.best_epoch >= config.patience:
            break
    return found


def joint_config(**changes: Any) -> TrainConfig:
    """A training in which every part counts: gradients are clipped, the curriculum ends, the best epoch is not the last."""
    small = LATSConfig(hidden=16, layers=2, dropout=0.0)
    plain = {
        "protocol": "paper",
        "epochs": 12,
        "evaluate_every": 2,
        "patience": 4,
        "lr": 0.01,
        "clip": 0.05,
        "weight_decay": 0.1,
        "lats": small,
        "seed": 50,
    }
    return quick("paper", **{**plain, "curriculum": CurriculumConfig(epochs=4), **changes})


def assert_same_weights(module: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=5e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_rows(rows: list[dict[str, Any]], expected: list[dict[str, float]]) -> None:
    assert len(rows) == len(expected)
    for row, plain in zip(rows, expected):
        assert ("selection" in row) == ("selection" in plain), row["epoch"]
        for name, value in plain.items():
            assert row[name] == pytest.approx(value, rel=1e-3, abs=1e-6), (row["epoch"], name)


def test_the_joint_recipe_ends_with_the_weights_of_a_plain_loop(drawn: Drawn) -> None:
    config = joint_config()
    expected = train_jointly(drawn, config)
    assert expected.best_epoch + 1 < len(expected.rows) < config.epochs, "the loop stops early and keeps an earlier epoch"
    trained = fit(drawn, config, head="linear")
    assert_same_rows(trained.history, expected.rows)
    assert_same_weights(trained.selector, expected.kept["selector"])
    assert_same_weights(trained.head, expected.kept["head"])


def train_head(
    store: FeatureStore,
    rows: np.ndarray,
    config: TrainConfig,
    pooled: Callable[[TokenBatch, float, torch.Generator], Tensor],
    chosen_on: np.ndarray | None = None,
) -> Reference:
    """A linear head behind a fixed selector, with a budget drawn for each batch.

    The rate falls as a cosine and the last epoch is kept. With images `chosen_on` the rate is constant, and of every second epoch
    and the last the one with the best accuracy on them at budget 0.5 is kept.
    """
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        modules = {"head": create_head("linear", store.dim, len(store.classes))}
    optimizer, found = adamw(modules, config), Reference({}, config.head_epochs - 1, [])
    for epoch in range(config.head_epochs):
        lr = cosine(config.lr, 0.0, epoch, config.head_epochs) if chosen_on is None else config.lr
        noise = generator(config.seed, "selector", epoch)
        draws = torch.randint(len(config.budgets), (len(rows),), generator=generator(config.seed, "budget", epoch)).tolist()
        total = 0.0
        for picked, draw in zip(orders(rows, config, epoch), draws):
            batch = store.read(picked)
            loss = F.cross_entropy(modules["head"](pooled(batch, config.budgets[draw], noise)), batch.label)
            descend(optimizer, loss, lr, config.clip)
            total += loss.item() * len(picked) / len(rows)
        found.rows.append({"lr": lr, "classification": total})
        if chosen_on is not None and (epoch % 2 == 1 or epoch + 1 == config.head_epochs):
            batch = store.read(chosen_on)
            with torch.no_grad():
                predicted = modules["head"](pooled(batch, 0.5, generator(config.seed, "evaluation", 0))).argmax(1)
            value = float((predicted == batch.label).double().mean())
            found.rows[-1]["selection"] = value
            if value > max((row["selection"] for row in found.rows[:-1] if "selection" in row), default=-1) + 0.002:
                found.best_epoch, found.kept = epoch, state(modules)
    return found if found.kept else replace(found, kept=state(modules))


def head_config(name: str, *methods: str, **changes: Any) -> TrainConfig:
    return quick(name, *methods, **{"head_epochs": 5, "lr": 0.01, "clip": 0.05, "weight_decay": 0.1, "views": "none", **changes})


def pooled_by(selector: Any) -> Callable[[TokenBatch, float, torch.Generator], Tensor]:
    return lambda batch, budget, noise: selector.select_budget(batch, budget, noise).pooled()


def test_the_head_of_the_lesion_first_recipe_ends_with_the_weights_of_a_plain_loop(drawn: Drawn) -> None:
    config = head_config("lesion-first", epochs=1)
    trained, rows = fit(drawn, config, head="linear"), TrainingRows.of(drawn.manifest, drawn.store, config)
    expected = train_head(drawn.store, rows.head, config, pooled_by(trained.selector))
    assert_same_rows([row for row in trained.history if row["stage"] == "head"], expected.rows)
    assert_same_weights(trained.head, expected.kept["head"])


@pytest.mark.parametrize("name", ["center", "random"])
def test_the_head_of_a_baseline_learns_as_a_plain_loop_does(drawn: Drawn, name: str) -> None:
    config, selector = head_config("paper", f"{name}+linear"), create_selector(name)
    rows = TrainingRows.of(drawn.manifest, drawn.store, config).head
    expected = train_head(drawn.store, rows, config, pooled_by(selector))
    assert_same_rows(fit(drawn, config, selector, "linear").history, expected.rows)


@pytest.mark.parametrize("name", ["center", "random"])
def test_under_the_papers_protocol_a_baseline_keeps_its_best_epoch_of_a_constant_rate(drawn: Drawn, name: str) -> None:
    config = head_config("paper", f"{name}+linear", protocol="paper", evaluate_every=2, head_epochs=9, lr=0.05, clip=1.0)
    selector = create_selector(name)
    expected = train_head(drawn.store, rows_of(drawn, "train"), config, pooled_by(selector), rows_of(drawn, "val"))
    assert expected.best_epoch + 1 < config.head_epochs, "the accuracy has its peak before the last epoch"
    trained = fit(drawn, config, selector, "linear")
    assert_same_rows(trained.history, expected.rows)
    assert_same_weights(trained.head, expected.kept["head"])


@pytest.mark.parametrize(("name", "head"), [("center", "abmil"), ("oracle", "mlp")])
def test_heads_that_read_tokens_and_selectors_that_need_masks_keep_their_best_epoch_too(drawn: Drawn, name: str, head: str) -> None:
    config = head_config("paper", f"{name}+{head}", protocol="paper", evaluate_every=1, head_epochs=3)
    trained = fit(drawn, config, create_selector(name), head)
    batch = drawn.store.read(rows_of(drawn, "val"))
    with torch.no_grad():
        predicted = trained(batch, 0.5).argmax(1)
    assert accuracy(batch.label, predicted) == pytest.approx(max(row["selection"] for row in trained.history))
    assert [row["lr"] for row in trained.history] == [config.lr] * 3


def test_the_curriculum_ablation_differs_from_lats_in_the_budget_alone(drawn: Drawn) -> None:
    config = quick("paper", "lats", epochs=3, curriculum=CurriculumConfig(epochs=2))
    lats, fixed = (fit(drawn, Method.parse(text).config(config)).history for text in ("lats", "lats:fixed-0.5"))
    assert [row["budget"] for row in lats] == [0.5, 0.375, 0.25]
    assert [row["budget"] for row in fixed] == [0.5, 0.5, 0.5]
    assert [row["lr"] for row in lats] == [row["lr"] for row in fixed]
    assert lats[0]["loss"] == fixed[0]["loss"]


@pytest.mark.parametrize(("gain", "best"), [(0.0015, 0), (0.0025, 1)])
def test_a_gain_below_the_least_improvement_keeps_the_earlier_epoch(gain: float, best: int) -> None:
    layer = nn.Linear(1, 1, bias=False)
    config = TrainConfig(evaluate_every=1, min_improvement=0.002)
    stage, measured = _Stage("selector", layer, torch.optim.SGD(layer.parameters(), 0.1), config, 2), iter([0.5, 0.5 + gain])
    for epoch, _ in enumerate(stage.run(lambda: next(measured), None)):
        nn.init.constant_(layer.weight, float(epoch))
    assert (stage.best_epoch, layer.weight.item()) == (best, float(best))
