"""Training: a learned selector jointly with its head (the paper's recipe), or first the selector, then the head; or a head alone.

An epoch is a pure function of the state before it (every generator is made from seed, purpose and epoch), so a training that was
killed resumes from its checkpoint to the same bytes as one that was not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.views import IDENTITY
from medtokenbudget.config import HEADLINE_BUDGETS, CurriculumConfig, TrainConfig, to_dict
from medtokenbudget.errors import MismatchError, RequestError, WorkError
from medtokenbudget.files import append_line, dotted, load_tensors, read_lines, save_tensors, sha256_json, write_lines
from medtokenbudget.heads import Head, create_head
from medtokenbudget.heads.head import RoutedClassifier
from medtokenbudget.metrics import accuracy, share_of_ceiling
from medtokenbudget.routing import LearnedSelector, Ranker, Selector, TrainingPass, selector_class
from medtokenbudget.routing.losses import classification_loss, total_loss
from medtokenbudget.runtime import resolve_device, say
from medtokenbudget.tokens import TokenBatch, TokenSet
from medtokenbudget.training import pooled
from medtokenbudget.training.rows import TrainingRows, class_weights, epoch_order, generator, require_labels

TRAINING_VERSION = 1
"""Raise it when a change of this code changes the numbers of a training: a resumed run then refuses to mix the two."""
CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.jsonl"
CLOCK = "seconds"
"""What differs between two equal trainings."""
OnEpoch = Callable[[str, int, int], None]
"""Called after every epoch with the stage, the epochs done and the epochs in all."""
Batches = Callable[[int], Iterator[tuple[Tensor | TokenSet, Tensor]]]
"""From an epoch to its batches: what the head reads, and the labels."""


def train(
    store: FeatureStore,
    rows: TrainingRows,
    config: TrainConfig,
    selector: str | Selector = "lats",
    head: str = "mlp",
    folder: Path | None = None,
    shared: Path | None = None,
    on_epoch: OnEpoch | None = None,
) -> RoutedClassifier:
    """Train a selector by name and its head, or only the head behind a finished selector; without classes, the selector alone.

    Checkpoint and `metrics.jsonl` go into `folder`, where a training that was stopped resumes. Trainings of one run keep pooled
    tokens in the folder `shared`. The classifier comes back on the CPU, ready for inference, with one row per epoch in `history`.
    """
    if isinstance(selector, Selector):
        classifier = RoutedClassifier(selector, None)
    else:
        classifier = _train_selector(store, rows, config, selector, head, folder, on_epoch)
    if store.classes and classifier.head is None:
        scratch = None if folder is None or isinstance(selector, Selector) else folder / "pooled.npy"
        classifier.head, history = _train_head(store, rows, config, classifier.selector, head, scratch, shared, on_epoch)
        classifier.history = [*classifier.history, *history]
        if folder is not None:
            write_lines(folder / METRICS, classifier.history)
    return classifier.eval()


def _train_selector(
    store: FeatureStore,
    rows: TrainingRows,
    config: TrainConfig,
    name: str,
    head: str,
    folder: Path | None,
    on_epoch: OnEpoch | None,
) -> RoutedClassifier:
    # The paper's recipe (joint) trains scorer and head with one loss. Lesion-first trains the scorer on masks alone, so that
    # classification cannot pull it away from the lesion, and the head afterwards.
    device, joint = resolve_device(config.device), config.recipe == "joint"
    if not len(rows.train):
        raise RequestError(
            "The lesion-first recipe learns from lesion masks, but no training image has one. "
            'Add masks to the manifest, or use `preset="paper"` with `losses.lesion=0`.'
        )
    label = store.label.numpy()[rows.train]
    if joint or config.class_balance == "sampler":
        require_labels(label)
    kind, classes = selector_class(name), len(store.classes)
    if not issubclass(kind, LearnedSelector):
        raise RequestError(f"Selector '{name}' does not learn. Train a head on its pooled tokens instead.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        # The selector first: its weights must not depend on the head.
        selector = kind.from_config(store.dim, config, classes)
        classifier = RoutedClassifier(selector, create_head(head, store.dim, classes) if joint and classes else None).to(device)
    # Under lesion-first there is no classification loss to weight.
    weights = class_weights(label, classes).to(device) if config.class_balance == "loss" and joint else None

    images = len(rows.train) + len(np.unique(np.asarray(store.ids)[rows.views]))
    epochs = epochs_for(images, config.batch_size, config.epochs, selector.min_steps(config))
    # Fused: one kernel for all parameters. Its last bits differ from the loop's, so it belongs to the training's version.
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
    stage = _Stage("selector", classifier, optimizer, config, epochs)
    if folder is not None:
        stage.resume(folder, _identity(store, rows, config, name, head))
    for row in stage.run(lambda: _selection_value(store, rows.select, classifier, config), on_epoch):
        row["budget"] = budget = curriculum_budget(config.curriculum, row["epoch"])
        # A generator per epoch, so that a checkpoint needs no state of one.
        noise = generator(config.seed, "noise", row["epoch"])
        order = rows.of_epoch(store, config, row["epoch"])
        for batch in store.batches(order, config.batch_size, signals=selector.requires):
            batch = batch.to(device, non_blocking=True)
            # Only the passes run in bf16: the losses below take logarithms of scores near 0 and 1.
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                if joint:
                    logits, step = classifier.training_pass(batch, budget, config, noise)
                else:
                    logits, step = None, selector.training_pass(batch, budget, config, noise, route=False)
            loss, logged = _loss(batch, logits, step, config, weights)
            stage.step(loss, logged, len(batch), batch.image_id or ())
    classifier.history = stage.history
    return classifier.to("cpu").eval()


def _identity(store: FeatureStore, rows: TrainingRows, config: TrainConfig, selector: str, head: str) -> dict[str, Any]:
    """Describe everything that the weights of a checkpoint depend on; under lesion-first the head is not among it."""
    settings = to_dict(config)
    # A training may resume on another device.
    del settings["device"]
    return {
        "version": TRAINING_VERSION,
        "config": settings,
        "names": [selector, head] if config.recipe == "joint" else [selector],
        "store": store.identity,
        "rows": len(rows.train) + len(rows.views),
        "classes": len(store.classes),
    }


def _loss(
    batch: TokenBatch, logits: Tensor | None, step: TrainingPass, config: TrainConfig, class_weight: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a step and what is logged of it: every term, mean and deviation of the scores."""
    terms, weights = dict(step.terms), dict(step.weights)
    if logits is not None and batch.label is not None:
        # A weight of 0 logs the term without a graph: its gradient would be zero anyway, at full price.
        with torch.set_grad_enabled(config.losses.classification != 0):
            term = classification_loss(logits, batch.label, class_weight)
        terms, weights = {"classification": term, **terms}, {"classification": config.losses.classification, **weights}
    loss, scores = total_loss(terms, weights), step.scores.detach()
    # The column `budget` is the budget of the epoch, so the loss term has another name.
    logged = {"budget_deviation" if name == "budget" else name: term.detach() for name, term in terms.items()}
    return loss, {"loss": loss.detach(), **logged, "score_mean": scores.mean(), "score_std": scores.std(dim=1).mean()}


@torch.no_grad()
def _selection_value(store: FeatureStore, rows: np.ndarray, classifier: RoutedClassifier, config: TrainConfig) -> float:
    """Measure what the epoch is chosen by: accuracy at one budget, or retention at the headline budgets."""
    classifier.eval()
    selector, by_retention = classifier.selector, config.selection_metric == "retention"
    if by_retention:
        rows = rows[store.has_mask.numpy()[rows]]
    if not len(rows):
        advice = "Split the manifest again with a selection part (`mtb data split`, `select`), or change `selection_metric`."
        raise RequestError(f"There are no images to choose the epoch by {config.selection_metric} on. {advice}")
    budgets = HEADLINE_BUDGETS if by_retention else (config.selection_budget,)
    means, evidence = pooled.pool_and_judge(store, rows, selector, budgets, config.seed)
    if not by_retention:
        if classifier.head is None:
            raise RequestError('Without class labels the epoch is chosen by retention: use `selection_metric="retention"`.')
        predicted = pooled.probabilities(classifier.head, store, rows, selector, budgets, config.seed, means)
        return accuracy(store.label.numpy()[rows], predicted[:, 0].argmax(-1))
    # Original images and views count equally, however many of each there are.
    straight = np.array([store.views[row] == IDENTITY for row in rows])
    groups = [group for group in (straight, ~straight) if group.any()]
    # Mergers keep no single patches: what is left of the lesion in their tokens takes the place of retention.
    if not isinstance(selector, Ranker):
        merged = evidence.dominated if np.isnan(evidence.mass).all() else evidence.mass
        return float(np.mean([np.nanmean(merged[group]) for group in groups]))
    lesion = store.lesion.numpy()[rows].sum(1)
    return float(np.mean([share_of_ceiling(evidence.kept_lesion[group], lesion[group], evidence.k) for group in groups]))


# Every method uses the same optimizer and budget sampling. Under the strict protocol no epoch is chosen: the rate falls to zero
# and the last one counts. Under the paper's the rate is constant and the best epoch on validation images counts, as for LATS.


def _train_head(
    store: FeatureStore,
    rows: TrainingRows,
    config: TrainConfig,
    selector: Selector,
    name: str,
    scratch: Path | None,
    shared: Path | None,
    on_epoch: OnEpoch | None,
) -> tuple[Head, list[dict[str, Any]]]:
    """Train a head on the tokens that a fixed selector keeps, at all budgets, and return it with one row per epoch.

    Pooled tokens are in the file `scratch` while the head trains. What a selector without parameters keeps depends on neither
    head nor seed: its tokens stay in the folder `shared`. With neither they are in memory.
    """
    trained_on = pooled.with_masks(store, rows.head, selector)
    label = store.label.numpy()[trained_on]
    head = new_head(name, store.dim, len(store.classes), config)
    judge = _head_judge(store, pooled.with_masks(store, rows.select, selector), selector, head, config)
    if selector.stochastic or head.reads == "tokens":
        batches = batches_of_store(store, trained_on, label, selector, head, config)
        return head, fit_head(head, batches, label, config, judge, on_epoch)
    file = scratch
    if scratch is None and shared is not None:
        # All that the pooled tokens depend on: trainings with other rows or options share the folder.
        key = sha256_json([store.identity, selector.name, selector.options(), trained_on.tolist(), list(config.budgets)])[:16]
        file = shared / f"{selector.name}-{key}.npy"
    means = pooled.pool(store, trained_on, selector, config.budgets, file)
    history = fit_head(head, batches_of_pooled(means, label, config, head.classes), label, config, judge, on_epoch)
    if scratch is not None:
        for leftover in (scratch, scratch.with_suffix(".json")):
            leftover.unlink(missing_ok=True)
    return head, history


def new_head(name: str, dim: int, classes: int, config: TrainConfig) -> Head:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return create_head(name, dim, classes)


def _head_judge(
    store: FeatureStore, rows: np.ndarray, selector: Selector, head: Head, config: TrainConfig
) -> Callable[[], float] | None:
    """Return what measures the accuracy of the head, by which its epoch is chosen; None under the strict protocol.

    The paper looks at validation accuracy to keep an epoch of LATS. Heads of baselines that kept their last epoch instead would be
    compared at a disadvantage.
    """
    if config.protocol == "strict":
        return None
    if not len(rows):
        raise RequestError('There are no validation images to choose the epoch of the head on. Use `protocol="strict"`.')
    budgets, label = (config.selection_budget,), store.label.numpy()[rows]

    @cache
    def means() -> np.ndarray | None:  # the selector is fixed, so once is enough
        return None if head.reads == "tokens" else pooled.pool_and_judge(store, rows, selector, budgets, config.seed)[0]

    def judge() -> float:
        predicted = pooled.probabilities(head, store, rows, selector, budgets, config.seed, means())
        return accuracy(label, predicted[:, 0].argmax(-1))

    return judge


def batches_of_pooled(means: np.ndarray, label: np.ndarray, config: TrainConfig, classes: int) -> Batches:
    """Read pooled tokens `[n, T, D]` of a deterministic selector; a budget is drawn for each batch."""

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for rows, draw in _drawn_batches(label, config, epoch, classes, means.shape[1]):
            yield torch.from_numpy(means[rows, draw]), torch.from_numpy(label[rows])

    return batches


def batches_of_store(
    store: FeatureStore, rows: np.ndarray, label: np.ndarray, selector: Selector, head: Head, config: TrainConfig
) -> Batches:
    """Select tokens again in every epoch, for selectors that draw and for heads that read tokens."""

    @torch.no_grad()
    def kept(batch: TokenBatch, budget: float, noise: torch.Generator) -> Tensor | TokenSet:
        if head.reads == "tokens":
            return pooled.token_sets(selector, batch, [selector.count(budget, batch.n)], noise)[0]
        return selector.pooled(batch, (budget,), noise)[:, 0]

    def batches(epoch: int) -> Iterator[tuple[Tensor | TokenSet, Tensor]]:
        drawn = list(_drawn_batches(label, config, epoch, head.classes, len(config.budgets)))
        # One order for the store, which reads ahead across the batches.
        order, noise = np.concatenate([part for part, _ in drawn]), generator(config.seed, "selector", epoch)
        stored = store.batches(rows[order], config.batch_size, signals=selector.requires)
        for (part, draw), batch in zip(drawn, stored):
            yield kept(batch, config.budgets[draw], noise), torch.from_numpy(label[part])

    return batches


def _drawn_batches(
    label: np.ndarray, config: TrainConfig, epoch: int, classes: int, budgets: int
) -> Iterator[tuple[np.ndarray, int]]:
    order = epoch_order(label, config, epoch, classes).numpy()
    draws = torch.randint(budgets, (len(order),), generator=generator(config.seed, "budget", epoch)).tolist()
    for number, start in enumerate(range(0, len(order), config.batch_size)):
        yield order[start : start + config.batch_size], draws[number]


def fit_head(
    head: Head,
    batches: Batches,
    label: np.ndarray,
    config: TrainConfig,
    judge: Callable[[], float] | None = None,
    on_epoch: OnEpoch | None = None,
) -> list[dict[str, Any]]:
    """Train a head for all of its epochs and return one row for each.

    With a `judge` the rate is constant and the best epoch is kept; without one the last epoch of a falling rate.
    """
    require_labels(label)
    weights = class_weights(label, head.classes) if config.class_balance == "loss" else None

    optimizer = torch.optim.AdamW(head.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    stage = _Stage("head", head, optimizer, config, config.head_epochs)
    for row in stage.run(judge, on_epoch):
        noise = generator(config.seed, "head-dropout", row["epoch"])
        for features, target in batches(row["epoch"]):
            logits, term = head.training_step(features, target, noise)
            loss = classification_loss(logits, target, weights)
            stage.step(loss if term is None else loss + term, {"classification": loss.detach()}, len(target))
    head.eval()
    return stage.history


def cosine_lr(base: float, epoch: int, epochs: int) -> float:
    return 0.5 * base * (1 + math.cos(math.pi * epoch / epochs))


def curriculum_budget(config: CurriculumConfig, epoch: int) -> float:
    """Return the budget of an epoch, counted from 0: a cosine from start to end over `config.epochs`, then constant; or fixed."""
    if config.kind == "fixed":
        return config.start
    if epoch >= config.epochs:
        return config.end
    share = (1 + math.cos(math.pi * epoch / config.epochs)) / 2
    # Twelve digits: a budget that is 0.3749999... by rounding would cost a patch.
    return round(config.end + (config.start - config.end) * share, 12)


def epochs_for(images: int, batch_size: int, epochs: int, min_steps: int) -> int:
    """Return `epochs`, or as many as `min_steps` steps take, at most five times as many."""
    steps = math.ceil(images / batch_size)
    return min(5 * epochs, max(epochs, math.ceil(min_steps / steps)))


class _Stage:
    """The epochs of a selector or of a head: weights, optimizer and the best epoch so far. In a folder they outlive the process."""

    folder: Path | None = None

    def __init__(self, name: str, module: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, epochs: int) -> None:
        self.name, self.module, self.optimizer, self.config, self.epochs = name, module, optimizer, config, epochs
        self.epoch, self.finished = 0, False
        self.best_value, self.best_epoch = -math.inf, -1
        self.best: dict[str, Tensor] = {}
        self.history: list[dict[str, Any]] = []
        self.sums, self.images = dict[str, float](), 0

    def run(self, judge: Callable[[], float] | None, on_epoch: OnEpoch | None) -> Iterator[dict[str, Any]]:
        """Yield the row of each epoch that is left, to be filled by `step`, and end the epoch when the next one is asked for.

        At the end the module has the weights of the epoch that `judge` measures highest; of the last one without a judge.
        """
        config = self.config
        while not self.finished:
            started, epoch = time.perf_counter(), self.epoch
            lr = config.lr if self.name == "head" and judge else cosine_lr(config.lr, epoch, self.epochs)
            self.optimizer.param_groups[0]["lr"] = lr
            row: dict[str, Any] = {"epoch": epoch, "stage": self.name, "lr": lr}
            self.sums, self.images = {}, 0
            self.module.train()
            yield row
            row |= {name: value / self.images for name, value in self.sums.items()}
            last = epoch + 1 >= self.epochs
            if judge is not None and ((epoch + 1) % config.evaluate_every == 0 or last):
                row["selection"] = measured = judge()
                if self.best_epoch < 0 or measured > self.best_value + config.min_improvement:
                    self.best_value, self.best_epoch, self.best = measured, epoch, module_tensors(self.module, "best/")
                last = last or (self.name == "selector" and epoch - self.best_epoch >= config.patience)
            row[CLOCK] = round(time.perf_counter() - started, 3)
            self._end_epoch(row, last)
            if on_epoch is not None:
                on_epoch(self.name, self.epoch, self.epochs)
        if self.best:
            self.module.load_state_dict(split_prefix(self.best, "best/"))

    def step(self, loss: Tensor, logged: Mapping[str, Tensor], n: int, images: Iterable[str] = ()) -> None:
        """Take a step down the loss of a batch of `n` images, and add to the means that are logged of the epoch."""
        if not math.isfinite(loss.item()):
            named = f" (images {', '.join(list(images)[:4])}, ...)" if images else ""
            advice = "Lower `lr`, or extract the tokens of these images again."
            raise WorkError(f"The loss of the {self.name} is not finite in epoch {self.epoch}{named}. {advice}")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip)
        self.optimizer.step()
        for name, value in logged.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value) * n
        self.images += n

    def _end_epoch(self, row: dict[str, Any], finished: bool) -> None:
        self.epoch, self.finished = self.epoch + 1, finished
        self.history.append(row)
        if self.folder is None:
            return
        # In this order: a row without its checkpoint is dropped when the training resumes, a lost row would stay lost.
        append_line(self.folder / METRICS, row)
        state = {
            "epoch": self.epoch,
            "finished": self.finished,
            "best": self.best_value,
            "best_epoch": self.best_epoch,
            "identity": self.identity,
            "metrics": log_hash(self.history),
        }
        tensors = {**module_tensors(self.module, "now/"), **self.best, **optimizer_tensors(self.optimizer)}
        save_tensors(self.folder / CHECKPOINT, tensors, state)

    def resume(self, folder: Path, identity: dict[str, Any]) -> None:
        """Keep checkpoint and log in a folder, and begin with what is there; the checkpoint must agree on `identity`."""
        self.folder, self.identity = folder, identity
        checkpoint, log = folder / CHECKPOINT, folder / METRICS
        if not checkpoint.exists():
            log.unlink(missing_ok=True)
            return
        tensors, state = load_tensors(checkpoint)
        # A checkpoint of other data or options would resume without an error and mean nothing.
        if identity != state["identity"]:
            advice = "Use the same options to resume, or another `out` to start over."
            raise MismatchError.between(f"The training in {checkpoint}", dotted(identity), dotted(state["identity"]), advice)
        self.module.load_state_dict(split_prefix(tensors, "now/"))
        self.best = {name: tensor for name, tensor in tensors.items() if name.startswith("best/")}
        restore_optimizer(self.optimizer, tensors)
        self.epoch, self.finished = state["epoch"], state["finished"]
        self.best_value, self.best_epoch = state["best"], state["best_epoch"]
        # Rows of the head, and of an epoch that was killed before its checkpoint, come again.
        logged = [row for row in (read_lines(log) if log.exists() else []) if row.get("stage") == self.name]
        self.history = [row for row in logged if isinstance(row.get("epoch"), int) and row["epoch"] < self.epoch]
        if log_hash(self.history) != state.get("metrics"):
            say(f"{log} is missing or damaged; it starts anew. For all curves, delete {folder} and run the command again.")
            self.history = []
        write_lines(log, self.history)


def log_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    """Hash the rows of a `metrics.jsonl`, without the clock: equal trainings have equal hashes.

    In any order and however often: ablations that run at the same time write the same rows to the log of their training.
    """
    plain = ({name: value for name, value in row.items() if name != CLOCK} for row in rows)
    return sha256_json(sorted({json.dumps(row, sort_keys=True) for row in plain}))


def split_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def module_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as named tensors (`optimizer/0/exp_avg`, ...)."""
    state = optimizer.state_dict()["state"]
    return {f"optimizer/{index}/{key}": torch.as_tensor(v).clone() for index, entry in state.items() for key, v in entry.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Undo `optimizer_tensors`, for an optimizer made over the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in split_prefix(tensors, "optimizer/").items():
        index, key = name.split("/")
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
