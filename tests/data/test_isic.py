"""ISIC 2019: the figures of the paper on the real CSVs, and an official layout that is wrong in some way."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from medtokenbudget.data import isic_manifest, match_masks, paper_split
from medtokenbudget.data.isic import CLASSES, GROUND_TRUTH, IMAGES, MASK_FOLDERS, METADATA, read_ground_truth, read_lesions
from medtokenbudget.errors import RequestError
from tests.data.pictures import disc_mask, lesion_picture, save


@pytest.fixture(scope="session")
def real(shared: Path) -> Path:
    return shared / "data" / "isic"


def test_the_paper_split_has_the_papers_sizes_and_class_counts(real: Path) -> None:
    truth = read_ground_truth(real / GROUND_TRUTH)
    split = paper_split(len(truth))
    assert Counter(split) == {"train": 20_264, "val": 5_067}
    validation = Counter(truth["label"][split == "val"])
    assert [validation[name] for name in CLASSES] == [910, 2568, 673, 167, 516, 45, 60, 128]
    assert truth["image"].str.endswith("_downsampled").sum() == 2_074


def test_images_of_a_partial_download_stay_on_their_side(real: Path) -> None:
    manifest = isic_manifest(real)
    assert Counter(manifest.rows["split"]) == {"train": 1_663, "val": 405}
    truth = read_ground_truth(real / GROUND_TRUTH)
    side = dict(zip(truth["image"], paper_split(len(truth))))
    assert all(side[image] == split for image, split in zip(manifest.ids, manifest.rows["split"]))
    order = {image: place for place, image in enumerate(truth["image"])}
    assert manifest.ids == sorted(manifest.ids, key=order.__getitem__)
    assert all(manifest.image_path(i).is_file() for i in range(0, len(manifest), 100))


def test_exact_names_find_136_masks_and_none_in_validation(real: Path) -> None:
    manifest = isic_manifest(real, "exact")
    masked = manifest.rows[manifest.rows["mask"].notna()]
    assert Counter(masked["split"]) == {"train": 136}
    assert not masked["image_id"].str.endswith("_downsampled").any()


def test_ids_find_all_masks_of_both_sources(real: Path) -> None:
    both = isic_manifest(real, "by-id", ["isic2018", "ham10000"])
    assert both.rows["mask"].notna().all()
    alone = isic_manifest(real, "by-id", ["isic2018"])
    assert alone.rows["mask"].notna().sum() == 675
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
    images = [f"{image}.jpg" for image in read_ground_truth(real / GROUND_TRUTH)["image"]]
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
    whole: Path, how: str, training: dict[str, int], validation: dict[str, int]
) -> None:
    manifest = isic_manifest(whole, how, ["isic2018"])
    assert len(manifest) == 25_331
    masked = manifest.rows[manifest.rows["mask"].notna()]
    assert Counter(masked["label"][masked["split"] == "train"]) == training
    assert Counter(masked["label"][masked["split"] == "val"]) == validation
    assert sum(training.values()) + sum(validation.values()) == {"exact": 617 + 155, "by-id": 2_073 + 520}[how]


def test_every_mask_at_hand_is_in_the_list_of_all(real: Path, whole: Path) -> None:
    folder = MASK_FOLDERS["isic2018"]
    assert {path.name for path in (real / folder).glob("*.png")} < {path.name for path in (whole / folder).iterdir()}


def test_a_group_is_a_lesion_or_the_image_itself(real: Path) -> None:
    lesions = read_lesions(real / METADATA)
    manifest = isic_manifest(real, "none")
    assert 25_331 - len(lesions) == 2_084
    assert all(group == lesions.get(image, image) for image, group in zip(manifest.ids, manifest.rows["group"]))
    assert manifest.rows["group"].notna().all()


def test_matching_by_id_looks_through_the_suffix_and_exact_does_not() -> None:
    images = ["ISIC_1", "ISIC_2_downsampled", "ISIC_3", "ISIC_4_downsampled"]
    masks = ["ISIC_1", "ISIC_2", "ISIC_9"]
    assert match_masks(images, masks, "exact") == {"ISIC_1": "ISIC_1"}
    assert match_masks(images, masks, "by-id") == {"ISIC_1": "ISIC_1", "ISIC_2_downsampled": "ISIC_2"}
    assert match_masks(images, masks, "none") == {}


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


def test_the_first_named_source_of_a_mask_wins(official: Path) -> None:
    for order in (["isic2018", "ham10000"], ["ham10000", "isic2018"]):
        mask = isic_manifest(official, "by-id", order).rows["mask"][1]
        assert MASK_FOLDERS[order[0]] in mask


def test_folders_unpacked_inside_themselves_are_read_too(official: Path) -> None:
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


def write_truth(*rows: str, header: str = TRUTH) -> object:
    return lambda root: (root / GROUND_TRUTH).write_text(header + "\n".join(rows))


BAD = {
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
    "empty csv": (lambda root: (root / GROUND_TRUTH).write_text(""), {}, "not a CSV file"),
    "binary csv": (lambda root: (root / GROUND_TRUTH).write_bytes(b"\xff\xfe\x00\x80image"), {}, "not a CSV file"),
    "image without a row": (write_truth(ROWS[0]), {}, "no row.*ISIC_2_downsampled.jpg.*--ignore-unlabeled"),
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
    "no mask folder at all": (lambda root: [shutil.rmtree(root / f) for f in MASK_FOLDERS.values()], {}, "--masks none"),
    "unknown matching": (lambda root: None, {"masks": "fuzzy"}, "Unknown mask matching 'fuzzy'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_layout_that_is_wrong_is_rejected_with_what_to_do(official: Path, case: str) -> None:
    harm, options, message = BAD[case]
    harm(official)
    with pytest.raises(RequestError, match=message):
        isic_manifest(official, **options)


def test_files_without_a_row_are_left_out_when_asked(official: Path) -> None:
    (official / GROUND_TRUTH).write_text(TRUTH + ROWS[0])
    assert isic_manifest(official, ignore_unlabeled=True).ids == ["ISIC_1"]
