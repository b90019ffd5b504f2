"""Locks on directories that one process writes at a time: stores, runs, models, reports, tables.

The lock is the kernel's (`flock` on a file in the directory), so it ends with its process, even if that is killed. The file also
says who holds it, for the message that others get.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import write_error
from medtokenbudget.progress import say

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: set[tuple[int, str]] = set()
_warned: set[str] = set()


@contextmanager
def exclusive(folder: Path | str, shared: bool = False, name: str = FILE, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a directory inside the block; the directory is created if needed.

    The same thread can take a lock that it holds once more. A `shared` lock allows others who also ask for one, such as the jobs of
    an array that fill one store. With `wait`, a lock that is held is waited for instead of refused.

    Raises:
        WorkError: If another process holds the lock, or the directory cannot be written.
        RequestError: If `folder` is a file.
    """
    path = Path(folder).resolve() / name
    if path.parent.exists() and not path.parent.is_dir():
        raise RequestError(f"{folder} is a file, not a folder. Write to another place.")
    key = (threading.get_ident(), str(path))
    if fcntl is None or key in _held:
        yield
        return
    handle = _acquire(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait)
    _held.add(key)
    try:
        yield
    finally:
        _held.remove(key)
        with contextlib.suppress(OSError):
            # The file goes with the last holder: others may share the lock.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(handle, path):
                path.unlink()
        os.close(handle)


def _acquire(path: Path, kind: int, wait: bool) -> int:
    """Return a handle of the lock file, locked; on a file system without locks, after a warning, one of nothing."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise write_error(path.parent, error) from error
        try:
            fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(handle) or "another process"
            os.close(handle)
            if error.errno in _BUSY:
                advice = "Wait until it has finished, or write to another place."
                raise WorkError(f"{path.parent} is being written by {holder}. {advice}") from None
            if error.errno not in _UNSUPPORTED:
                raise write_error(path.parent, error) from error
            if str(path) not in _warned:
                _warned.add(str(path))
                say(f"The file system of {path.parent} has no locks. Make sure that no other process writes there.")
            path.unlink(missing_ok=True)
            return os.open(os.devnull, os.O_RDONLY)
        # The previous holder may have removed the file between `open` and `flock`: then this lock protects nothing.
        if _is_named(handle, path):
            break
        os.close(handle)
    # A file that a process described and none locks was left by one that was killed.
    if kind == fcntl.LOCK_EX and not wait and (holder := _holder(handle)):
        say(f"Taking over {path.parent}: {holder} ended without finishing.")
    with contextlib.suppress(OSError):  # on a full disk the lock holds without its description
        os.ftruncate(handle, 0)
        command = Path(sys.argv[0]).name
        if command.startswith("mtb"):
            command = shlex.join(["mtb", *sys.argv[1:]])[:200]
        text = f"process {os.getpid()} on {socket.gethostname()} (`{command}`, since {time.strftime('%Y-%m-%d %H:%M')})"
        os.pwrite(handle, text.encode("utf-8", "backslashreplace"), 0)
    return handle


def _is_named(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


def _holder(handle: int) -> str:
    """Read who described the lock file; empty if nobody did."""
    with contextlib.suppress(OSError):
        return os.pread(handle, 1000, 0).decode("utf-8", "replace")
    return ""
