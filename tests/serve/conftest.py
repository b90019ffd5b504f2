"""The exported site, which several files test in different browsers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine import absent
from tests.serve.sites import built_site, serving


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; not to be changed."""
    return built_site(tmp_path_factory)


@pytest.fixture(scope="session")
def site_url(site: Path) -> Iterator[str]:
    """Where the site is served, as most hosts do."""
    with serving(site) as address:
        yield address


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
