"""The check: one data set with every fault in it, and the real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medtokenbudget.cli import main
from medtokenbudget.data import Manifest, Report, check, open_data, patch_labels
from medtokenbudget.data.checks import to_text
from tests.data.pictures import class_folders, disc_mask, lesion_picture, save


def found(report: Report) -> dict[str, list[str]]:
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
    return Manifest.from_records(records, ("MEL", "NV"), root=tmp_path, source="broken", split_rule="grouped")


def test_every_fault_is_found_in_one_pass(broken: Manifest) -> None:
    report = check(broken)
    kinds = found(report)
    first = {kind: [item.split(":")[0] for item in items] for kind, items in kinds.items()}
    assert first["image-missing"] == ["missing"]
    assert first["image-damaged"] == ["cut"]
    assert first["image-unreadable"] == ["text"]
    assert first["mask-missing"] == ["gone"]
    assert first["mask-unreadable"] == ["no_mask"]
    assert first["mask-aspect"] == ["turned"]
    assert first["mask-empty"] == ["empty"]
    assert first["mask-no-patch"] == ["speck"]
    assert first["mask-not-binary"] == ["gray"]
    assert first["mask-values"] == ["index"]
    assert first["unlabeled"] == ["unlabeled"]
    assert kinds["duplicate-exact"] == ["good_a = copy"]
    assert kinds["duplicate-near"] == ["good_b = smaller"]
    assert kinds["duplicate-labels"] == ["good_a (NV) = copy (MEL)"]
    assert kinds["duplicate-crosses"] == ["good_a (val) = copy (train)", "good_b (train) = smaller (val)"]
    assert kinds["group-crosses"] == ["p1 (train, val)"]
    assert kinds["class-unseen"] == ["NV"]
    assert report.fatal


def test_a_crossing_is_fatal_unless_the_paper_split_was_asked_for(broken: Manifest) -> None:
    leaky = broken.take([broken.ids.index(name) for name in ("good_a", "good_b", "crossing")])
    for rule, severity in (("grouped", "fatal"), ("kfold 0/5", "fatal"), ("given", "fatal"), ("paper, select 0.1", "warning")):
        report = check(leaky.with_columns(split=leaky.rows["split"].tolist(), split_rule=rule))
        (crossing,) = [finding for finding in report.findings if finding.kind == "group-crosses"]
        assert crossing.severity == severity
        assert report.fatal == (severity == "fatal")


def test_counts_and_coverage_are_by_class_and_part(broken: Manifest) -> None:
    report = check(broken)
    assert report.classes["val"] == {"MEL": 1, "NV": 1}
    assert report.classes["all"] == {"MEL": 14, "NV": 1, "-": 1}
    assert report.masks["val"] == {"MEL": 0, "NV": 1}
    assert sum(report.masks["all"].values()) == 9


def test_the_prevalence_table_is_over_the_masks_with_a_lesion(broken: Manifest) -> None:
    report = check(broken)
    good = patch_labels(disc_mask(), (16, 16)).sum()
    assert report.prevalence_images["val"] == 1
    assert report.prevalence["val"]["median"] == {"patches": good, "prevalence": good / 256}
    assert report.prevalence_images["all"] == sum(report.prevalence_images[part] for part in ("train", "val"))
    text = to_text(report)
    table = text[text.index("Lesion patches of 256") :]
    assert "val, n=1" in table
    assert f"{good:.1f} ({good / 256:.1%})" in table


def test_a_mask_of_another_aspect_is_fatal_and_no_workers_are_one(broken: Manifest) -> None:
    report = check(broken, workers=0)
    assert next(finding for finding in report.findings if finding.kind == "mask-aspect").severity == "fatal"


def test_the_text_shows_every_finding_and_shortens_long_ones(broken: Manifest) -> None:
    report = check(broken)
    text = to_text(report, limit=1)
    assert all(finding.kind in text for finding in report.findings)
    assert "and 1 more (use --all to list them)" in text
    assert "--all" not in to_text(report, limit=0)


def test_the_command_prints_json_and_ends_with_1_when_something_is_fatal(
    broken: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = broken.write(tmp_path / "m.parquet")
    assert main(["data", "check", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["fatal"] is True
    assert {finding["kind"] for finding in report["findings"]} >= {"image-missing", "group-crosses"}
    assert main(["data", "check", str(path)]) == 1
    assert "FATAL image-missing (1): images that do not exist" in capsys.readouterr().out


def test_a_clean_folder_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class_folders(tmp_path / "photos", 6)
    manifest = tmp_path / "m.parquet"
    assert main(["data", "folder", str(tmp_path / "photos"), "--out", str(manifest)]) == 0
    assert main(["data", "check", str(manifest)]) == 0
    out = capsys.readouterr().out
    assert "No problems found." in out
    assert out.splitlines()[-1] == f"Next: mtb extract {manifest} --store STORE"


@pytest.mark.slow
def test_the_real_images_are_sound_and_their_duplicates_are_found(shared: Path) -> None:
    report = check(open_data(shared / "data" / "isic"))
    kinds = found(report)
    assert not report.fatal
    assert "ISIC_0012127_downsampled = ISIC_0012970_downsampled" in kinds["duplicate-exact"]
    assert "ISIC_0012127_downsampled (val) = ISIC_0012970_downsampled (train)" in kinds["duplicate-crosses"]
    assert "ISIC_0000222 = ISIC_0014846_downsampled" in kinds["duplicate-near"]
    assert len(kinds["duplicate-exact"]) == 2
    assert len(kinds["duplicate-near"]) == 11
    assert report.images == 2_068
    assert sum(report.masks["all"].values()) == 2_068


def test_nothing_is_lost_when_the_images_move_away(tmp_path: Path) -> None:
    class_folders(tmp_path / "photos", 3)
    path = tmp_path / "m.parquet"
    main(["data", "folder", str(tmp_path / "photos"), "--out", str(path)])
    shutil.rmtree(tmp_path / "photos" / "NV")
    assert len(found(check(Manifest.read(path)))["image-missing"]) == 3
