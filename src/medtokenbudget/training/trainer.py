"""The trainer of LATS: the paper's joint recipe, and the lesion-first one whose head learns on the finished scorer's tokens.

An epoch is a pure function of the checkpoint before it (every generator is made from seed, purpose and epoch), so a run that was
killed goes on to the same bytes as one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.config import HEADLINE_BUDGETS, TrainConfig, to_dict
from medtokenbudget.data import Manifest
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.features import FeatureStore
from medtokenbudget.features.views import IDENTITY
from medtokenbudget.files import append_line, read_lines, write_lines
from medtokenbudget.progress import progress
from medtokenbudget.routing import LATSSelector
from medtokenbudget.tokens import TokenBatch
from medtokenbudget.training import checkpoints as ck
from medtokenbudget.training.curriculum import BudgetCurriculum
from medtokenbudget.training.head import RoutedClassifier, RoutingHead
from medtokenbudget.training.heads import PooledHead, class_weights, epoch_order, probabilities, require_labels
from medtokenbudget.training.losses import total_loss
from medtokenbudget.training.parts import Parts, ViewDraw, make_parts
from medtokenbudget.training.pooling import pool_and_judge, pool_to_file
from medtokenbudget.training.schedule import EarlyStopping, cosine_lr, epochs_for
from medtokenbudget.training.seeds import generator
from medtokenbudget.training.tracking import Tracker


@dataclass(frozen=True)
class Trained:
    """A finished training: selector and head, the rows that they were made and chosen on, and the epoch that was kept."""

    selector: LATSSelector
    head: RoutingHead
    parts: Parts
    best_epoch: int
    best_value: float


def train_lats(manifest: Manifest, store: FeatureStore, out: Path, config: TrainConfig) -> Trained:
    """Train one LATS model in `out` (checkpoint, `metrics.jsonl`), or go on with one that was stopped there."""
    parts = make_parts(manifest, store, config)
    trainer = _Trainer(store, parts, Path(out), config, len(manifest.classes))
    trainer.run()
    return trainer.result()


class _Trainer:
    def __init__(self, store: FeatureStore, parts: Parts, out: Path, config: TrainConfig, classes: int) -> None:
        self.store, self.parts, self.out, self.config, self.classes = store, parts, out, config, classes
        self.device = resolve_device(config.device)
        self.joint = config.recipe == "joint"
        if self.joint and config.patches:
            raise RequestError("the joint recipe routes whole images, so it learns from all patches: set --patches 0.")
        self.images, self.views = self._usable(parts.train), ViewDraw(store, self._usable(parts.train_views))
        if not len(self.images):
            raise RequestError(
                "the lesion-first recipe learns from lesion masks, and no training image has one. "
                "Add masks to the manifest, or use --preset paper with --losses.lesion 0 (the mask-free control)."
            )
        self.epochs = epochs_for(len(self.images) + len(self.views), config.batch_size, config.epochs, config.min_steps)
        if self.joint or config.class_balance == "sampler":
            require_labels(store.label.numpy()[self.images], "training")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.selector = LATSSelector.from_config(store.dim, config.lats, config.router)
            self.head = RoutingHead(store.dim, classes)
        self.classifier = RoutedClassifier(self.selector, self.head).to(self.device)
        self.parameters = list((self.classifier if self.joint else self.selector).parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
        self.curriculum = BudgetCurriculum(config.curriculum)
        self.stopping = EarlyStopping(config.patience, config.min_improvement)
        self.weights = None
        if config.class_balance == "loss" and self.joint:
            self.weights = class_weights(store.label.numpy()[self.images], classes).to(self.device)
        self.best: dict[str, Tensor] = {}
        self.epoch = 0
        self.finished = False

    # Rows ------------------------------------------------------------------------------------------------------------

    def _usable(self, rows: np.ndarray) -> np.ndarray:
        """The joint recipe needs labels, the lesion-first one masks: every one there is."""
        return rows if self.joint else rows[self.store.has_mask.numpy()[rows]]

    # The loop --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self._resume()
        tracker = Tracker(self.out)
        bar = progress(total=self.epochs, initial=self.epoch, what="train", unit="epoch")
        while not self.finished:
            started = time.perf_counter()
            row = self._train_epoch(self.epoch)
            looked_at = (self.epoch + 1) % self.config.evaluate_every == 0 or self.epoch + 1 == self.epochs
            if looked_at:
                row["selection"] = self._selection_value()
                if self.stopping.improved(row["selection"], self.epoch):
                    self.best = self._module_state("best/")
            row["seconds"] = round(time.perf_counter() - started, 3)
            self.finished = self.epoch + 1 >= self.epochs or (looked_at and self.stopping.stop(self.epoch))
            self.epoch += 1
            # In this order: a row without its checkpoint is dropped when the training goes on, a lost one would stay lost.
            tracker.write(row)
            self._save()
            bar.set_postfix(loss=f"{row['loss']:.4f}", selection=f"{self.stopping.best:.4f}")
            bar.update()
        bar.close()
        self._load_modules(ck.split_prefix(self.best, "best/"))

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        config = self.config
        lr = cosine_lr(config.lr, epoch, self.epochs)
        self.optimizer.param_groups[0]["lr"] = lr
        budget = self.curriculum.budget(epoch)
        sums: dict[str, float] = {}
        noise = generator(config.seed, "noise", epoch)
        seen = 0
        self.classifier.train()
        for batch in self._batches(epoch):
            loss, terms, scores = self._step(batch, budget, noise)
            if not math.isfinite(loss.item()):
                names = ", ".join((batch.image_id or ())[:4])
                raise WorkError(
                    f"the loss is not finite in epoch {epoch} (images {names}, ...). "
                    "Lower --lr, or check these images' tokens with `mtb extract`."
                )
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, config.clip)
            self.optimizer.step()
            seen += len(batch)
            for name, value in {**terms, "score_mean": scores.mean(), "score_std": scores.std(dim=1).mean()}.items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(batch)
        means = {name: value / seen for name, value in sums.items()}
        means["loss"] = means.pop("total")
        means["budget_deviation"] = means.pop("budget")
        return {"epoch": epoch, "stage": "scorer", "lr": lr, "budget": budget, **means}

    def _batches(self, epoch: int) -> Iterator[TokenBatch]:
        """Every image as it is, and in one of its views where it has any, in an order of the epoch's own."""
        rows = np.concatenate([self.images, self.views.draw(generator(self.config.seed, "views", epoch))])
        order = epoch_order(self.store.label.numpy()[rows], self.config, epoch, self.classes).numpy()
        for batch in self.store.batches(rows[order], self.config.batch_size):
            yield batch.to(self.device, non_blocking=True)

    def _step(self, batch: TokenBatch, budget: float, noise: torch.Generator) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            at = None
            if self.joint:
                output = self.classifier.training_forward(batch, budget, noise)
                logits, scores, score_logits = output.logits, output.scores, output.score_logits
            else:
                at = self._patches(batch, noise)
                logits, score_logits = None, self.selector.logits(batch, noise, at)
                scores = torch.sigmoid(score_logits)
        loss, terms = total_loss(
            logits,
            scores,
            k=self.selector.count(budget, batch.n),
            budget=budget,
            label=batch.label,
            lesion=_at(batch.lesion, at),
            has_mask=batch.has_mask,
            cls_attention=_at(batch.cls_attention, at),
            score_logits=score_logits,
            weights=self.config.losses,
            class_weights=self.weights,
        )
        return loss, terms, scores.detach()

    def _patches(self, batch: TokenBatch, noise: torch.Generator) -> Tensor | None:
        """The patches of each image that this step learns from, [B, T], drawn without replacement; None: all of them."""
        if not 0 < self.config.patches < batch.n:
            return None
        return torch.rand(len(batch), batch.n, generator=noise).argsort(1)[:, : self.config.patches].to(self.device)

    # What picks the epoch --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _selection_value(self) -> float:
        self.classifier.eval()
        rows, config = self.parts.select, self.config
        if config.selection_metric == "retention":
            rows = rows[self.store.has_mask.numpy()[rows]]
        if not len(rows):
            raise RequestError(
                f"the part that picks the epoch by {config.selection_metric} is empty; give the manifest a selection part "
                "with `mtb data split --select`, or change --selection_metric."
            )
        budgets = HEADLINE_BUDGETS if config.selection_metric == "retention" else (config.selection_budget,)
        pooled, evidence = pool_and_judge(self.store, rows, self.selector, budgets, config.seed, self.device)
        if config.selection_metric == "retention":
            ceiling = np.minimum(self.store.lesion.numpy()[rows].sum(1)[:, None], np.array(evidence.k)[None])
            straight = np.array([self.store.views[row] == IDENTITY for row in rows])
            groups = [group for group in (straight, ~straight) if group.any()]
            return float(np.mean([evidence.kept_lesion[group].sum(0) / ceiling[group].sum(0) for group in groups]))
        predicted = probabilities(self.head.cpu(), pooled)[:, 0].argmax(-1)
        self.head.to(self.device)
        return float((predicted == self.store.label.numpy()[rows]).mean())

    # Checkpoints -----------------------------------------------------------------------------------------------------

    @property
    def _checkpoint(self) -> Path:
        return self.out / "checkpoint.safetensors"

    def _module_state(self, prefix: str) -> dict[str, Tensor]:
        return {**ck.module_tensors(self.selector.scorer, f"{prefix}scorer."), **ck.module_tensors(self.head, f"{prefix}head.")}

    def _load_modules(self, tensors: dict[str, Tensor]) -> None:
        self.selector.scorer.load_state_dict(ck.split_prefix(tensors, "scorer."))
        self.head.load_state_dict(ck.split_prefix(tensors, "head."))

    def _identity(self) -> dict[str, Any]:
        config = to_dict(self.config)
        config.pop("device")
        return {"config": config, "store": self.store.identity, "rows": len(self.images) + self.views.rows, "classes": self.classes}

    def _save(self) -> None:
        state = {
            "epoch": self.epoch,
            "finished": self.finished,
            "best": self.stopping.best,
            "best_epoch": self.stopping.best_epoch,
            "identity": self._identity(),
        }
        tensors = {**self._module_state("now/"), **self.best, **ck.optimizer_tensors(self.optimizer)}
        ck.save_tensors(self._checkpoint, tensors, state)

    def _resume(self) -> None:
        metrics = self.out / "metrics.jsonl"
        if not self._checkpoint.exists():
            metrics.unlink(missing_ok=True)
            return
        tensors, state = ck.load_tensors(self._checkpoint)
        ck.require_same(self._checkpoint, "the training", self._identity(), state["identity"])
        self._load_modules(ck.split_prefix(tensors, "now/"))
        self.best = {name: tensor for name, tensor in tensors.items() if name.startswith("best/")}
        ck.restore_optimizer(self.optimizer, tensors)
        self.epoch, self.finished = state["epoch"], state["finished"]
        self.stopping.best, self.stopping.best_epoch = state["best"], state["best_epoch"]
        if metrics.exists():
            kept = [row for row in read_lines(metrics) if row["stage"] == "scorer" and row["epoch"] < self.epoch]
            write_lines(metrics, kept)

    # The second stage ------------------------------------------------------------------------------------------------

    def result(self) -> Trained:
        self.classifier.to("cpu").eval()
        if not self.joint:
            self._train_head()
        return Trained(self.selector, self.head, self.parts, self.stopping.best_epoch, self.stopping.best)

    def _train_head(self) -> None:
        """The head of the lesion-first recipe: trained on the tokens that the finished scorer keeps, at all budgets."""
        rows = self.parts.head
        path = self.out / "pooled.npy"
        with torch.no_grad():
            pooled = pool_to_file(path, self.store, rows, self.selector, self.config.budgets)
        pooled_head = PooledHead(self.store.dim, self.classes, self.config)
        for row in pooled_head.train_on_file(pooled, self.store.label.numpy()[rows]):
            append_line(self.out / "metrics.jsonl", row)
        path.unlink()
        self.head.load_state_dict(pooled_head.head.state_dict())


def _at(values: Tensor | None, at: Tensor | None) -> Tensor | None:
    return values if values is None or at is None else values.take_along_dim(at, 1)
