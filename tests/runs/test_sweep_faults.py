"""Sweeps that are killed or damaged: no worker outlives its parent, damage is noticed, and failures are exit codes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from medtokenbudget.cli import main
from medtokenbudget.errors import RequestError
from medtokenbudget.runs.methods import Method
from medtokenbudget.runs.results import read_results
from medtokenbudget.runs.run import RunInfo
from medtokenbudget.runs.trained import load_unit
from medtokenbudget.runs.units import Unit
from medtokenbudget.routing import Ranker, register_selector
from medtokenbudget.routing.base import SELECTORS
from tests import processes
from tests.drawn import Drawn

pytestmark = pytest.mark.slow

HEADS = ["--head-epochs", "1", "--batch-size", "16", "--device", "cpu"]
LATS = ["--epochs", "1", "--lats.hidden", "16", "--lats.layers", "1"]


def command(drawn: Drawn, out: Path, *more: object) -> list[str]:
    small = [*HEADS, *(LATS if any(str(word).startswith("lats") for word in more) else ())]
    return [str(word) for word in ("sweep", drawn.manifest_path, "--store", drawn.store_path, "--out", out, *small, *more)]


def descendants(pid: int) -> set[int]:
    """The processes that a process started, and those that they started."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found: set[int] = set()
    while True:
        more = {child for child, parent in parents.items() if parent in {pid, *found}} - found
        if not more:
            return found
        found |= more


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks at processes in /proc")
def test_the_workers_of_a_killed_sweep_end_with_it(drawn: Drawn, tmp_path: Path) -> None:
    methods = ["--methods", "random", "center", "--seeds", *range(20)]
    running = processes.Running(command(drawn, tmp_path / "run", "--jobs", 2, *methods), tmp_path / "log")
    while running.process.is_alive() and not list((tmp_path / "run").glob("units/*/unit.json")):
        time.sleep(0.05)
    workers = descendants(running.pid)
    assert len(workers) >= 2
    running.kill()
    running.wait()
    for _ in range(200):
        left = {pid for pid in workers if os.path.exists(f"/proc/{pid}") and "Z" not in _state(pid)}
        if not left:
            break
        time.sleep(0.1)
    assert not left
    units = len(list((tmp_path / "run").glob("units/*/unit.json")))
    time.sleep(1)
    assert len(list((tmp_path / "run").glob("units/*/unit.json"))) == units < 40


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_sweep_with_a_failed_unit_exits_with_1_and_lists_it(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @register_selector("broken")
    class Broken(Ranker):
        def score(self, tokens, generator=None):  # type: ignore[no-untyped-def]
            raise RuntimeError("not today")

    try:
        assert main(command(drawn, tmp_path, "--jobs", 1, "--methods", "center", "broken")) == 1
    finally:
        SELECTORS.unregister("broken")
    said = capsys.readouterr().err
    assert "1 of 2 trainings failed: broken (seed 42)." in said
    assert "not today" in said
    assert set(read_results(tmp_path / "results.csv")["method"]) == {"center"}


@pytest.fixture(scope="module")
def whole(drawn: Drawn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole")
    assert main(command(drawn, out, "--jobs", 1, "--methods", "lats:lesion-first", "center")) == 0
    return out


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("units/center-42/head.safetensors", False),
        ("units/center-42/predictions.parquet", True),
        ("units/center-42/routing.safetensors", True),
        ("units/center-42/images.json", True),
        ("units/center-42/unit.json", True),
        ("units/lats~lesion-first-42/head.safetensors", False),
        ("results.csv", False),
        ("predictions.parquet", False),
        ("routing.safetensors", True),
    ],
)
def test_a_damaged_file_of_a_finished_run_is_made_again(
    drawn: Drawn, whole: Path, capsys: pytest.CaptureFixture[str], name: str, cut: bool
) -> None:
    results, model, expected = ((whole / n).read_bytes() for n in ("results.csv", "model/heads.safetensors", name))
    damage(whole / name, cut)
    assert main(command(drawn, whole, "--jobs", 1, "--methods", "lats:lesion-first", "center")) == 0
    assert (whole / name).read_bytes() == expected
    assert (whole / "results.csv").read_bytes() == results
    assert (whole / "model/heads.safetensors").read_bytes() == model
    if name.startswith("units") and "unit.json" not in name:
        assert f"{name} is missing or damaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["head.safetensors", "checkpoint.safetensors"])
def test_a_flipped_bit_is_not_published(whole: Path, name: str) -> None:
    path = whole / "units" / "lats~lesion-first-42" / name
    before = path.read_bytes()
    damage(path, cut=False)
    try:
        with pytest.raises(RequestError, match=f"{name} is damaged"):
            load_unit(RunInfo.read(whole), Unit(Method.parse("lats:lesion-first"), 42), 64)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("cut", [True, False])
def test_damaged_pooled_tokens_are_made_again(drawn: Drawn, whole: Path, cut: bool) -> None:
    (pooled,) = (whole / "pooled").glob("center-*.npy")
    expected, head = pooled.read_bytes(), (whole / "units/center-42/head.safetensors").read_bytes()
    damage(pooled, cut)
    (whole / "units/center-42/unit.json").unlink()
    assert main(command(drawn, whole, "--jobs", 1, "--methods", "lats:lesion-first", "center")) == 0
    assert pooled.read_bytes() == expected
    assert (whole / "units/center-42/head.safetensors").read_bytes() == head


def damage(path: Path, cut: bool) -> None:
    """Cut a file in half, or flip one bit near its end."""
    data = bytearray(path.read_bytes())
    if not cut:
        data[-3] ^= 1
    path.write_bytes(data[: len(data) // 2] if cut else data)
