"""Files that appear whole: full disks, leftovers of killed processes, names that are not UTF-8, damaged tensors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from medtokenbudget import files
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.tensor_files import load_tensors, save_tensors


def _killed_while_writing(folder: Path) -> Path:
    script = """
import os, sys
from medtokenbudget.files import atomic_write
with atomic_write(sys.argv[1]) as temporary:
    temporary.write_text("half")
    os._exit(9)
"""
    subprocess.run([sys.executable, "-c", script, str(folder / "table.csv")], check=False)
    (leftover,) = folder.glob(".*.part")
    return leftover


def test_what_a_killed_process_left_behind_is_removed_by_the_next_one(tmp_path: Path) -> None:
    leftover = _killed_while_writing(tmp_path)
    files.write_text(tmp_path / "other.csv", "whole")
    assert not leftover.exists()


def test_leftovers_of_running_processes_other_machines_and_other_users_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = tmp_path / f".a.{files._machine()}-{os.getpid()}-x.part"
    elsewhere = tmp_path / ".b.0123abcd-1-x.part"
    for path in (running, elsewhere):
        path.write_text("half")
    files.remove_leftovers(tmp_path)
    assert running.exists()
    assert elsewhere.exists()
    old = time.time() - 2 * files.LEFTOVER_SECONDS
    os.utime(elsewhere, (old, old))
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    files.remove_leftovers(tmp_path)
    assert elsewhere.exists(), "it belongs to another user"
    monkeypatch.undo()
    files.remove_leftovers(tmp_path)
    assert not elsewhere.exists()


def test_the_folder_is_synced_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    replace, sync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b))[1])

    def synced(handle: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        sync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    files.write_text(tmp_path / "a.txt", "a")
    assert calls == ["file", "replace", "folder"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EMFILE])
def test_a_line_that_cannot_be_appended_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(WorkError, match=r"(Cannot write|No space left while writing) .*metrics\.jsonl"):
        files.append_line(tmp_path / "metrics.jsonl", {"a": 1})


def test_a_file_name_that_is_not_utf8_survives_json_lines(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    files.append_line(tmp_path / "errors.jsonl", {"image": name})
    assert files.read_lines(tmp_path / "errors.jsonl") == [{"image": name}]


def test_deeply_nested_json_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(RequestError, match="nested too deeply"):
        files.read_json(tmp_path / "x.json")


def test_a_sealed_file_gives_back_what_was_written_and_notices_every_other_value(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    values = {"text": "café \udcff", "numbers": (0.1, 1e-300, -3, None, True), "nested": {"2": [], "10": {}}, "where": tmp_path}
    expected = {**values, "numbers": [0.1, 1e-300, -3, None, True], "where": str(tmp_path)}
    for compact in (False, True):
        files.write_sealed(path, values, compact)
        assert files.read_sealed(path, "") == expected
    whole, messages = path.read_bytes(), []
    for place, byte in enumerate(whole):
        path.write_bytes(whole[:place] + bytes([byte ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            assert files.read_sealed(path, "") == expected, place
        except RequestError as error:
            messages.append(str(error))
    assert len(messages) >= len(whole) - 1  # the newline at the end may become a space
    assert all(message.startswith(str(path)) for message in messages)
    path.write_text('{"a": 1}')
    with pytest.raises(RequestError, match=r"no checksum\. Make it again"):
        files.read_sealed(path, "Make it again.")


def test_a_flipped_bit_in_a_checkpoint_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_tensors(path, {"a": torch.arange(4.0), "b": torch.ones(2, dtype=torch.int64)}, {"epoch": 3})
    whole = path.read_bytes()
    assert load_tensors(path)[1] == {"epoch": 3}
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            tensors, state = load_tensors(path)
        except RequestError:
            continue
        # A bit that means nothing, such as one of the padding.
        assert state == {"epoch": 3}
        assert torch.equal(tensors["a"], torch.arange(4.0))


def test_a_file_of_another_program_is_not_a_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "c.safetensors")
    with pytest.raises(RequestError, match="was not written by MedTokenBudget"):
        load_tensors(tmp_path / "c.safetensors")


def test_a_safetensors_file_is_written_without_a_hidden_file_of_the_library(tmp_path: Path) -> None:
    """The library's `save_file` writes to `.tmpXXXXXX` first, whose owner nobody knows after a kill."""
    seen: list[str] = []
    real = files.atomic_write

    @contextmanager
    def watched(path: Path) -> Iterator[Path]:
        with real(path) as temporary:
            yield temporary
            seen.extend(entry.name for entry in tmp_path.iterdir())

    tensors = {"a": torch.arange(6.0).reshape(2, 3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "atomic_write", watched)
        files.write_safetensors(tmp_path / "x.safetensors", save(tensors, {"note": "1"}))
    assert len(seen) == 1
    assert seen[0].endswith(".part")
    save_file(tensors, tmp_path / "y.safetensors", {"note": "1"})
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
