"""Splits: the paper's by an independent count, the others by what must hold for any data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medtokenbudget.cli import main
from medtokenbudget.data import Manifest, SplitRule, apply_split, cut_selection, folder_manifest, keep_split, paper_split
from medtokenbudget.data.splits import balance_text
from medtokenbudget.errors import RequestError
from tests.data.pictures import class_folders, lesion_picture, save


def manifest(labels: list[int], groups: list[str | None] | None = None) -> Manifest:
    groups = groups or [None] * len(labels)
    records = [
        {"image_id": f"i{k}", "image": f"{k}.png", "label": f"c{c}", "group": g} for k, (c, g) in enumerate(zip(labels, groups))
    ]
    return Manifest.from_records(records, [f"c{c}" for c in range(max(labels) + 1)])


def random_manifest(n: int, classes: int, groups: int, seed: int) -> Manifest:
    """Groups of one class each, as lesions are."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, groups, n)
    label_of = rng.integers(0, classes, groups)
    return manifest([*label_of[group].tolist(), classes - 1], [*(f"g{g}" for g in group), None])


def test_the_paper_split_trains_on_the_first_80_percent_of_the_permutation() -> None:
    order = np.random.RandomState(42).permutation(11)
    assert [paper_split(11)[i] for i in order] == ["train"] * 8 + ["val"] * 3
    assert (paper_split(25_331) == "train").sum() == 20_264, "the paper's validation part has the other 5,067 images"


@settings(max_examples=8, deadline=None)
@given(
    n=st.integers(40, 200),
    classes=st.integers(1, 6),
    groups=st.integers(20, 150),
    seed=st.integers(0, 9),
    select=st.sampled_from([0, 0.2]),
)
def test_no_group_crosses_and_every_image_has_a_part(n: int, classes: int, groups: int, seed: int, select: float) -> None:
    before = random_manifest(n, classes, groups, seed)
    for rule in ("grouped", "kfold"):
        after = apply_split(before, rule, folds=4, fold=1, select=select, seed=seed)
        parts = after.rows.groupby("group")["split"].nunique()
        assert (parts == 1).all()
        assert after.ids == before.ids
        assert set(after.rows["split"]) == ({"train", "select", "val"} if select else {"train", "val"})


def test_each_part_has_its_share_of_every_class() -> None:
    before = random_manifest(2000, 4, 1250, seed=1)
    after = apply_split(before, "grouped", select=0.1)
    overall = after.rows["split"].value_counts(normalize=True)
    assert overall["val"] == pytest.approx(0.2, abs=0.025)  # a standard deviation of 0.011
    assert overall["select"] == pytest.approx(0.08, abs=0.02)
    for label, rows in after.rows.groupby("label"):
        share = rows["split"].value_counts(normalize=True)
        # About 310 groups per class: the standard deviation of a hashed share of 0.2 is 0.023.
        assert share["val"] == pytest.approx(0.2, abs=0.07), label
        assert share["select"] == pytest.approx(0.08, abs=0.05), label


@pytest.mark.parametrize("rule", ["grouped", "kfold"])
@settings(max_examples=6, deadline=None)
@given(n=st.integers(30, 150), more=st.integers(1, 150), seed=st.integers(0, 9))
def test_no_image_changes_its_part_when_others_are_added(rule: str, n: int, more: int, seed: int) -> None:
    whole = random_manifest(n + more, 3, 60, seed)
    some = whole.take(sorted(np.random.default_rng(seed).permutation(n + more)[:n]))
    before = apply_split(some, rule, folds=3, fold=1, select=0.3, merge_duplicates=False)
    after = apply_split(whole, rule, folds=3, fold=1, select=0.3, merge_duplicates=False)
    part = dict(zip(after.ids, after.rows["split"]))
    assert [part[name] for name in before.ids] == before.rows["split"].tolist()


def test_an_old_split_is_kept_and_new_images_of_its_groups_follow() -> None:
    groups = [f"g{k // 2}" for k in range(40)]
    whole = manifest([0, 1] * 20, list(groups))
    old = apply_split(whole.take(range(0, 20)), "grouped", seed=1, merge_duplicates=False)
    old = old.with_columns(split=["val" if part == "train" else "train" for part in old.rows["split"]])
    new = keep_split(apply_split(whole, "grouped", seed=1, merge_duplicates=False), old)
    assert new.rows["split"].tolist()[:20] == old.rows["split"].tolist()
    assert (new.rows.groupby("group")["split"].nunique() == 1).all()
    assert str(new.split_rule) == "grouped, kept from an older manifest"
    with pytest.raises(RequestError, match="no split to keep"):
        keep_split(whole.take([0, 1]), whole.take([2, 3]))


def test_groups_that_a_new_duplicate_joins_are_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    old = manifest([0, 0, 0], ["a", "b", "c"]).with_columns(split=["train", "val", "val"])
    new = keep_split(manifest([0, 0, 0, 0], ["a", "a", "c", "a"]).with_columns(split=["val"] * 4), old)
    assert new.rows["split"].tolist() == ["train", "train", "val", "train"]
    assert "1 image moves to training" in capsys.readouterr().err


def test_a_data_set_of_few_groups_still_has_both_parts(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(8):
        after = apply_split(manifest([0, 1, 0]), "grouped", seed=seed, merge_duplicates=False)
        assert set(after.rows["split"]) == {"train", "val"}
    assert "Pass this manifest as `keep_split`" in capsys.readouterr().err


def test_the_balance_is_stated_by_class() -> None:
    rows = manifest([0] * 10 + [1] * 4 + [2] * 2).with_columns(split=["val"] * 3 + ["train"] * 11 + ["val"] * 2)
    assert balance_text(rows) == (
        "Validation has 31.2% of the images; by class, from 0.0% (c1) to 100.0% (c2). "
        "There are no validation images of c1 and no training images of c2."
    )


def test_a_share_far_from_the_aim_is_stated() -> None:
    rows = manifest([0] * 10).with_columns(split=["val"] * 4 + ["train"] * 6)
    for rule, note in {
        SplitRule("kfold", 0, 5, select=0.1): " (20% was the aim)",
        SplitRule("given"): "",
        SplitRule("grouped", kept=True): " (20% is the aim for new images)",
    }.items():
        assert balance_text(rows.with_columns(rule)) == f"Validation has 40.0% of the images{note}."
    near = rows.with_columns(SplitRule("grouped"), split=["val"] * 2 + ["train"] * 8)
    assert balance_text(near) == "Validation has 20.0% of the images."


def test_every_image_validates_in_exactly_one_fold_and_the_seed_decides_in_which() -> None:
    before = random_manifest(300, 3, 120, seed=5)
    folds = [set(apply_split(before, "kfold", folds=5, fold=k).part("val").ids) for k in range(5)]
    assert sum(len(fold) for fold in folds) == len(before)
    assert set().union(*folds) == set(before.ids)
    first, again, other = (apply_split(before, "grouped", seed=seed).split_hash for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("rule", ["grouped", "kfold"])
def test_duplicates_are_merged_into_one_group_as_the_command_does(
    tmp_path: Path, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = class_folders(tmp_path / "photos", 5)
    (photos / "MEL" / "broken.png").write_bytes(b"no picture")
    for k in range(5):
        save(lesion_picture(k).resize((48, 36)), photos / "MEL" / f"copy_{k}.png")
    after = apply_split(folder_manifest(photos), rule)
    assert "1 of 16 images could not be read and were not checked for duplicates." in capsys.readouterr().err
    rows = after.rows.set_index("image_id")
    for k in range(5):
        assert rows["group"][f"MEL/MEL_{k}"] == rows["group"][f"MEL/copy_{k}"] == f"MEL/MEL_{k}"
        assert rows["split"][f"MEL/MEL_{k}"] == rows["split"][f"MEL/copy_{k}"]
    assert main(["data", "folder", str(photos), "--split", rule, "--out", str(tmp_path / "m.parquet")]) == 0
    assert Manifest.read(tmp_path / "m.parquet").hash == after.hash
    apart = apply_split(folder_manifest(photos), rule, merge_duplicates=False)
    assert apart.rows["group"].tolist() == apart.ids


def test_a_selection_part_comes_from_training_alone_and_can_be_undone() -> None:
    before = apply_split(manifest([0, 1] * 50), "paper")
    cut = cut_selection(before, 0.25, seed=3)
    assert cut.part("val").ids == before.part("val").ids
    assert Counter(cut.rows["split"])["select"] == pytest.approx(20, abs=10)
    assert cut.split_rule == SplitRule("paper", select=0.25)
    assert cut_selection(cut, 0, seed=3).split_hash == before.split_hash


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: apply_split(m, "random"), "Unknown split 'random'"),
        (lambda m: apply_split(m, "kfold", folds=1), "`folds` must be at least 2"),
        (lambda m: apply_split(m, "kfold", folds=5, fold=5), "fold must be below the number of folds"),
        (lambda m: apply_split(m, "kfold", folds=50), "Cannot split 20 groups into 50 parts"),
        (lambda m: apply_split(m, "grouped", select=1.0), "`select` must be at least 0 and below 1"),
        (lambda m: apply_split(m.with_columns(group=["one"] * len(m)), "grouped"), "Cannot split 1 groups"),
    ],
)
def test_an_impossible_split_is_rejected(call: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(manifest([0, 1] * 10))


def test_one_center_after_the_other_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    centers = ["b", "a", "c", "b", "a"]
    before = manifest([0, 1, 0, 1, 0])
    before = replace(before, rows=before.rows.assign(center=centers))
    for fold, name in enumerate("abc"):
        after = apply_split(before, "center", fold=fold)
        assert [part == "val" for part in after.rows["split"]] == [center == name for center in centers]
        assert str(after.split_rule) == f"center {fold}/3"
        assert f"Validation: all images of {name}." in capsys.readouterr().err
    with pytest.raises(RequestError, match=r"`fold` must be below the number of centers, which is 3 \(a, b, c\), got 3"):
        apply_split(before, "center", fold=3)
    with pytest.raises(RequestError, match="Not every image has a value in the column `center`"):
        apply_split(replace(before, rows=before.rows.assign(center=["a", None, "b", "b", "a"])), "center")
    with pytest.raises(RequestError, match="Not every image has a value in the column `center`"):
        apply_split(manifest([0, 1]), "center")


def test_validation_images_of_a_lesion_that_is_trained_on_are_counted() -> None:
    before = manifest([0] * 7, ["x", "x", "x", "y", "y", None, "z"])
    before = before.with_columns(split=["train", "val", "val", "val", "select", "val", "val"])
    assert before.crossing.tolist() == [False, True, True, True, False, False, False]
    assert "3 of these images show one of 2 lesions or patients that are in training too" in balance_text(before)
    assert "in training too" not in balance_text(before.with_columns(group=[None] * 7))
