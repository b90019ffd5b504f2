"""Files that appear whole, damaged tensors, and folders that two processes write: the second stops at once."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from medtokenbudget import files
from medtokenbudget.cli import main
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import exclusive, load_tensors, read_lines, save_tensors
from tests import processes
from tests.drawn import Drawn
from tests.reporting.fake_run import fake_run
from tests.small_model import draw_images, small_backbone, small_model


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


def test_a_file_name_that_is_not_utf8_survives_json_lines(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    files.append_line(tmp_path / "errors.jsonl", {"image": name})
    assert files.read_lines(tmp_path / "errors.jsonl") == [{"image": name}]


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


SMALL = ["--batch-size", "16", "--device", "cpu"]
LATS = ["--lats.hidden", "16", "--lats.layers", "1"]


def test_a_lock_is_given_once_and_leaves_no_file(tmp_path: Path) -> None:
    with exclusive(tmp_path / "run"):
        seen: list[str] = []

        def other() -> None:
            try:
                with exclusive(tmp_path / "run"):
                    seen.append("entered")
            except WorkError as error:
                seen.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(seen) == 1
        assert f"{tmp_path / 'run'} is being written by process {os.getpid()} on " in seen[0]
        with exclusive(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / ".lock").exists(), "taking it once more and giving it back keeps the lock"
    assert list(tmp_path.iterdir()) == [], "a folder in which nothing was written goes too"


def test_the_jobs_of_an_array_share_a_lock_and_keep_others_out(tmp_path: Path) -> None:
    first = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(first, fcntl.LOCK_SH)
    with exclusive(tmp_path, shared=True):
        pass
    assert (tmp_path / ".lock").exists(), "the other job still holds it"
    with pytest.raises(WorkError, match="is being written by"), exclusive(tmp_path):
        pass
    os.close(first)
    with exclusive(tmp_path):
        pass


def test_a_file_system_without_locks_is_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for _ in range(2):
        with exclusive(tmp_path):
            pass
    assert capsys.readouterr().err.count("has no locks") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_cannot_be_locked_as_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="is a file, not a folder"), exclusive(tmp_path / "file"):
        pass


@pytest.fixture
def sweep(drawn: Drawn, tmp_path: Path) -> list[object]:
    return ["sweep", drawn.manifest_path, "--store", drawn.store_path, "--out", tmp_path / "run", "--jobs", 1, *SMALL, *LATS]


def _started(running: processes.Running, path: Path) -> None:
    while running.process.is_alive() and not path.exists():
        time.sleep(0.01)
    assert running.process.is_alive()


@pytest.mark.slow
def test_two_different_runs_into_one_directory_do_not_mix(sweep: list[object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = processes.Running([*sweep, "--epochs", 12, "--methods", "lats"], tmp_path / "first")
    _started(first, run / "units" / "lats-42" / "metrics.jsonl")
    os.kill(first.pid, signal.SIGSTOP)  # it must not end before the others have tried
    try:
        for arguments in ([*sweep, "--epochs", 3, "--methods", "lats", "center"], ["report", run]):
            second = processes.run(arguments, tmp_path / "second")
            assert second.code == 1, second.said
            assert f"{run} is being written by process {first.pid} on " in second.said
            assert "Traceback" not in second.said
    finally:
        os.kill(first.pid, signal.SIGCONT)
    ended = first.wait()
    assert ended.code == 0, ended.said
    epochs = [row["epoch"] for row in read_lines(run / "units" / "lats-42" / "metrics.jsonl")]
    assert epochs == list(range(len(epochs)))
    assert len(epochs) >= 12
    assert not (run / ".lock").exists()


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_taken_over(sweep: list[object], tmp_path: Path) -> None:
    run, command = tmp_path / "run", [*sweep, "--epochs", 8, "--methods", "lats"]
    first = processes.Running(command, tmp_path / "first")
    _started(first, run / "units" / "lats-42" / "metrics.jsonl")
    first.kill()
    first.wait()
    assert (run / ".lock").exists()
    second = processes.run(command, tmp_path / "second")
    assert second.code == 0, second.said
    assert f"Taking over {run}: process {first.pid} on " in second.said
    assert not (run / ".lock").exists()


@pytest.mark.parametrize("what", ["extract", "report", "export", "predict", "data"])
def test_every_writing_command_stops_where_another_process_writes(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """Held through another open file, as another process would."""
    place, name = tmp_path / "place", ".p.lock" if what == "predict" else ".lock"
    place.mkdir()
    weights = small_backbone(drawn.store_path.parent).weights
    if what in ("export", "predict"):
        small_model(tmp_path / "weights", baselines=("center",)).save_pretrained(tmp_path / "model")
        draw_images(tmp_path / "images", 1)
    if what == "report":
        fake_run(tmp_path / "run", n=8, seeds=(42,), studies=("main",), images=False)
    command = {
        "extract": f"{drawn.manifest_path} --store {place} --backbone test_vit --weights {weights} --image-size 160",
        "report": f"{tmp_path}/run --out {place}",
        "export": f"{tmp_path}/model --format hub --out {place}",
        "predict": f"{tmp_path}/images --model {tmp_path}/model --out {place}/p.csv --device cpu",
        "data": f"synthetic --out {place} --n 2",
    }[what]
    handle = os.open(place / name, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    capsys.readouterr()
    try:
        assert main([what, *command.split()]) == 1
    finally:
        os.close(handle)
    assert f"{place} is being written by another process." in capsys.readouterr().err
    assert [path.name for path in place.iterdir()] == [name]
