"""Public data sets by name: where their owners publish them, and downloads that resume, are verified and unpacked.

Nothing is removed but what a download made itself: its partial file and its folder of half unpacked files. By hand and not with
pooch, which starts a broken download again from the first byte: ISIC 2019 has 9.8 GB.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from dataclasses import dataclass
from http.client import HTTPException
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import yaml

from medtokenbudget.data.images import SUFFIXES
from medtokenbudget.errors import RequestError, UnknownNameError, WorkError
from medtokenbudget.files import write_error
from medtokenbudget.runtime import progress, say

_BLOCK = 2**20
_TIMEOUT = 60.0
"""Seconds without a byte after which a connection counts as broken."""


@dataclass(frozen=True)
class Archive:
    """One file of a data set, as its owner publishes it, which `holds` so many `images`; 'sha256:...' or 'md5:...' is its checksum.

    Size and checksum are empty where no source states them. `read_in` says where they were read: none of the addresses could be
    tried.
    """

    url: str
    holds: str
    size: int | None
    checksum: str
    images: int
    read_in: str
    name: str = ""
    """Name of the file, if it is not the end of the address."""

    @property
    def file(self) -> str:
        return self.name or PurePosixPath(urlsplit(self.url).path).name


@dataclass(frozen=True)
class Dataset:
    """A public data set: its terms, its files, and the command that reads them."""

    title: str
    terms: str
    page: str
    archives: tuple[Archive, ...]
    then: str

    @property
    def text(self) -> str:
        size = sum(archive.size or 0 for archive in self.archives)
        return f"{self.title}{f', {size / 1e6:,.0f} MB' if size else ''} ({self.page}). {self.terms}"


def _read_datasets() -> dict[str, Dataset]:
    sets = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: Dataset(**{**one, "archives": tuple(Archive(**file) for file in one["archives"])}) for name, one in sets.items()}


DATASETS = _read_datasets()


def dataset(name: str) -> Dataset:
    if name not in DATASETS:
        raise UnknownNameError.of("public data set", name, DATASETS)
    return DATASETS[name]


def download(name: str, out: Path | str, accept_license: bool = False) -> list[Path]:
    """Download a public data set to the folder `out`, in its official layout; what is there already stays.

    A broken download resumes with the next call. An archive that lies in `out` already, for example from a browser, is verified
    and unpacked instead of downloaded, and stays there.
    """
    asked, folder = dataset(name), Path(out)
    missing = [archive for archive in asked.archives if not _is_here(folder, archive)]
    if missing and not accept_license:
        raise RequestError(f"{asked.text} Nothing was downloaded. Pass `accept_license` if you accept these terms.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error
    # Archive and files lie side by side until the archive is unpacked; images take about the same space in both.
    _require_space(folder, sum(2 * (archive.size or 0) - _bytes(_source(folder, archive)) for archive in missing))
    for archive in missing:
        _get(folder, archive)
    return [folder / archive.holds for archive in asked.archives]


def _is_here(folder: Path, archive: Archive) -> bool:
    target = folder / archive.holds
    if not target.exists():
        return False
    there, wanted, what = (
        (_images(target), archive.images, "images and masks") if archive.images else (_bytes(target), archive.size, "bytes")
    )
    if wanted is not None and there < wanted:
        raise RequestError(
            f"{target} is there, but it has {there:,} of {wanted:,} {what} and was not made by this command. "
            "Move it away, or choose another `out`."
        )
    return True


def _images(folder: Path) -> int:
    return sum(Path(name).suffix.lower() in SUFFIXES for _, _, names in os.walk(folder) for name in names)


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _source(folder: Path, archive: Archive) -> Path:
    """Return the archive that the user put there, or the partial file of the download."""
    own = folder / archive.file
    return own if archive.images and own.is_file() else folder / f".{archive.file}.part"


def _require_space(folder: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise WorkError(
            f"{folder} has {free / 1e9:,.1f} GB of free disk space, but the archive and the files in it need "
            f"{needed / 1e9:,.1f} GB. Free some disk space, or choose another `out`."
        )


def _get(folder: Path, archive: Archive) -> None:
    source = _source(folder, archive)
    ours = source.name.endswith(".part")
    if ours:
        _fetch(folder, archive, source)
    try:
        _verify(archive, source)
        if archive.images:
            _unpack(folder, archive, source)
    except _NotOfficial as error:
        if ours:
            source.unlink(missing_ok=True)
        again = "It was removed. Run the same command again." if ours else f"Move {source} away and run the same command again."
        raise WorkError(f"{error} {again} If that does not help, the official file has changed: see {archive.url}.") from None
    if not archive.images:
        os.replace(source, folder / archive.holds)
    elif ours:
        source.unlink(missing_ok=True)


class _NotOfficial(Exception):
    """A file is not the official one."""


def _fetch(folder: Path, archive: Archive, part: Path) -> None:
    """Complete a partial file. A connection that breaks is opened again for as long as each one brings something."""
    if archive.size is not None and _bytes(part) > archive.size:
        part.unlink()
    host, saved = urlsplit(archive.url).netloc, folder / archive.file
    total = None if archive.size is None else max(1, round(archive.size / 1e6))
    with progress(total=total, what=archive.file, unit="MB", initial=round(_bytes(part) / 1e6)) as bar:
        while archive.size is None or _bytes(part) < archive.size:
            before = _bytes(part)
            try:
                if _receive(archive, part, bar):
                    return
                reason = "the connection broke"
            except HTTPError as error:
                advice = f"The file may have moved: get it from its page, save it as {saved} and run the same command again."
                raise WorkError(f"{host} answers {error.code} ({error.reason}) for {archive.url}. {advice}") from None
            except (OSError, HTTPException) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            if _bytes(part) <= before:
                raise WorkError(
                    f"Cannot download {archive.file} from {host}: {reason}. {before / 1e6:,.1f} MB are kept. Check the network and "
                    f"run the same command again to continue, or save {archive.url} as {saved} with a browser."
                )


def _receive(archive: Archive, part: Path, bar: Any) -> bool:
    start = _bytes(part)
    headers = {"User-Agent": "medtokenbudget"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(Request(archive.url, headers=headers), timeout=_TIMEOUT)
    except HTTPError as error:
        if error.code == 416 and archive.size is None:  # nothing is left to send
            return True
        raise
    with response:
        start = start if response.status == 206 else 0  # a server that cannot resume sends everything
        length = response.headers["Content-Length"]
        total = archive.size if length is None else start + int(length)
        if archive.size not in (None, total):
            advice = "It may have changed: see its page."
            raise WorkError(f"{archive.url} has {total:,} bytes, but the official file has {archive.size:,}. {advice}")
        with open(part, "ab" if start else "wb", buffering=0) as stream:  # what a buffer holds would fail again on closing
            while block := response.read(_BLOCK):
                start += _append(stream, block, part)
                bar.update(round(start / 1e6) - bar.n)
    return total is None or start == total


def _append(stream: FileIO, block: bytes, path: Path) -> int:
    """Write all of a block and return its length; an error here is the disk's, not the network's."""
    written = 0
    try:
        while written < len(block):
            written += stream.write(block[written:])
    except OSError as error:
        raise write_error(path, error) from error
    return written


def _verify(archive: Archive, path: Path) -> None:
    if archive.size not in (None, _bytes(path)):
        raise _NotOfficial(f"{archive.file} has {_bytes(path):,} bytes, but the official file has {archive.size:,}.")
    kind, _, expected = archive.checksum.partition(":")
    say(f"Verifying {archive.file} ...")
    with open(path, "rb") as stream:
        found = hashlib.file_digest(stream, kind or "sha256").hexdigest()
    if not expected:
        say(f"No checksum of {archive.file} is published: its size and its zip are checked. SHA-256: {found}")
    elif found != expected:
        raise _NotOfficial(
            f"{archive.file} has the {kind.upper()} {found}, but the official file has {expected} ({archive.read_in})."
        )


def _unpack(folder: Path, archive: Archive, path: Path) -> None:
    """Unpack an archive next to its place and move it there when it is complete; the zip's own checksums are compared."""
    half = folder / f".{archive.holds}.unpacking"
    shutil.rmtree(half, ignore_errors=True)  # of a call that was killed
    try:
        with zipfile.ZipFile(path) as packed:
            members = packed.infolist()
            for member in members:
                # The paths in an archive are input: one of them may lead out of the folder.
                name = PurePosixPath(member.filename.replace("\\", "/"))
                if name.is_absolute() or ".." in name.parts or ":" in member.filename:
                    raise _NotOfficial(f"{archive.file} would write outside of its folder: {member.filename}.")
            _require_space(folder, sum(member.file_size for member in members))
            for member in progress(members, total=len(members), what="Unpacking", unit="file"):
                packed.extract(member, half)
        made = half / archive.holds if (half / archive.holds).is_dir() else half
        if (count := _images(made)) < archive.images:
            raise _NotOfficial(f"{archive.file} has {count:,} images and masks, but the official file has {archive.images:,}.")
        # At the end and at once: a folder of that name is complete, and the next call skips it.
        os.replace(made, folder / archive.holds)
    except zipfile.BadZipFile as error:
        raise _NotOfficial(f"{archive.file} is not an intact zip archive ({error}).") from None
    except OSError as error:
        raise write_error(half, error) from error
    finally:
        shutil.rmtree(half, ignore_errors=True)
