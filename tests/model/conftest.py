"""One small model and a few images for all tests that do not change them."""

from __future__ import annotations

from pathlib import Path

import pytest

from medtokenbudget.model import MedTokenBudget
from tests.small_model import draw_images, small_model


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="package")
def model(root: Path) -> MedTokenBudget:
    """LATS and the baselines of `small_model`; not to be changed."""
    return small_model(root / "weights")


@pytest.fixture(scope="package")
def images(root: Path) -> list[Path]:
    return draw_images(root / "images", 5)
