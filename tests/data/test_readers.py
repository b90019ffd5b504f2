"""ISIC 2019 by the figures of the paper, Kvasir, class folders, and CSV files; and each of them wrong in some way."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from medtokenbudget.cli import main
from medtokenbudget.data import (
    Manifest,
    apply_split,
    csv_manifest,
    folder_manifest,
    isic_manifest,
    kvasir_manifest,
    paper_split,
    readers,
)
from medtokenbudget.data.readers import GROUND_TRUTH, IMAGES, ISIC_CLASSES, KVASIR_CLASSES, MASK_FOLDERS, METADATA
from medtokenbudget.errors import RequestError
from medtokenbudget.model import expand
from tests.data.pictures import class_folders, disc_mask, lesion_picture, save


@pytest.fixture(scope="session")
def real(shared: Path) -> Path:
    return shared / "data" / "isic"


def test_the_paper_split_has_the_papers_counts_and_a_partial_download_stays_on_its_side(real: Path) -> None:
    truth = readers.read_ground_truth(real / GROUND_TRUTH)
    split = paper_split(len(truth))
    assert Counter(split) == {"train": 20_264, "val": 5_067}
    validation = Counter(truth["label"][split == "val"])
    assert [validation[name] for name in ISIC_CLASSES] == [910, 2568, 673, 167, 516, 45, 60, 128]
    assert truth["image"].str.endswith("_downsampled").sum() == 2_074
    manifest = isic_manifest(real)
    assert Counter(manifest.rows["split"]) == {"train": 1_663, "val": 405}
    side = dict(zip(truth["image"], split))
    assert all(side[image] == split for image, split in zip(manifest.ids, manifest.rows["split"]))
    order = {image: place for place, image in enumerate(truth["image"])}
    assert manifest.ids == sorted(manifest.ids, key=order.__getitem__)
    assert all(manifest.image_path(i).is_file() for i in range(0, len(manifest), 100))
    lesions = readers.read_lesions(real / METADATA)
    assert 25_331 - len(lesions) == 2_084
    assert all(group == lesions.get(image, image) for image, group in zip(manifest.ids, manifest.rows["group"]))


def test_exact_names_find_136_masks_and_ids_all_of_both_sources(real: Path) -> None:
    manifest = isic_manifest(real, "exact")
    masked = manifest.rows[manifest.rows["mask"].notna()]
    assert Counter(masked["split"]) == {"train": 136}
    assert not masked["image_id"].str.endswith("_downsampled").any()
    both = isic_manifest(real, "by-id", ["isic2018", "ham10000"])
    assert both.rows["mask"].notna().all()
    folders = Counter(Path(mask).parent.name for mask in both.rows["mask"])
    assert folders == {MASK_FOLDERS["isic2018"]: 675, MASK_FOLDERS["ham10000"]: 1_393}


@pytest.fixture(scope="session")
def whole(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The complete official layout: the real CSVs, and all images and masks of ISIC 2018 by name only."""
    root = tmp_path_factory.mktemp("whole")
    for name in (GROUND_TRUTH, METADATA):
        (root / name).symlink_to(real / name)
    lines = (Path(__file__).parent / "isic2018_task1.txt").read_text().splitlines()
    masks = [f"ISIC_{number}_segmentation.png" for line in lines if not line.startswith("#") for number in line.split()]
    assert len(set(masks)) == 2_594
    images = [f"{image}.jpg" for image in readers.read_ground_truth(real / GROUND_TRUTH)["image"]]
    for folder, names in ((IMAGES, images), (MASK_FOLDERS["isic2018"], masks)):
        (root / folder).mkdir()
        for name in names:
            (root / folder / name).touch()
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "training", "validation"),
    [
        ("exact", {"NV": 488, "MEL": 129}, {"NV": 120, "MEL": 35}),
        ("by-id", {"NV": 1_493, "MEL": 418, "BKL": 162}, {"NV": 373, "MEL": 101, "BKL": 46}),
    ],
)
def test_the_complete_files_give_the_papers_counts_of_masks(
    real: Path, whole: Path, how: str, training: dict[str, int], validation: dict[str, int]
) -> None:
    manifest = isic_manifest(whole, how, ["isic2018"])
    assert len(manifest) == 25_331
    masked = manifest.rows[manifest.rows["mask"].notna()]
    assert Counter(masked["label"][masked["split"] == "train"]) == training
    assert Counter(masked["label"][masked["split"] == "val"]) == validation
    folder = MASK_FOLDERS["isic2018"]
    assert {path.name for path in (real / folder).glob("*.png")} < {path.name for path in (whole / folder).iterdir()}


def test_matching_by_id_looks_through_the_suffix_and_exact_does_not() -> None:
    images = ["ISIC_1", "ISIC_2_downsampled", "ISIC_3", "ISIC_4_downsampled"]
    masks = ["ISIC_1", "ISIC_2", "ISIC_9"]
    assert readers.match_masks(images, masks, "exact") == {"ISIC_1": "ISIC_1"}
    assert readers.match_masks(images, masks, "by-id") == {"ISIC_1": "ISIC_1", "ISIC_2_downsampled": "ISIC_2"}
    assert readers.match_masks(images, masks, "none") == {}


TRUTH = "image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK\n"
ROWS = ["ISIC_1,1,0,0,0,0,0,0,0,0", "ISIC_2_downsampled,0,1.0,0,0,0,0,0,0,0", "ISIC_3,0,0,0,0,0,0,0,1,0"]


@pytest.fixture
def official(tmp_path: Path) -> Path:
    root = tmp_path / "isic"
    for seed, name in enumerate(("ISIC_1", "ISIC_2_downsampled")):
        save(lesion_picture(seed), root / IMAGES / f"{name}.jpg")
    (root / IMAGES / "ATTRIBUTION.txt").write_text("terms")
    (root / GROUND_TRUTH).write_text(TRUTH + "\n".join(ROWS))
    (root / METADATA).write_text(
        "image,age_approx,anatom_site_general,lesion_id,sex\nISIC_1,,,L1,\nISIC_2_downsampled,,,,\nISIC_3,,,L1,\n"
    )
    save(disc_mask(), root / MASK_FOLDERS["isic2018"] / "ISIC_2_segmentation.png")
    save(disc_mask(radius=5), root / MASK_FOLDERS["ham10000"] / "ISIC_2_segmentation.png")
    return root


def test_the_first_source_of_a_mask_wins_and_folders_unpacked_inside_themselves_are_read(official: Path) -> None:
    for order in (["isic2018", "ham10000"], ["ham10000", "isic2018"]):
        mask = isic_manifest(official, "by-id", order).rows["mask"][1]
        assert MASK_FOLDERS[order[0]] in mask

    def masks() -> list[str]:
        return [Path(mask).name for mask in isic_manifest(official).rows["mask"].dropna()]

    before = masks()
    for name in (IMAGES, *MASK_FOLDERS.values()):
        (official / name).rename(official / "moved")
        (official / name).mkdir()
        (official / "moved").rename(official / name / name)
    assert isic_manifest(official).ids == ["ISIC_1", "ISIC_2_downsampled"]
    assert isic_manifest(official).name == "ISIC 2019"
    assert masks() == before == ["ISIC_2_segmentation.png"]


def test_masks_of_other_images_are_said_to_be_of_no_use(official: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert isic_manifest(official, "exact").rows["mask"].isna().all()
    assert f"None of the 2 images has a mask in {MASK_FOLDERS['isic2018']}." in capsys.readouterr().err
    isic_manifest(official, "none")
    assert capsys.readouterr().err == ""
    (official / GROUND_TRUTH).write_text(TRUTH + ROWS[0])
    assert isic_manifest(official, ignore_unlabeled=True).ids == ["ISIC_1"]


def write_truth(*rows: str, header: str = TRUTH) -> object:
    return lambda root: (root / GROUND_TRUTH).write_text(header + "\n".join(rows))


ISIC_BAD = {
    "no root": (shutil.rmtree, {}, "does not exist. Pass the folder"),
    "root is a file": (lambda root: (shutil.rmtree(root), root.write_text("")), {}, "is a file, not a folder"),
    "no ground truth": (lambda root: (root / GROUND_TRUTH).unlink(), {}, f"{GROUND_TRUTH} does not exist"),
    "no metadata": (lambda root: (root / METADATA).unlink(), {}, f"{METADATA} does not exist. Download it"),
    "no images": (lambda root: shutil.rmtree(root / IMAGES), {}, f"{IMAGES} does not exist"),
    "empty image folder": (lambda root: [f.unlink() for f in (root / IMAGES).iterdir()], {}, "contains no images"),
    "missing column": (write_truth("ISIC_1,1", header="image,MEL\n"), {}, "lacks the columns NV, BCC"),
    "two classes": (write_truth("ISIC_1,1,1,0,0,0,0,0,0,0"), {}, "1 rows do not have exactly one 1.*ISIC_1"),
    "no class": (write_truth("ISIC_1,0,0,0,0,0,0,0,0,0"), {}, "1 rows do not have exactly one 1"),
    "half a class": (write_truth("ISIC_1,0.5,0.5,0,0,0,0,0,0,0"), {}, "1 rows do not have exactly one 1"),
    "not a number": (write_truth("ISIC_1,yes,0,0,0,0,0,0,0,0"), {}, "1 rows do not have exactly one 1"),
    "empty cell": (write_truth("ISIC_1,1,,0,0,0,0,0,0,0"), {}, "1 rows do not have exactly one 1"),
    "unknown class": (write_truth("ISIC_1,0,0,0,0,0,0,0,0,1"), {}, "class UNK.*ISIC_1"),
    "image twice": (write_truth(ROWS[0], ROWS[0]), {}, "more than one row for ISIC_1"),
    "empty csv": (lambda root: (root / GROUND_TRUTH).write_text(""), {}, "not a readable CSV file"),
    "binary csv": (lambda root: (root / GROUND_TRUTH).write_bytes(b"\xff\xfe\x00\x80image"), {}, "not a readable CSV file"),
    "image without a row": (write_truth(ROWS[0]), {}, "no row.*ISIC_2_downsampled.jpg.*`ignore_unlabeled`"),
    "lesion ids missing": (lambda root: (root / METADATA).write_text("image\nISIC_1\n"), {}, "lacks the columns lesion_id"),
    "unknown mask source": (lambda root: None, {"mask_sources": ["isic2081"]}, "Did you mean 'isic2018'"),
    "mask source not there": (
        lambda root: shutil.rmtree(root / MASK_FOLDERS["ham10000"]),
        {"mask_sources": ["ham10000"]},
        "Download it",
    ),
    "empty mask folder": (
        lambda root: [f.unlink() for f in (root / MASK_FOLDERS["isic2018"]).iterdir()],
        {},
        f"{MASK_FOLDERS['isic2018']} contains no masks. Unpack",
    ),
    "no mask folder at all": (lambda root: [shutil.rmtree(root / f) for f in MASK_FOLDERS.values()], {}, '`masks="none"`'),
    "unknown matching": (lambda root: None, {"masks": "fuzzy"}, "Unknown mask matching 'fuzzy'"),
}


@pytest.mark.parametrize("case", ISIC_BAD)
def test_a_layout_that_is_wrong_is_rejected_with_what_to_do(official: Path, case: str) -> None:
    harm, options, message = ISIC_BAD[case]
    harm(official)
    with pytest.raises(RequestError, match=message):
        isic_manifest(official, **options)


def test_a_folder_is_recognized_by_its_layout(shared: Path, tmp_path: Path) -> None:
    assert readers.open_data(shared / "data" / "kvasir-dataset-v2").source == "kvasir v2"
    assert readers.open_data(shared / "data" / "isic").source == "isic 2019, masks by-id from isic2018+ham10000"
    assert readers.open_data(class_folders(tmp_path / "photos", 1)).source == "folder photos"


def test_kvasir_is_split_80_to_20_over_the_sorted_files(shared: Path, tmp_path: Path) -> None:
    root = shared / "data" / "kvasir-dataset-v2"
    manifest = kvasir_manifest(root)
    assert Counter(manifest.rows["label"]) == dict.fromkeys(KVASIR_CLASSES, 40)
    assert Counter(manifest.rows["split"]) == {"train": 256, "val": 64}
    files = sorted(path.relative_to(root).as_posix() for path in root.glob("*/*.jpg"))
    trained = {files[i] for i in np.random.RandomState(42).permutation(320)[:256]}
    part = manifest.part("train")
    assert {part.image_path(i).relative_to(root).as_posix() for i in range(len(part))} == trained
    assert manifest.rows["mask"].isna().all()
    assert kvasir_manifest(root.parent).hash == manifest.hash, "the folder that the archive was unpacked in will do"
    class_folders(tmp_path, 1, KVASIR_CLASSES[:-1])
    with pytest.raises(RequestError, match=r"lacks the class folders ulcerative-colitis\..*mtb data folder"):
        kvasir_manifest(tmp_path)


def test_class_folders_give_labels_and_ids_at_any_depth(tmp_path: Path) -> None:
    root = class_folders(tmp_path, 1)
    save(lesion_picture(5), root / "MEL" / "patient_7" / "left" / "x.png")
    manifest = folder_manifest(root)
    assert manifest.classes == ("MEL", "NV")
    assert manifest.ids == ["MEL/MEL_0", "MEL/patient_7/left/x", "NV/NV_0"]
    assert manifest.rows["label"].tolist() == ["MEL", "MEL", "NV"]
    assert manifest.split_rule.kind == "none"


def test_folders_called_train_and_val_give_the_split(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", 2)
    class_folders(tmp_path / "val", 1)
    manifest = folder_manifest(tmp_path)
    assert manifest.classes == ("MEL", "NV")
    assert Counter(manifest.rows["split"]) == {"train": 4, "val": 2}
    assert manifest.split_rule.kind == "given"


def test_a_flat_folder_has_no_labels_and_other_files_are_counted_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(lesion_picture(0), tmp_path / "b.PNG")
    save(lesion_picture(1), tmp_path / "a.jpg")
    save(lesion_picture(1), tmp_path / ".hidden.jpg")
    for name in ("a.heic", "b.heic", "deeper/c.svg", ".DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    manifest = folder_manifest(tmp_path)
    assert f"Skipped 3 files in {tmp_path} that cannot be read as images: 2 .heic, 1 .svg." in capsys.readouterr().err
    assert manifest.ids == ["a", "b"]
    assert manifest.rows["label"].tolist() == [None, None]
    assert manifest.classes == ()


@pytest.mark.parametrize("inside", [False, True])
def test_masks_are_found_by_name_and_their_folder_inside_is_no_class(
    tmp_path: Path, inside: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    root = class_folders(tmp_path / "images", 2)
    save(lesion_picture(9), root / "NV" / "ISIC_1_downsampled.jpg")
    masks = (root if inside else tmp_path) / "masks"
    for name in ("MEL/MEL_0.png", "MEL_1_segmentation.png", "NV_1_mask.png", "ISIC_1_segmentation.png", "c_mask.png"):
        save(disc_mask(), masks / name)
    manifest = folder_manifest(root, masks)
    assert dict(zip(manifest.ids, [mask and Path(mask).name for mask in manifest.rows["mask"]])) == {
        "MEL/MEL_0": "MEL_0.png",
        "MEL/MEL_1": "MEL_1_segmentation.png",
        "NV/ISIC_1_downsampled": "ISIC_1_segmentation.png",
        "NV/NV_0": None,
        "NV/NV_1": "NV_1_mask.png",
    }
    assert manifest.classes == ("MEL", "NV")
    message = capsys.readouterr().err
    assert "1 of 5 files in" in message
    assert "c_mask.png" in message


@pytest.mark.parametrize("ending", ["_seg", "_Segmentation", "-mask", "_GT", "_groundtruth", "_lesion", "_label"])
def test_common_names_of_masks_are_found_in_any_case_and_the_command_says_which(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = class_folders(tmp_path / "images", 2)
    save(disc_mask(), tmp_path / "masks" / f"mel_0{ending}.PNG")
    save(disc_mask(), tmp_path / "masks" / f"MEL_1{ending}.PNG")
    masks = dict(zip(*(folder_manifest(root, tmp_path / "masks").rows[name] for name in ("image_id", "mask"))))
    assert {name: mask and Path(mask).name for name, mask in masks.items()} == {
        "MEL/MEL_0": f"mel_0{ending}.PNG",
        "MEL/MEL_1": f"MEL_1{ending}.PNG",
        "NV/NV_0": None,
        "NV/NV_1": None,
    }
    assert f"Masks found as {{stem}}{ending}.PNG (2) in {tmp_path / 'masks'}." in capsys.readouterr().err


def test_of_two_masks_whose_names_differ_in_case_an_image_takes_its_own(tmp_path: Path) -> None:
    for name in ("a", "A"):
        save(lesion_picture(1), tmp_path / "images" / f"{name}.jpg")
        save(disc_mask(), tmp_path / "masks" / f"{name}_mask.png")
    rows = folder_manifest(tmp_path / "images", tmp_path / "masks").rows
    assert {name: Path(mask).name for name, mask in zip(rows["image_id"], rows["mask"])} == {"a": "a_mask.png", "A": "A_mask.png"}


def test_a_pattern_finds_masks_of_any_name_and_those_among_the_images_are_no_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The layout of PH2: a folder per image.
    for name in ("IMD1", "IMD2"):
        save(lesion_picture(int(name[-1])), tmp_path / "ph2" / name / f"{name}.bmp")
        save(disc_mask(), tmp_path / "ph2" / name / f"{name.lower()}_roi" / "outline.BMP")
    out = tmp_path / "m.parquet"
    words = ["data", "folder", str(tmp_path / "ph2"), "--out", str(out)]
    assert main([*words, "--masks", str(tmp_path / "ph2"), "--mask-pattern", "{stem}_ROI/*.bmp"]) == 0
    rows = Manifest.read(out).rows
    assert rows["image_id"].tolist() == ["IMD1/IMD1", "IMD2/IMD2"]
    assert [Path(mask).parent.name for mask in rows["mask"]] == ["imd1_roi", "imd2_roi"]
    assert "Masks found as {stem}_ROI/*.bmp (2) in" in capsys.readouterr().err
    assert main([*words, "--masks", str(tmp_path / "ph2"), "--mask-pattern", "_roi.bmp"]) == 2
    assert "--mask-pattern must contain {stem}" in capsys.readouterr().err
    assert main([*words, "--mask-pattern", "{stem}.bmp"]) == 2
    assert "--mask-pattern only matters with --masks" in capsys.readouterr().err


def test_links_to_folders_elsewhere_are_followed_and_those_that_lead_back_are_not(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "back", 1)
    (root / "MEL" / "again").symlink_to(root, target_is_directory=True)
    (root / "NV" / "out").symlink_to(tmp_path, target_is_directory=True)
    (root / "loop").symlink_to(root, target_is_directory=True)
    assert folder_manifest(root).ids == ["MEL/MEL_0", "NV/NV_0"]
    elsewhere = class_folders(tmp_path / "elsewhere", 1)
    root = tmp_path / "photos"
    root.mkdir()
    for name in ("MEL", "NV"):
        (root / name).symlink_to(elsewhere / name, target_is_directory=True)
    (elsewhere / "MEL" / "to").symlink_to(elsewhere / "NV", target_is_directory=True)
    (elsewhere / "NV" / "fro").symlink_to(elsewhere / "MEL", target_is_directory=True)
    assert folder_manifest(root).ids == ["MEL/MEL_0", "MEL/to/NV_0", "NV/NV_0", "NV/fro/MEL_0"]


def test_masks_next_to_their_images_are_masks_however_the_folder_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = class_folders(tmp_path, 2)
    save(disc_mask(), root / "MEL" / "MEL_0_segmentation.png")
    monkeypatch.chdir(tmp_path)
    manifest = folder_manifest(".", root)
    assert "mask of no image" not in capsys.readouterr().err
    assert manifest.ids == ["MEL/MEL_0", "MEL/MEL_1", "NV/NV_0", "NV/NV_1"]
    assert [mask and Path(mask).name for mask in manifest.rows["mask"]] == ["MEL_0_segmentation.png", None, None, None]
    with pytest.raises(RequestError, match=r"look like masks.*: MEL_0_segmentation.png.*`masks`"):
        folder_manifest(root)
    (root / "MEL" / "MEL_0_segmentation.png").unlink()
    save(disc_mask(), root / "masks" / "a.png")
    with pytest.raises(RequestError, match="folder 'masks' would become a class"):
        folder_manifest(root)


def test_several_masks_of_one_image_become_their_union_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The layout of BUSI: class folders, masks beside the images, a mask for each of several lesions, and empty ones.
    root = tmp_path / "busi"
    parts = [np.zeros((40, 50), np.uint8) for _ in range(3)]
    parts[0][5:15, 5:15], parts[1][20:30, 20:40], parts[2][12:20, 12:20] = 255, 255, 255
    for label in ("benign", "normal"):
        save(lesion_picture(1), root / label / f"{label} (1).png")
        save(Image.new("L", (50, 40)), root / label / f"{label} (1)_mask.png")
    save(lesion_picture(2), root / "benign" / "benign (2).png")
    for part, ending in zip(parts, ("", "_1", "_2")):
        save(Image.fromarray(part), root / "benign" / f"benign (2)_mask{ending}.png")
    assert main(["data", "folder", str(root), "--masks", str(root), "--out", str(tmp_path / "m.parquet")]) == 0
    message = capsys.readouterr().err
    assert (
        "1 of 3 images have several masks, such as benign (2).png. Each gets their union: they are taken as several lesions."
        in message
    )
    assert "If they are by several annotators, pass `annotators=" in message
    manifest = Manifest.read(tmp_path / "m.parquet")
    assert manifest.ids == ["benign/benign (1)", "benign/benign (2)", "normal/normal (1)"]
    assert manifest.classes == ("benign", "normal")
    masks = [manifest.mask_path(i) for i in range(3)]
    assert [mask and mask.name for mask in masks] == ["benign (1)_mask.png", "benign (2).png", "normal (1)_mask.png"]
    assert masks[1] == tmp_path / "m-masks" / "benign" / "benign (2).png"
    assert (np.asarray(Image.open(masks[1])) == np.maximum.reduce(parts)).all()


def test_several_masks_that_cannot_be_merged_are_rejected(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", 1)
    for ending in ("_mask", "_mask_1"):
        save(disc_mask(), root / "MEL" / f"MEL_0{ending}.png")
    with pytest.raises(RequestError, match=r"MEL_0.png has several masks .*: MEL/MEL_0_mask.png, MEL/MEL_0_mask_1.png"):
        folder_manifest(root, root)
    with pytest.raises(RequestError, match="would become a class"):
        folder_manifest(root, root, merged=root / "union")
    with pytest.raises(RequestError, match=r"look like masks.*MEL_0_mask_1.png"):
        folder_manifest(root)
    save(Image.new("L", (8, 8)), root / "MEL" / "MEL_0_mask_1.png")
    with pytest.raises(RequestError, match=r"of one size, but MEL_0_mask_1.png has 8 x 8"):
        folder_manifest(root, root, merged=tmp_path / "union")
    assert not (root / "union").exists()


def square(top: int, left: int, value: int = 255) -> Image.Image:
    """A mask of 20 x 20 pixels with a square of 10 x 10."""
    pixels = np.zeros((20, 20), np.uint8)
    pixels[top : top + 10, left : left + 10] = value
    return Image.fromarray(pixels)


def annotated(root: Path, layout: str) -> Path:
    """Images a (three annotators), a_b (two) and c (one); masks have suffixes, or are in a folder for each annotator."""
    for seed, name in enumerate(("a", "a_b", "c")):
        save(lesion_picture(seed), root / "photos" / f"{name}.jpg")
    masks = {
        ("a", "A03_T1_S1"): square(0, 0),
        ("a", "A07_T2_S1"): square(0, 4),
        ("a", "A09_T3_S2"): square(6, 0, 180),
        ("a_b", "A03_T1_S1"): square(0, 0),
        ("a_b", "A07_T2_S1"): square(10, 10),
        ("c", "A03_T1_S1"): square(5, 5),
    }
    for (name, reader), mask in masks.items():
        save(mask, root / "masks" / (f"{name}_{reader}.png" if layout == "suffixes" else f"{reader}/{name}.png"))
    return root


@pytest.mark.parametrize("layout", ["suffixes", "folders"])
def test_of_several_annotators_half_decide_and_each_stays_known(
    tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = annotated(tmp_path / "data", layout)
    command = ["data", "folder", str(root / "photos"), "--masks", str(root / "masks"), "--out", str(root / "m.parquet")]
    assert main([*command, "--annotators", "each"]) == 0
    said = capsys.readouterr().err
    assert "2 of 3 images have several masks, such as a.jpg. Training reads what at least half of the annotators marked" in said
    manifest = Manifest.read(root / "m.parquet")
    assert manifest.ids == ["a", "a_b", "c"]
    joined = [np.asarray(Image.open(str(manifest.mask_path(i)))) > 0 for i in range(3)]
    # Two of three: where any two squares meet. One of two is half of the annotators.
    expected = np.zeros((20, 20), bool)
    expected[0:10, 4:10] = expected[6:10, 0:10] = True
    assert (joined[0] == expected).all()
    assert joined[1].sum() == 200
    assert joined[2].sum() == 100
    names = ["A03_T1_S1", "A07_T2_S1", "A09_T3_S2"]
    paths = [root / "masks" / (f"a_{name}.png" if layout == "suffixes" else f"{name}/a.png") for name in names]
    assert manifest.annotator_paths(0) == paths
    assert [len(manifest.annotator_paths(i)) for i in range(3)] == [3, 2, 0]

    # A folder moves together with its manifest, also after an edit.
    moved = tmp_path / "elsewhere"
    shutil.move(root, moved)
    assert all(path.is_file() for path in Manifest.read(moved / "m.parquet").annotator_paths(0))
    assert main(["data", "csv", str(moved / "m.parquet"), "--out", str(moved / "sub" / "again.parquet"), "--allow-unlabeled"]) == 0
    again = Manifest.read(moved / "sub" / "again.parquet")
    assert [path.resolve() for path in again.annotator_paths(1)] == manifest_paths(moved, layout)
    assert again.annotator_paths(2) == []


def manifest_paths(root: Path, layout: str) -> list[Path]:
    names = ["A03_T1_S1", "A07_T2_S1"]
    return [root / "masks" / (f"a_b_{name}.png" if layout == "suffixes" else f"{name}/a_b.png") for name in names]


def test_the_majority_leaves_the_union_of_another_manifest_alone(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", 1)
    save(square(0, 0), tmp_path / "masks" / "MEL_0_mask.png")
    save(square(0, 4), tmp_path / "masks" / "MEL_0_mask_1.png")
    save(square(0, 8), tmp_path / "masks" / "MEL_0_mask_2.png")
    command = ["data", "folder", str(root), "--masks", str(tmp_path / "masks"), "--out", str(tmp_path / "m.parquet")]
    assert main(command) == 0
    union = Manifest.read(tmp_path / "m.parquet").mask_path(0)
    assert main([*command, "--annotators", "majority"]) == 2  # another manifest is there
    assert (np.asarray(Image.open(union)) > 0).sum() == 180
    assert main([*command, "--annotators", "majority", "--overwrite"]) == 0
    manifest = Manifest.read(tmp_path / "m.parquet")
    assert (np.asarray(Image.open(str(manifest.mask_path(0)))) > 0).sum() == 100  # columns 4 to 13
    assert manifest.further == []


def test_annotators_that_cannot_be_compared_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = annotated(tmp_path, "suffixes")
    command = ["data", "folder", str(root / "photos"), "--out", str(root / "m.parquet"), "--annotators", "each"]
    assert main(command) == 2
    assert "masks" in capsys.readouterr().err
    save(Image.new("L", (10, 10), 255), root / "masks" / "a_A11_T1_S1.png")
    assert main([*command, "--masks", str(root / "masks")]) == 2
    assert "of one size, but a_A11_T1_S1.png has 10 x 10 pixels, a_A03_T1_S1.png 20 x 20" in capsys.readouterr().err
    for path in sorted((root / "masks").iterdir()):
        if "A03" not in path.name:
            path.unlink()
    assert main([*command, "--masks", str(root / "masks")]) == 2
    assert "No image has several masks" in capsys.readouterr().err
    assert not (root / "m.parquet").exists()


FOLDER_BAD = {
    "train beside test": (
        lambda root: [(root / a).rename(root / b) for a, b in (("MEL", "train"), ("NV", "test"))],
        "folders test, train",
    ),
    "capital parts": (lambda root: (root / "MEL").rename(root / "Test"), "folders NV, Test"),
    "a part beside classes": (
        lambda root: save(lesion_picture(9), root / "val" / "MEL" / "x.png"),
        "Cannot tell parts of a split from classes",
    ),
    "missing": (lambda root: shutil.rmtree(root), "does not exist"),
    "no image": (lambda root: [path.unlink() for path in root.rglob("*.png")], "contain no images"),
    "loose images beside class folders": (
        lambda root: save(lesion_picture(9), root / "loose.png"),
        "both class folders and images outside of them",
    ),
    "one name, two files": (lambda root: save(lesion_picture(9), root / "MEL" / "MEL_0.jpg"), "more than once: MEL/MEL_0"),
    "mask folder missing": (lambda root: shutil.rmtree(root.parent / "masks"), "Pass the folder that contains the masks"),
    "masks of other images": (lambda root: (root.parent / "masks/MEL_0.png").rename(root.parent / "masks/x.png"), "No mask in"),
    "two masks": (lambda root: save(disc_mask(), root.parent / "masks" / "MEL_0_mask.png"), "more than one mask"),
}


@pytest.mark.parametrize("case", FOLDER_BAD)
def test_a_folder_that_is_wrong_is_rejected(tmp_path: Path, case: str) -> None:
    root = class_folders(tmp_path / "images", 2)
    save(disc_mask(), tmp_path / "masks" / "MEL_0.png")
    harm, message = FOLDER_BAD[case]
    harm(root)
    with pytest.raises(RequestError, match=message):
        folder_manifest(root, tmp_path / "masks")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    for k in range(3):
        save(lesion_picture(k), tmp_path / "pictures" / f"{k}.png")
    save(disc_mask(), tmp_path / "mask.png")
    path = tmp_path / "table.csv"
    path.write_text(
        "image,image_id,label,mask,group,split\n"
        "pictures/0.png,007,NA,mask.png,p1,train\npictures/1.png,x,MEL,,p1,train\npictures/2.png,y,MEL,,,val\n"
    )
    return path


def test_a_csv_keeps_its_text_and_needs_no_more_than_the_images(table: Path) -> None:
    manifest = csv_manifest(table)
    assert manifest.ids == ["007", "x", "y"]
    assert manifest.classes == ("MEL", "NA")
    assert manifest.rows["label"].tolist() == ["NA", "MEL", "MEL"]
    assert manifest.rows["group"].tolist() == ["p1", "p1", None]
    assert manifest.mask_path(0) == table.parent.resolve() / "mask.png"
    assert manifest.rows["split"].tolist() == ["train", "train", "val"]
    table.write_text("image\npictures/0.png\npictures/1.png\n")
    assert csv_manifest(table).rows[["image_id", "label"]].to_numpy().tolist() == [["0", None], ["1", None]]


@pytest.mark.parametrize("missing", ["NaN", "<NA>", ""])
def test_nan_is_no_label_no_group_and_no_mask(table: Path, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = f"pictures/0.png,{missing},{missing},{missing}\npictures/1.png,MEL,mask.png,p1\npictures/2.png,{missing},,\n"
    table.write_text(f"image,label,mask,group\n{rows}")
    with pytest.raises(RequestError, match=r"label is empty or NaN.*`allow_unlabeled`.*: row 2, row 4"):
        csv_manifest(table)
    capsys.readouterr()
    manifest = csv_manifest(table, allow_unlabeled=True)
    assert manifest.classes == ("MEL",)
    for column, values in {"label": [None, "MEL", None], "group": [None, "p1", None]}.items():
        assert manifest.rows[column].tolist() == values
    assert [manifest.mask_path(i) is None for i in range(3)] == [True, False, True]
    assert ("2 of 3 rows have NaN as their label: taken as no label." in capsys.readouterr().err) == bool(missing)
    path = table.with_suffix(".parquet")
    pq.write_table(pa.table({"image": ["pictures/0.png", "pictures/1.png"], "label": [1.5, float("nan")]}), path)
    assert csv_manifest(path, allow_unlabeled=True).rows["label"].tolist() == ["1.5", None]


@pytest.mark.parametrize("name", ["NA", "None"])
def test_a_class_may_be_called_like_nothing_and_that_is_said(table: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table.write_text(f"image,label\npictures/0.png,{name}\npictures/1.png,MEL\npictures/2.png,{name}\n")
    message = f"2 rows have the label {name}: taken as the name of a class. Leave the cell empty for no label."
    assert csv_manifest(table).rows["label"].tolist() == [name, "MEL", name]
    assert message in capsys.readouterr().err
    assert csv_manifest(table, [name, "MEL"]).classes == (name, "MEL")
    assert message not in capsys.readouterr().err
    table.write_text("image,label\npictures/0.png,nan\npictures/1.png,MEL\n")
    assert csv_manifest(table, ["nan", "MEL"]).rows["label"].tolist() == ["nan", "MEL"]


def test_a_link_in_a_circle_is_named_and_the_other_images_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = class_folders(tmp_path / "images", 2)
    for path in (root / "circle", root / "MEL" / "circle.png"):
        path.symlink_to(path)
    expected = folder_manifest(class_folders(tmp_path / "plain", 2)).ids
    capsys.readouterr()
    assert folder_manifest(root).ids == expected
    message = capsys.readouterr().err
    for path in (root / "circle", root / "MEL" / "circle.png"):
        assert message.count(f"Skipped {path}: Too many levels of symbolic links.") == 1
    assert [Path(source.name).stem for source in expand(root)] == [Path(name).name for name in expected]
    with pytest.raises(RequestError, match="Pass the folder that contains the masks"):
        folder_manifest(root, root / "circle")


CSV_BAD = {
    "no image column": ("file,label\na.png,MEL\n", {}, "no column 'image', only file"),
    "a column that means nothing": ("image,lable\npictures/0.png,MEL\n", {}, "unknown columns: lable"),
    "no rows": ("image,label\n", {}, "has no rows"),
    "empty file": ("", {}, "not a readable CSV file"),
    "image missing": ("image\npictures/9.png\n", {}, r"images that do not exist: row 2 \(pictures/9.png\)"),
    "image cell empty": ("image,label\n,MEL\n", {}, "image is empty: row 2"),
    "mask missing": ("image,mask\npictures/0.png,m.png\n", {}, r"masks that do not exist: row 2 \(m.png\)"),
    "label empty": ("image,label\npictures/0.png,\n", {}, "label is empty.*`allow_unlabeled`.*row 2"),
    "label unknown": ("image,label\npictures/0.png,XYZ\n", {"classes": ["MEL", "NV"]}, r"other than MEL, NV: row 2 \(XYZ\)"),
    "split unknown": ("image,split\npictures/0.png,test\n", {}, r"other than train, select, val: row 2 \(test\)"),
    "split empty": ("image,split\npictures/0.png,\n", {}, "other than train, select, val: row 2"),
    "id twice": ("image,image_id\npictures/0.png,a\npictures/1.png,a\n", {}, "more than once: a"),
    "name twice": ("image\npictures/0.png\n./pictures/0.png\n", {}, "more than once: 0.*add a column image_id"),
    "ragged": ("image,label\npictures/0.png,MEL,3,4\n\n1,2,3,4,5,6\n", {}, "not a readable CSV file|columns|exist"),
}


@pytest.mark.parametrize("case", CSV_BAD)
def test_a_csv_that_is_wrong_is_rejected(table: Path, case: str) -> None:
    text, options, message = CSV_BAD[case]
    table.write_text(text)
    with pytest.raises(RequestError, match=message):
        csv_manifest(table, **options)


def described(tmp_path: Path, text: str) -> Manifest:
    """Three pictures, joined with the text of a CSV."""
    for name in ("a", "b", "c"):
        save(lesion_picture(1), tmp_path / "photos" / "MEL" / f"{name}.png")
    (tmp_path / "about.csv").write_text(text)
    return readers.join_columns(folder_manifest(tmp_path / "photos"), tmp_path / "about.csv")


def test_columns_are_joined_by_id_and_stay_in_the_file_but_not_in_the_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joined = described(tmp_path, "image_id,hair,site\nMEL/c,1,\nMEL/a,0,back\nMEL/x,1,arm\n")
    assert joined.further == ["hair", "site"]
    assert joined.rows["hair"].tolist() == ["0", None, "1"]
    assert joined.rows["site"].tolist() == ["back", None, None]
    assert "1 of 3 images have no row in" in capsys.readouterr().err
    plain = folder_manifest(tmp_path / "photos")
    assert joined.hash == plain.hash
    path = joined.write(tmp_path / "m.parquet")
    again = Manifest.read(path)
    assert again.rows["hair"].tolist() == ["0", None, "1"]
    assert again.part("train").take([2]).rows["hair"].tolist() == ["1"]
    # A value that was changed behind its back is noticed, and the edited file is read with its columns.
    table = pq.read_table(path)
    changed = table.set_column(table.column_names.index("hair"), "hair", pa.array(["1", None, "1"]))
    pq.write_table(changed, path)
    with pytest.raises(RequestError, match="was edited or damaged"):
        Manifest.read(path)
    assert csv_manifest(path).rows["hair"].tolist() == ["1", None, "1"]


def test_columns_of_a_table_that_names_files_are_joined_by_their_stem(tmp_path: Path) -> None:
    save(lesion_picture(1), tmp_path / "photos" / "a.png")
    (tmp_path / "about.csv").write_text("image,hair\na.jpg,1\n")
    assert readers.join_columns(folder_manifest(tmp_path / "photos"), tmp_path / "about.csv").rows["hair"].tolist() == ["1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,hair\nMEL/a,1\n", "has no column 'image_id', only name, hair"),
        ("image_id,label\nMEL/a,1\n", "the manifest has already or that cannot be names: label"),
        ("image_id,a|b\nMEL/a,1\n", "cannot be names"),
        ("image_id,hair\nMEL/a,1\nMEL/a,0\n", "more than one row for MEL/a"),
        ("image_id,hair\na,1\n", "no image_id of the manifest: it has a; the manifest has MEL/a"),
    ],
)
def test_columns_that_cannot_be_joined_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        described(tmp_path, text)


def test_artifacts_that_people_saw_become_columns_of_isic_and_survive_another_split(real: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "isic.parquet", tmp_path / "again.parquet"
    artifacts = real.parent / "artefacts.csv"
    assert main(["data", "isic", str(real), "--split", "paper", "--columns", str(artifacts), "--out", str(out)]) == 0
    table = pd.read_csv(artifacts, dtype=str).set_index("image_id")
    rows = Manifest.read(out).rows
    originals = [name.replace("_downsampled", "") for name in rows["image_id"]]
    seen = [table.loc[name, "ruler"] if name in table.index else None for name in originals]
    assert sum(value is not None for value in seen) == 537  # 136 of them by their own name
    assert rows["ruler"].tolist() == seen
    assert main(["data", "split", str(out), "--split", "kfold", "--out", str(again)]) == 0
    pd.testing.assert_series_equal(Manifest.read(again).rows["ruler"], rows["ruler"])


@pytest.mark.slow
def test_the_complete_files_have_three_centers_as_the_prefix_of_the_lesion_says(whole: Path, tmp_path: Path) -> None:
    manifest = isic_manifest(whole, "none")
    assert Counter(manifest.rows["center"]) == {"BCN20000": 12_413, "HAM10000": 10_015, "MSK": 2_903}
    table = pd.read_csv(whole / METADATA, dtype=str, keep_default_na=False).set_index("image").loc[manifest.ids, "lesion_id"]
    prefix = table.str.split("_").str[0].replace({"HAM": "HAM10000", "BCN": "BCN20000", "MSK4": "MSK"}).to_numpy()
    assert Counter(prefix == manifest.rows["center"]) == {True: 23_247, False: 2_084}  # the 23,247 images of Fed-ISIC2019
    assert set(prefix[prefix != manifest.rows["center"]]) == {""}
    left_out = apply_split(manifest, "center", fold=1)
    assert Counter(left_out.rows["split"]) == {"val": 10_015, "train": 15_316}
    assert set(left_out.part("val").rows["center"]) == {"HAM10000"}
    assert not left_out.crossing.any()  # no lesion was photographed in two of them


@pytest.mark.slow
def test_the_papers_split_of_the_complete_files_lets_2294_lesions_cross(whole: Path) -> None:
    manifest = isic_manifest(whole, "none")
    sides: dict[str, set[str]] = {}
    for group, split in zip(manifest.rows["group"], manifest.rows["split"]):
        sides.setdefault(group, set()).add(split)
    both = {group for group, parts in sides.items() if len(parts) == 2}
    assert len(both) == 2_294
    crossing = manifest.rows[manifest.crossing]
    assert set(crossing["group"]) == both
    assert len(crossing) == 3_079


RESULTS_HASH = "a77722d229552c91e32da51deb2e886efc17323019265db28b4c6be7e9c5a6c7"


def test_the_images_of_the_results_pages_are_listed_with_the_hash_of_their_manifest(real: Path, tmp_path: Path) -> None:
    ids = Path(__file__).parents[2] / "docs" / "results" / "isic.ids.csv"
    assert pd.read_csv(ids)["image_id"].tolist() == isic_manifest(real).ids
    command = ["data", "isic", str(real), "--split", "paper", "--only", str(ids), "--out", str(tmp_path / "m.parquet")]
    assert main(command) == 0
    assert Manifest.read(tmp_path / "m.parquet").hash == RESULTS_HASH
    assert RESULTS_HASH in (ids.parents[1] / "reproduce.md").read_text()


@pytest.mark.slow
def test_the_complete_download_restricted_to_a_list_is_the_manifest_of_the_partial_one(
    real: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = isic_manifest(real, "none")
    (tmp_path / "ids.csv").write_text("image_id\n" + "\n".join(reversed(part.ids)) + "\n")
    restricted = readers.only_images(isic_manifest(whole, "none"), tmp_path / "ids.csv")
    assert (restricted.hash, restricted.split_hash) == (part.hash, part.split_hash)
    (tmp_path / "ids.csv").write_text("image_id\nISIC_0000000\nISIC_9\n")
    with pytest.raises(RequestError, match=r"1 of the 2 images in .* are not here: ISIC_9"):
        readers.only_images(isic_manifest(whole, "none"), tmp_path / "ids.csv")
    (tmp_path / "ids.csv").write_text("image\nISIC_0000000\n")
    with pytest.raises(RequestError, match="no column 'image_id'"):
        readers.only_images(part, tmp_path / "ids.csv")
