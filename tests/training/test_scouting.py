"""Training a scout: views, settings, resuming, and the whole way from a manifest to kept patches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.config import PRESETS, preset, settings_of, with_settings
from medtokenbudget.data import Drawings, Manifest, synthetic_manifest
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.training import scouting
from medtokenbudget.training.scouting import random_view, train_scout
from tests.runs.test_method import KINDS, another

SMALL = preset(
    "scout", epochs=2, min_steps=0, batch_size=8, device="cpu", scout=replace(preset("scout").scout, image_size=64, width=0.5)
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_manifest(tmp_path_factory.mktemp("photos"), Drawings(30, seed=4, size=96))


def test_a_view_moves_image_and_mask_together_and_shows_all_of_some() -> None:
    noise = torch.Generator().manual_seed(0)
    masks = torch.zeros(64, 1, 96, 96, dtype=torch.uint8)
    masks[:, :, 20:50, 10:70] = 255
    config = with_settings(SMALL, {"scout.pale": 0.0})
    view, target = random_view(masks.expand(-1, 3, -1, -1), masks, config, noise)
    gray = torch.nn.functional.avg_pool2d(view.mean(1, keepdim=True), 2).squeeze(1)
    assert view.shape == (64, 3, 64, 64)
    assert target.shape == (64, 32, 32)
    assert torch.corrcoef(torch.stack([gray.flatten(), target.flatten()]))[0, 1] > 0.95
    whole = 30 * 60 / 96**2
    assert (target.mean((1, 2)) - whole).abs().lt(0.005).float().mean() > 0.2, "whole images, turned and flipped"
    assert target.mean((1, 2)).std() > 0.05, "and crops"


def test_some_views_have_the_lesion_near_the_frame() -> None:
    images = torch.full((256, 3, 96, 96), 200, dtype=torch.uint8)
    masks = torch.zeros(256, 1, 96, 96, dtype=torch.uint8)
    masks[:, :, 40:56, 40:56] = 255  # in the middle: a crop of the image alone hardly brings it to the frame
    config = with_settings(SMALL, {"scout.pale": 0.0})
    _, target = random_view(images, masks, config, torch.Generator().manual_seed(0))
    axis, total = torch.linspace(-1, 1, 32), target.sum((1, 2)).clamp(min=1)
    away = torch.maximum(((target.sum(1) @ axis) / total).abs(), ((target.sum(2) @ axis) / total).abs())
    assert 0.15 < (away > 0.6).float().mean() < 0.5


def test_dark_corners_are_no_lesion() -> None:
    images, masks = torch.full((256, 3, 96, 96), 200, dtype=torch.uint8), torch.full((256, 1, 96, 96), 255, dtype=torch.uint8)
    view, target = random_view(images, masks, with_settings(SMALL, {"scout.pale": 0.0}), torch.Generator().manual_seed(0))
    dark = torch.nn.functional.max_pool2d(view.amax(1), 2) < 0.15
    assert 0.02 < dark.any(2).any(1).float().mean() < 0.2
    assert target[dark].max() < 0.2
    assert target[~dark].mean() > 0.97


def test_half_of_the_paler_lesions_are_red() -> None:
    images = torch.full((256, 3, 48, 48), 220, dtype=torch.uint8)
    images[:, :, 16:32, 16:32] = 0
    masks = (images[:, :1] == 0).to(torch.uint8) * 255
    config = with_settings(SMALL, {"scout.pale": 1.0, "scout.image_size": 32, "scout.crop": 1.0})
    view, target = random_view(images, masks, config, torch.Generator().manual_seed(0))
    lesion = torch.nn.functional.interpolate(target.unsqueeze(1), (32, 32)) > 0.99
    red, green = ((view[:, c : c + 1] * lesion).sum((1, 2, 3)) / lesion.sum((1, 2, 3)) for c in (0, 1))
    assert 0.25 < (red > 1.2 * green).float().mean() < 0.6
    assert (green > 1.2 * red).float().mean() < 0.1


@pytest.mark.parametrize("name", KINDS)
def test_every_setting_is_read_or_refused(name: str) -> None:
    value = another(settings_of(PRESETS["scout"])[name], KINDS[name])
    if name in ("recipe", "device", "scout.image_size"):
        return
    config = with_settings(preset("scout"), {name: value})
    if name in scouting.READS:
        scouting.check_settings(config)
    else:
        with pytest.raises(RequestError, match=f"does not use {name} = "):
            scouting.check_settings(config)


def test_a_training_that_was_stopped_resumes_to_the_same_numbers(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, save = Manifest.read(photos), scouting._save
    whole = train_scout(manifest, SMALL, tmp_path / "whole").state_dict()

    def stop(*arguments: object) -> None:
        save(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(scouting, "_save", stop)
        with pytest.raises(KeyboardInterrupt):
            train_scout(manifest, SMALL, tmp_path / "stopped")
    resumed = train_scout(manifest, SMALL, tmp_path / "stopped").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    with pytest.raises(MismatchError, match=r"other images or options.*another `out`"):
        train_scout(manifest, replace(SMALL, lr=1e-2), tmp_path / "stopped")


def test_without_a_lesion_to_learn_from_nothing_is_trained_and_nothing_left(photos: Path, tmp_path: Path) -> None:
    manifest, out = Manifest.read(photos), tmp_path / "run"
    val = (manifest.rows["split"] == "val").to_numpy()
    masks = [str(manifest.mask_path(i)) for i in range(len(manifest))]
    blank = tmp_path / "blank.png"
    Image.new("L", (96, 96)).save(blank)
    for columns, message in (
        ([mask if of_val else None for mask, of_val in zip(masks, val)], "No training image has a mask"),
        ([None if of_val else mask for mask, of_val in zip(masks, val)], "no validation image with a mask"),
        ([mask if of_val else str(blank) for mask, of_val in zip(masks, val)], "no mask with a lesion"),
    ):
        with pytest.raises(RequestError, match=message):
            mtb.train(manifest.with_columns(mask=columns), None, out, SMALL)
        assert not out.exists()
    one = manifest.take([*np.flatnonzero(~val)[:1], *np.flatnonzero(val)])
    with pytest.raises(RequestError, match="fewer than two images with a mask"):
        mtb.train(one, None, out, SMALL)
    with pytest.raises(RequestError, match="`store` is required"):
        mtb.train(manifest, None, out)
    with pytest.raises(RequestError, match="Leave out `store`"):
        mtb.train(manifest, tmp_path, out, "scout")
    with pytest.raises(RequestError, match="multiple of 16"):
        mtb.train(manifest, None, out, with_settings(SMALL, {"scout.image_size": 120}))
    assert not out.exists()


def trained(photos: Path, out: Path, *options: str) -> Path:
    small = ["--epochs", "2", "--min-steps", "0", "--scout.image-size", "64", "--scout.width", "0.5", "--device", "cpu"]
    assert main(["train", str(photos), "--recipe", "scout", "--out", str(out), *small, *options]) == 0
    return out


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(photos, tmp_path_factory.mktemp("scout") / "run")


def test_its_scores_become_the_control_segmenter_of_a_store_of_the_same_manifest_only(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(photos, tmp_path / "run", "--scout.plain")
    capsys.readouterr()
    extract = ["extract", str(photos), "--store", str(tmp_path / "tokens"), "--backbone", "embedded", "--views", "off-center"]
    assert main([*extract, "--device", "cpu"]) == 0
    sweep = ["sweep", str(photos), "--store", str(tmp_path / "tokens"), "--head-epochs", "1", "--jobs", "1"]
    assert main([*sweep, "--methods", "segmenter", "--out", str(tmp_path / "sweep")]) == RequestError.exit_code
    assert "has no segmentation for" in capsys.readouterr().err
    assert main([*extract, "--device", "cpu", "--segmenter", str(run)]) == 0
    assert main([*sweep, "--methods", "segmenter", "center", "--out", str(tmp_path / "sweep")]) == 0
    # What the model itself keeps of the same images.
    theirs, ours = (mtb.Run(folder).results for folder in (run, tmp_path / "sweep"))
    kept = [
        float(found.query("method == @method and view == @view and budget == 0.3")["retention"].iloc[0])
        for found, method in ((theirs, "scout"), (ours, "segmenter"))
        for view in ("as-is", "off-center")
    ]
    assert kept[:2] == pytest.approx(kept[2:], abs=1e-6)
    split = Manifest.read(photos)
    parts = ["val" if part == "train" else "train" for part in split.rows["split"]]
    other = split.with_columns(split=parts).write(tmp_path / "other.parquet")
    words = ["extract", str(other), *extract[2:], "--device", "cpu", "--segmenter", str(run)]
    assert main(words) == RequestError.exit_code
    assert "may have seen validation images" in capsys.readouterr().err


def test_of_the_manifest_that_a_scout_was_trained_with_the_validation_images_are_evaluated(
    photos: Path, run: Path, tmp_path: Path
) -> None:
    assert Manifest.read(photos).classes, "without classes, a router would be trained with the very same manifest"
    assert main(["evaluate", str(photos), "--model", str(run), "--budgets", "0.3", "--out", str(tmp_path / "again")]) == 0
    before, again = (
        mtb.Run(folder).results.query("view == 'as-is' and budget == 0.3 and method == 'scout'")
        for folder in (run, tmp_path / "again")
    )
    assert again["n_masked"].tolist() == before["n_masked"].tolist()
    assert again["retention"].to_numpy() == pytest.approx(before["retention"].to_numpy(), abs=1e-6)


def test_the_command_makes_a_model_that_routes_exports_and_scouts(photos: Path, run: Path, tmp_path: Path) -> None:
    results = mtb.Run(run).results
    assert {"scout", "center", "darkness", "random", "oracle"} == set(results["method"]), (
        "border-contrast reads tokens, and these are pixels"
    )
    assert set(results["view"]) == {"as-is", "off-center"}
    model = mtb.load(run, device="cpu")
    routing = model.route(Manifest.read(photos).image_path(0), budget=0.3)[0]
    assert routing.kept is not None
    assert (len(routing.kept), routing.tokens.shape) == (76, (76, 192))
    assert routing.unfamiliarity is not None
    assert main(["export", str(run), "--out", str(tmp_path / "onnx"), "--budget", "0.3"]) == 0
    store = mtb.extract(photos, tmp_path / "few", "embedded", early=mtb.EarlyRouting(model, "scout", budget=0.3), device="cpu")
    assert (store.per_image, store.grid) == (76, (16, 16))
