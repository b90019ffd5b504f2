"""`mtb extract`: what it says and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.cli import main
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError
from tests.backbone.tiny import CONFIG, extract_arguments, tiny_manifest


@pytest.mark.parametrize(("device", "message"), [("gpu", "not a device"), ("cuda:97", "not available")])
def test_a_device_that_is_not_there_is_rejected(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, device: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        extract(manifest, tmp_path / "store", backbone, replace(CONFIG, device=device))


def _command(manifest: Path, store: Path, backbone: BackboneConfig, *more: str) -> int:
    return main(extract_arguments(manifest, store, backbone, *more))


def test_the_command_extracts_says_what_failed_and_what_is_next(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest.write(tmp_path / "m.parquet")
    assert _command(path, tmp_path / "store", backbone, "--shards", "2/2") == 2
    assert not (tmp_path / "store").exists()
    assert _command(path, tmp_path / "store", backbone, "--shards", "0/2") == 0
    assert "1 of 3 shards are missing" in capsys.readouterr().out
    assert _command(path, tmp_path / "store", backbone, "--verify") == 0
    out = capsys.readouterr().out
    assert "Skipped 2 of 10 rows; " in out
    assert f"mtb train {path} --store {tmp_path / 'store'}" in out
    assert len(FeatureStore.open(tmp_path / "store")) == 8


def test_a_store_that_every_image_was_left_out_of_is_a_failure(
    tmp_path: Path, backbone: BackboneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    records = [{"image_id": "broken", "image": str(tmp_path / "broken.png"), "split": "train"}]
    path = Manifest.from_records(records, ()).write(tmp_path / "m.parquet")
    assert _command(path, tmp_path / "store", backbone) == 1
    said = capsys.readouterr()
    assert f"{tmp_path / 'store'} has no rows: every image was skipped. The first reason: " in said.err
    assert "Next:" not in said.out


def test_masks_of_zeros_and_ones_are_left_out_aloud_and_not_read_as_empty(
    tmp_path: Path, backbone: BackboneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tiny_manifest(tmp_path / "data", 4)
    path = manifest.write(tmp_path / "m.parquet")
    mask = manifest.mask_path(2)
    assert mask is not None
    Image.fromarray((np.asarray(Image.open(mask)) > 0).astype(np.uint8)).save(mask)
    assert _command(path, tmp_path / "store", backbone) == 0
    assert f"The first: {mask.name} has only the values 0 and 1, so no pixel counts as lesion." in capsys.readouterr().out
    assert FeatureStore.open(tmp_path / "store", manifest).ids == ["image-000", "image-001", "image-003"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--crops", "0"], "--crops cannot be '0'. Use a whole number that is at least 1"),
        (["--crops", "3"], "--crops only matters with --views off-center. Add that, or leave out --crops."),
        (["--crops", "2", "--views", "flips"], "--crops only matters with --views off-center."),
        (["--workers", "-1"], "Use a whole number that is at least 0"),
        (["--shards", "3"], "I/N"),
        (["--shards", "4/2"], "4/2 does not exist"),
        (["--address", "auto"], "--address only matters with --engine ray"),
        (["--budget", "0.3"], "--budget is only used with --route"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors do not exist"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(
    tmp_path: Path,
    backbone: BackboneConfig,
    manifest: Manifest,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    path = manifest.write(tmp_path / "m.parquet")
    assert _command(path, tmp_path / "store", backbone, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_off_center_views_without_any_mask_are_rejected_before_the_backbone_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("medtokenbudget.backbone.backbone.Backbone.load", lambda *_: pytest.fail("the backbone was loaded"))
    unmasked = replace(tiny_manifest(tmp_path / "images", 2, masks=False), name="Clinic A").write(tmp_path / "m.parquet")
    code = main(["extract", str(unmasked), "--store", str(tmp_path / "store"), "--backbone", "embedded", "--views", "off-center"])
    assert code == 2
    assert "no image of 'Clinic A' has a mask. Add masks to the manifest, or choose other views." in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
