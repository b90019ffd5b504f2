"""Pooled tokens: what a head sees of an image at each budget, and what the selector kept of the lesion.

A frozen selector gives the same pooled tokens in every epoch, so they are computed once, for all budgets in one pass over the
store; heads then train on `[n, budgets, D]` numbers instead of `[n, N, D]` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.errors import RequestError
from medtokenbudget.files import atomic_write, read_json, sha256_file, write_json
from medtokenbudget.metrics import group_purity, kept_lesion_counts, lesion_dominated, lesion_mass
from medtokenbudget.routing import Ranker, Selector, gather, pooled_means, rank
from medtokenbudget.tokens import TokenBatch, TokenSet
from medtokenbudget.training.seeds import generator

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
    pooled, found, order, scores = zip(*judged)
    kept, purity, dominated, mass = np.concatenate(found, axis=1)
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
    found = np.full((4, len(batch), len(counts)), np.nan)
    if batch.lesion is not None and batch.has_mask is not None:
        masked = batch.has_mask.bool().cpu().numpy()
        found[0, masked] = kept_lesion_counts(order, batch.lesion, counts)[masked]
    return pooled, found, order.to(torch.int16).cpu().numpy(), scores.half().cpu().numpy()


def _selected(selector: Selector, batch: TokenBatch, counts: Sequence[int], noise: torch.Generator | None) -> Judged:
    selections = [selector.select(batch, k, noise) for k in counts]
    pooled = np.stack([selection.pooled().cpu().numpy() for selection in selections], 1)
    found = np.full((4, *pooled.shape[:2]), np.nan)
    if batch.lesion is not None and batch.has_mask is not None:
        masked, lesion = batch.has_mask.bool().cpu().numpy(), batch.lesion.bool()
        for column, selection in enumerate(selections):
            if selection.kept is not None:  # a sampler
                found[0, masked, column] = (selection.kept & lesion).sum(1).cpu().numpy()[masked]
            elif selection.attention is not None:
                found[3, masked, column] = lesion_mass(selection.attention, lesion).cpu().numpy()[masked]
            else:
                found[1, masked, column] = group_purity(selection.assignment, lesion).cpu().numpy()[masked]
                found[2, masked, column] = lesion_dominated(selection.assignment, lesion).cpu().numpy()[masked]
    return pooled, found, None, None
