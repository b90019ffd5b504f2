"""Locks on directories that one process writes at a time: stores, runs, models, reports, tables.

The lock is the kernel's (`flock` on a file in the directory), so it ends with its process, even if that is killed. The file also
says who holds it, for the message that others get.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import process_exists, write_error
from medtokenbudget.progress import say

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: dict[tuple[int, str], int] = {}
_warned: set[str] = set()


@contextmanager
def exclusive(folder: Path | str, shared: bool = False, name: str = FILE) -> Iterator[None]:
    """Hold the lock of a directory inside the block; the directory is created if needed.

    The same thread can take a lock that it holds once more.

    Args:
        folder: Directory that is written.
        shared: Allow others who also ask for a shared lock, such as the jobs of an array that fill one store.
        name: Name of the lock file.

    Raises:
        WorkError: If another process holds the lock, or the directory cannot be written.
        RequestError: If `folder` is a file.

    Example:
        >>> with exclusive("runs/first"):  # doctest: +SKIP
        ...     write_results()
    """
    path = Path(folder).resolve() / name
    if path.parent.exists() and not path.parent.is_dir():
        raise RequestError(f"{folder} is a file, not a folder. Write to another place.")
    key = (threading.get_ident(), str(path))
    if fcntl is None or key in _held:
        yield
        return
    handle = _acquire(path, shared)
    _held[key] = handle
    try:
        yield
    finally:
        del _held[key]
        _release(path, handle)


def _acquire(path: Path, shared: bool) -> int:
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise write_error(path.parent, error) from error
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except OSError as error:
            owner = _read_owner(handle)
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise _in_use(path, owner) from None
            if error.errno not in _UNSUPPORTED:
                raise write_error(path.parent, error) from error
            return _without_lock(path)
        # The previous holder may have removed the file between `open` and `flock`: then this lock protects nothing.
        if _same_file(handle, path):
            break
        os.close(handle)
    if not shared:
        _report_takeover(path, _read_owner(handle))
    _write_owner(handle)
    return handle


def _release(path: Path, handle: int) -> None:
    """Remove the file unless others share the lock, then let go of it."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _same_file(handle, path):
            path.unlink()
    with contextlib.suppress(OSError):
        os.close(handle)


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


def _without_lock(path: Path) -> int:
    if str(path) not in _warned:
        _warned.add(str(path))
        say(f"The file system of {path.parent} has no locks. Make sure that no other process writes there.")
    with contextlib.suppress(OSError):
        path.unlink()
    return os.open(os.devnull, os.O_RDONLY)


def _write_owner(handle: int) -> None:
    command = shlex.join(["mtb", *sys.argv[1:]])[:200] if Path(sys.argv[0]).name.startswith("mtb") else Path(sys.argv[0]).name
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "command": command, "since": time.strftime("%Y-%m-%d %H:%M")}
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its description
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(owner).encode("utf-8", "backslashreplace"), 0)


def _read_owner(handle: int) -> dict[str, Any]:
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
        return {
            "pid": int(owner["pid"]),
            "host": str(owner["host"]),
            "command": str(owner["command"]),
            "since": str(owner["since"]),
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _in_use(path: Path, owner: dict[str, Any]) -> WorkError:
    who = "another process"
    if owner:
        who = f"process {owner['pid']} on {owner['host']} (`{owner['command']}`, since {owner['since']})"
    return WorkError(f"{path.parent} is being written by {who}. Wait until it has finished, or write to another place.")


def _report_takeover(path: Path, owner: dict[str, Any]) -> None:
    """A description in a file that nobody locks is that of a process that was killed."""
    if owner and not (owner["host"] == socket.gethostname() and owner["pid"] == os.getpid()):
        ended = "ended early" if owner["host"] == socket.gethostname() and not process_exists(owner["pid"]) else "left it"
        say(f"Taking over {path.parent}: process {owner['pid']} on {owner['host']} {ended} without finishing.")
