"""Progress where there is no terminal: lines for long work, nothing for short work and for workers."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import subprocess
import sys
import time

import pytest

from medtokenbudget import progress as module
from medtokenbudget.progress import progress


def steps(n: int, seconds: float) -> None:
    with progress(total=n + 1000, initial=1000, what="extract", unit="image") as bar:
        for _ in range(n):
            time.sleep(seconds)
            bar.update(1)


def test_long_work_writes_a_line_now_and_then_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.2)
    start = time.monotonic()
    steps(100, 0.01)
    seconds = time.monotonic() - start
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert 2 <= len(lines) <= seconds / 0.2 + 1
    for line in lines[:-1]:
        assert re.fullmatch(r"extract: 1,0\d\d of 1,100 images, [\d.]+ per second, 00:\d\d left", line), line
    assert re.fullmatch(r"extract: 1,100 of 1,100 images, [\d.]+ per second", lines[-1])
    pace = float(lines[-1].split(", ")[1].split()[0])
    assert pace <= 100, "images that were done before do not count"


def test_short_work_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    steps(10, 0)
    assert list(progress(range(3), what="reading")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_work_of_unknown_length_tells_what_it_knows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.02)
    with progress(what="predict", unit="image") as bar:
        bar.set_postfix(loss="0.1")
        for _ in range(5):
            time.sleep(0.01)
            bar.update()
    assert re.search(r"predict: 5 images, [\d.]+ per second, loss=0\.1\n$", capsys.readouterr().err)


def _told(seconds: float) -> str:
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(told):
        patch.setattr(module, "_SECONDS", seconds)
        steps(5, 0.01)
    return told.getvalue()


def test_a_worker_process_writes_nothing() -> None:
    assert _told(0.01) != ""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_told, (0.01,)) == ""


_KILLED_WHILE_DRAWING = """
import os, random, signal, time
from medtokenbudget.progress import progress

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
