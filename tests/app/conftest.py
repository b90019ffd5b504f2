"""The exported site, which several files test in different browsers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.app.sites import absent, built_site, serving

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; not to be changed."""
    return built_site(tmp_path_factory)


@pytest.fixture(scope="session")
def site_url(site: Path) -> Iterator[str]:
    """Where the site is served, as most hosts do."""
    with serving(site) as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. One for each file, because two of Playwright's drivers cannot run at the same time."""
    if not Path(CHROMIUM).exists():
        absent("needs Chromium (Debian: apt install chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe(repository: Path) -> str:
    """The source of axe-core, installed by its package manager into the cache."""
    folder = repository / ".cache" / "axe"
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        npm = shutil.which("npm")
        if npm is None:
            absent("needs npm to install axe-core")
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [str(npm), "install", "--prefix", str(folder), "--no-save", "--no-audit", "--no-fund", "axe-core@4"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            absent(f"axe-core cannot be installed: {done.stderr[-300:]}")
    return script.read_text()
