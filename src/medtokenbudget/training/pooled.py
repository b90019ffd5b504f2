"""What a selector keeps at every budget, and training a head behind a fixed selector: the baselines and the second stage of ours.

A fixed selector gives the same pooled tokens in every epoch, so they are computed once, for all budgets in one pass; heads then
train on `[n, budgets, D]` numbers instead of `[n, N, D]` tokens.

Every method uses the same optimizer and budget sampling. Under the strict protocol no epoch is chosen: the rate falls to zero and
the last one counts. Under the paper's the rate is constant and the best epoch on validation images counts, as for LATS.
"""

from __future__ import annotations

import copy
import math
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
from medtokenbudget.files import atomic_write, read_json, sha256_file, sha256_json, write_json
from medtokenbudget.heads import Head, create_head
from medtokenbudget.metrics import accuracy, group_purity, kept_lesion_counts, lesion_dominated, lesion_mass
from medtokenbudget.routing import Ranker, Selector, gather, pooled_means, rank
from medtokenbudget.routing.losses import classification_loss
from medtokenbudget.tokens import TokenBatch, TokenSet
from medtokenbudget.training.rows import TrainingRows, class_weights, epoch_order, generator, require_labels

BATCH = 64
OnEpoch = Callable[[str, int, int], None]
"""Called after every epoch with the stage, the epochs done and the epochs in all."""
Batches = Callable[[int], Iterator[tuple[Tensor | TokenSet, Tensor]]]
"""From an epoch to its batches: what the head reads, and the labels."""


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


@torch.no_grad()
def pool_and_judge(
    store: FeatureStore,
    rows: np.ndarray,
    selector: Selector,
    budgets: Sequence[float],
    seed: int,
    device: torch.device | str = "cpu",
) -> tuple[np.ndarray, Evidence]:
    """Compute the pooled tokens `[n, T, D]` and the evidence kept, in one pass; `seed` is for selectors that draw."""
    counts = tuple(selector.count(budget, store.per_image) for budget in budgets)
    pooled, measures, orders, scores = [], [], [], []
    # Noise by batch: the same images in the same batches draw the same patches, whatever was evaluated before.
    for index, batch in enumerate(store.batches(rows, BATCH, signals=selector.requires)):
        batch, noise = batch.to(device), _evaluation_noise(selector, seed, index)
        if isinstance(selector, Ranker) and batch.places is None:
            # A ranker orders the patches once for all budgets.
            score = selector.score(selector.check(batch), noise)
            order = rank(score)
            pooled.append(pooled_means(batch.patches, order, counts).cpu().numpy())
            measures.append(_measures(batch, counts, order=order))
            # Compact, because a run keeps them for every method: 16 bits hold any patch number and a score for a histogram.
            orders.append(order.to(torch.int16).cpu().numpy())
            scores.append(score.half().cpu().numpy())
        else:
            selections = [selector.select(batch, k, noise) for k in counts]
            pooled.append(np.stack([selection.pooled().cpu().numpy() for selection in selections], 1))
            measures.append(_measures(batch, counts, selections=selections))
    kept, purity, dominated, mass = np.concatenate(measures, axis=1)
    return np.concatenate(pooled), Evidence(
        k=counts,
        kept_lesion=kept,
        purity=purity,
        dominated=dominated,
        mass=mass,
        order=np.concatenate(orders) if orders else None,
        scores=np.concatenate(scores) if scores and selector.learns else None,
    )


def _measures(batch: TokenBatch, counts: Sequence[int], order: Tensor | None = None, selections: Sequence[Any] = ()) -> np.ndarray:
    """Measure the four rows `[4, n, T]` of `Evidence`: lesion patches kept, purity, dominated and mass."""
    measures = np.full((4, len(batch), len(counts)), np.nan)
    if batch.lesion is None or batch.has_mask is None:
        return measures
    masked, lesion = batch.has_mask.bool().cpu().numpy(), batch.lesion.bool()
    if order is not None:
        measures[0, masked] = kept_lesion_counts(order, batch.lesion, counts)[masked]
    for column, selection in enumerate(selections):
        if selection.kept is not None:  # a sampler
            measures[0, masked, column] = (selection.kept & lesion).sum(1).cpu().numpy()[masked]
        elif selection.attention is not None:
            measures[3, masked, column] = lesion_mass(selection.attention, lesion).cpu().numpy()[masked]
        else:
            measures[1, masked, column] = group_purity(selection.assignment, lesion).cpu().numpy()[masked]
            measures[2, masked, column] = lesion_dominated(selection.assignment, lesion).cpu().numpy()[masked]
    return measures


def _evaluation_noise(selector: Selector, seed: int, batch: int) -> torch.Generator | None:
    return generator(seed, "evaluation", batch) if selector.stochastic else None


def token_sets(
    selector: Selector, batch: TokenBatch, counts: Sequence[int], noise: torch.Generator | None = None
) -> list[TokenSet]:
    """Return the tokens that heads read of a batch at each K; a ranker orders the patches once."""
    if isinstance(selector, Ranker) and batch.places is None:
        order = selector.order(batch, noise)
        return [TokenSet.of(gather(batch.patches, order[:, :k]), batch.grid) for k in counts]
    return [TokenSet.of(selector.select(batch, k, noise), batch.grid) for k in counts]


@torch.no_grad()
def probabilities(
    head: Head,
    store: FeatureStore,
    rows: np.ndarray,
    selector: Selector,
    budgets: Sequence[float],
    seed: int,
    pooled: np.ndarray | None,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Compute class probabilities `[n, T, C]` from the pooled tokens `[n, T, D]`, or from the tokens if the head reads them.

    Selectors that draw then draw the same patches as `pool_and_judge` with the same seed.
    """
    head.eval()
    if head.reads != "tokens" and pooled is not None:
        chunks = (np.ascontiguousarray(chunk) for chunk in np.array_split(pooled, len(pooled) // 512 + 1))
        return torch.cat([head(torch.from_numpy(chunk).to(device)).softmax(-1).cpu() for chunk in chunks]).numpy()
    counts = [selector.count(budget, store.per_image) for budget in budgets]
    parts = []
    for index, batch in enumerate(store.batches(rows, BATCH, signals=selector.requires)):
        kept = token_sets(selector, batch.to(device), counts, _evaluation_noise(selector, seed, index))
        parts.append(torch.stack([head(tokens).softmax(-1) for tokens in kept], 1).cpu())
    return torch.cat(parts).numpy()


# Pooled tokens of training images -------------------------------------------------------------------------------------


def pool_to_file(path: Path, store: FeatureStore, rows: np.ndarray, selector: Selector, budgets: Sequence[float]) -> np.ndarray:
    """Pool the tokens `[n, T, D]` of a deterministic selector into a file, and map it into memory.

    The file is made if it does not exist, and made again if it is damaged: its hash is in `NAME.json` next to it.
    """
    shape, note = (len(rows), len(budgets), store.dim), path.with_suffix(".json")
    if not is_whole(path):
        with atomic_write(path) as temporary, open(temporary, "wb") as stream:
            # Not through a memory map: on a full disk that ends in a signal instead of an error.
            np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
            for part in _pooled_batches(store, rows, selector, budgets):
                stream.write(part.tobytes())
        write_json(note, {"sha256": sha256_file(path)})
    return np.load(path, mmap_mode="r")


def is_whole(path: Path) -> bool:
    """Tell whether a file of pooled tokens exists and has the hash that was noted when it was written."""
    try:
        recorded = read_json(path.with_suffix(".json"))
    except RequestError:
        return False
    return isinstance(recorded, dict) and path.exists() and recorded.get("sha256") == sha256_file(path)


@torch.no_grad()
def _pooled_batches(store: FeatureStore, rows: np.ndarray, selector: Selector, budgets: Sequence[float]) -> Iterator[np.ndarray]:
    for batch in store.batches(rows, BATCH, signals=selector.requires):
        yield selector.pooled(batch, budgets).numpy().astype("<f4")


def with_masks(store: FeatureStore, rows: np.ndarray, selector: Selector) -> np.ndarray:
    """Return the rows that a selector can read: one that looks at masks (the oracle) reads only images that have one."""
    return rows[store.has_mask.numpy()[rows]] if "has_mask" in selector.requires else rows


# Heads ----------------------------------------------------------------------------------------------------------------


def train_head(
    store: FeatureStore,
    rows: TrainingRows,
    config: TrainConfig,
    selector: Selector,
    name: str,
    file: Path | None = None,
    shared: Path | None = None,
    on_epoch: OnEpoch | None = None,
) -> tuple[Head, list[dict[str, Any]]]:
    """Train a head on the tokens that a fixed selector keeps, at all budgets, and return it with one row per epoch.

    Args:
        file: Where pooled tokens are while the head trains; None keeps them in memory.
        shared: Folder that pooled tokens stay in instead: what a selector without parameters keeps depends on neither head nor
            seed.
        on_epoch: Called after every epoch.
    """
    trained_on = with_masks(store, rows.head, selector)
    label = store.label.numpy()[trained_on]
    head = new_head(name, store.dim, len(store.classes), config)
    judge = _epoch_judge(store, with_masks(store, rows.select, selector), selector, config)
    if selector.stochastic or head.reads == "tokens":
        batches = batches_of_store(store, trained_on, label, selector, head, config)
        return head, fit_head(head, batches, label, config, judge, on_epoch)
    if shared is not None:
        key = sha256_json([store.identity, selector.name, selector.options(), trained_on.tolist(), list(config.budgets)])[:16]
        file = shared / f"{selector.name}-{key}.npy"
    if file is None:
        pooled = np.concatenate(list(_pooled_batches(store, trained_on, selector, config.budgets)))
    else:
        pooled = pool_to_file(file, store, trained_on, selector, config.budgets)
    history = fit_head(head, batches_of_pooled(pooled, label, config, head.classes), label, config, judge, on_epoch)
    if file is not None and shared is None:
        for leftover in (file, file.with_suffix(".json")):
            leftover.unlink(missing_ok=True)
    return head, history


def new_head(name: str, dim: int, classes: int, config: TrainConfig) -> Head:
    """Create a head whose weights depend on the seed of the training alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return create_head(name, dim, classes)


def _epoch_judge(store: FeatureStore, rows: np.ndarray, selector: Selector, config: TrainConfig) -> Callable[[Head], float] | None:
    """Return how good a head is, by which its epoch is chosen under the paper's protocol; None under the strict one.

    The paper looks at validation accuracy to keep an epoch of LATS. Heads of baselines that kept their last epoch instead would be
    compared at a disadvantage.
    """
    if config.protocol == "strict":
        return None
    if not len(rows):
        raise RequestError('There are no validation images to choose the epoch of the head on. Use `protocol="strict"`.')
    budgets, label = (config.selection_budget,), store.label.numpy()[rows]

    @cache
    def pooled() -> np.ndarray:  # the selector is fixed, so once is enough
        return pool_and_judge(store, rows, selector, budgets, config.seed)[0]

    def judge(head: Head) -> float:
        means = None if head.reads == "tokens" else pooled()
        predicted = probabilities(head, store, rows, selector, budgets, config.seed, means)
        return accuracy(label, predicted[:, 0].argmax(-1))

    return judge


def batches_of_pooled(pooled: np.ndarray, label: np.ndarray, config: TrainConfig, classes: int) -> Batches:
    """Read pooled tokens `[n, T, D]` of a deterministic selector; a budget is drawn for each batch."""

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = epoch_order(label, config, epoch, classes).numpy()
        steps = len(order) // config.batch_size + 1
        draws = torch.randint(pooled.shape[1], (steps,), generator=generator(config.seed, "budget", epoch))
        for number, start in enumerate(range(0, len(order), config.batch_size)):
            rows = order[start : start + config.batch_size]
            yield torch.from_numpy(pooled[rows, int(draws[number])]), torch.from_numpy(label[rows])

    return batches


def batches_of_store(
    store: FeatureStore, rows: np.ndarray, label: np.ndarray, selector: Selector, head: Head, config: TrainConfig
) -> Batches:
    """Select tokens again in every epoch, for selectors that draw and for heads that read tokens."""

    @torch.no_grad()
    def kept(batch: TokenBatch, budget: float, noise: torch.Generator) -> Tensor | TokenSet:
        if head.reads == "tokens":
            return token_sets(selector, batch, [selector.count(budget, batch.n)], noise)[0]
        return selector.pooled(batch, (budget,), noise)[:, 0]

    def batches(epoch: int) -> Iterator[tuple[Tensor | TokenSet, Tensor]]:
        order = epoch_order(label, config, epoch, head.classes).numpy()
        draws = torch.randint(len(config.budgets), (len(order),), generator=generator(config.seed, "budget", epoch))
        noise, start = generator(config.seed, "selector", epoch), 0
        for number, batch in enumerate(store.batches(rows[order], config.batch_size, signals=selector.requires)):
            budget = config.budgets[int(draws[number])]
            yield kept(batch, budget, noise), torch.from_numpy(label[order[start : start + len(batch)]])
            start += len(batch)

    return batches


def fit_head(
    head: Head,
    batches: Batches,
    label: np.ndarray,
    config: TrainConfig,
    judge: Callable[[Head], float] | None = None,
    on_epoch: OnEpoch | None = None,
) -> list[dict[str, Any]]:
    """Train a head for all of its epochs and return one row for each.

    With a `judge` the rate is constant and the best epoch is kept; without one the last epoch of a falling rate.
    """
    require_labels(label)
    optimizer = torch.optim.AdamW(head.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    weights = class_weights(label, head.classes) if config.class_balance == "loss" else None
    history: list[dict[str, Any]] = []
    best: tuple[float, dict[str, Tensor]] | None = None
    for epoch in range(config.head_epochs):
        head.train()
        lr = config.lr if judge else cosine_lr(config.lr, epoch, config.head_epochs)
        optimizer.param_groups[0]["lr"] = lr
        total, seen, noise = 0.0, 0, generator(config.seed, "head-dropout", epoch)
        for features, target in batches(epoch):
            logits, term = head.training_step(features, target, noise)
            loss = classification_loss(logits, target, weights)
            loss = loss if term is None else loss + term
            if not torch.isfinite(loss):
                raise WorkError(f"The loss of the head is not finite in epoch {epoch}. Lower `lr`, or check the tokens.")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), config.clip)
            optimizer.step()
            total, seen = total + loss.item() * len(target), seen + len(target)
        history.append({"epoch": epoch, "stage": "head", "lr": lr, "classification": total / seen})
        if judge and is_looked_at(epoch, config.head_epochs, config.evaluate_every):
            history[-1]["selection"] = value = judge(head)
            if best is None or value > best[0] + config.min_improvement:
                best = value, copy.deepcopy(head.state_dict())
        if on_epoch is not None:
            on_epoch("head", epoch + 1, config.head_epochs)
    if best is not None:
        head.load_state_dict(best[1])
    head.eval()
    return history


def cosine_lr(base: float, epoch: int, epochs: int) -> float:
    """Return the rate of an epoch: a cosine from `base` at epoch 0 to 0 after the last epoch."""
    return 0.5 * base * (1 + math.cos(math.pi * epoch / epochs))


def is_looked_at(epoch: int, epochs: int, every: int) -> bool:
    """Tell whether the selection metric is computed after this epoch: every so often, and after the last."""
    return (epoch + 1) % every == 0 or epoch + 1 == epochs
