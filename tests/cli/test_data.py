"""`mtb data` from the outside: files written, last lines, exit codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from medtokenbudget.cli import main
from medtokenbudget.data import Manifest, folder_manifest
from tests.data.pictures import class_folders, lesion_picture, save


def run(*arguments: object) -> int:
    return main(["data", *map(str, arguments)])


WRONG = {
    "a manifest by another name": (("folder", "photos", "--out", "m.csv"), "must end in .parquet"),
    "a negative seed": (("folder", "photos", "--seed", -1, "--out", "m.parquet"), "--seed must be at least 0"),
    "a missing fold": (
        ("folder", "photos", "--split", "kfold", "--fold", 5, "--out", "m.parquet"),
        "which is 5, got 5",
    ),
    "more than all for selection": (("folder", "photos", "--select", 1, "--out", "m.parquet"), "--select must be at least 0"),
    "a fold of drawings": (("synthetic", "--split", "kfold", "--folds", 1, "--out", "drawn"), "--folds must be at least 2"),
    "no ISIC folder": (("isic", "photos", "--out", "m.parquet"), "GroundTruth.csv does not exist. Pass the folder"),
    "a folder that does not exist": (("folder", "/nowhere", "--out", "m"), "does not exist"),
    "nothing to check": (("check", "/nowhere.parquet"), "does not exist"),
    "nothing to split": (("split", "/nowhere.parquet", "--out", "m"), "does not exist"),
    "an unknown way to match masks": (("isic", "/nowhere", "--masks", "fuzzy", "--out", "m"), "exact"),
    "several faults of a CSV": (("csv", "t.csv", "--out", "m.parquet"), "unknown columns: lable"),
    "a CSV with semicolons": (("csv", "semicolons.csv", "--out", "m.parquet"), "only image;label. Columns are separated by commas"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_one_message_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    class_folders(tmp_path / "photos", 4)
    (tmp_path / "t.csv").write_text("image,lable,split\nnowhere.png,MEL,tset\n")
    (tmp_path / "semicolons.csv").write_text("image;label\na.png;MEL\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("medtokenbudget.data.duplicates.decode_image", lambda path: pytest.fail("the images were read first"))
    arguments, message = WRONG[case]
    assert run(*arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "drawn").exists()
    if case == "several faults of a CSV":
        assert "images that do not exist: row 2 (nowhere.png)" in printed
        assert "values of split" in printed


def test_a_folder_becomes_a_manifest_and_is_split_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, first, second = class_folders(tmp_path / "photos", 10), tmp_path / "a.parquet", tmp_path / "b.parquet"
    assert run("folder", photos, "--name", "2019", "--out", first) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"Wrote {first}: 20 images (")
    assert last.endswith(f"Next: mtb data check {first}")
    assert str(Manifest.read(first).split_rule) == "grouped"
    assert run("split", first, "--split", "kfold", "--folds", 4, "--fold", 2, "--select", 0.2, "--out", second) == 0
    again = Manifest.read(second)
    assert (str(again.split_rule), again.name) == ("kfold 2/4, select 0.2", "2019")
    assert again.data_hash == Manifest.read(first).data_hash


SOURCES = {
    "folder": (("folder", "photos"), "photos"),
    "this folder": (("folder", "."), "here"),
    "csv": (("csv", "table.csv"), "table"),
    "synthetic": (("synthetic", "--n", 5, "--size", 64, "--workers", 1), "drawn dermoscopy"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_data_set_has_the_name_that_its_owner_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    here = tmp_path / "here"
    class_folders(here / "photos", 4)
    files = [path.relative_to(here).as_posix() for path in sorted(here.glob("photos/*/*"))]
    (here / "table.csv").write_text("image,label\n" + "".join(f"{name},{name.split('/')[1]}\n" for name in files))
    monkeypatch.chdir(here)
    arguments, default = SOURCES[case]
    for words, name in (([], default), (["--name", "Clinic A, 2019"], "Clinic A, 2019")):
        assert run(*arguments, *words, "--out", tmp_path / f"{len(words)}.parquet") == 0
        assert Manifest.read(tmp_path / f"{len(words)}.parquet").name == name
    assert run(*arguments, "--name", "", "--out", tmp_path / "empty.parquet") == 2
    assert not (tmp_path / "empty.parquet").exists()


def test_a_given_split_stays_unless_another_is_asked_for(tmp_path: Path) -> None:
    class_folders(tmp_path / "photos" / "train", 4)
    class_folders(tmp_path / "photos" / "val", 1)
    for words, rule in (([], "given"), (["--split", "paper"], "paper")):
        assert run("folder", tmp_path / "photos", *words, "--out", tmp_path / f"{rule}.parquet") == 0
        assert str(Manifest.read(tmp_path / f"{rule}.parquet").split_rule) == rule


def test_a_different_manifest_is_replaced_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, out = class_folders(tmp_path / "photos", 6), tmp_path / "m.parquet"
    assert run("folder", photos, "--out", out) == 0
    assert run("folder", photos, "--out", out) == 0, "the same manifest again is no conflict"
    before = out.read_bytes()
    save(lesion_picture(77), photos / "NV" / "new.png")
    assert run("folder", photos, "--out", out) == 2
    assert f"{out} already exists and is different. Pass " in capsys.readouterr().err
    assert out.read_bytes() == before
    assert run("folder", photos, "--keep-split", out, "--overwrite", "--out", out) == 0
    assert len(Manifest.read(out)) == 13
    out.write_text("something else")
    assert run("folder", photos, "--out", out) == 2
    assert out.read_text() == "something else"


def test_the_split_of_an_older_manifest_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, old, new = class_folders(tmp_path / "photos", 10), tmp_path / "old.parquet", tmp_path / "new.parquet"
    assert run("folder", photos, "--seed", 7, "--out", old) == 0
    assert "Validation has" in capsys.readouterr().out
    for k in range(5):
        save(lesion_picture(100 + k), photos / "MEL" / f"a_new_{k}.png")
    assert run("folder", photos, "--keep-split", old, "--out", new) == 0
    part = dict(zip(Manifest.read(new).ids, Manifest.read(new).rows["split"]))
    before = Manifest.read(old)
    assert [part[name] for name in before.ids] == before.rows["split"].tolist()
    assert run("folder", photos, "--split", "paper", "--keep-split", old, "--out", new) == 2


def test_an_edited_manifest_becomes_valid_again_with_every_column(tmp_path: Path) -> None:
    photos, path = class_folders(tmp_path / "photos", 4), tmp_path / "m.parquet"
    save(lesion_picture(0), photos / "mask.bmp")
    unlabeled = replace(folder_manifest(photos / "MEL"), classes=("B", "A"), name="Clinic A")
    mask, split = [str(photos / "mask.bmp")] * 4, ["train", "train", "val", "val"]
    made = unlabeled.with_columns(label=[*"BABA"], group=[*"gghh"], split=split, mask=mask)
    edited = pd.read_parquet(made.write(path)).assign(label=[*"AABA"])
    edited.to_csv(tmp_path / "m.csv", index=False)
    edited.to_csv(tmp_path / "with-row-numbers.csv")
    edited.to_parquet(tmp_path / "edited.parquet")
    for table in ("m.csv", "with-row-numbers.csv", "edited.parquet"):
        assert run("csv", tmp_path / table, "--classes", "B,A", "--name", "Clinic A", "--out", path, "--overwrite") == 0
        assert Manifest.read(path).hash == made.with_columns(label=[*"AABA"]).hash


def test_a_manifest_edited_in_place_keeps_its_class_order(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    made = folder_manifest(class_folders(tmp_path / "photos", 3))
    replace(made, classes=("NV", "MEL"), name="Clinic A").write(path)
    table = pq.read_table(path)
    labels = ["BCC", *table["label"].to_pylist()[1:]]
    pq.write_table(table.set_column(2, "label", [labels]).replace_schema_metadata(table.schema.metadata), path)
    assert run("csv", path, "--out", path, "--overwrite") == 0
    again = Manifest.read(path)
    assert (again.classes, again.name) == (("NV", "MEL", "BCC"), "Clinic A")


@pytest.mark.slow
def test_isic_from_the_command_line(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, paper, grouped = shared / "data" / "isic", tmp_path / "p.parquet", tmp_path / "g.parquet"
    assert run("isic", root, "--masks", "exact", "--split", "paper", "--out", paper) == 0
    assert "2,068 images (1,663 train, 405 val; 136 with a mask)" in capsys.readouterr().out
    assert run("isic", root, "--mask-sources", "isic2018,ham10000", "--select", 0.1, "--out", grouped) == 0
    rows = Manifest.read(grouped).rows
    assert (rows.groupby("group")["split"].nunique() == 1).all()
    split = rows.set_index("image_id")["split"]
    assert split["ISIC_0012127_downsampled"] == split["ISIC_0012970_downsampled"]
    assert run("split", grouped, "--split", "paper", "--out", paper) == 2
    assert "all rows of the official CSV" in capsys.readouterr().err


def test_drawn_images_and_a_csv_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("synthetic", "--n", 10, "--seed", 1, "--size", 64, "--off-center", "--workers", 1, "--out", tmp_path / "drawn") == 0
    assert "10 images" in capsys.readouterr().out
    assert "off-center" in Manifest.read(tmp_path / "drawn" / "manifest.parquet").source
    class_folders(tmp_path / "photos", 6)
    lines = [f"photos/{c}/{c}_{k}.png,{c},p{k}" for c in ("MEL", "NV") for k in range(6)]
    (tmp_path / "t.csv").write_text("image,label,group\n" + "\n".join(lines))
    assert run("csv", tmp_path / "t.csv", "--classes", "NV,MEL", "--out", tmp_path / "m.parquet") == 0
    manifest = Manifest.read(tmp_path / "m.parquet")
    assert manifest.classes == ("NV", "MEL")
    assert (manifest.rows.groupby("group")["split"].nunique() == 1).all()
