"""Who trains and who validates: the paper's split, and splits that no group crosses.

Pure functions over labels and groups; where the groups come from (lesions, patients, duplicates) is the business of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from medtokenbudget.data.manifest import Manifest
from medtokenbudget.errors import RequestError, UnknownNameError

SplitRule = Literal["paper", "grouped", "kfold"]
PAPER_SEED = 42
PAPER_SHARE = 0.8
VALIDATION_SHARE = 0.2


def paper_split(n: int) -> np.ndarray:
    """The paper's 80/20 over `n` rows in file order: `[n]` of 'train' and 'val'."""
    order = np.random.RandomState(PAPER_SEED).permutation(n)
    parts = np.full(n, "val", dtype=object)
    parts[order[: int(PAPER_SHARE * n)]] = "train"
    return parts


def stratified_group_parts(labels: np.ndarray, groups: Sequence[str], shares: Sequence[float], seed: int) -> np.ndarray:
    """Part number `[n]` of each image: no group in two parts, and each part near its share of every class.

    Greedy: the largest groups first, in seeded order among equals, each to the part that lacks most of what the group holds.
    """
    names, group_of = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    kinds, label_of = np.unique(labels, return_inverse=True)
    counts = np.zeros((len(names), len(kinds)))
    np.add.at(counts, (group_of, label_of), 1)
    target = np.outer(np.asarray(shares) / np.sum(shares), counts.sum(0))
    shuffled = np.random.default_rng(seed).permutation(len(names))
    order = shuffled[np.argsort(-counts[shuffled].sum(1), kind="stable")]
    filled = np.zeros_like(target)
    part_of_group = np.zeros(len(names), dtype=np.int64)
    for group in order:
        held = counts[group]
        need = ((target - filled) / target) @ held
        room = (target - filled).sum(1)
        part = max(range(len(target)), key=lambda p: (round(need[p], 9), room[p]))
        filled[part] += held
        part_of_group[group] = part
    return part_of_group[group_of]


def group_names(manifest: Manifest) -> list[str]:
    """The group of each row; an image without one is its own group."""
    return [image_id if group is None else group for image_id, group in zip(manifest.ids, manifest.rows["group"])]


def check_request(rule: str, folds: int, fold: int, select: float, seed: int) -> None:
    """Refuse a split that cannot be made of any images; asked before they are read or drawn, which may take long."""
    if rule not in get_args(SplitRule):
        raise UnknownNameError.of("split", rule, get_args(SplitRule))
    if seed < 0:
        raise RequestError(f"the seed of a split is 0 or more, got {seed}.")
    if rule == "kfold" and (folds < 2 or not 0 <= fold < folds):
        raise RequestError(f"--folds is 2 or more and --fold between 0 and folds - 1, got folds {folds}, fold {fold}.")
    _check_share(select)


def _check_share(select: float) -> None:
    if not 0 <= select < 1:
        raise RequestError(f"--select is a share of training in [0, 1), got {select}.")


def apply_split(
    manifest: Manifest,
    rule: str,
    *,
    folds: int = 5,
    fold: int = 0,
    select: float = 0.0,
    seed: int = 42,
    merged: Sequence[str] | None = None,
) -> Manifest:
    """The same images with a new split, named in `split_rule`.

    `paper` permutes the rows of the manifest as they stand (a source that knows the whole data set does it there). For `grouped`
    and `kfold`, `merged` are groups that take duplicates in; they become the manifest's groups.
    """
    check_request(rule, folds, fold, select, seed)
    groups = list(merged) if merged is not None and rule != "paper" else group_names(manifest)
    if rule == "paper":
        parts, name = paper_split(len(manifest)), "paper"
    else:
        shares = [1 - VALIDATION_SHARE, VALIDATION_SHARE] if rule == "grouped" else [1 / folds] * folds
        name, val = ("grouped", 1) if rule == "grouped" else (f"kfold {fold}/{folds}", fold)
        parts = _group_parts(manifest, groups, shares, val, seed)
    split = manifest.with_columns(split=parts.tolist(), split_rule=name)
    if rule != "paper":
        split = split.with_columns(group=groups)
    return cut_selection(split, select, seed)


def _group_parts(manifest: Manifest, groups: list[str], shares: list[float], val: int, seed: int) -> np.ndarray:
    if len(set(groups)) < len(shares):
        raise RequestError(f"{len(set(groups))} groups cannot be split into {len(shares)} parts. Add images, or take fewer folds.")
    numbers = stratified_group_parts(manifest.label_index, groups, shares, seed)
    if (numbers == val).all() or not (numbers == val).any():
        raise RequestError(f"{len(manifest)} images in {len(set(groups))} groups leave a part of the split empty. Add images.")
    return np.where(numbers == val, "val", "train").astype(object)


def cut_selection(manifest: Manifest, share: float, seed: int) -> Manifest:
    """Move a stratified `share` of the training part to 'select', whole groups at a time; an earlier one goes back first."""
    _check_share(share)
    split = manifest.rows["split"].to_numpy(dtype=object).copy()
    split[split == "select"] = "train"
    rule = manifest.split_rule.split(",")[0]
    if share == 0:
        return manifest.with_columns(split=split.tolist(), split_rule=rule)
    train = np.flatnonzero(split == "train")
    groups = np.asarray(group_names(manifest), dtype=object)[train]
    if len(set(groups)) < 2:
        raise RequestError("the training part has fewer than two groups: no selection part can be cut from it.")
    cut = stratified_group_parts(manifest.label_index[train], list(groups), [1 - share, share], seed)
    split[train[cut == 1]] = "select"
    return manifest.with_columns(split=split.tolist(), split_rule=f"{rule}, select {share:g}")
