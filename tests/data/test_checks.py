"""The check: one data set with every fault in it, and the real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medtokenbudget.cli import main
from medtokenbudget.data import Manifest, Report, SplitRule, check, open_data, patch_labels
from medtokenbudget.data.checks import to_text
from tests.data.pictures import class_folders, disc_mask, lesion_picture, save


def items_by_kind(report: Report) -> dict[str, list[str]]:
    return {finding.kind: finding.items for finding in report.findings}


@pytest.fixture
def broken(tmp_path: Path) -> Manifest:
    """One image for each fault; `good_*` have none."""
    records = []

    def add(name: str, image: Image.Image | bytes | None, mask: Image.Image | bytes | None = None, **columns: object) -> None:
        path, mask_path = tmp_path / f"{name}.png", tmp_path / "masks" / f"{name}.png"
        for content, target in ((image, path), (mask, mask_path)):
            if isinstance(content, bytes):
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(content)
            elif content is not None:
                save(content, target)
        records.append({"image_id": name, "image": str(path), "label": "MEL", "mask": mask and str(mask_path), **columns})

    add("good_a", lesion_picture(1), disc_mask(), group="p1", split="val", label="NV")
    add("good_b", lesion_picture(2), disc_mask(), group="p2")
    add("missing", None)
    add("cut", (tmp_path / "good_a.png").read_bytes()[:800])
    add("text", b"not a picture")
    add("copy", (tmp_path / "good_a.png").read_bytes())
    add("smaller", lesion_picture(2).resize((48, 36)), split="val")
    add("crossing", lesion_picture(3), group="p1")
    add("turned", lesion_picture(4), disc_mask().transpose(Image.Transpose.ROTATE_90))
    add("empty", lesion_picture(5), Image.new("L", (96, 72)))
    add("speck", lesion_picture(6), disc_mask(radius=1.5))
    add("index", lesion_picture(7), Image.fromarray((np.asarray(disc_mask()) // 255).astype(np.uint8)))
    add("gray", lesion_picture(8), Image.fromarray(np.tile(np.linspace(0, 255, 96).astype(np.uint8), (72, 1))))
    add("no_mask", lesion_picture(9), b"no mask")
    add("unlabeled", lesion_picture(10), label=None)
    records.append(
        {"image_id": "gone", "image": str(save(lesion_picture(11), tmp_path / "gone.png")), "mask": "/nowhere.png", "label": "MEL"}
    )
    return Manifest.from_records(records, ("MEL", "NV"), root=tmp_path, source="broken", split_rule=SplitRule("grouped"))


def test_every_fault_is_found_in_one_pass_and_the_command_ends_with_1(
    broken: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check(broken, workers=0)
    assert {kind: [item.split(":")[0] for item in items] for kind, items in items_by_kind(report).items()} == {
        "image-missing": ["missing"],
        "image-damaged": ["cut"],
        "image-unreadable": ["text"],
        "unlabeled": ["unlabeled"],
        "mask-missing": ["gone"],
        "mask-values": ["index"],
        "mask-unreadable": ["no_mask"],
        "mask-aspect": ["turned"],
        "mask-empty": ["empty"],
        "mask-no-patch": ["speck"],
        "mask-not-binary": ["gray"],
        "duplicate-exact": ["good_a = copy"],
        "duplicate-near": ["good_b = smaller"],
        "duplicate-labels": ["good_a (NV) = copy (MEL)"],
        "duplicate-crosses": ["good_a (val) = copy (train)", "good_b (train) = smaller (val)"],
        "group-crosses": ["p1 (train, val)"],
        "class-unseen": ["NV"],
    }
    severity = {finding.kind: finding.severity for finding in report.findings}
    assert (severity["mask-aspect"], severity["mask-empty"]) == ("fatal", "warning")
    path = broken.write(tmp_path / "m.parquet")
    assert main(["data", "check", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == report.to_dict()
    assert main(["data", "check", str(path)]) == 1
    assert "FATAL image-missing (1): images that do not exist" in capsys.readouterr().out


def test_a_manifest_without_the_broken_files_is_written_on_request(
    broken: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, left = broken.write(tmp_path / "m.parquet"), tmp_path / "left.parquet"
    found = check(broken)
    unread = {"missing", "cut", "text"}
    unused = {item.split(":")[0] for one in found.findings if one.severity == "fatal" and "mask" in one.kind for item in one.items}
    assert unused
    assert main(["data", "check", str(path), "--drop", str(left)]) == 1  # groups and duplicates still cross the split
    out, err = capsys.readouterr()
    assert "--drop" in out
    masked = {name for row, name in enumerate(broken.ids) if broken.mask_path(row) is not None}
    images, masks = len(broken), len(masked)
    assert f"Wrote {left}: {images - 3} of {images} images, {len(masked - unused - unread)} of {masks} masks." in err
    kept = Manifest.read(left)
    assert kept.ids == [name for name in broken.ids if name not in unread]
    masks, before = (dict(zip(one.ids, one.rows["mask"].notna())) for one in (kept, broken))
    assert masks == {name: before[name] and name not in unused for name in kept.ids}
    assert not any(one.kind.startswith(("image-", "mask-")) and one.severity == "fatal" for one in check(kept).findings)
    assert main(["data", "check", str(path), "--drop", str(path)]) == 2
    assert "--drop must be a new file that ends in .parquet" in capsys.readouterr().err


def test_a_crossing_is_fatal_unless_the_paper_split_was_asked_for(broken: Manifest) -> None:
    leaky = broken.take([broken.ids.index(name) for name in ("good_a", "good_b", "crossing")])
    for rule in (SplitRule("grouped"), SplitRule("kfold", 0, 5), SplitRule("given"), SplitRule("paper", select=0.1)):
        report = check(leaky.with_columns(rule))
        severity = "warning" if rule.kind == "paper" else "fatal"
        (crossing,) = [finding for finding in report.findings if finding.kind == "group-crosses"]
        assert crossing.severity == severity
        assert report.fatal == (severity == "fatal")


def test_counts_and_prevalence_are_by_class_and_part(broken: Manifest) -> None:
    report = check(broken)
    assert report.classes["val"] == {"MEL": 1, "NV": 1}
    assert report.classes["all"] == {"MEL": 14, "NV": 1, "-": 1}
    assert report.masks["val"] == {"MEL": 0, "NV": 1}
    assert sum(report.masks["all"].values()) == 9
    good = patch_labels(disc_mask(), (16, 16)).sum()
    assert report.prevalence_images["val"] == 1
    assert report.prevalence["val"]["median"] == {"patches": good, "prevalence": good / 256}
    assert report.prevalence_images["all"] == sum(report.prevalence_images[part] for part in ("train", "val"))
    text = to_text(report, limit=1)
    table = text[text.index("Lesion patches of 256") :]
    assert "val, n=1" in table
    assert f"{good:.1f} ({good / 256:.1%})" in table
    assert all(finding.kind in text for finding in report.findings)
    assert "and 1 more (`all` lists them)" in text
    assert "more" not in to_text(report, limit=0)


def test_a_clean_folder_is_clean_until_its_images_are_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class_folders(tmp_path / "photos", 9)
    manifest = tmp_path / "m.parquet"
    assert main(["data", "check", str(tmp_path / "photos")]) == 0
    assert "part-empty" not in capsys.readouterr().out, "a folder without a split lacks no part"
    assert main(["data", "folder", str(tmp_path / "photos"), "--out", str(manifest)]) == 0
    assert main(["data", "check", str(manifest)]) == 0
    out = capsys.readouterr().out
    assert "No problems found." in out
    assert f"\nmanifest hash {Manifest.read(manifest).hash}\n" in out
    assert out.splitlines()[-1] == f"Next: mtb extract {manifest} --store STORE"
    shutil.rmtree(tmp_path / "photos" / "NV")
    assert len(items_by_kind(check(Manifest.read(manifest)))["image-missing"]) == 9
    assert main(["data", "check", str(manifest)]) == 1
    assert "  and 1 more (--all lists them)\n" in capsys.readouterr().out


@pytest.mark.slow
def test_the_real_images_are_sound_and_their_duplicates_are_found(shared: Path) -> None:
    report = check(open_data(shared / "data" / "isic"))
    kinds = items_by_kind(report)
    assert not report.fatal
    assert "ISIC_0012127_downsampled = ISIC_0012970_downsampled" in kinds["duplicate-exact"]
    assert "ISIC_0012127_downsampled (val) = ISIC_0012970_downsampled (train)" in kinds["duplicate-crosses"]
    assert "ISIC_0000222 = ISIC_0014846_downsampled" in kinds["duplicate-near"]
    assert len(kinds["duplicate-exact"]) == 2
    assert len(kinds["duplicate-near"]) == 11
    assert report.images == 2_068
    assert sum(report.masks["all"].values()) == 2_068
