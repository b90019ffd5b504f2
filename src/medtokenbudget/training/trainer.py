"""The trainer of learned selectors: jointly with their head (the paper's recipe), or first the selector, then the head.

An epoch is a pure function of the checkpoint before it (every generator is made from seed, purpose and epoch), so a training that
was killed resumes to the same bytes as one that was not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.views import IDENTITY
from medtokenbudget.config import HEADLINE_BUDGETS, TrainConfig, to_dict
from medtokenbudget.data import Manifest
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import MismatchError, RequestError, WorkError
from medtokenbudget.files import append_line, dotted, read_lines, sha256_json, write_lines
from medtokenbudget.heads import Head, create_head
from medtokenbudget.metrics import accuracy, share_of_ceiling
from medtokenbudget.progress import say
from medtokenbudget.routing import LearnedSelector, Ranker, selector_class
from medtokenbudget.routing.losses import classification_loss, total_loss
from medtokenbudget.tensor_files import load_tensors, save_tensors
from medtokenbudget.tokens import TokenBatch
from medtokenbudget.training.classifier import RoutedClassifier
from medtokenbudget.training.pooled import (
    OnEpoch,
    PooledHead,
    epoch_judge,
    pool_and_judge,
    pool_to_file,
    probabilities,
    token_probabilities,
)
from medtokenbudget.training.rows import Parts, ViewDraw, class_weights, epoch_order, generator, make_parts, require_labels
from medtokenbudget.training.schedule import EarlyStopping, cosine_lr, curriculum_budget, epochs_for, is_looked_at

CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.jsonl"
CLOCK = "seconds"
"""What differs between two equal trainings."""


@dataclass(frozen=True)
class Trained:
    """A finished training: selector and head, the rows they were trained and chosen on, and the epoch that was kept.

    `head` is None where the manifest has no classes.
    """

    selector: LearnedSelector
    head: Head | None
    parts: Parts
    best_epoch: int
    best_value: float


def train_selector(
    manifest: Manifest,
    store: FeatureStore,
    out: Path,
    config: TrainConfig,
    selector: str = "lats",
    head: str = "mlp",
    on_epoch: OnEpoch | None = None,
    sibling: Path | None = None,
) -> Trained:
    """Train a learned selector and its head in `out` (checkpoint, `metrics.jsonl`), or resume a training that was stopped there.

    With a manifest that has no classes the selector is trained alone, from masks.

    Args:
        on_epoch: Called after every epoch with the stage, the epochs done and the epochs in all.
        sibling: Folder of the same training with another head. The lesion-first recipe trains the selector without the head, so a
            finished one is taken from there; anything else in that folder is left alone.
    """
    parts = make_parts(manifest, store, config)
    trainer = _Trainer(store, parts, Path(out), config, len(manifest.classes), (selector, head), on_epoch)
    if sibling is not None:
        trainer.take_over(sibling)
    trainer.run()
    return trainer.result()


class _Trainer:
    def __init__(
        self,
        store: FeatureStore,
        parts: Parts,
        out: Path,
        config: TrainConfig,
        classes: int,
        names: tuple[str, str],
        on_epoch: OnEpoch | None,
    ) -> None:
        self.store, self.parts, self.out, self.config, self.classes = store, parts, out, config, classes
        self.names, self.on_epoch = names, on_epoch
        self.device = resolve_device(config.device)
        self.joint = config.recipe == "joint"
        self.images, self.views = self._usable(parts.train), ViewDraw(store, self._usable(parts.train_views))
        if not len(self.images):
            raise RequestError(
                "The lesion-first recipe learns from lesion masks, but no training image has one. "
                "Add masks to the manifest, or use --preset paper with --losses.lesion 0."
            )
        if self.joint or config.class_balance == "sampler":
            require_labels(store.label.numpy()[self.images], "training")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.selector = _learned(names[0]).from_config(store.dim, config, classes)
            self.head = create_head(names[1], store.dim, classes) if classes else None
        least = self.selector.min_steps(config)
        self.epochs = epochs_for(len(self.images) + len(self.views), config.batch_size, config.epochs, least)
        self.classifier = RoutedClassifier(self.selector, self.head).to(self.device)
        self.parameters = list((self.classifier if self.joint else self.selector).parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
        self.stopping = EarlyStopping(config.patience, config.min_improvement)
        self.weights = None
        if config.class_balance == "loss" and self.joint:
            self.weights = class_weights(store.label.numpy()[self.images], classes).to(self.device)
        self.best: dict[str, Tensor] = {}
        self.epoch = 0
        self.finished = False

    def _usable(self, rows: np.ndarray) -> np.ndarray:
        """The joint recipe trains on every image, the lesion-first one on those with a mask."""
        return rows if self.joint else rows[self.store.has_mask.numpy()[rows]]

    def run(self) -> None:
        self._resume()
        while not self.finished:
            started = time.perf_counter()
            row = self._train_epoch(self.epoch)
            looked_at = is_looked_at(self.epoch, self.epochs, self.config.evaluate_every)
            if looked_at:
                row["selection"] = self._selection_value()
                if self.stopping.improved(row["selection"], self.epoch):
                    self.best = module_tensors(self.classifier, "best/")
            row[CLOCK] = round(time.perf_counter() - started, 3)
            self.finished = self.epoch + 1 >= self.epochs or (looked_at and self.stopping.stop(self.epoch))
            self.epoch += 1
            # In this order: a row without its checkpoint is dropped when the training resumes, a lost row would stay lost.
            append_line(self.out / METRICS, row)
            self._save()
            if self.on_epoch is not None:
                self.on_epoch("selector", self.epoch, self.epochs)
        self.classifier.load_state_dict(split_prefix(self.best, "best/"))

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        config = self.config
        lr = cosine_lr(config.lr, epoch, self.epochs)
        self.optimizer.param_groups[0]["lr"] = lr
        budget = curriculum_budget(config.curriculum, epoch)
        sums: dict[str, float] = {}
        noise = generator(config.seed, "noise", epoch)
        seen = 0
        self.classifier.train()
        for batch in self._batches(epoch):
            loss, terms, scores = self._step(batch, budget, noise)
            if not math.isfinite(loss.item()):
                names = ", ".join((batch.image_id or ())[:4])
                raise WorkError(
                    f"The loss is not finite in epoch {epoch} (images {names}, ...). "
                    "Lower --lr, or extract the tokens of these images again."
                )
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, config.clip)
            self.optimizer.step()
            seen += len(batch)
            for name, value in {**terms, "score_mean": scores.mean(), "score_std": scores.std(dim=1).mean()}.items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(batch)
        means = {name: value / seen for name, value in sums.items()}
        if "budget" in means:  # the term, which the row keeps apart from the budget itself
            means["budget_deviation"] = means.pop("budget")
        return {"epoch": epoch, "stage": "selector", "lr": lr, "budget": budget, **means}

    def _batches(self, epoch: int) -> Iterator[TokenBatch]:
        """Read every image once unchanged and, where it has views, once in one of them, shuffled anew for the epoch."""
        rows = np.concatenate([self.images, self.views.draw(generator(self.config.seed, "views", epoch))])
        order = epoch_order(self.store.label.numpy()[rows], self.config, epoch, self.classes).numpy()
        for batch in self.store.batches(rows[order], self.config.batch_size, signals=self.selector.requires):
            yield batch.to(self.device, non_blocking=True)

    def _step(self, batch: TokenBatch, budget: float, noise: torch.Generator) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        config = self.config
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            if self.joint:
                logits, step = self.classifier.training_pass(batch, budget, config, noise)
            else:
                logits, step = None, self.selector.training_pass(batch, budget, config, noise, route=False)
        terms, weights = dict(step.terms), dict(step.weights)
        if logits is not None and batch.label is not None:
            with torch.set_grad_enabled(config.losses.classification != 0):
                term = classification_loss(logits, batch.label, self.weights)
            terms, weights = {"classification": term, **terms}, {"classification": config.losses.classification, **weights}
        loss = total_loss(terms, weights)
        logged = {"loss": loss.detach()} | {name: term.detach() for name, term in terms.items()}
        return loss, logged, step.scores.detach()

    @torch.no_grad()
    def _selection_value(self) -> float:
        self.classifier.eval()
        rows, config = self.parts.select, self.config
        if config.selection_metric == "retention":
            rows = rows[self.store.has_mask.numpy()[rows]]
        if not len(rows):
            raise RequestError(
                f"There are no images to choose the epoch by {config.selection_metric} on. Give the manifest a selection part "
                "with `mtb data split --select 0.1`, or change --selection-metric."
            )
        budgets = HEADLINE_BUDGETS if config.selection_metric == "retention" else (config.selection_budget,)
        pooled, evidence = pool_and_judge(self.store, rows, self.selector, budgets, config.seed, self.device)
        if config.selection_metric == "retention":
            lesion = self.store.lesion.numpy()[rows].sum(1)
            straight = np.array([self.store.views[row] == IDENTITY for row in rows])
            groups = [group for group in (straight, ~straight) if group.any()]
            if not isinstance(self.selector, Ranker):
                merged = evidence.dominated if np.isnan(evidence.mass).all() else evidence.mass
                return float(np.mean([np.nanmean(merged[group]) for group in groups]))
            return float(np.mean([share_of_ceiling(evidence.kept_lesion[group], lesion[group], evidence.k) for group in groups]))
        if self.head is None:
            raise RequestError("Without class labels the epoch is chosen by retention: use --selection-metric retention.")
        if self.head.reads == "tokens":
            predicted = token_probabilities(self.head, self.store, rows, self.selector, budgets, config.seed, self.device)
        else:
            predicted = probabilities(self.head.cpu(), pooled)
            self.head.to(self.device)
        return accuracy(self.store.label.numpy()[rows], predicted[:, 0].argmax(-1))

    @property
    def _checkpoint(self) -> Path:
        return self.out / CHECKPOINT

    def _identity(self) -> dict[str, Any]:
        config = to_dict(self.config)
        config.pop("device")
        rows = len(self.images) + self.views.rows
        return {"config": config, "names": list(self.names), "store": self.store.identity, "rows": rows, "classes": self.classes}

    def _save(self) -> None:
        state = {
            "epoch": self.epoch,
            "finished": self.finished,
            "best": self.stopping.best,
            "best_epoch": self.stopping.best_epoch,
            "identity": self._identity(),
            "metrics": log_hash(self._logged()),
        }
        tensors = {**module_tensors(self.classifier, "now/"), **self.best, **optimizer_tensors(self.optimizer)}
        save_tensors(self._checkpoint, tensors, state)

    def take_over(self, sibling: Path) -> None:
        """Write the checkpoint that this training would end with, from that of a finished training with another head."""
        if self.joint or self._checkpoint.exists() or not (sibling / CHECKPOINT).exists():
            return
        tensors, state = load_tensors(sibling / CHECKPOINT)
        mine, theirs = self._identity(), state["identity"]
        if not state["finished"] or theirs != mine | {"names": [self.names[0], theirs["names"][1]]}:
            return
        selector = {name: tensor for name, tensor in tensors.items() if not name.startswith(("now/head.", "best/head."))}
        untrained = module_tensors(self.classifier, "now/") | module_tensors(self.classifier, "best/")
        save_tensors(self._checkpoint, untrained | selector, {**state, "identity": mine})
        write_lines(self.out / METRICS, [row for row in _read_log(sibling / METRICS) if row.get("stage") == "selector"])

    def _resume(self) -> None:
        metrics = self.out / METRICS
        if not self._checkpoint.exists():
            metrics.unlink(missing_ok=True)
            return
        tensors, state = load_tensors(self._checkpoint)
        if (identity := self._identity()) != state["identity"]:
            advice = "Use the same options to resume, or another --out to start over."
            differences = dotted(identity), dotted(state["identity"])
            raise MismatchError.between(f"The training in {self._checkpoint}", *differences, advice)
        self.classifier.load_state_dict(split_prefix(tensors, "now/"))
        self.best = {name: tensor for name, tensor in tensors.items() if name.startswith("best/")}
        restore_optimizer(self.optimizer, tensors)
        self.epoch, self.finished = state["epoch"], state["finished"]
        self.stopping.best, self.stopping.best_epoch = state["best"], state["best_epoch"]
        kept = self._logged()
        if log_hash(kept) != state.get("metrics"):
            say(f"{metrics} is missing or damaged; it starts anew. For all curves, delete {self.out} and run the command again.")
            kept = []
        write_lines(metrics, kept)

    def _logged(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl` of the epochs that the checkpoint holds."""
        rows = [row for row in _read_log(self.out / METRICS) if row.get("stage") == "selector"]
        return [row for row in rows if isinstance(row.get("epoch"), int) and row["epoch"] < self.epoch]

    def result(self) -> Trained:
        self.classifier.to("cpu").eval()
        if self.head is not None and not self.joint:
            self._train_head(self.head)
        return Trained(self.selector, self.head, self.parts, self.stopping.best_epoch, self.stopping.best)

    def _train_head(self, head: Head) -> None:
        """The head of the lesion-first recipe, trained on the tokens that the finished selector keeps, at all budgets."""
        rows = self.parts.head
        label = self.store.label.numpy()[rows]
        judge = epoch_judge(self.store, self.parts.select, self.selector, self.config)
        pooled_head = PooledHead(self.names[1], self.store.dim, self.classes, self.config, self.on_epoch, judge)
        path = self.out / "pooled.npy"
        if head.reads == "tokens":
            history = pooled_head.train_on_store(self.store, rows, label, self.selector, self.config.budgets)
        else:
            with torch.no_grad():
                pooled = pool_to_file(path, self.store, rows, self.selector, self.config.budgets)
            history = pooled_head.train_on_file(pooled, label)
        for row in history:
            append_line(self.out / METRICS, row)
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
        head.load_state_dict(pooled_head.head.state_dict())


def _read_log(path: Path) -> list[dict[str, Any]]:
    return read_lines(path) if path.exists() else []


def _learned(name: str) -> type[LearnedSelector]:
    selector = selector_class(name)
    if not issubclass(selector, LearnedSelector):
        raise RequestError(f"Selector '{name}' does not learn. Train a head on its pooled tokens instead.")
    return selector


def log_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    """Hash of the rows of a `metrics.jsonl`, without the clock: equal trainings have equal hashes.

    In any order and however often: ablations that run at the same time write the same rows to the log of their training.
    """
    plain = ({name: value for name, value in row.items() if name != CLOCK} for row in rows)
    return sha256_json(sorted({json.dumps(row, sort_keys=True) for row in plain}))


def split_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors called `prefix...`, without the prefix."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def optimizer_tensors(optimizer: torch.optim.Optimizer, prefix: str = "optimizer/") -> dict[str, Tensor]:
    """The optimizer's state as named tensors (`0/exp_avg`, ...)."""
    state = optimizer.state_dict()["state"]
    return {f"{prefix}{index}/{key}": torch.as_tensor(v).clone() for index, entry in state.items() for key, v in entry.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], prefix: str = "optimizer/") -> None:
    """The inverse of `optimizer_tensors`, for an optimizer made over the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in split_prefix(tensors, prefix).items():
        index, key = name.split("/")
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def module_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The parameters of a module under a prefix, copied: a later step does not change them."""
    return {f"{prefix}{name}": tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
