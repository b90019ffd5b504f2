"""A saved model, and a copy of it to break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.small_model import small_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    return small_model(root / "weights", baselines=("center",)).save_pretrained(root / "model")


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))
