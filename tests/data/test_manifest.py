"""The manifest: what makes one, what it keeps, and how a damaged file is noticed."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from medtokenbudget.data import Manifest, ManifestError, SplitRule

ROWS = [
    {"image_id": "a", "image": "images/a.png", "label": "MEL", "mask": "masks/a.png", "group": "g1", "split": "train"},
    {"image_id": "b", "image": "images/b.png", "label": "NV", "mask": None, "group": None, "split": "val"},
    {"image_id": "c", "image": "images/c.png", "label": None, "mask": None, "group": "g1", "split": "select"},
]


def manifest(root: Path | None = None, rows: list[dict[str, object]] = ROWS) -> Manifest:
    return Manifest.from_records(rows, ("MEL", "NV"), root=root, source="test", split_rule=SplitRule("kfold", 2, 5))


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    before = manifest(tmp_path)
    path = before.write(tmp_path / "m.parquet")
    after = Manifest.read(path)
    pd.testing.assert_frame_equal(after.rows, before.rows)
    assert (after.classes, after.source, after.hash) == (before.classes, "test", before.hash)
    assert after.split_rule == SplitRule("kfold", 2, 5)
    assert str(replace(after.split_rule, select=0.1)) == "kfold 2/5, select 0.1"
    assert path.read_bytes() == before.write(tmp_path / "again.parquet").read_bytes()
    assert after.rows["mask"].tolist() == ["masks/a.png", None, None]
    assert after.image_path(1) == tmp_path / "images/b.png"
    assert after.mask_path(0) == tmp_path / "masks/a.png"
    assert after.mask_path(1) is None
    assert after.label_index.tolist() == [0, 1, -1]
    assert after.label_index.dtype == np.int64


def test_a_folder_moves_with_its_manifest_and_images_elsewhere_keep_their_place(tmp_path: Path) -> None:
    inside = Manifest.read(manifest(tmp_path / "data").write(tmp_path / "data/m.parquet"))
    outside = Manifest.read(manifest(tmp_path / "data").write(tmp_path / "elsewhere/m.parquet"))
    assert outside.image_path(0) == inside.image_path(0) == tmp_path / "data/images/a.png"
    assert Path(outside.rows["image"][0]).is_absolute()
    assert outside.hash == inside.hash
    shutil.move(tmp_path / "data", tmp_path / "there")
    moved = Manifest.read(tmp_path / "there/m.parquet")
    assert moved.image_path(0) == tmp_path / "there/images/a.png"
    assert moved.hash == inside.hash


def test_hashes_tell_data_split_and_folders_apart_but_not_where_the_common_folder_lies(tmp_path: Path) -> None:
    one = manifest()
    other = one.with_columns(split=["val", "train", "train"])
    assert one.data_hash == other.data_hash
    assert one.split_hash != other.split_hash
    assert one.hash != other.hash
    assert one.hash != one.with_columns(label=["NV", "NV", None]).hash

    def in_folders(top: Path, *names: str) -> str:
        rows = [{"image_id": str(k), "image": top / name / "image.png"} for k, name in enumerate(names)]
        return Manifest.from_records(rows, ("MEL",)).data_hash

    assert in_folders(tmp_path / "here", "p1", "p2") == in_folders(tmp_path / "there", "p1", "p2")
    assert in_folders(tmp_path / "here", "p1", "p2") != in_folders(tmp_path / "here", "p2", "p1")


def test_parts_and_rows_can_be_taken() -> None:
    whole = manifest()
    assert whole.part("val").ids == ["b"]
    assert whole.take([2, 0]).ids == ["c", "a"]
    assert len(whole.take([])) == 0
    with pytest.raises(ManifestError, match="Unknown part 'test'"):
        whole.part("test")


def changed(**values: object) -> list[dict[str, object]]:
    return [{**ROWS[0], **values}, *ROWS[1:]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed(image_id="b"), "image_id used more than once: b"),
        (changed(image_id=""), "image_id is empty in the rows: 0"),
        (changed(image=""), "image is empty in the rows: 0"),
        (changed(label="UNK"), "labels other than MEL, NV: UNK"),
        (changed(split="test"), "values of split other than train, select, val: test"),
        (changed(split=None), "values of split other than train, select, val: None"),
        (changed(image_id="caf\udce9"), "not valid UTF-8.*caf"),
    ],
)
def test_rows_that_make_no_manifest_are_rejected(rows: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        manifest(rows=rows)


def test_all_faults_are_told_together_and_missing_columns_by_name() -> None:
    with pytest.raises(ManifestError) as caught:
        manifest(rows=[*changed(label="UNK", split="test"), ROWS[1]])
    assert all(word in str(caught.value) for word in ("UNK", "test", "more than once: b"))
    with pytest.raises(ManifestError, match="Missing: group, split"):
        Manifest(pd.DataFrame({"image_id": ["a"], "image": ["a"], "label": ["x"], "mask": [None]}), ("x",))


def test_the_name_is_kept_in_the_file_and_does_not_change_the_hashes(tmp_path: Path) -> None:
    one, other = replace(manifest(tmp_path), name="Clinic  A "), manifest(tmp_path)
    read = Manifest.read(one.write(tmp_path / "m.parquet"))
    assert read.name == read.part("val").name == "Clinic A"
    assert (one.hash, one.data_hash, one.split_hash) == (other.hash, other.data_hash, other.split_hash)
    assert other.name == "unnamed"


@pytest.mark.parametrize("name", ["", "  ", "a|b", "a\x00b"])
def test_a_name_that_tables_cannot_show_is_rejected(name: str) -> None:
    with pytest.raises(ManifestError, match="cannot be the name of a data set"):
        replace(manifest(), name=name)


@pytest.mark.parametrize(("source", "command"), [("folder photos", "folder"), ("unknown", "isic|kvasir|folder|csv|synthetic")])
def test_a_file_of_another_version_is_rejected_with_the_command_to_run_again(tmp_path: Path, source: str, command: str) -> None:
    path = replace(manifest(tmp_path), source=source).write(tmp_path / "m.parquet")
    table = pq.read_table(path)
    metadata = {**json.loads(table.schema.metadata[b"medtokenbudget"]), "version": 1}
    pq.write_table(table.replace_schema_metadata({b"medtokenbudget": json.dumps(metadata).encode()}), path)
    message = f"{path} has manifest format 1, but this version reads format 3. Run `mtb data {command}` again."
    with pytest.raises(ManifestError, match=re.escape(message)):
        Manifest.read(path)


def test_a_different_file_is_replaced_only_if_that_is_allowed(tmp_path: Path) -> None:
    path = manifest(tmp_path).write(tmp_path / "m.parquet")
    manifest(tmp_path).write(path, overwrite=False)
    other = manifest(tmp_path).with_columns(label=["NV", "NV", None])
    for harm in (lambda path: None, edited, lambda path: path.write_text("notes")):
        harm(path)
        before = path.read_bytes()
        with pytest.raises(ManifestError, match=r"m\.parquet already exists and is different\. Pass `overwrite`"):
            (other if harm is not edited else manifest(tmp_path)).write(path, overwrite=False)
        assert path.read_bytes() == before
    assert Manifest.read(other.write(path)).hash == other.hash


def edited(path: Path) -> None:
    table = pq.read_table(path)
    labels = ["NV", "NV", None]
    pq.write_table(table.set_column(2, "label", [labels]).replace_schema_metadata(table.schema.metadata), path)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"images/a", b"imag\xffs/a")), "m.parquet"),
        (lambda path: path.write_text("image_id,image\n"), "not a manifest or is damaged"),
        (lambda path: pd.DataFrame({"x": [1]}).to_parquet(path), "not a manifest"),
        (edited, r"was edited or damaged .* `mtb data csv`.* Otherwise create it again with `mtb data`"),
        (lambda path: pq.write_table(pq.read_table(path).drop_columns("group"), path), "lacks the columns group.* create it again"),
        (lambda path: pd.read_parquet(path).to_parquet(path), "not a manifest yet.*read it with `mtb data csv`.* create it again"),
        (lambda path: pd.read_parquet(path).drop(columns="group").to_parquet(path), "read it with `mtb data csv`"),
    ],
)
def test_a_file_that_is_no_manifest_is_rejected(tmp_path: Path, harm: object, message: str) -> None:
    path = manifest(tmp_path).write(tmp_path / "m.parquet")
    harm(path)
    with pytest.raises(ManifestError, match=message):
        Manifest.read(path)
