"""Two processes that write the same directory: the second stops at once, and a killed one leaves nothing behind that blocks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from medtokenbudget.cli import main
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import read_lines
from medtokenbudget.locks import exclusive
from tests import processes
from tests.drawn import Drawn

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
    assert list((tmp_path / "run").iterdir()) == []


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
    from tests.small_model import draw_images, small_backbone, small_model

    place, name = tmp_path / "place", ".lock"
    place.mkdir()
    backbone = small_backbone(drawn.store_path.parent)
    view = ["--backbone", backbone.name, "--weights", backbone.weights, "--image-size", 160]
    if what in ("export", "predict"):
        small_model(tmp_path / "weights", baselines=("center",)).save_pretrained(tmp_path / "model")
    if what == "predict":
        name = ".p.lock"
    commands: dict[str, list[object]] = {
        "extract": ["extract", drawn.manifest_path, "--store", place, *view],
        "report": ["report", "RUN", "--out", place],
        "export": ["export", tmp_path / "model", "--format", "hub", "--out", place],
        "predict": ["predict", tmp_path / "model", *draw_images(tmp_path / "i", 1), "--out", place / "p.csv", "--device", "cpu"],
        "data": ["data", "synthetic", "--out", place, "--n", 2],
    }
    if what == "report":
        sweep = ["sweep", drawn.manifest_path, "--store", drawn.store_path, "--out", tmp_path / "run", "--methods", "center"]
        assert main([str(word) for word in (*sweep, *SMALL, "--head-epochs", 1, "--jobs", 1)]) == 0
        commands["report"][1] = tmp_path / "run"
    handle = os.open(place / name, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    capsys.readouterr()
    try:
        assert main([str(word) for word in commands[what]]) == 1
    finally:
        os.close(handle)
    assert f"{place} is being written by another process." in capsys.readouterr().err
    assert [path.name for path in place.iterdir()] == [name]
