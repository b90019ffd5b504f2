"""Fixtures that all rooms' tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.drawn import Drawn, drawn_store

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real images and weights beside the repository; a test that needs them is skipped where they are absent."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail("../shared is absent, but in CI the tests on real images must run")
        pytest.skip("needs the real images in ../shared beside the repository")
    return folder


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """A small drawn data set with its store."""
    return drawn_store(tmp_path_factory.mktemp("drawn"))
