"""Splits: the paper's by an independent count, the others by what must hold for any data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medtokenbudget.cli import main
from medtokenbudget.data import Manifest, apply_split, cut_selection, folder_manifest, paper_split
from medtokenbudget.data.splits import stratified_group_parts
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


@settings(max_examples=15, deadline=None)
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
    before = random_manifest(4000, 8, 2500, seed=1)
    after = apply_split(before, "grouped", select=0.1)
    for label, rows in after.rows.groupby("label"):
        share = rows["split"].value_counts(normalize=True)
        assert share["val"] == pytest.approx(0.2, abs=0.01), label
        assert share["select"] == pytest.approx(0.08, abs=0.01), label


def test_single_images_split_to_the_exact_count() -> None:
    after = apply_split(manifest([0] * 100 + [1] * 50 + [2] * 10), "grouped")
    validation = Counter(after.part("val").rows["label"])
    assert validation == {"c0": 20, "c1": 10, "c2": 2}


def test_a_class_of_one_image_is_trained_on() -> None:
    after = apply_split(manifest([0] * 50 + [1]), "grouped")
    assert after.rows["split"].iloc[-1] == "train"


def test_every_image_validates_in_exactly_one_fold() -> None:
    before = random_manifest(300, 3, 120, seed=5)
    folds = [set(apply_split(before, "kfold", folds=5, fold=k).part("val").ids) for k in range(5)]
    assert sum(len(fold) for fold in folds) == len(before)
    assert set().union(*folds) == set(before.ids)


def test_the_same_seed_splits_the_same_and_another_does_not() -> None:
    before = random_manifest(300, 3, 120, seed=5)
    first, again, other = (apply_split(before, "grouped", seed=seed).split_hash for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("rule", ["grouped", "kfold"])
def test_duplicates_are_merged_into_one_group_as_the_command_does(tmp_path: Path, rule: str) -> None:
    photos = class_folders(tmp_path / "photos", 8)
    for k in range(8):
        save(lesion_picture(k).resize((48, 36)), photos / "MEL" / f"copy_{k}.png")
    after = apply_split(folder_manifest(photos), rule)
    rows = after.rows.set_index("image_id")
    for k in range(8):
        assert rows["group"][f"MEL/MEL_{k}"] == rows["group"][f"MEL/copy_{k}"] == f"MEL/MEL_{k}"
        assert rows["split"][f"MEL/MEL_{k}"] == rows["split"][f"MEL/copy_{k}"]
    assert main(["data", "folder", str(photos), "--split", rule, "--out", str(tmp_path / "m.parquet")]) == 0
    assert Manifest.read(tmp_path / "m.parquet").hash == after.hash
    apart = apply_split(folder_manifest(photos), rule, merge_duplicates=False)
    assert apart.rows["group"].tolist() == apart.ids


def test_images_that_cannot_be_compared_are_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = class_folders(tmp_path / "photos", 4)
    (photos / "MEL" / "broken.png").write_bytes(b"no picture")
    apply_split(folder_manifest(photos), "grouped")
    assert "1 of 9 images could not be read and were not checked for duplicates." in capsys.readouterr().err


def test_a_selection_part_comes_from_training_alone_and_can_be_undone() -> None:
    before = apply_split(manifest([0, 1] * 50), "paper")
    cut = cut_selection(before, 0.25, seed=3)
    assert cut.part("val").ids == before.part("val").ids
    assert Counter(cut.rows["split"]) == {"train": 60, "select": 20, "val": 20}
    assert cut.split_rule == "paper, select 0.25"
    assert cut_selection(cut, 0, seed=3).split_hash == before.split_hash


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: apply_split(m, "random"), "Unknown split 'random'"),
        (lambda m: apply_split(m, "kfold", folds=1), "--folds must be 2 or more"),
        (lambda m: apply_split(m, "kfold", folds=5, fold=5), "--fold between 0"),
        (lambda m: apply_split(m, "kfold", folds=50), "Cannot split 20 groups into 50 parts"),
        (lambda m: apply_split(m, "grouped", select=1.0), "--select must be a share"),
        (lambda m: apply_split(m.with_columns(group=["one"] * len(m)), "grouped"), "Cannot split 1 groups"),
        (lambda m: apply_split(m.take([0, 1]).with_columns(label=["c0", "c1"]), "grouped"), "leaves one part empty"),
    ],
)
def test_an_impossible_split_is_rejected(call: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(manifest([0, 1] * 10))  # type: ignore[operator]


def test_part_numbers_do_not_depend_on_the_order_of_rows() -> None:
    rng = np.random.default_rng(0)
    labels, groups = rng.integers(0, 3, 200), np.array([f"g{g}" for g in rng.integers(0, 80, 200)])
    order = rng.permutation(200)
    straight = stratified_group_parts(labels, list(groups), [0.7, 0.3], seed=4)
    shuffled = stratified_group_parts(labels[order], list(groups[order]), [0.7, 0.3], seed=4)
    np.testing.assert_array_equal(straight[order], shuffled)
