"""The drawn dermoscopy: repeatable, labeled, sized as in the paper, placed where it says, and no give-away; and its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from medtokenbudget.data import Drawings, Manifest, decode_image, decode_mask, synthetic_manifest
from medtokenbudget.data.readers import ISIC_CLASSES as CLASSES
from medtokenbudget.data.synthetic import RENDERER, Drawing, draw, sample_labels
from medtokenbudget.errors import RequestError


@pytest.fixture(scope="module")
def many() -> list[Drawing]:
    """Drawings at the frequencies of ISIC 2019; small, since outlines do not depend on the number of pixels."""
    return [draw(label, seed, size=96) for seed, label in enumerate(sample_labels(300, seed=5))]


def lesion_patches(mask: np.ndarray) -> np.ndarray:
    """The supplement's patch labels: bilinear to 16 x 16, more than one half."""
    grid = Image.fromarray(mask.astype(np.uint8) * 255).resize((16, 16), Image.Resampling.BILINEAR)
    return np.asarray(grid) / 255 > 0.5


@pytest.mark.parametrize("off_center", [False, True])
@pytest.mark.parametrize("label", CLASSES)
def test_every_class_is_drawn_with_its_mask_and_twice_the_same(label: str, off_center: bool) -> None:
    first, second = (draw(label, 11, 64, off_center) for _ in range(2))
    assert (first.image.shape, first.image.dtype) == ((64, 64, 3), np.uint8)
    assert (first.mask.shape, first.mask.dtype) == ((64, 64), bool)
    assert first.mask.any()
    assert first.label == label
    assert first.traits["prevalence"] == first.mask.mean()
    assert json.loads(json.dumps(first.traits)).keys() == first.traits.keys()
    np.testing.assert_array_equal(first.image, second.image)
    np.testing.assert_array_equal(first.mask, second.mask)
    assert first.traits == second.traits


def test_the_version_of_the_renderer_changes_with_its_pixels() -> None:
    """Sums of the pixels with random signs: another rounding moves them by a few units, other noise by hundreds.

    If they moved, change `RENDERER` and write the new sums here: folders of older drawings must not be continued.
    """
    assert RENDERER == "05358133b0eda83a"
    signs = np.random.default_rng(0).choice([-1, 1], (64, 64, 3))
    sums = [int((signs * draw(label, 7, 64).image).sum()) for label in CLASSES]
    np.testing.assert_allclose(sums, [21528, 17173, 13473, 10358, 12501, 6915, 18799, 18694], atol=8)


@pytest.mark.slow
def test_prevalence_follows_the_paper(many: list[Drawing]) -> None:
    share = np.array([100 * lesion_patches(drawing.mask).mean() for drawing in many])
    assert np.percentile(share, 25) == pytest.approx(13.7, abs=4)
    assert np.median(share) == pytest.approx(27.7, abs=4)
    assert np.percentile(share, 75) == pytest.approx(40.6, abs=4)
    assert share.mean() == pytest.approx(31.6, abs=3)
    assert share.std() == pytest.approx(22.8, abs=3)
    assert 0 < share.min() < 6
    assert 88 < share.max() < 100


def test_the_mask_is_where_the_lesion_was_painted(many: list[Drawing]) -> None:
    """Inside and just outside must differ by more than two such parts of plain skin do, in nearly every picture."""
    contrasts = []
    for drawing in many[:200]:
        inside = ndimage.binary_erosion(drawing.mask, iterations=2)
        ring = ndimage.binary_dilation(drawing.mask, iterations=9) & ~ndimage.binary_dilation(drawing.mask, iterations=4)
        ring &= drawing.image.sum(2) > 120
        if inside.sum() > 30 and ring.sum() > 30:
            contrasts.append(np.abs(np.median(drawing.image[inside], 0) - np.median(drawing.image[ring], 0)).max())
    assert len(contrasts) > 150
    assert np.mean(np.array(contrasts) > 12) > 0.9


def test_off_center_lesions_are_away_from_the_center_and_mostly_inside() -> None:
    centroids, headings = [], []
    for seed in range(64):
        drawing = draw(CLASSES[seed % 8], seed, 128, off_center=True)
        away = np.array(drawing.traits["center"]) - 0.5
        assert 0.25 <= np.hypot(*away) <= 0.33
        headings.append(np.arctan2(away[1], away[0]))
        rows, columns = np.nonzero(drawing.mask)
        centroids.append(np.hypot(columns.mean() / 128 - 0.5, rows.mean() / 128 - 0.5))
        assert drawing.traits["inside"] >= 0.6
    assert min(centroids) > 0.15
    assert np.mean(centroids) > 0.23
    # Directions of all quarters, not a favourite one.
    assert np.histogram(headings, bins=4, range=(-np.pi, np.pi))[0].min() >= 6


def test_skin_hair_and_things_on_it_vary_and_lesions_lie_near_the_center(many: list[Drawing]) -> None:
    traits = [drawing.traits for drawing in many]
    centers = np.array([t["center"] for t in traits])
    assert centers.mean(0) == pytest.approx([0.5, 0.5], abs=0.015)
    assert centers.std(0) == pytest.approx([0.06, 0.06], abs=0.012)
    assert {t["fitzpatrick"] for t in traits} == {1, 2, 3, 4, 5, 6}
    assert {t["hair"] for t in traits} == {"none", "dark", "light", "stubble"}
    assert {t["field"] for t in traits} == {"full", "corners", "circle"}
    for thing in ("ruler", "ink", "bubbles", "telangiectasia"):
        assert 0.03 < np.mean([t[thing] for t in traits]) < 0.5


def test_the_lesion_is_not_simply_the_darkest_part(many: list[Drawing]) -> None:
    """Retention of the K darkest patches as a share of the ceiling at beta 0.3: 86 % on the paper's real masks."""
    kept = ceiling = 0
    for drawing in many:
        lesion = lesion_patches(drawing.mask).ravel()
        luminance = drawing.image.mean(2).reshape(16, 6, 16, 6).mean((1, 3)).ravel()
        kept += lesion[np.argsort(luminance, kind="stable")[:76]].sum()
        ceiling += min(76, lesion.sum())
    assert 0.7 < kept / ceiling < 0.92


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 40, 25_331])
def test_labels_are_as_many_as_asked_hold_every_class_from_eight_on_and_have_the_frequencies_of_isic_2019(n: int) -> None:
    labels = sample_labels(n, seed=4)
    assert len(labels) == n
    assert labels == sample_labels(n, seed=4)
    if n >= 8:
        assert set(labels) == set(CLASSES)
    if n >= 40:
        assert labels != sample_labels(n, seed=5)
    if n == 25_331:
        published = {"MEL": 4522, "NV": 12875, "BCC": 3323, "AK": 867, "BKL": 2624, "DF": 239, "VASC": 253, "SCC": 628}
        assert {name: labels.count(name) for name in CLASSES} == pytest.approx(published, abs=1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: draw("MELANOMA", 0), "'MELANOMA'.* Available: AK, BCC, BKL, DF, MEL, NV, SCC, VASC"),
        (lambda: draw("NV", 0, 16), "`size` must be at least 32"),
        (lambda: draw("NV", -1), "`seed` must be at least 0"),
        (lambda: sample_labels(-3, seed=0), "-3"),
        (lambda: Drawings(n=0), "^`n` must"),
        (lambda: Drawings(n=1, size=8), "^`size` must"),
        (lambda: Drawings(n=1, seed=-1), "^`seed` must"),
    ],
)
def test_an_impossible_request_is_rejected_with_what_to_do(call: Callable[[], object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        call()


REQUEST = Drawings(n=12, seed=3, size=64)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_images_masks_and_manifest_belong_together(tmp_path: Path) -> None:
    manifest = Manifest.read(synthetic_manifest(tmp_path / "drawn", REQUEST, select=0.2))
    assert manifest.ids == [f"SYN_{k:06d}" for k in range(12)]
    assert set(manifest.rows["label"]) <= set(manifest.classes)
    assert set(manifest.rows["split"]) == {"train", "select", "val"}
    for index in range(len(manifest)):
        mask_path = manifest.mask_path(index)
        mask = np.asarray(decode_mask(mask_path))
        assert decode_image(manifest.image_path(index)).size == (64, 64)
        assert set(np.unique(mask)) == {0, 255}


@pytest.mark.slow
def test_the_same_request_is_the_same_bytes_whatever_the_workers(tmp_path: Path) -> None:
    synthetic_manifest(tmp_path / "a", REQUEST)
    synthetic_manifest(tmp_path / "b", REQUEST, workers=2)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    synthetic_manifest(tmp_path / "c", Drawings(n=12, seed=4, size=64))
    assert content(tmp_path / "a")["images/SYN_000000.jpg"] != content(tmp_path / "c")["images/SYN_000000.jpg"]


def test_an_interrupted_drawing_resumes_and_another_request_does_not_mix_in(tmp_path: Path) -> None:
    synthetic_manifest(tmp_path / "a", REQUEST)
    whole = content(tmp_path / "a")
    kept = tmp_path / "a" / "images" / "SYN_000001.jpg"
    before = kept.stat().st_mtime_ns
    for gone in ("images/SYN_000002.jpg", "masks/SYN_000005.png", "manifest.parquet"):
        (tmp_path / "a" / gone).unlink()
    synthetic_manifest(tmp_path / "a", REQUEST)
    assert content(tmp_path / "a") == whole
    assert kept.stat().st_mtime_ns == before
    with pytest.raises(RequestError, match="seed: expected 9, found 3"):
        synthetic_manifest(tmp_path / "a", Drawings(n=12, seed=9, size=64))


@pytest.mark.parametrize("n", [1, 4, 5])
def test_a_few_images_are_a_data_set_too(tmp_path: Path, n: int) -> None:
    manifest = Manifest.read(synthetic_manifest(tmp_path / "few.parquet", Drawings(n=n, size=64)))
    assert len(manifest) == n
    assert manifest.image_path(0) == tmp_path / "few" / "images" / "SYN_000000.jpg"
    assert set(manifest.rows["split"]) == ({"train"} if n < 5 else {"train", "val"})
