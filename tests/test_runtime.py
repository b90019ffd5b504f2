"""Progress where there is no terminal, and device names: every command says the same about what this machine lacks."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

from medtokenbudget import runtime as module
from medtokenbudget.errors import RequestError
from medtokenbudget.runtime import available_devices, progress, resolve_device, worker_devices


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the bars see."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def test_long_work_writes_a_line_every_30_seconds_and_at_its_end(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress(total=1020, initial=1000, what="extract", unit="image") as bar:
        for _ in range(20):
            clock[0] += 4
            bar.update(1)
    out, err = capsys.readouterr()
    assert out == ""
    # A line after 8 and 16 steps of 4 seconds; images that were done before do not count for the rate.
    assert err.splitlines() == [
        "extract: 1,008 of 1,020 images, 0.25 per second, 00:48 left",
        "extract: 1,016 of 1,020 images, 0.25 per second, 00:16 left",
        "extract: 1,020 of 1,020 images, 0.25 per second",
    ]


def test_work_of_units_of_different_length_tells_no_rate(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress(total=3, what="sweep", unit="unit", pace=False) as bar:
        clock[0] += 31
        bar.set_postfix(epoch=2)
    assert capsys.readouterr().err == "sweep: 0 of 3 units, epoch=2\n"


def test_short_work_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(range(3), what="reading")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_work_of_unknown_length_tells_what_it_knows(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress(what="predict", unit="image") as bar:
        bar.set_postfix(loss="0.1")
        clock[0] += 40
        bar.update(80)
    assert capsys.readouterr().err == "predict: 80 images, 2.0 per second, loss=0.1\n"


def _lines_of_long_work() -> str:
    lines = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(lines):
        patch.setattr(module, "_SECONDS", 1e-9)
        for _ in progress(range(5), what="extract"):
            pass
    return lines.getvalue()


def test_a_worker_process_writes_nothing() -> None:
    assert _lines_of_long_work() != ""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_lines_of_long_work) == ""


_KILLED_WHILE_DRAWING = """
import os, random, signal, time
from medtokenbudget.runtime import progress

progress(total=1, what="first").close()
for _ in range(30):
    child = os.fork()
    if child == 0:
        while True:
            progress(total=1, what="child").close()
    time.sleep(random.uniform(0.01, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    progress(total=1, what="parent").close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_killed_worker_takes_no_lock_with_it() -> None:
    subprocess.run([sys.executable, "-c", _KILLED_WHILE_DRAWING], check=True, timeout=60)


def test_names_become_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device(torch.device("cpu")) == torch.device("cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert available_devices()[:3] == ["cpu", "cuda:0", "cuda:1"]
    for name in ("cuda", "cuda:0", "cuda:1"):
        assert resolve_device(name) == torch.device(name)
    with pytest.raises(RequestError, match=r"Device 'cuda:2' is not available on this machine. Available: cpu, cuda:0, cuda:1"):
        resolve_device("cuda:2")
    assert worker_devices("cuda") == ["cuda:0", "cuda:1"]
    assert worker_devices("auto", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert worker_devices("cuda:1", 2) == ["cuda:1", "cuda:1"]
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert worker_devices("cpu") == ["cpu"] * 4


def test_a_name_of_no_device_or_of_one_that_this_machine_lacks_is_rejected_with_the_available_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    for name in ("gpu", "", "cuda:first", "cpu:-1"):
        with pytest.raises(RequestError, match=f"'{name}' is not a device name. Available: cpu"):
            resolve_device(name)
    for name in ("cuda", "mps", "meta", "cpu:5"):
        with pytest.raises(RequestError, match=f"Device '{name}' is not available on this machine. Available: cpu"):
            resolve_device(name)
