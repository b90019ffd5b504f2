"""A tiny backbone, a few images, of which two are damaged, and a store of them with off-center crops."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest
from tests.backbone.tiny import OFF_CENTER, tiny_backbone, tiny_manifest


@pytest.fixture(scope="session")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> BackboneConfig:
    return tiny_backbone(tmp_path_factory.mktemp("tiny") / "backbone")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return tiny_manifest(tmp_path / "images", 10, bad=(1, 5))


@pytest.fixture(scope="session")
def extracted(tmp_path_factory: pytest.TempPathFactory, backbone: BackboneConfig) -> Path:
    """A store of equal images in another folder: images are known by their content."""
    folder = tmp_path_factory.mktemp("extracted")
    return extract(tiny_manifest(folder / "images", 10, bad=(1, 5)), folder / "store", backbone, OFF_CENTER).path


@pytest.fixture
def store(tmp_path: Path, extracted: Path, manifest: Manifest) -> FeatureStore:
    shutil.copytree(extracted, tmp_path / "store", ignore=shutil.ignore_patterns("cache"))
    return FeatureStore.open(tmp_path / "store", manifest)
