"""Training and validation parts: the paper's split, and splits in which no group appears in two parts.

The part of a group is a seeded hash of its name, so images keep their part when a data set grows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pandas as pd

from medtokenbudget.config import Folds, Fraction, Natural, Parallel, Seed, check_values
from medtokenbudget.data.duplicates import merged_groups
from medtokenbudget.data.manifest import Manifest, SplitRule, listed, require_two_groups
from medtokenbudget.errors import RequestError
from medtokenbudget.runtime import say

PAPER_SEED = 42
PAPER_SHARE = 0.8
VALIDATION_SHARE = 0.2


def paper_split(n: int) -> np.ndarray:
    """Split `n` rows in file order 80/20 as the paper does: `[n]` of 'train' and 'val'."""
    # The paper's figures need this generator: `default_rng(42)` permutes differently.
    order = np.random.RandomState(PAPER_SEED).permutation(n)
    parts = np.full(n, "val", dtype=object)
    parts[order[: int(PAPER_SHARE * n)]] = "train"
    return parts


def check_request(rule: str, folds: int, fold: int, select: float, seed: int, workers: int = 1) -> None:
    """Raise a RequestError for a split that is impossible for any data; called before images are read or drawn."""
    values = {"split": (rule, Literal["paper", "grouped", "kfold", "center"]), "folds": (folds, Folds), "fold": (fold, Natural)}
    check_values(values | {"select": (select, Fraction), "seed": (seed, Seed), "workers": (workers, Parallel)})
    if rule == "kfold" and fold >= folds:
        raise RequestError(f"fold must be below the number of folds, which is {folds}, got {fold}.")


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

    'grouped' splits 80/20 and 'kfold' into folds, both by a seeded hash of the group: no group is in two parts, and no image
    changes its part when others are added. `merge_duplicates` reads every image and puts duplicates into one group. 'center'
    validates on all images of one value of the column `center`, the `fold`-th by name. 'paper' is the paper's 80/20 permutation of
    the rows, whatever their groups. `select` is the share of the training part to set aside as 'select', whole groups at a time.
    """
    check_request(rule, folds, fold, select, seed)
    if rule == "paper":
        return cut_selection(manifest.with_columns(SplitRule("paper"), split=paper_split(len(manifest))), select, seed)
    if rule == "center":
        centers = manifest.rows["center"] if "center" in manifest.further else pd.Series([None])
        if centers.isna().any():
            raise RequestError(
                "Not every image has a value in the column `center`. `mtb data isic` gives one; for other images, pass a file with "
                "such a column as `columns`."
            )
        # By name, so that `fold` means the same center whatever the order of the rows.
        names = sorted(set(centers))
        if len(names) < 2 or fold >= len(names):
            raise RequestError(f"`fold` must be below the number of centers, which is {len(names)} ({listed(names)}), got {fold}.")
        say(f"Validation: all images of {names[fold]}.")
        parts = np.where(centers == names[fold], "val", "train").tolist()
        return cut_selection(manifest.with_columns(SplitRule("center", fold, len(names)), split=parts), select, seed)
    groups, unreadable = merged_groups(manifest, workers) if merge_duplicates else (manifest.groups, [])
    if unreadable:
        say(
            f"{len(unreadable):,} of {len(manifest):,} images could not be read and were not checked for duplicates. "
            "`mtb data check` lists them."
        )
    least = 2 if rule == "grouped" else folds
    if (count := len(set(groups))) < least:
        raise RequestError(f"Cannot split {count} groups into {least} parts. Add images, or use fewer folds.")
    if rule == "grouped":
        made, start, share = SplitRule("grouped"), 0.0, VALIDATION_SHARE
    else:
        made, start, share = SplitRule("kfold", fold, folds), fold / folds, 1 / folds
    validation = _hashed_into(groups, start, share, seed, "split")
    parts = np.where(validation, "val", "train")
    return cut_selection(manifest.with_columns(made, split=parts.tolist(), group=groups), select, seed)


def _hashed_into(groups: Sequence[str], start: float, share: float, seed: int, purpose: Literal["split", "select"]) -> np.ndarray:
    """Choose the images whose group hashes into [start, start + share) of [0, 1), `[n]` bool.

    With few groups that may be none or all; then the nearest group decides.
    """
    # A hash of the seed and the group's name and of nothing else: that is why images keep their part when others are added.
    place = {
        group: int.from_bytes(hashlib.sha256(f"{purpose}/{seed}/{group}".encode()).digest()[:8], "big") / 2**64
        for group in set(groups)
    }
    # One hash per group, not per image: a group is never in two parts.
    hashes = np.array([place[group] for group in groups], dtype=np.float64)
    chosen = (hashes >= start) & (hashes < start + share)
    if chosen.all() or not chosen.any():
        distance = np.abs(hashes - (start + share / 2))
        chosen = (distance != distance.max()) if chosen.all() else (distance == distance.min())
        say(
            f"With only {len(place)} groups, one group was moved so that neither training nor "
            f"{'validation' if purpose == 'split' else 'selection'} is empty. "
            "Pass this manifest as `keep_split` when you add images: the split may change otherwise."
        )
    return chosen


def cut_selection(manifest: Manifest, share: float, seed: int) -> Manifest:
    """Move a share of the training part to the part 'select', for early stopping without validation labels.

    Whole groups move, by a hash of the group. An earlier selection part returns to training first; a share of 0 does only that.
    """
    check_values({"share": (share, Fraction)})
    split = manifest.rows["split"].replace("select", "train").to_numpy(dtype=object, copy=True)
    if share:
        train = np.flatnonzero(split == "train")
        groups = np.asarray(manifest.groups, dtype=object)[train].tolist()
        require_two_groups(groups)
        split[train[_hashed_into(groups, 0.0, share, seed, "select")]] = "select"
    return manifest.with_columns(replace(manifest.split_rule, select=share, kept=False), split=split)


def keep_split(manifest: Manifest, old: Manifest) -> Manifest:
    """Put every image of `old` back into the part it had there; new images of its group follow it.

    Images are found by `image_id`. If images of one group were in several parts of `old` (a duplicate was found since), the whole
    group is trained on, because a group never crosses a split: nothing that was trained on becomes a validation image.
    """
    before = dict(zip(old.ids, old.rows["split"]))
    parts: dict[str, set[str]] = {}
    for image_id, group in zip(manifest.ids, manifest.groups):
        if image_id in before:
            parts.setdefault(group, set()).add(before[image_id])
    if not parts:
        raise RequestError(f"No image_id of this manifest is in the old one ('{old.name}'), so there is no split to keep.")
    kept = {group: next(iter(of)) if len(of) == 1 else "train" for group, of in parts.items()}
    split = [kept.get(group, part) for group, part in zip(manifest.groups, manifest.rows["split"])]
    moved = sum(before.get(image_id, part) != part for image_id, part in zip(manifest.ids, split))
    if moved:
        say(
            f"{moved:,} {'image moves' if moved == 1 else 'images move'} to training: duplicates found since then "
            "put groups of several parts into one. All other images keep their part."
        )
    return manifest.with_columns(replace(manifest.split_rule, kept=True), split=split)


def balance_text(manifest: Manifest) -> str:
    """Say the share of validation images in a sentence, overall and in the classes where it is smallest and largest."""
    validation = (manifest.rows["split"] == "val").to_numpy(dtype=bool)
    if not validation.any():
        return "No validation images."
    text = f"Validation has {validation.mean():.1%} of the images"
    rule = manifest.split_rule
    aim = {"grouped": VALIDATION_SHARE, "kfold": 1 / max(rule.folds, 1)}.get(rule.kind)
    if aim is not None and abs(validation.mean() - aim) > aim / 4:
        # Hashes of a few groups may fall far from the share.
        text += f" ({aim:.0%} {'is the aim for new images' if rule.kept else 'was the aim'})"
    labels = manifest.label_index
    shares = {
        name: float(validation[labels == label].mean()) for label, name in enumerate(manifest.classes) if (labels == label).any()
    }
    if len(shares) > 1:
        low, high = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        text += f"; by class, from {shares[low]:.1%} ({low}) to {shares[high]:.1%} ({high})"
    never, always = ([name for name in shares if shares[name] == extreme] for extreme in (0, 1))
    without = [f"no {part} images of {listed(names)}" for part, names in (("validation", never), ("training", always)) if names]
    crossing = manifest.crossing
    if crossing.any():
        groups = manifest.rows["group"][crossing].nunique()
        text += f"; {crossing.sum():,} of these images show one of {groups:,} lesions or patients that are in training too"
    return f"{text}." + (f" There are {' and '.join(without)}." if without else "")
