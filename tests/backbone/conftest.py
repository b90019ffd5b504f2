"""A tiny backbone and a few images, of which two are damaged, for the tests of extraction."""

from __future__ import annotations

from pathlib import Path

import pytest

from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest
from tests.backbone.tiny import tiny_backbone, tiny_manifest


@pytest.fixture
def backbone(tmp_path: Path) -> BackboneConfig:
    return tiny_backbone(tmp_path / "backbone")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return tiny_manifest(tmp_path / "images", 10, bad=(1, 5))
