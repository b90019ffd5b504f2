"""What a selector keeps of images at every budget: pooled tokens, evidence of the lesion, class probabilities.

A fixed selector gives the same pooled tokens in every epoch, so they are computed once, for all budgets in one pass; heads then
train on `[n, budgets, D]` numbers instead of `[n, N, D]` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.errors import RequestError
from medtokenbudget.files import atomic_write, read_json, sha256_file, write_json
from medtokenbudget.heads import Head
from medtokenbudget.metrics import group_purity, kept_lesion_counts, lesion_dominated, lesion_mass
from medtokenbudget.routing import Ranker, Selector, gather, pooled_means, rank
from medtokenbudget.tokens import TokenBatch, TokenSet
from medtokenbudget.training.rows import generator

BATCH = 64


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


def _device(part: Selector | Head) -> torch.device:
    parameters = part.parameters() if isinstance(part, torch.nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


@torch.no_grad()
def pool_and_judge(
    store: FeatureStore, rows: np.ndarray, selector: Selector, budgets: Sequence[float], seed: int
) -> tuple[np.ndarray, Evidence]:
    """Compute the pooled tokens `[n, T, D]` and the evidence kept, in one pass; `seed` is for selectors that draw."""
    device = _device(selector)
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
) -> np.ndarray:
    """Compute class probabilities `[n, T, C]` from the pooled tokens `[n, T, D]`, or from the tokens if the head reads them.

    Selectors that draw then draw the same patches as `pool_and_judge` with the same seed.
    """
    head.eval()
    device = _device(head)
    if head.reads != "tokens" and pooled is not None:
        chunks = (np.ascontiguousarray(chunk) for chunk in np.array_split(pooled, len(pooled) // 512 + 1))
        return torch.cat([head(torch.from_numpy(chunk).to(device)).softmax(-1).cpu() for chunk in chunks]).numpy()
    counts = [selector.count(budget, store.per_image) for budget in budgets]
    parts = []
    for index, batch in enumerate(store.batches(rows, BATCH, signals=selector.requires)):
        kept = token_sets(selector, batch.to(device), counts, _evaluation_noise(selector, seed, index))
        parts.append(torch.stack([head(tokens).softmax(-1) for tokens in kept], 1).cpu())
    return torch.cat(parts).numpy()


@torch.no_grad()
def pool(store: FeatureStore, rows: np.ndarray, selector: Selector, budgets: Sequence[float], file: Path | None) -> np.ndarray:
    """Pool the tokens `[n, T, D]` of a deterministic selector, in memory or in a file that is mapped into memory.

    The file is made if it does not exist, and made again if it is damaged: its hash is in `NAME.json` next to it.
    """
    batches = store.batches(rows, BATCH, signals=selector.requires)
    parts = (selector.pooled(batch, budgets).numpy().astype("<f4") for batch in batches)
    if file is None:
        return np.concatenate(list(parts))
    # Also where a killed process had not noted the hash yet.
    if not is_whole(file):
        shape = (len(rows), len(budgets), store.dim)
        with atomic_write(file) as temporary, open(temporary, "wb") as stream:
            # Not through a memory map: on a full disk that ends in a signal instead of an error.
            np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
            for part in parts:
                stream.write(part.tobytes())
        write_json(file.with_suffix(".json"), {"sha256": sha256_file(file)})
    # Mapped: ten budgets of a million images take 31 GB at D = 768.
    return np.load(file, mmap_mode="r")


def is_whole(file: Path) -> bool:
    """Tell whether a file of pooled tokens exists and has the hash that was noted when it was written."""
    try:
        recorded = read_json(file.with_suffix(".json"))
    except RequestError:
        return False
    return isinstance(recorded, dict) and file.exists() and recorded.get("sha256") == sha256_file(file)


def with_masks(store: FeatureStore, rows: np.ndarray, selector: Selector) -> np.ndarray:
    """Return the rows that a selector can read: one that looks at masks (the oracle) reads only images that have one."""
    return rows[store.has_mask.numpy()[rows]] if "has_mask" in selector.requires else rows
