"""How a prediction shows itself: a picture in notebooks, and overlays from paths, pictures and arrays alike."""

from __future__ import annotations

import base64
import doctest
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import medtokenbudget as mtb
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError
from medtokenbudget.model import MedTokenBudget, Prediction, overlay, overlays
from medtokenbudget.model import model as routed
from medtokenbudget.model.overlays import LESION_EDGE
from tests.small_model import CLASSES, draw_images, small_model

MAIN = "lats:lesion-first"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prediction")


@pytest.fixture(scope="module")
def model(root: Path) -> MedTokenBudget:
    return small_model(root / "weights", baselines=("center", "tome"), main=MAIN)


@pytest.fixture(scope="module")
def images(root: Path) -> list[Path]:
    return draw_images(root / "images", 3)


def lesion_mask() -> np.ndarray:
    mask = np.zeros((200, 200), np.uint8)
    mask[60:140, 60:140] = 255
    return mask


def amber(picture: Image.Image) -> int:
    return int((np.asarray(picture) == np.array(LESION_EDGE)).all(-1).sum())


def test_a_notebook_shows_the_image_with_its_kept_patches(model: MedTokenBudget, images: list[Path]) -> None:
    (found,) = model.predict(images[0], selector="center")
    png = found._repr_png_()
    assert png is not None
    shown = Image.open(io.BytesIO(png))
    assert np.array_equal(np.asarray(shown), np.asarray(overlay(images[0], found)))
    # The center is kept and clear, the corner is dropped and dim.
    pixels = np.asarray(shown.convert("L"), dtype=float)
    assert pixels[5:55, 5:55].mean() < 0.5 * np.asarray(Image.open(images[0]).convert("L"), dtype=float)[:15, :15].mean()


def test_the_html_of_a_prediction_is_its_picture_with_its_text(model: MedTokenBudget, images: list[Path]) -> None:
    (found,) = model.predict(images[0])
    text = found._repr_html_()
    assert text is not None
    match = re.fullmatch(r'<img alt="([^"]*)" src="data:image/png;base64,([^"]*)">', text)
    assert match is not None
    assert "30 of 100 patches" in match[1]
    assert base64.b64decode(match[2]) == found._repr_png_()


def test_a_notebook_shows_text_when_the_file_is_gone(model: MedTokenBudget, tmp_path: Path) -> None:
    (path,) = draw_images(tmp_path, 1)
    (found,) = model.predict(path)
    path.unlink()
    assert found._repr_png_() is None
    assert found._repr_html_() is None
    assert "30 of 100 patches" in repr(found)
    with pytest.raises(RequestError, match="does not exist"):
        found.overlay()


def test_a_picture_passed_as_an_object_is_shown_again(model: MedTokenBudget, images: list[Path]) -> None:
    with Image.open(images[0]) as opened:
        picture = opened.convert("RGB")
    (of_file,), (of_picture,), (of_array,) = (model.predict(given) for given in (images[0], picture, np.asarray(picture)))
    assert of_picture._repr_png_() == of_array._repr_png_() == of_file._repr_png_() != b""


def test_the_mask_of_a_manifest_is_outlined(model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    Image.fromarray(lesion_mask()).save(tmp_path / "mask.png")
    rows = [
        {"image_id": "a", "image": str(images[0]), "mask": str(tmp_path / "mask.png"), "label": "NV"},
        {"image_id": "b", "image": str(images[1])},
    ]
    first, second = model.predict(Manifest.from_records(rows, CLASSES))
    assert amber(first.overlay()) > 500
    assert amber(second.overlay()) == 0


def test_overlay_takes_paths_pictures_and_arrays_alike(model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    (found,) = model.predict(images[0])
    mask = lesion_mask()
    Image.fromarray(mask).save(tmp_path / "mask.png")
    picture = Image.open(images[0]).convert("RGB")
    wanted = np.asarray(mtb.overlay(images[0], found, tmp_path / "mask.png"))
    assert amber(Image.fromarray(wanted)) > 500
    for image, outline in (
        (str(images[0]), Image.fromarray(mask)),
        (picture, mask),
        (np.asarray(picture), mask > 0),
        (images[0].read_bytes(), (tmp_path / "mask.png").read_bytes()),
    ):
        assert np.array_equal(np.asarray(mtb.overlay(image, found, outline)), wanted)


def test_a_mask_of_zeros_and_ones_is_rejected_instead_of_drawn_empty(model: MedTokenBudget, images: list[Path]) -> None:
    (found,) = model.predict(images[0])
    with pytest.raises(RequestError, match=r"only the values 0 and 1.*Multiply its values by 255"):
        mtb.overlay(images[0], found, lesion_mask() // 255)


def test_a_prediction_without_a_picture_says_how_to_draw_it(model: MedTokenBudget, images: list[Path]) -> None:
    (found,) = model.predict(images[0])
    values = {name: getattr(found, name) for name in Prediction.__dataclass_fields__ if name != "source"}
    with pytest.raises(RequestError, match=r"Use mtb\.overlay\(image, prediction\)"):
        Prediction(**values).overlay()


def test_the_examples_in_the_docstrings_run_as_written(
    model: MedTokenBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("runs/demo/model")
    draw_images(tmp_path, 1)[0].rename("photo.jpg")
    names = {"mtb": mtb, "model": model}
    finder, runner = doctest.DocTestFinder(recurse=True), doctest.DocTestRunner()
    ran = 0
    for module in (routed, overlays):
        for test in finder.find(module, extraglobs=names):
            ran += len(test.examples)
            report = io.StringIO()
            assert runner.run(test, out=report.write).failed == 0, report.getvalue()
    assert ran >= 7
