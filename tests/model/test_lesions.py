"""The lesion that a router sees, as a mask, boxes and a crop: values, order, what has none, and that nothing is computed twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from medtokenbudget.cli import main
from medtokenbudget.errors import RequestError
from medtokenbudget.model import MedTokenBudget, Routing
from medtokenbudget.model.batch import RouteConfig, route_files
from medtokenbudget.model.overlays import lesion_boxes
from tests.small_model import early_model, scout_model


@pytest.fixture(scope="module")
def scout(images: list[Path]) -> MedTokenBudget:
    """A scout that calls half of each image lesion, in several parts."""
    model = scout_model()
    logit = model.classifier().selector.network.logit
    logit.weight.data *= 20
    probability = np.stack([found.lesion_map for found in model.route(images)])
    logit.bias.data -= float(np.median(np.log(probability / (1 - probability))))
    return model


def calls_of(network: torch.nn.Module) -> list[None]:
    """A list that grows by one with every call of `network`."""
    calls: list[None] = []
    network.register_forward_pre_hook(lambda *_: calls.append(None))
    return calls


def filled(mask: np.ndarray) -> list[tuple[int, tuple[int, int, int, int]]]:
    """Area and box of each part, largest first, by flooding it pixel by pixel."""
    left, parts = set(zip(*np.nonzero(mask))), []
    while left:
        front, part = [left.pop()], []
        while front:
            y, x = front.pop()
            part.append((y, x))
            near = {(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)} & left
            left -= near
            front += near
        rows, columns = zip(*part)
        parts.append((len(part), (min(columns), min(rows), max(columns) + 1, max(rows) + 1)))
    return sorted(parts, reverse=True)


def test_the_mask_is_the_probability_enlarged_to_the_image(scout: MedTokenBudget, images: list[Path]) -> None:
    (found,) = scout.route(images[0])
    picture = Image.open(images[0]).resize((64, 64), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        selector = scout.classifier().selector
        probability = selector.network(selector.images(scout.backbone.tokens(pixels))).sigmoid()
    np.testing.assert_allclose(found.lesion_map, probability[0].numpy(), atol=1e-5)
    # Bilinear enlargement of torch, an independent implementation.
    large = F.interpolate(probability[None], size=(200, 200), mode="bilinear", align_corners=False)[0, 0].numpy()
    for threshold in np.quantile(large, (0.2, 0.5, 0.9)):
        sure = np.abs(large - threshold) > 1e-5
        assert np.array_equal(found.mask(threshold)[sure], (large > threshold)[sure])


def test_boxes_are_of_connected_parts_and_the_largest_comes_first() -> None:
    mask = np.zeros((60, 90), bool)
    mask[5:15, 10:20] = mask[30:50, 40:80] = True  # 100 and 800 pixels
    mask[20:40, 5:8] = True  # 60, which touches nothing
    mask[15, 20] = True  # touches the first by a corner only: a part of its own, but a speck
    assert lesion_boxes(mask) == [(40, 30, 80, 50), (10, 5, 20, 15), (5, 20, 8, 40)]
    assert lesion_boxes(np.zeros((9, 9), bool)) == []
    noise = np.asarray(Image.fromarray(np.random.default_rng(0).random((12, 12)).astype(np.float32)).resize((72, 96))) > 0.55
    expected = [box for area, box in filled(noise) if area >= 0.02 * filled(noise)[0][0]]
    found = lesion_boxes(noise)
    assert sorted(found) == sorted(expected)
    assert found[0] == expected[0]


def test_a_crop_is_the_largest_box_with_a_margin_inside_the_image(images: list[Path], scout: MedTokenBudget) -> None:
    (found,) = scout.route(images[0])
    field = np.zeros((32, 32), np.float32)
    field[0:8, 16:28] = field[20:22, 4:6] = 1
    vars(found)["lesion_map"] = field
    left, top, right, bottom = found.box
    assert len(found.boxes) == 2
    # Half a cell of 6.25 pixels at most from the drawn rectangle.
    np.testing.assert_allclose([left, top, right, bottom], [100, 0, 175, 50], atol=3.2)
    room = round(0.1 * (right - left))
    expected = Image.open(images[0]).crop((left - room, 0, right + room, bottom + room))
    assert np.array_equal(np.asarray(found.crop()), np.asarray(expected))
    assert found.crop(0).size == (right - left, bottom - top)


def test_without_a_lesion_there_is_no_box_and_no_crop(images: list[Path], tmp_path: Path) -> None:
    scout = scout_model()
    torch.nn.init.constant_(scout.classifier().selector.network.logit.bias, -50)
    (found,) = scout.route(images[0])
    assert not found.mask().any()
    assert (found.boxes, found.box, found.crop()) == ([], None, None)
    routed = route_files(images[:1], tmp_path, scout, config=RouteConfig(mask=True, box=True, crop=True))
    (row,) = pd.read_parquet(routed.table).itertuples()
    assert not np.asarray(Image.open(tmp_path / row.mask)).any()
    assert len(row.box) == 0
    assert pd.isna(row.crop)


def test_files_hold_what_a_routing_says_and_the_network_runs_once(
    scout: MedTokenBudget, images: list[Path], tmp_path: Path
) -> None:
    wanted, calls = scout.route(images), calls_of(scout.classifier().selector.network.stem)
    config = RouteConfig(mask=True, box=True, crop=True, batch_size=5)
    table = pd.read_parquet(route_files(images, tmp_path, scout, config=config).table)
    assert len(calls) == 1
    assert not (tmp_path / "overlays").exists()
    for row, routing in zip(table.itertuples(), wanted):
        mask = np.asarray(Image.open(tmp_path / row.mask))
        assert (mask.dtype, mask.shape, set(np.unique(mask)) <= {0, 255}) == (np.uint8, (200, 200), True)
        # A routing computes its map for one image, the command for five: a pixel at the threshold may round to the other side.
        assert ((mask > 0) != routing.mask()).sum() <= 2
        assert routing.boxes
        assert [tuple(box) for box in np.reshape(row.box, (-1, 4)).tolist()] == routing.boxes
        assert np.array_equal(np.asarray(Image.open(tmp_path / row.crop)), np.asarray(routing.crop()))
    np.testing.assert_allclose(table["scores"][0], wanted[0].scores, atol=1e-5)


def test_scores_of_patches_are_the_map_of_a_method_that_has_no_finer_one(
    model: MedTokenBudget, images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = model.predict(images[0])
    monkeypatch.setattr(model, "encode", None)  # running the backbone again would fail
    assert np.array_equal(found.lesion_map, found.scores.reshape(10, 10))
    assert found.mask().shape == (200, 200)


def test_a_model_that_is_routed_early_shows_the_lesion_of_its_router(images: list[Path], tmp_path: Path) -> None:
    model = early_model(tmp_path, "scout")
    (found,) = model.predict(images[0])
    assert np.array_equal(found.lesion_map, model.scout.route(images[0])[0].scores.reshape(10, 10))
    routed = route_files(images[:2], tmp_path / "out", model, config=RouteConfig(mask=True))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out" / pd.read_parquet(routed.table)["mask"][0])) > 0, found.mask())


def test_methods_without_a_lesion_probability_are_refused_by_name_before_any_work(
    model: MedTokenBudget, images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("center", "tome", "local-contrast"):
        with pytest.raises(RequestError, match=f"The method '{name}' gives no lesion probability. Use one that learns scores"):
            route_files(images, tmp_path / "out", model, config=RouteConfig(selector=name, box=True))
    assert not (tmp_path / "out").exists()
    (found,) = model.route(images[0], selector="center")
    with pytest.raises(RequestError, match="'center' gives no lesion probability"):
        found.mask()
    maskless = scout_model()
    maskless.info = {"run": {"masks": 0}}
    folder = maskless.save_pretrained(tmp_path / "maskless")
    command = ["route", str(images[0]), "--model", str(folder), "--mask", "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(command) == 2
    assert "The router's method 'scout' was trained without lesion masks" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    lonely = Routing(**{name: getattr(found, name) for name in Routing.__dataclass_fields__ if name not in ("model", "source")})
    with pytest.raises(RequestError, match="does not know its model and its picture"):
        lonely.mask()
