"""Training and validation parts: the paper's split, and splits in which no group appears in two parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from medtokenbudget.data.duplicates import merged_groups
from medtokenbudget.data.manifest import Manifest
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.progress import say

SplitRule = Literal["paper", "grouped", "kfold"]
PAPER_SEED = 42
PAPER_SHARE = 0.8
VALIDATION_SHARE = 0.2


def paper_split(n: int) -> np.ndarray:
    """The paper's 80/20 split of `n` rows in file order: `[n]` of 'train' and 'val'."""
    order = np.random.RandomState(PAPER_SEED).permutation(n)
    parts = np.full(n, "val", dtype=object)
    parts[order[: int(PAPER_SHARE * n)]] = "train"
    return parts


def stratified_group_parts(labels: np.ndarray, groups: Sequence[str], shares: Sequence[float], seed: int) -> np.ndarray:
    """Assign images to parts so that no group is split and each part gets about its share of every class.

    A greedy assignment: the largest groups come first, in random order among equals, and each goes to the part that lacks most
    of what the group contains.

    Args:
        labels: Class of each image, `[n]`.
        groups: Group of each image, `[n]`.
        shares: Relative size of each part.
        seed: Seed of the random order.

    Returns:
        The number of the part of each image, `[n]` int64.
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


def check_request(rule: str, folds: int, fold: int, select: float, seed: int) -> None:
    """Raise a RequestError for a split that is impossible for any data; called before images are read or drawn."""
    if rule not in get_args(SplitRule):
        raise UnknownNameError.of("split", rule, get_args(SplitRule))
    if seed < 0:
        raise RequestError(f"The seed of a split must be 0 or more, got {seed}.")
    if rule == "kfold" and (folds < 2 or not 0 <= fold < folds):
        raise RequestError(f"--folds must be 2 or more and --fold between 0 and folds - 1, got folds {folds} and fold {fold}.")
    _check_share(select)


def _check_share(select: float) -> None:
    if not 0 <= select < 1:
        raise RequestError(f"--select must be a share of the training part in [0, 1), got {select}.")


def apply_split(
    manifest: Manifest,
    rule: str,
    *,
    folds: int = 5,
    fold: int = 0,
    select: float = 0.0,
    seed: int = 42,
    merge_duplicates: bool = True,
    workers: int = 4,
) -> Manifest:
    """Split a manifest again, exactly as `mtb data split` does.

    Args:
        manifest: The images to split.
        rule: 'grouped' splits 80/20 and 'kfold' into folds, both stratified by class and with no group in two parts. 'paper' is
            the paper's 80/20 permutation of the rows, whatever their groups.
        folds: Number of folds for 'kfold'.
        fold: The fold that becomes the validation part, counted from 0.
        select: Share of the training part to set aside as 'select', whole groups at a time.
        seed: Seed of 'grouped', 'kfold' and `select`. The paper's split has its own.
        merge_duplicates: Read every image and put duplicates into one group, so that no picture is in two parts. Only for
            'grouped' and 'kfold'. The merged groups become the manifest's groups.
        workers: Threads that read images.

    Returns:
        The same images with a new split, and its name in `split_rule`.

    Raises:
        RequestError: The split is impossible, for example because there are fewer groups than parts.

    Example:
        >>> manifest = apply_split(folder_manifest("photos"), "grouped", select=0.1)  # doctest: +SKIP
    """
    check_request(rule, folds, fold, select, seed)
    if rule == "paper":
        parts = paper_split(len(manifest)).tolist()
        return cut_selection(manifest.with_columns(split=parts, split_rule="paper"), select, seed)
    groups = _merged(manifest, workers) if merge_duplicates else manifest.groups
    shares = [1 - VALIDATION_SHARE, VALIDATION_SHARE] if rule == "grouped" else [1 / folds] * folds
    name, val = ("grouped", 1) if rule == "grouped" else (f"kfold {fold}/{folds}", fold)
    parts = _group_parts(manifest, groups, shares, val, seed)
    return cut_selection(manifest.with_columns(split=parts, group=groups, split_rule=name), select, seed)


def _merged(manifest: Manifest, workers: int) -> list[str]:
    groups, unreadable = merged_groups(manifest, workers)
    if unreadable:
        say(
            f"{len(unreadable):,} of {len(manifest):,} images could not be read and were not checked for duplicates. "
            "`mtb data check` lists them."
        )
    return groups


def _group_parts(manifest: Manifest, groups: list[str], shares: list[float], val: int, seed: int) -> list[str]:
    count = len(set(groups))
    if count < len(shares):
        raise RequestError(f"Cannot split {count} groups into {len(shares)} parts. Add images, or use fewer folds.")
    numbers = stratified_group_parts(manifest.label_index, groups, shares, seed)
    if (numbers == val).all() or not (numbers == val).any():
        raise RequestError(f"Splitting {len(manifest)} images in {count} groups leaves one part empty. Add images.")
    return np.where(numbers == val, "val", "train").tolist()


def cut_selection(manifest: Manifest, share: float, seed: int) -> Manifest:
    """Move a share of the training part to the part 'select', for early stopping without validation labels.

    Whole groups move, stratified by class. An earlier selection part goes back to training first.

    Args:
        manifest: A manifest with a split.
        share: Share of the training part in [0, 1); 0 removes the selection part.
        seed: Seed of the random order of groups.

    Returns:
        The same images with the new parts, and the share in `split_rule`.

    Raises:
        RequestError: The share is not in [0, 1), or training has fewer than two groups.
    """
    _check_share(share)
    split = manifest.rows["split"].to_numpy(dtype=object).copy()
    split[split == "select"] = "train"
    rule = manifest.split_rule.split(",")[0]
    if share == 0:
        return manifest.with_columns(split=split.tolist(), split_rule=rule)
    train = np.flatnonzero(split == "train")
    groups = [manifest.groups[row] for row in train]
    if len(set(groups)) < 2:
        raise RequestError(
            "Cannot cut a selection part: the training part has fewer than two groups. Add images, or drop --select."
        )
    cut = stratified_group_parts(manifest.label_index[train], groups, [1 - share, share], seed)
    split[train[cut == 1]] = "select"
    return manifest.with_columns(split=split.tolist(), split_rule=f"{rule}, select {share:g}")
