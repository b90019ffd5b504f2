"""Pooled tokens, and training a head behind a fixed selector: the paper's baselines, and the second stage of lesion-first.

A frozen selector gives the same pooled tokens in every epoch, so they are computed once, for all budgets in one pass;
heads then train on `[n, budgets, D]` numbers instead of `[n, N, D]` tokens.

Every method uses the same optimizer and budget sampling. Under the strict protocol no epoch is chosen: the rate falls to zero and
the last one counts. Under the paper's the rate is constant and the best epoch on validation images counts, as for LATS.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import atomic_write, read_json, sha256_file, write_json
from medtokenbudget.heads import Head, create_head
from medtokenbudget.metrics import accuracy, group_purity, kept_lesion_counts, lesion_dominated, lesion_mass
from medtokenbudget.routing import Ranker, Selector, gather, pooled_means, rank
from medtokenbudget.routing.losses import classification_loss
from medtokenbudget.tokens import TokenBatch, TokenSet
from medtokenbudget.training.rows import class_weights, epoch_order, generator, require_labels
from medtokenbudget.training.schedule import EarlyStopping, cosine_lr, is_looked_at

BATCH = 64
OnEpoch = Callable[[str, int, int], None]
"""Called after every epoch with the stage, the epochs done and the epochs in all."""
Judge = Callable[[Head], float]
"""How good a head is: what its epoch is chosen by."""


@dataclass(frozen=True)
class Evidence:
    """What a selector kept of n images at T budgets; NaN or None where it was not measured.

    k            [T] tokens given to the head
    kept_lesion  [n, T] lesion patches kept (NaN without a mask, and for mergers)
    purity       [n, T] purity of a hard merger's groups (NaN otherwise)
    dominated    [n, T] share of the lesion patches in tokens dominated by lesion (NaN but for hard mergers)
    mass         [n, T] attention of a soft merger on lesion patches (NaN otherwise)
    order        [n, N] patches, best first, or None for samplers and mergers
    scores       [n, N] scores of a learned selector, or None
    """

    k: tuple[int, ...]
    kept_lesion: np.ndarray
    purity: np.ndarray
    dominated: np.ndarray
    mass: np.ndarray
    order: np.ndarray | None
    scores: np.ndarray | None


def pool_to_file(path: Path, store: FeatureStore, rows: np.ndarray, selector: Selector, budgets: Sequence[float]) -> np.ndarray:
    """Pooled tokens `[n, T, D]` of a deterministic selector, memory-mapped from `path`.

    The file is made if it does not exist, and made again if it is damaged: its hash is in `NAME.json` next to it.
    """
    shape, note = (len(rows), len(budgets), store.dim), path.with_suffix(".json")
    if not _is_whole(path, note):
        with atomic_write(path) as temporary, open(temporary, "wb") as stream:
            # Not through a memory map: on a full disk that ends in a signal instead of an error.
            np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
            for batch in store.batches(rows, BATCH, signals=selector.requires):
                stream.write(selector.pooled(batch, budgets).numpy().astype("<f4").tobytes())
        write_json(note, {"sha256": sha256_file(path)})
    return np.load(path, mmap_mode="r")


def _is_whole(path: Path, note: Path) -> bool:
    if not (path.exists() and note.exists()):
        return False
    try:
        recorded = read_json(note)
    except RequestError:
        return False
    return isinstance(recorded, dict) and recorded.get("sha256") == sha256_file(path)


def pool_and_judge(
    store: FeatureStore,
    rows: np.ndarray,
    selector: Selector,
    budgets: Sequence[float],
    seed: int,
    device: torch.device | str = "cpu",
) -> tuple[np.ndarray, Evidence]:
    """Pooled tokens `[n, T, D]` and the evidence kept, in one pass; `seed` is for selectors that draw."""
    counts = tuple(selector.count(budget, store.per_image) for budget in budgets)
    judged = []
    for index, batch in enumerate(store.batches(rows, BATCH, signals=selector.requires)):
        noise = generator(seed, "evaluation", index) if selector.stochastic else None
        batch = batch.to(device)
        if isinstance(selector, Ranker) and batch.places is None:
            judged.append(_ranked(selector, batch, counts, noise))
        else:
            judged.append(_selected(selector, batch, counts, noise))
    pooled, measures, order, scores = zip(*judged)
    kept, purity, dominated, mass = np.concatenate(measures, axis=1)
    evidence = Evidence(
        k=counts,
        kept_lesion=kept,
        purity=purity,
        dominated=dominated,
        mass=mass,
        order=np.concatenate(order) if order[0] is not None else None,
        scores=np.concatenate(scores) if selector.learns and scores[0] is not None else None,
    )
    return np.concatenate(pooled), evidence


def token_sets(
    selector: Selector, batch: TokenBatch, counts: Sequence[int], noise: torch.Generator | None = None
) -> list[TokenSet]:
    """The tokens that heads read of a batch at each K; a ranker orders the patches once."""
    if isinstance(selector, Ranker) and batch.places is None:
        order = selector.order(batch, noise)
        return [TokenSet.of(gather(batch.patches, order[:, :k]), batch.grid) for k in counts]
    return [TokenSet.of(selector.select(batch, k, noise), batch.grid) for k in counts]


Judged = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]
"""Pooled tokens, the four measures of `Evidence` [4, n, T], the order and the scores."""


def _ranked(selector: Ranker, batch: TokenBatch, counts: Sequence[int], noise: torch.Generator | None) -> Judged:
    scores = selector.score(selector.check(batch), noise)
    order = rank(scores)
    pooled = pooled_means(batch.patches, order, counts).cpu().numpy()
    measures = np.full((4, len(batch), len(counts)), np.nan)
    if batch.lesion is not None and batch.has_mask is not None:
        masked = batch.has_mask.bool().cpu().numpy()
        measures[0, masked] = kept_lesion_counts(order, batch.lesion, counts)[masked]
    return pooled, measures, order.to(torch.int16).cpu().numpy(), scores.half().cpu().numpy()


def _selected(selector: Selector, batch: TokenBatch, counts: Sequence[int], noise: torch.Generator | None) -> Judged:
    selections = [selector.select(batch, k, noise) for k in counts]
    pooled = np.stack([selection.pooled().cpu().numpy() for selection in selections], 1)
    measures = np.full((4, *pooled.shape[:2]), np.nan)
    if batch.lesion is not None and batch.has_mask is not None:
        masked, lesion = batch.has_mask.bool().cpu().numpy(), batch.lesion.bool()
        for column, selection in enumerate(selections):
            if selection.kept is not None:  # a sampler
                measures[0, masked, column] = (selection.kept & lesion).sum(1).cpu().numpy()[masked]
            elif selection.attention is not None:
                measures[3, masked, column] = lesion_mass(selection.attention, lesion).cpu().numpy()[masked]
            else:
                measures[1, masked, column] = group_purity(selection.assignment, lesion).cpu().numpy()[masked]
                measures[2, masked, column] = lesion_dominated(selection.assignment, lesion).cpu().numpy()[masked]
    return pooled, measures, None, None


def epoch_judge(store: FeatureStore, rows: np.ndarray, selector: Selector, config: TrainConfig) -> Judge | None:
    """Accuracy on the selection rows at the selection budget, for heads of the paper's protocol; None under the strict one.

    The paper looks at validation accuracy to keep an epoch of LATS. Heads of baselines that kept their last epoch instead would be
    compared at a disadvantage.
    """
    if config.protocol == "strict":
        return None
    if "has_mask" in selector.requires:
        rows = rows[store.has_mask.numpy()[rows]]
    if not len(rows):
        raise RequestError("There are no validation images to choose the epoch of the head on. Use --protocol strict.")
    budgets, label = (config.selection_budget,), store.label.numpy()[rows]

    @cache
    def pooled() -> np.ndarray:  # the selector is fixed, so once is enough
        return pool_and_judge(store, rows, selector, budgets, config.seed)[0]

    def judge(head: Head) -> float:
        if head.reads == "tokens":
            predicted = token_probabilities(head, store, rows, selector, budgets, config.seed)
        else:
            predicted = probabilities(head, pooled())
        return accuracy(label, predicted[:, 0].argmax(-1))

    return judge


class PooledHead:
    """A head that learns behind a fixed selector, on pooled tokens or on the tokens themselves, as it reads them.

    Args:
        on_epoch: Called after every epoch.
        judge: Chooses the epoch, and makes the learning rate constant; without one the last epoch of a falling rate is kept.
    """

    def __init__(
        self,
        head: str,
        dim: int,
        classes: int,
        config: TrainConfig,
        on_epoch: OnEpoch | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.config, self.classes, self.on_epoch, self.judge = config, classes, on_epoch, judge
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.head = create_head(head, dim, classes)

    def train_on_file(self, pooled: np.ndarray, label: np.ndarray) -> list[dict[str, Any]]:
        """Train on pooled tokens `[n, T, D]` of a deterministic selector; a budget is drawn for each batch."""
        budgets = pooled.shape[1]

        def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
            order = epoch_order(label, self.config, epoch, self.classes).numpy()
            draws = torch.randint(budgets, (len(order) // self.config.batch_size + 1,), generator=self._noise("budget", epoch))
            for number, start in enumerate(range(0, len(order), self.config.batch_size)):
                rows = order[start : start + self.config.batch_size]
                yield torch.from_numpy(pooled[rows, int(draws[number])]), torch.from_numpy(label[rows])

        return self._train(batches, label)

    def train_on_store(
        self, store: FeatureStore, rows: np.ndarray, label: np.ndarray, selector: Selector, budgets: Sequence[float]
    ) -> list[dict[str, Any]]:
        """Train on tokens that are selected again in every epoch, for selectors that draw and for heads that read tokens."""

        def batches(epoch: int) -> Iterator[tuple[Tensor | TokenSet, Tensor]]:
            order = epoch_order(label, self.config, epoch, self.classes).numpy()
            draws = torch.randint(len(budgets), (len(order),), generator=self._noise("budget", epoch))
            noise = self._noise("selector", epoch)
            start = 0
            for number, batch in enumerate(store.batches(rows[order], self.config.batch_size, signals=selector.requires)):
                budget = budgets[int(draws[number])]
                kept: Tensor | TokenSet
                with torch.no_grad():
                    if self.head.reads == "tokens":
                        kept = token_sets(selector, batch, [selector.count(budget, batch.n)], noise)[0]
                    else:
                        kept = selector.pooled(batch, (budget,), noise)[:, 0]
                yield kept, torch.from_numpy(label[order[start : start + len(batch)]])
                start += len(batch)

        return self._train(batches, label)

    def _noise(self, purpose: str, epoch: int) -> torch.Generator:
        return generator(self.config.seed, purpose, epoch)

    def _train(self, batches: Any, label: np.ndarray) -> list[dict[str, Any]]:
        require_labels(label, "training")
        config = self.config
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        weights = class_weights(label, self.classes) if config.class_balance == "loss" else None
        history = []
        # The paper trains heads for all of their epochs: the rule only says which one is the best.
        rule = EarlyStopping(config.head_epochs, config.min_improvement)
        best: dict[str, Tensor] = {}
        for epoch in range(config.head_epochs):
            self.head.train()
            lr = config.lr if self.judge else cosine_lr(config.lr, epoch, config.head_epochs)
            optimizer.param_groups[0]["lr"] = lr
            total, seen, noise = 0.0, 0, self._noise("head-dropout", epoch)
            for features, target in batches(epoch):
                logits, own = self.head.training_step(features, target, noise)
                loss = classification_loss(logits, target, weights)
                loss = loss if own is None else loss + own
                if not torch.isfinite(loss):
                    raise WorkError(f"The loss of the head is not finite in epoch {epoch}. Lower --lr, or check the tokens.")
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.head.parameters(), config.clip)
                optimizer.step()
                total, seen = total + loss.item() * len(target), seen + len(target)
            history.append({"epoch": epoch, "stage": "head", "lr": lr, "classification": total / seen})
            if self.judge and is_looked_at(epoch, config.head_epochs, config.evaluate_every):
                history[-1]["selection"] = value = self.judge(self.head)
                if rule.improved(value, epoch):
                    best = copy.deepcopy(self.head.state_dict())
            if self.on_epoch is not None:
                self.on_epoch("head", epoch + 1, config.head_epochs)
        if best:
            self.head.load_state_dict(best)
        self.head.eval()
        return history


@torch.no_grad()
def token_probabilities(
    head: Head,
    store: FeatureStore,
    rows: np.ndarray,
    selector: Selector,
    budgets: Sequence[float],
    seed: int,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Class probabilities `[n, T, C]` by a head that reads tokens; draws like `pool_and_judge` with the same seed."""
    head.eval()
    counts = [selector.count(budget, store.per_image) for budget in budgets]
    parts = []
    for index, batch in enumerate(store.batches(rows, BATCH, signals=selector.requires)):
        noise = generator(seed, "evaluation", index) if selector.stochastic else None
        kept = token_sets(selector, batch.to(device), counts, noise)
        parts.append(torch.stack([head(tokens).softmax(-1) for tokens in kept], 1).cpu())
    return torch.cat(parts).numpy()


@torch.no_grad()
def probabilities(head: Head, pooled: np.ndarray) -> np.ndarray:
    """Class probabilities `[n, T, C]` of pooled tokens `[n, T, D]`."""
    head.eval()
    parts = [
        head(torch.from_numpy(np.ascontiguousarray(chunk))).softmax(-1) for chunk in np.array_split(pooled, len(pooled) // 512 + 1)
    ]
    return torch.cat(parts).numpy()
