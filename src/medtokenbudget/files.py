"""Files that appear whole, and hashes of what is in them.

Everything that the package writes goes through `atomic_write`: a temporary file in the same folder, fsync, then `os.replace`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medtokenbudget.errors import RequestError, WorkError


@contextmanager
def atomic_write(path: Path | str) -> Iterator[Path]:
    """Give a temporary path in the folder of `path`; when the block ends without an error, it becomes `path` at once."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise _write_error(target, error) from error
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        raise _write_error(target, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_error(path: Path, error: OSError) -> WorkError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WorkError(f"no space left while writing {path}. Free some disk and run the same command again: it goes on.")
    return WorkError(f"cannot write {path}: {error.strerror or error}.")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def write_text(path: Path | str, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:
    """Write JSON with sorted keys, so that equal values are equal bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, default=str) + "\n")


def read_json(path: Path | str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not valid JSON ({error}). It may be damaged: make it anew.") from None


def append_line(path: Path | str, value: Any) -> None:
    """Append one JSON line (`metrics.jsonl`, `errors.jsonl`)."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(_line(value))


def write_lines(path: Path | str, rows: Iterable[Any]) -> None:
    """Write a whole file of JSON lines."""
    write_text(path, "".join(map(_line, rows)))


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str) + "\n"


def read_lines(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line that a crash cut short is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def sha256_file(path: Path | str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hash of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def dotted(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted keys, so that a difference is shown where it is."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def write_safetensors(path: Path | str, save: Callable[[str], None]) -> None:
    """Let `save` (a call of `safetensors.*.save_file`) write to a temporary file that then becomes `path`."""
    with atomic_write(path) as temporary:
        save(str(temporary))
