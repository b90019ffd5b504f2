"""Downloads from a server on this machine that breaks connections, sends wrong files, and knows ranges or not."""

from __future__ import annotations

import hashlib
import http.server
import io
import shutil
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medtokenbudget.cli import main
from medtokenbudget.data import download as module
from medtokenbudget.data.download import DATASETS, Archive, Dataset, download
from medtokenbudget.errors import RequestError, UnknownNameError, WorkError

PICTURES = {f"Pictures/{i}.png": np.random.default_rng(i).bytes(30_000) for i in range(4)}
TABLE = b"image,label\na,1\n"


def packed(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


class Host:
    """What the server sends, and what it was asked for."""

    def __init__(self) -> None:
        self.files = {"/p.zip": packed(PICTURES), "/t.csv": TABLE}
        self.breaks_after = 10**9
        """Bytes after which each connection breaks."""
        self.ranges = True
        self.sent = 0
        self.asked: list[str] = []
        self.address = ""

    def archive(self, name: str, holds: str, images: int, **changes: Any) -> Archive:
        content = self.files[name]
        checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
        return replace(Archive(self.address + name, holds, len(content), checksum, images, "this test"), **changes)

    def handler(host) -> type[http.server.BaseHTTPRequestHandler]:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host.asked.append(self.path)
                if self.path not in host.files:
                    self.send_error(404)
                    return
                content, start = host.files[self.path], 0
                if (wanted := self.headers["Range"]) and host.ranges:
                    start = int(wanted.removeprefix("bytes=").rstrip("-"))
                    if start >= len(content):
                        self.send_error(416)
                        return
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                part = content[start : start + host.breaks_after]
                host.sent += len(part)
                self.wfile.write(part)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of the data set 'busi': a zip with four pictures, and a table."""
    host = Host()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), host.handler())
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    host.address = f"http://127.0.0.1:{server.server_port}"
    offer(monkeypatch, host.archive("/t.csv", "t.csv", 0), host.archive("/p.zip", "Pictures", 4))
    yield host
    server.shutdown()
    server.server_close()


def offer(monkeypatch: pytest.MonkeyPatch, *archives: Archive) -> None:
    then = "mtb data folder {out}/Pictures --out p.parquet"
    monkeypatch.setitem(DATASETS, "busi", Dataset("Four pictures", "License: none.", "https://example.org", archives, then))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


COMPLETE = {**PICTURES, "t.csv": TABLE}


def test_a_data_set_is_downloaded_verified_and_unpacked_and_a_second_call_asks_for_nothing(tmp_path: Path, host: Host) -> None:
    assert download("busi", tmp_path / "new", True) == [tmp_path / "new" / "t.csv", tmp_path / "new" / "Pictures"]
    assert contents(tmp_path / "new") == COMPLETE
    host.asked.clear()
    download("busi", tmp_path / "new")  # without the license, which was accepted before
    assert host.asked == []


def test_a_broken_connection_continues_where_it_broke(tmp_path: Path, host: Host) -> None:
    host.breaks_after = 50_000
    download("busi", tmp_path, True)
    assert contents(tmp_path) == COMPLETE
    assert host.asked.count("/p.zip") == 3
    assert host.sent == len(host.files["/p.zip"]) + len(TABLE)  # no byte twice


def test_a_server_without_ranges_is_read_from_the_start_again(tmp_path: Path, host: Host) -> None:
    host.ranges = False
    (tmp_path / ".p.zip.part").write_bytes(host.files["/p.zip"][:1000])
    download("busi", tmp_path, True)
    assert contents(tmp_path) == COMPLETE


def test_a_host_that_sends_nothing_more_is_an_error_that_keeps_what_came(tmp_path: Path, host: Host) -> None:
    host.breaks_after = 0
    (tmp_path / ".p.zip.part").write_bytes(host.files["/p.zip"][:1000])
    (tmp_path / "t.csv").write_bytes(TABLE)
    with pytest.raises(WorkError, match=r"Cannot download p\.zip from 127.*the connection broke\. 0\.0 MB are kept.*to continue"):
        download("busi", tmp_path, True)
    assert (tmp_path / ".p.zip.part").stat().st_size == 1000


def test_without_a_network_the_message_says_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    offer(monkeypatch, replace(host.archive("/p.zip", "Pictures", 4), url="http://127.0.0.1:9/p.zip"))
    with pytest.raises(WorkError, match=r"Cannot download p\.zip from 127\.0\.0\.1:9: .*refused.*with a browser"):
        download("busi", tmp_path, True)


def test_an_archive_from_a_browser_is_unpacked_and_stays(tmp_path: Path, host: Host) -> None:
    (tmp_path / "p.zip").write_bytes(host.files["/p.zip"])
    (tmp_path / "t.csv").write_bytes(TABLE)
    download("busi", tmp_path, True)
    assert host.asked == []
    assert contents(tmp_path) == {**COMPLETE, "p.zip": host.files["/p.zip"]}


def test_a_wrong_checksum_is_refused_and_only_what_was_downloaded_is_removed(tmp_path: Path, monkeypatch: Any, host: Host) -> None:
    right = host.archive("/p.zip", "Pictures", 4)
    offer(monkeypatch, replace(right, checksum=f"md5:{'0' * 32}"))
    (tmp_path / "mine.txt").write_text("mine")
    found = hashlib.md5(host.files["/p.zip"]).hexdigest()
    with pytest.raises(WorkError, match=f"MD5 {found}, but the official file has 000.*It was removed"):
        download("busi", tmp_path, True)
    assert contents(tmp_path) == {"mine.txt": b"mine"}
    (tmp_path / "p.zip").write_bytes(host.files["/p.zip"])
    with pytest.raises(WorkError, match=r"Move .*p\.zip away"):
        download("busi", tmp_path, True)
    assert (tmp_path / "p.zip").exists()


def test_another_size_is_refused_before_anything_is_read(tmp_path: Path, monkeypatch: Any, host: Host) -> None:
    archive = host.archive("/p.zip", "Pictures", 4)
    offer(monkeypatch, replace(archive, size=archive.size + 5))
    with pytest.raises(WorkError, match=f"has {archive.size:,} bytes, but the official file has {archive.size + 5:,}"):
        download("busi", tmp_path, True)
    assert contents(tmp_path) == {}


def test_a_file_without_published_size_and_checksum_is_checked_as_a_zip_and_its_hash_is_shown(
    tmp_path: Path, monkeypatch: Any, host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(monkeypatch, host.archive("/p.zip", "Pictures", 4, size=None, checksum=""))
    (tmp_path / ".p.zip.part").write_bytes(host.files["/p.zip"])  # complete, but killed before it was unpacked
    download("busi", tmp_path, True)
    assert contents(tmp_path) == PICTURES
    assert hashlib.sha256(host.files["/p.zip"]).hexdigest() in capsys.readouterr().err
    damaged = bytearray(host.files["/p.zip"])
    damaged[20_000] ^= 255  # inside the first picture
    host.files["/p.zip"] = bytes(damaged)
    with pytest.raises(WorkError, match="not an intact zip archive"):
        download("busi", tmp_path / "second", True)
    assert contents(tmp_path / "second") == {}


@pytest.mark.parametrize(
    "name", ["../outside.png", "/outside.png", "Pictures/../../outside.png", "C:/outside.png", "..\\outside.png"]
)
def test_a_zip_that_writes_outside_of_its_folder_is_refused(tmp_path: Path, monkeypatch: Any, host: Host, name: str) -> None:
    host.files["/p.zip"] = packed({**PICTURES, name: b"evil"})
    offer(monkeypatch, host.archive("/p.zip", "Pictures", 4))
    with pytest.raises(WorkError, match="would write outside of its folder"):
        download("busi", tmp_path / "here", True)
    assert contents(tmp_path) == {}


def test_an_archive_with_too_few_images_is_refused(tmp_path: Path, monkeypatch: Any, host: Host) -> None:
    offer(monkeypatch, host.archive("/p.zip", "Pictures", 5))
    with pytest.raises(WorkError, match="has 4 images and masks, but the official file has 5"):
        download("busi", tmp_path, True)
    assert not (tmp_path / "Pictures").exists()


def test_an_archive_without_a_folder_inside_gets_one(tmp_path: Path, monkeypatch: Any, host: Host) -> None:
    host.files["/p.zip"] = packed({Path(name).name: content for name, content in PICTURES.items()})
    offer(monkeypatch, host.archive("/p.zip", "Pictures", 4))
    download("busi", tmp_path, True)
    assert contents(tmp_path) == PICTURES


def test_an_incomplete_folder_of_the_user_is_named_and_not_replaced(tmp_path: Path, host: Host) -> None:
    (tmp_path / "Pictures").mkdir()
    (tmp_path / "Pictures" / "0.png").write_bytes(b"mine")
    with pytest.raises(RequestError, match="has 1 of 4 images and masks and was not made by this command"):
        download("busi", tmp_path, True)
    assert contents(tmp_path) == {"Pictures/0.png": b"mine"}


def test_disk_space_for_archive_and_files_is_checked_before_the_download(tmp_path: Path, monkeypatch: Any, host: Host) -> None:
    needed = 2 * (len(host.files["/p.zip"]) + len(TABLE))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(WorkError, match="of free disk space"):
        download("busi", tmp_path, True)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=20_000_000))
    with pytest.raises(WorkError, match="has 20 MB of free disk space, but the archive and the files in it need 22 MB"):
        module._require_space(tmp_path, 2 * 10_808_743)
    assert host.asked == []
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=needed))
    download("busi", tmp_path, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_disk_that_fills_up_is_said(tmp_path: Path, host: Host) -> None:
    (tmp_path / ".t.csv.part").symlink_to("/dev/full")
    with pytest.raises(WorkError, match="No space left while writing"):
        download("busi", tmp_path, True)


def test_a_page_that_is_gone_says_where_to_save_the_file(tmp_path: Path, host: Host) -> None:
    del host.files["/p.zip"]
    with pytest.raises(WorkError, match=r"answers 404 .*save it as .*p\.zip"):
        download("busi", tmp_path, True)


def test_nothing_is_downloaded_without_the_license(tmp_path: Path, host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "download", "busi", "--out", str(tmp_path)]) == 2  # standard input of a test is no terminal
    assert "License: none. Nothing was downloaded. Pass --accept-license" in capsys.readouterr().err
    assert host.asked == []
    assert main(["data", "download", "busi", "--out", str(tmp_path), "--accept-license"]) == 0
    assert f"Next: mtb data folder {tmp_path}/Pictures" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 2), ("no", 2)])
def test_a_terminal_is_asked(tmp_path: Path, monkeypatch: Any, host: Host, answer: str, code: int) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: answer)
    assert main(["data", "download", "busi", "--out", str(tmp_path)]) == code
    assert (tmp_path / "Pictures").exists() == (code == 0)


def test_an_unknown_data_set_is_named_with_the_closest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'kvasir-seg'"):
        download("kvasir-sg", tmp_path, True)


def test_every_entry_of_the_table_says_where_it_was_read_and_has_a_checksum_of_the_right_length() -> None:
    archives = [archive for one in DATASETS.values() for archive in one.archives]
    assert len(archives) == 8
    for archive in archives:
        kind, _, digits = archive.checksum.partition(":")
        assert len(bytes.fromhex(digits)) == (hashlib.new(kind).digest_size if kind else 0)
        assert archive.url.startswith("https://")
        assert archive.read_in


def test_the_tables_of_isic_2019_have_the_published_sizes_and_checksums(shared: Path) -> None:
    for archive in DATASETS["isic2019"].archives[:2]:
        content = (shared / "data" / "isic" / archive.holds).read_bytes()
        assert len(content) == archive.size
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == archive.checksum
