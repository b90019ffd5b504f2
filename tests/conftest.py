"""Fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import medtokenbudget.api  # noqa: F401  # before a test patches a function that it imports
from tests.drawn import Drawn, drawn_store
from tests.machine import absent

if TYPE_CHECKING:
    from playwright.sync_api import Browser

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files of many slow tests (xdist would with those of many tests): a long one at the end would run alone."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session", autouse=True)
def _own_notes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where weights are is noted for the tests alone, not among the notes of the person who runs them."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.getbasetemp() / "state")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real images and weights beside the repository; a test that needs them is skipped where they are absent."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        absent("needs the real images in ../shared beside the repository")
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. One for each file, because two of Playwright's drivers cannot run at the same time."""
    program = shutil.which("chromium")
    if program is None:
        absent("needs Chromium (Debian: apt install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """A small drawn data set with its store."""
    return drawn_store(tmp_path_factory.mktemp("drawn"))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray with workers at normal priority: at its default, the lowest one, a busy test machine starves them."""
    monkeypatch.setenv("RAY_worker_niceness", "0")
    return pytest.importorskip("ray")


@pytest.fixture
def hub_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Points the hub's client, which reads its environment only once, to an address and to an empty cache."""

    def point(address: str, offline: bool = False) -> None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return point
