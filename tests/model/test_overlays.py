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
from medtokenbudget.model import MedTokenBudget, Prediction, overlays
from medtokenbudget.model import model as model_module
from tests.small_model import CLASSES, draw_images, small_model

MASK = np.zeros((200, 200), np.uint8)
MASK[60:140, 60:140] = 255


def amber(picture: Image.Image) -> int:
    return int((np.asarray(picture) == np.array(overlays.LESION_EDGE)).all(-1).sum())


def test_a_notebook_shows_the_image_with_its_kept_patches(model: MedTokenBudget, images: list[Path]) -> None:
    (found,) = model.predict(images[0], selector="center")
    png = found._repr_png_()
    displayed = Image.open(io.BytesIO(png))
    assert np.array_equal(np.asarray(displayed), np.asarray(mtb.overlay(images[0], found)))
    # The center is kept and clear, the corner is dropped and dim.
    pixels = np.asarray(displayed.convert("L"), dtype=float)
    assert pixels[5:55, 5:55].mean() < 0.5 * np.asarray(Image.open(images[0]).convert("L"), dtype=float)[:15, :15].mean()
    match = re.fullmatch(r'<img alt="([^"]*)" src="data:image/png;base64,([^"]*)">', found._repr_html_() or "")
    assert match is not None
    assert "30 of 100 patches" in match[1]
    assert base64.b64decode(match[2]) == png


def test_a_notebook_shows_text_when_the_picture_is_gone(model: MedTokenBudget, tmp_path: Path) -> None:
    (path,) = draw_images(tmp_path, 1)
    (found,) = model.predict(path)
    path.unlink()
    assert found._repr_png_() is None
    assert found._repr_html_() is None
    assert "30 of 100 patches" in repr(found)
    with pytest.raises(RequestError, match="does not exist"):
        found.overlay()
    values = {name: getattr(found, name) for name in Prediction.__dataclass_fields__ if name != "source"}
    with pytest.raises(RequestError, match=r"Use mtb\.overlay\(image, routing\)"):
        Prediction(**values).overlay()


def test_the_mask_of_a_manifest_is_outlined(model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    Image.fromarray(MASK).save(tmp_path / "mask.png")
    rows = [
        {"image_id": "a", "image": str(images[0]), "mask": str(tmp_path / "mask.png"), "label": "NV"},
        {"image_id": "b", "image": str(images[1])},
    ]
    first, second = model.predict(Manifest.from_records(rows, CLASSES))
    assert amber(first.overlay()) > 500
    assert amber(second.overlay()) == 0


def test_overlay_takes_paths_pictures_and_arrays_alike(model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    (found,) = model.predict(images[0])
    Image.fromarray(MASK).save(tmp_path / "mask.png")
    picture = Image.open(images[0]).convert("RGB")
    expected = np.asarray(mtb.overlay(images[0], found, tmp_path / "mask.png"))
    assert amber(Image.fromarray(expected)) > 500
    for image, outline in (
        (str(images[0]), Image.fromarray(MASK)),
        (picture, MASK),
        (np.asarray(picture), MASK > 0),
        (images[0].read_bytes(), (tmp_path / "mask.png").read_bytes()),
    ):
        assert np.array_equal(np.asarray(mtb.overlay(image, found, outline)), expected)
        assert np.array_equal(np.asarray(model.predict([image])[0].overlay(outline)), expected)
    with pytest.raises(RequestError, match=r"only the values 0 and 1.*Multiply its values by 255"):
        mtb.overlay(images[0], found, MASK // 255)


def test_the_examples_in_the_docstrings_run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(root / "weights", baselines=("center", "tome"), main="lats:lesion-first")
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("runs/demo/model")
    draw_images(tmp_path, 1)[0].rename("photo.jpg")
    ran = 0
    for module in (model_module, overlays):
        for test in doctest.DocTestFinder(recurse=True).find(module, extraglobs={"mtb": mtb, "model": model}):
            ran += len(test.examples)
            report = io.StringIO()
            assert doctest.DocTestRunner().run(test, out=report.write).failed == 0, report.getvalue()
    assert ran >= 7
