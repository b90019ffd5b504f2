"""Training: a learned selector jointly with its head (the paper's recipe), or first the selector, then the head; or a head alone.

An epoch is a pure function of the state before it (every generator is made from seed, purpose and epoch), so a training that was
killed resumes from its checkpoint to the same bytes as one that was not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.views import IDENTITY
from medtokenbudget.config import HEADLINE_BUDGETS, CurriculumConfig, TrainConfig, to_dict
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import MismatchError, RequestError, WorkError
from medtokenbudget.files import append_line, dotted, read_lines, sha256_json, write_lines
from medtokenbudget.heads import create_head
from medtokenbudget.metrics import accuracy, share_of_ceiling
from medtokenbudget.progress import say
from medtokenbudget.routing import LearnedSelector, Ranker, Selector, TrainingPass, selector_class
from medtokenbudget.routing.losses import classification_loss, total_loss
from medtokenbudget.tensor_files import load_tensors, save_tensors
from medtokenbudget.tokens import TokenBatch
from medtokenbudget.training.classifier import RoutedClassifier
from medtokenbudget.training.pooled import OnEpoch, cosine_lr, is_looked_at, pool_and_judge, probabilities, train_head
from medtokenbudget.training.rows import TrainingRows, class_weights, generator, require_labels

TRAINING_VERSION = 1
"""Raise it when a change of this code changes the numbers of a training: a resumed run then refuses to mix the two."""
CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.jsonl"
CLOCK = "seconds"
"""What differs between two equal trainings."""


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
    """Train a selector and its head; where the store has no classes, the selector alone, from masks.

    Args:
        store: The tokens, opened with the manifest that has their labels and masks.
        rows: Which of them are for what.
        config: Settings of the training.
        selector: Name of a selector to train, or a finished one: then only the head is trained.
        head: Name of the head.
        folder: Where checkpoint and `metrics.jsonl` go; a training that was stopped there resumes. None leaves no files.
        shared: Folder of pooled tokens that trainings of one run share.
        on_epoch: Called after every epoch with the stage, the epochs done and the epochs in all.

    Returns:
        The classifier on the CPU, ready for inference, with one row per epoch in `history`.
    """
    if isinstance(selector, Selector):
        classifier = RoutedClassifier(selector, None)
        if store.classes:
            classifier.head, classifier.history = train_head(store, rows, config, selector, head, None, shared, on_epoch)
        if folder is not None and classifier.history:
            write_lines(folder / METRICS, classifier.history)
        return classifier.eval()
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
    classifier = _untrained(store, config, selector, head if joint else None).to(device)
    scorer = classifier.selector
    assert isinstance(scorer, LearnedSelector)
    weights = class_weights(label, len(store.classes)).to(device) if config.class_balance == "loss" and joint else None
    images = len(rows.train) + len(np.unique(np.asarray(store.ids)[rows.views]))
    epochs = epochs_for(images, config.batch_size, config.epochs, scorer.min_steps(config))
    state = _State(classifier, config, _identity(store, rows, config, selector, head), folder)
    while not state.finished:
        started, epoch = time.perf_counter(), state.epoch
        lr = cosine_lr(config.lr, epoch, epochs)
        state.optimizer.param_groups[0]["lr"] = lr
        budget = curriculum_budget(config.curriculum, epoch)
        noise = generator(config.seed, "noise", epoch)
        sums: dict[str, float] = {}
        classifier.train()
        order = rows.of_epoch(store, config, epoch)
        for batch in store.batches(order, config.batch_size, signals=scorer.requires):
            batch = batch.to(device, non_blocking=True)
            # Only the passes run in bf16: the losses below take logarithms of scores near 0 and 1.
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                if joint:
                    logits, step = classifier.training_pass(batch, budget, config, noise)
                else:
                    logits, step = None, scorer.training_pass(batch, budget, config, noise, route=False)
            loss, terms = _loss(batch, logits, step, config, weights)
            if not math.isfinite(loss.item()):
                names = ", ".join((batch.image_id or ())[:4])
                raise WorkError(
                    f"The loss is not finite in epoch {epoch} (images {names}, ...). "
                    "Lower `lr`, or extract the tokens of these images again."
                )
            state.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(classifier.parameters(), config.clip)
            state.optimizer.step()
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(batch)
        means = {name: value / len(order) for name, value in sums.items()}
        if "budget" in means:  # the loss term; `budget` itself is the budget of the epoch
            means["budget_deviation"] = means.pop("budget")
        row: dict[str, Any] = {"epoch": epoch, "stage": "selector", "lr": lr, "budget": budget, **means}
        looked_at = is_looked_at(epoch, epochs, config.evaluate_every)
        if looked_at:
            row["selection"] = _selection_value(store, rows.select, classifier, config, device)
            if state.best_epoch < 0 or row["selection"] > state.best_value + config.min_improvement:
                state.best_value, state.best_epoch, state.best = row["selection"], epoch, module_tensors(classifier, "best/")
        row[CLOCK] = round(time.perf_counter() - started, 3)
        out_of_patience = looked_at and epoch - state.best_epoch >= config.patience
        state.end_epoch(row, finished=epoch + 1 >= epochs or out_of_patience)
        if on_epoch is not None:
            on_epoch("selector", state.epoch, epochs)
    classifier.load_state_dict(split_prefix(state.best, "best/"))
    classifier.to("cpu").eval()
    classifier.history = state.history
    if store.classes and not joint:
        file = None if folder is None else folder / "pooled.npy"
        classifier.head, history = train_head(store, rows, config, scorer, head, file, on_epoch=on_epoch)
        classifier.history = [*state.history, *history]
        if folder is not None:
            write_lines(folder / METRICS, classifier.history)
    return classifier.eval()


def _untrained(store: FeatureStore, config: TrainConfig, selector: str, head: str | None) -> RoutedClassifier:
    """Create selector and head, in this order, with weights that depend on the seed alone."""
    kind, classes = selector_class(selector), len(store.classes)
    if not issubclass(kind, LearnedSelector):
        raise RequestError(f"Selector '{selector}' does not learn. Train a head on its pooled tokens instead.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        # The selector first: its weights must not depend on the head.
        made = kind.from_config(store.dim, config, classes)
        return RoutedClassifier(made, create_head(head, store.dim, classes) if head and classes else None)


def _identity(store: FeatureStore, rows: TrainingRows, config: TrainConfig, selector: str, head: str) -> dict[str, Any]:
    """Describe everything that the weights of a checkpoint depend on; under lesion-first the head is not among it."""
    settings = to_dict(config)
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
    spread = {"score_mean": scores.mean(), "score_std": scores.std(dim=1).mean()}
    return loss, {"loss": loss.detach()} | {name: term.detach() for name, term in terms.items()} | spread


@torch.no_grad()
def _selection_value(
    store: FeatureStore, rows: np.ndarray, classifier: RoutedClassifier, config: TrainConfig, device: torch.device
) -> float:
    """Measure what the epoch is chosen by: accuracy at one budget, or retention at the headline budgets."""
    classifier.eval()
    selector, by_retention = classifier.selector, config.selection_metric == "retention"
    if by_retention:
        rows = rows[store.has_mask.numpy()[rows]]
    if not len(rows):
        raise RequestError(
            f"There are no images to choose the epoch by {config.selection_metric} on. Split the manifest again with a selection "
            "part (`mtb data split`, `select`), or change `selection_metric`."
        )
    budgets = HEADLINE_BUDGETS if by_retention else (config.selection_budget,)
    pooled, evidence = pool_and_judge(store, rows, selector, budgets, config.seed, device)
    if not by_retention:
        if classifier.head is None:
            raise RequestError('Without class labels the epoch is chosen by retention: use `selection_metric="retention"`.')
        predicted = probabilities(classifier.head, store, rows, selector, budgets, config.seed, pooled, device)
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


def curriculum_budget(config: CurriculumConfig, epoch: int) -> float:
    """Return the budget of an epoch, counted from 0: a cosine from start to end over `config.epochs`, then constant; or fixed.

    The curriculum ablation changes nothing but this.
    """
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


class _State:
    """What an epoch is a function of: weights, optimizer and the best epoch so far. In a folder it outlives the process.

    Args:
        identity: What a checkpoint must agree on to be resumed.
        folder: Where checkpoint and log are; None keeps everything in memory.
    """

    def __init__(self, classifier: RoutedClassifier, config: TrainConfig, identity: dict[str, Any], folder: Path | None) -> None:
        self.classifier, self.identity, self.folder = classifier, identity, folder
        # Fused: one kernel for all parameters. Its last bits differ from the loop's, so it belongs to the training's version.
        self.optimizer = torch.optim.AdamW(classifier.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
        self.epoch, self.finished = 0, False
        self.best_value, self.best_epoch = -math.inf, -1
        self.best: dict[str, Tensor] = {}
        self.history: list[dict[str, Any]] = []
        if folder is not None:
            self._resume(folder)

    def end_epoch(self, row: dict[str, Any], finished: bool) -> None:
        """Log an epoch and write the checkpoint after it."""
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
        tensors = {**module_tensors(self.classifier, "now/"), **self.best, **optimizer_tensors(self.optimizer)}
        save_tensors(self.folder / CHECKPOINT, tensors, state)

    def _resume(self, folder: Path) -> None:
        checkpoint, log = folder / CHECKPOINT, folder / METRICS
        if not checkpoint.exists():
            log.unlink(missing_ok=True)
            return
        tensors, state = load_tensors(checkpoint)
        if self.identity != state["identity"]:
            advice = "Use the same options to resume, or another `out` to start over."
            differences = dotted(self.identity), dotted(state["identity"])
            raise MismatchError.between(f"The training in {checkpoint}", *differences, advice)
        self.classifier.load_state_dict(split_prefix(tensors, "now/"))
        self.best = {name: tensor for name, tensor in tensors.items() if name.startswith("best/")}
        restore_optimizer(self.optimizer, tensors)
        self.epoch, self.finished = state["epoch"], state["finished"]
        self.best_value, self.best_epoch = state["best"], state["best_epoch"]
        # Rows of the head, and of an epoch that was killed before its checkpoint, come again.
        logged = [row for row in (read_lines(log) if log.exists() else []) if row.get("stage") == "selector"]
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
    """Return the tensors called `prefix...`, without the prefix."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def module_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Copy the parameters of a module under a prefix: a later step does not change them."""
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
