"""Which content a file has: its SHA-256, remembered with size and time of change so that unchanged files are not read again.

Kept in the store's `cache/files.json`, under hashes of the paths, because stores are shared. The cache can be deleted at any time;
it only saves time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from medtokenbudget.errors import MedTokenBudgetError
from medtokenbudget.files import read_sealed, sha256_file, sha256_json, write_sealed

_THREADS = 4


class FileIndex:
    """Hashes of files by path.

    Args:
        store: The folder of the store; `cache/files.json` in it is read now and written by `save`.
    """

    def __init__(self, store: Path) -> None:
        self._file = store / "cache" / "files.json"
        self._known: dict[str, tuple[int, int, str]] = {}
        self._changed = self.damaged = False
        try:
            found = read_sealed(self._file, "") if self._file.is_file() else {}
            self._known = {str(key): (int(size), int(time), str(digest)) for key, (size, time, digest) in found.items()}
        except (MedTokenBudgetError, ValueError, TypeError, AttributeError):
            self._changed = self.damaged = True  # a damaged cache is made again

    def hashes(self, paths: Iterable[Path | None], again: bool = False) -> list[str | None]:
        """SHA-256 of each file, from memory where size and time of change are the same.

        Args:
            paths: Files; None stays None.
            again: Read every file, whatever is remembered.

        Returns:
            One hash per path. A file that is not there has the hash that was seen last, or None if it was never seen.
        """
        wanted = [None if path is None else os.path.abspath(path) for path in paths]
        with ThreadPoolExecutor(_THREADS, "mtb-hash") as pool:
            found = dict(pool.map(lambda path: (path, self._hash(path, again)), {path for path in wanted if path is not None}))
        return [None if path is None else found[path] for path in wanted]

    def _hash(self, path: str, again: bool) -> str | None:
        key = sha256_json(path)[:32]
        known = self._known.get(key)
        try:
            status = os.stat(path)
            if known is not None and not again and known[:2] == (status.st_size, status.st_mtime_ns):
                return known[2]
            digest = sha256_file(path)
        except OSError:
            return None if known is None else known[2]
        if known != (status.st_size, status.st_mtime_ns, digest):
            self._known[key] = (status.st_size, status.st_mtime_ns, digest)
            self._changed = True
        return digest

    def save(self) -> None:
        """Write the cache if it changed; a store that cannot be written to is read all the same."""
        if not self._changed:
            return
        try:
            write_sealed(self._file, self._known)
            self._changed = False
        except MedTokenBudgetError:
            return
