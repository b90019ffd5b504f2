"""The exported site and its WebAssembly runtime: only pinned bytes are used, and every way to lack them is a message."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.serve import site
from tests.small_model import small_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return site.cache_folder()


def test_without_npm_or_network_the_message_says_how_to_get_the_runtime(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(WorkError, match=r"npm is not installed .* pass `runtime`. Run `npm pack onnxruntime-web@"):
        site.find_runtime()
    assert not cache.exists()
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'npm error network request failed' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(WorkError, match="npm error network request failed"):
        site.find_runtime()


def test_an_archive_with_other_bytes_is_not_used(cache: Path, tmp_path: Path) -> None:
    archive = tmp_path / "package.tgz"
    with tarfile.open(archive, "w:gz") as package:
        package.add(__file__, arcname=f"package/dist/{site.BINARY}")
    with pytest.raises(WorkError, match="not the pinned one"):
        site.unpack(archive, cache)
    assert not cache.exists()


def test_a_folder_without_the_runtime_or_with_another_version_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not have"):
        site.find_runtime(tmp_path)
    for name in site.HASHES:
        (tmp_path / name).write_text("another version")
    with pytest.raises(RequestError, match="another version of onnxruntime-web"):
        site.find_runtime(tmp_path)


def test_a_folder_with_other_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RequestError, match=r"has other files \(thesis.tex\). Choose an empty folder.*as `out`"):
        site.write_site(small_model(tmp_path / ".weights"), tmp_path, tmp_path)
