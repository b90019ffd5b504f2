"""A tiny backbone, a few images, of which two are damaged, and a store of them with off-center crops."""

from __future__ import annotations

from pathlib import Path

import pytest

from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest
from tests.backbone.tiny import OFF_CENTER, tiny_backbone, tiny_manifest


@pytest.fixture
def backbone(tmp_path: Path) -> BackboneConfig:
    return tiny_backbone(tmp_path / "backbone")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return tiny_manifest(tmp_path / "images", 10, bad=(1, 5))


@pytest.fixture
def store(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> FeatureStore:
    return extract(manifest, tmp_path / "store", backbone, OFF_CENTER)
