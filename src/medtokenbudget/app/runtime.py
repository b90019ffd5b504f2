"""onnxruntime-web, the WebAssembly runtime of the page without a server: found in a folder or in the cache, or fetched once by npm.

It is not part of this package. Its version and its hashes are pinned here, so that every site has the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from medtokenbudget.errors import RequestError, WorkError, first_line
from medtokenbudget.files import atomic_write
from medtokenbudget.progress import say

PACKAGE = "onnxruntime-web"
VERSION = "1.30.0"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
"""SHA-512 of the package archive, in base64, as package managers write it."""
SCRIPT = "ort.wasm.bundle.min.mjs"
BINARY = "ort-wasm-simd-threaded.wasm"
HASHES = {
    SCRIPT: "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    BINARY: "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
"""SHA-256 of the two files of the package that a site needs."""


@dataclass(frozen=True)
class WebRuntime:
    """Where the two files are."""

    script: Path
    binary: Path


def find_runtime(folder: Path | None = None) -> WebRuntime:
    """Return the runtime in `folder` (the unpacked package or its `dist`), or else from the cache, which npm fills if needed.

    Raises:
        RequestError: If the folder does not have it, or has another version.
        WorkError: If it is not in the cache and npm cannot fetch it.
    """
    if folder is not None:
        return _given(folder)
    cache = cache_folder()
    if not _complete(cache):
        _fetch(cache)
    return WebRuntime(cache / SCRIPT, cache / BINARY)


def cache_folder() -> Path:
    """Folder of the runtime in the cache of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "medtokenbudget" / f"{PACKAGE}-{VERSION}"


def _given(folder: Path) -> WebRuntime:
    for place in (folder, folder / "dist", folder / "package" / "dist", folder / PACKAGE / "dist"):
        if all((place / name).is_file() for name in HASHES):
            if not _complete(place):
                raise RequestError(f"{place} has another version of {PACKAGE} than {VERSION}, or a damaged one. {_advice()}")
            return WebRuntime(place / SCRIPT, place / BINARY)
    raise RequestError(f"--runtime {folder} does not have {SCRIPT} and {BINARY} of {PACKAGE} {VERSION}. {_advice()}")


def _advice() -> str:
    return f"Run `npm pack {PACKAGE}@{VERSION}`, unpack the file and pass its folder `package`."


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() and _sha256(folder / name) == expected for name, expected in HASHES.items())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fetch(cache: Path) -> None:
    npm = shutil.which("npm")
    needs = f"A page without a server needs {PACKAGE} {VERSION}, which is not in {cache}"
    if npm is None:
        raise WorkError(f"{needs}, and npm is not installed to fetch it. Install npm, or pass --runtime DIR. {_advice()}")
    say(f"Fetching {PACKAGE} {VERSION} with npm (33 MB, once) ...")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", folder, "--silent"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise WorkError(f"{needs}, and npm did not fetch it: {first_line(error)} Pass --runtime DIR. {_advice()}") from None
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            why = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no archive"]
            raise WorkError(f"{needs}, and npm did not fetch it: {why[0]}. Connect, or pass --runtime DIR. {_advice()}")
        unpack(archives[0], cache)


def unpack(archive: Path, folder: Path) -> None:
    """Check the package archive and write its two files to `folder`."""
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode("ascii")
    if found != INTEGRITY:
        raise WorkError(f"The archive of {PACKAGE} {VERSION} has SHA-512 {found}, not the pinned one, so it is not used.")
    with tarfile.open(archive) as package:
        for name in HASHES:
            member = package.extractfile(f"package/dist/{name}")
            assert member is not None, "the hash of the archive says that it is there"
            with atomic_write(folder / name) as temporary:
                temporary.write_bytes(member.read())
