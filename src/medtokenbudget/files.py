"""Atomic writes, locks, JSON and tensors that carry a checksum, hashes of files, files of the Hugging Face Hub, and where
weights are on this machine.

Everything that the package writes goes through `atomic_write`: a temporary file in the same folder, fsync, then `os.replace`, then
fsync of the folder. What a killed process leaves behind (`.NAME.*.part`) is removed when the folder is written to again. While a
process writes a folder, it holds its lock (`exclusive`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from medtokenbudget.errors import MedTokenBudgetError, MismatchError, RequestError, WorkError
from medtokenbudget.runtime import say

if TYPE_CHECKING:
    from torch import Tensor

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

LEFTOVER_SECONDS = 24 * 3600
"""Age at which a temporary file of another machine counts as left behind."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PART = re.compile(r"\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-[^.]*\.part$")
_NAME_ROOM = 160
_PLACES = 8
"""Further copies of the same weights that are remembered, in case the last one is deleted."""
_SEAL = "checksum"
_cleaned: set[tuple[int, str]] = set()


@contextmanager
def atomic_write(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`, which replaces `path` if the block ends without an error."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if (key := (os.getpid(), os.path.abspath(target.parent))) not in _cleaned:
            _cleaned.add(key)
            remove_leftovers(target.parent)
        # Names have at most 255 bytes, and a long one must leave room for the rest.
        prefix = f".{target.name[:_NAME_ROOM]}.{_machine()}-{os.getpid()}-"
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=".part", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise write_error(target, error) from error
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.umask(mask := os.umask(0))  # the system has no other way to ask for it
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # a rename survives a power failure only then
            finally:
                os.close(folder)
    except OSError as error:
        raise write_error(target, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_error(path: Path | str, error: OSError) -> WorkError:
    """Return the error for a file that could not be written."""
    if error.errno in _FULL:
        return WorkError(f"No space left while writing {path}. Free some disk space and run the same command again to continue.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return WorkError(f"Cannot write {path}: {error.strerror}. Choose a folder that you can write to.")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return WorkError(f"Cannot write {path}: {error.strerror}. Raise the limit with `ulimit -n 4096`, or use fewer workers.")
    return WorkError(f"Cannot write {path}: {error.strerror or error}.")


@lru_cache(maxsize=1)
def _machine() -> str:
    """Name where process ids mean the same: this host since it started, in this container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def remove_leftovers(folder: Path | str) -> None:
    """Remove temporary files of this user whose process is gone; those of other machines only after a day."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") and entry.name.endswith(".part"):
                with contextlib.suppress(OSError):
                    if _left_behind(entry):
                        os.unlink(entry.path)


def _left_behind(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    # In a shared folder, files of others are not ours to remove.
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return False
    made_by = _PART.search(entry.name)
    if made_by is None or made_by["machine"] != _machine():
        return time.time() - status.st_mtime > LEFTOVER_SECONDS
    try:
        os.kill(int(made_by["pid"]), 0)  # asks whether the process exists
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def write_text(path: Path | str, text: str) -> None:
    """Write text as UTF-8; file names that are not UTF-8 appear in it with escapes (`\\udcff`), which JSON reads back."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_encoded(path: Path | str, encode: Callable[[BinaryIO], Any]) -> None:
    """Let `encode` (such as a picture's `save`) write to memory, and that to a file.

    Pillow writes to files without a look at how much was written, so that a full disk would leave a truncated picture behind.
    """
    stream = io.BytesIO()
    encode(stream)
    write_bytes(path, stream.getvalue())


def write_json(path: Path | str, value: Any) -> None:
    """Write JSON with sorted keys, so that equal values give equal bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, default=str) + "\n")


def read_json(path: Path | str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist.") from None
    except (ValueError, RecursionError) as error:
        why = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid JSON ({error})"
        raise RequestError(f"{path} {why}. The file may be damaged; create it again.") from None
    except OSError as error:
        raise RequestError(f"Cannot read {path}: {error.strerror or error}.") from None


def write_sealed(path: Path | str, values: Mapping[str, Any], compact: bool = False) -> None:
    """Write a JSON object that results depend on, with a checksum of its own content; `unsealed` checks it."""
    # After a round trip, because JSON turns tuples into lists and the keys into text.
    plain = json.loads(json.dumps(values, default=str))
    whole = {**plain, _SEAL: sha256_json(plain)}
    if compact:
        write_text(path, json.dumps(whole, separators=(",", ":")) + "\n")
    else:
        write_json(path, whole)


def unsealed(path: Path | str, values: Any, advice: str) -> dict[str, Any]:
    """Return what `write_sealed` was given from the parsed content of a file; `advice` says how to get a good one.

    Apart from reading, so that a format without a checksum can be recognized by its number first.
    """
    if not isinstance(values, dict) or _SEAL not in values:
        raise RequestError(f"{path} is damaged or was written by another version: it has no checksum. {advice}")
    plain = {key: value for key, value in values.items() if key != _SEAL}
    if values[_SEAL] != sha256_json(plain):
        raise RequestError(f"{path} is damaged or was edited: its content does not match its checksum. {advice}")
    return plain


def read_sealed(path: Path | str, advice: str) -> dict[str, Any]:
    return unsealed(path, read_json(path), advice)


def claim(path: Path | str, settings: Mapping[str, Any], what: str, advice: str, ignore: Sequence[str] = ()) -> None:
    """Record in `path` the settings that the results in a folder depend on, or refuse to add results of other settings.

    The settings named in `ignore` may differ. The message starts with `what`, such as "The store tokens", and ends with `advice`.
    """
    if not Path(path).exists():
        write_sealed(path, settings)
    expected = {key: value for key, value in settings.items() if key not in ignore}
    check_same(what, expected, read_sealed(path, advice), advice)


def check_same(what: str, expected: Mapping[str, Any], recorded: Mapping[str, Any], advice: str) -> None:
    """Raise a MismatchError that shows where `recorded` differs from `expected`; keys that only `recorded` has may differ."""
    wanted, has = dotted(json.loads(json.dumps(expected, default=str))), dotted(recorded)
    if any(has.get(key) != value for key, value in wanted.items()):
        raise MismatchError.between(what, wanted, {key: has.get(key) for key in wanted}, advice)


def append_line(path: Path | str, value: Any) -> None:
    """Append one line to a JSON-lines file."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(_line(value))
    except OSError as error:
        raise write_error(path, error) from error


def remove(path: Path | str) -> None:
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error) from error


def write_lines(path: Path | str, rows: Iterable[Any]) -> None:
    write_text(path, "".join(map(_line, rows)))


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str) + "\n"


def read_lines(path: Path | str) -> list[dict[str, Any]]:
    """Read a JSON-lines file; lines that a crash left incomplete are skipped."""
    rows: list[Any] = []
    for line in Path(path).read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # not JSON, or not UTF-8
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def sha256_file(path: Path | str) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hash a JSON value (SHA-256), independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to one with dotted keys: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write bytes atomically. The `save_file` of safetensors would leave a hidden file behind when it is killed."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)


def save_tensors(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and a JSON state as one safetensors file that carries its own hash; equal content gives equal bytes."""
    from safetensors.torch import save

    # Sorted and cloned: equal content gives equal bytes, and tensors that share memory can be saved.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())}
    text = json.dumps(state, sort_keys=True)
    # One key only: safetensors writes several in an order that changes from call to call.
    metadata = {"state": json.dumps({"sha256": _digest(plain, text), "state": text}, sort_keys=True)}
    write_bytes(path, save(plain, metadata))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and JSON state of a file written by `save_tensors`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as stream:
            metadata = stream.metadata() or {}
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from None
    if "state" not in metadata:
        raise RequestError(f"{path} was not written by MedTokenBudget: its header has no state.")
    try:
        envelope = json.loads(metadata["state"])
        text, expected = envelope["state"], envelope["sha256"]
        state = json.loads(text)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _damaged(path, "its header cannot be read") from None
    if _digest(tensors, text) != expected:
        raise _damaged(path, "its content does not match its hash")
    return tensors, state


def _damaged(path: Path, why: str) -> RequestError:
    return RequestError(f"{path} is damaged or incomplete ({why}). Delete it and run the command again.")


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    import torch

    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        # Type and shape too: the same bytes mean other numbers in another type.
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# One process at a time writes a store, run, model, report or table. The lock is the kernel's (`flock` on a file in the directory),
# so it ends with its process, even if that is killed. The file also says who holds it, for the message that others get.

LOCK = ".lock"
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: set[tuple[int, str]] = set()
_warned: set[str] = set()


@contextmanager
def exclusive(folder: Path | str, shared: bool = False, name: str = LOCK, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a directory inside the block; the directory is created if needed, and removed again if nothing was written.

    The same thread can take a lock that it holds once more. A `shared` lock allows others who also ask for one, such as the jobs
    of an array that fill one store. With `wait`, a lock that is held is waited for instead of refused.
    """
    path = Path(folder).resolve() / name
    if path.parent.exists() and not path.parent.is_dir():
        raise RequestError(f"{folder} is a file, not a folder. Write to another place.")
    # A lock belongs to an open file: the same thread would wait for itself when it opens the file again.
    key = (threading.get_ident(), str(path))
    if fcntl is None or key in _held:
        yield
        return
    new = not shared and not path.parent.exists()
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
            if new:
                path.parent.rmdir()  # fails unless it is empty
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
    with contextlib.suppress(OSError):
        return os.pread(handle, 1000, 0).decode("utf-8", "replace")
    return ""


_reached: set[str] = set()


def fetch(repo_id: str, name: str, revision: str | None = None) -> Path:
    """Return the path of a repository's file in the cache, downloaded if the hub can be reached.

    A WorkError says that it is in neither; other errors come from the hub's client.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, name, revision=revision, local_files_only=not _answers()))
    except LocalEntryNotFoundError:
        why = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise WorkError(f"The hub cannot be reached{why}, and {repo_id}/{name} is not in its cache.") from None


def _answers() -> bool:
    """Whether the hub answers. Its own client tries five times, for half a minute, before it looks into its cache."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.ENDPOINT not in _reached and not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=5.0)
        except Exception:  # the errors of the client's transport, which changes with its version
            return False
        _reached.add(constants.ENDPOINT)
    return not constants.HF_HUB_OFFLINE


def remember(path: Path, sha256: str) -> None:
    """Note for this user where the weights with this hash are; models and stores name them by hash alone."""
    place = str(path.absolute())
    others = [str(known) for known in remembered(sha256) if str(known) != place]
    with contextlib.suppress(OSError, MedTokenBudgetError):  # a user without a home directory names the weights again
        text = "\n".join([place, *others[:_PLACES]])
        if not _note(sha256).is_file() or _note(sha256).read_text(encoding="utf-8") != text:
            write_text(_note(sha256), text)


def remembered(sha256: str) -> list[Path]:
    """Return where the weights with this hash were last seen, as far as they are still there, the newest place first."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        return [path for line in _note(sha256).read_text(encoding="utf-8").splitlines() if (path := Path(line)).is_file()]
    return []


def _note(sha256: str) -> Path:
    """Return the file in which this user's machine notes where the weights with this hash are."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "medtokenbudget" / "weights" / sha256
