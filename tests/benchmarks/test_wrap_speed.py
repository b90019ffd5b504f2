"""The benchmark of wrapped models: what it writes, and that it goes on where it was stopped."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import wrap_speed

TWO = ("dense", "wrap")
REQUEST = ["--shapes", "ViT-S/14", "--batches", "1", "3", "--step", "2", "--threads", "1", "--rounds", "1"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was measured, with a model of one layer in place of transformers."""
    done: list[Any] = []

    def seconds(what: str, found: Any, batch: int, rounds: int, threads: int) -> dict[str, list[float]]:
        done.append((what, batch, rounds))
        return original(what, found, batch, rounds, threads)

    def memory(shape: str, way: str, batch: int) -> float:
        done.append(("memory", way))
        return 7.0

    original, tiny = wrap_speed.seconds_of, nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, wrap_speed.CLASSES))
    monkeypatch.setattr(wrap_speed, "ways", lambda shape: dict.fromkeys(TWO, (tiny, 4)))
    monkeypatch.setattr(wrap_speed, "seconds_of", seconds)
    monkeypatch.setattr(wrap_speed, "memory", memory)
    return done


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_each_pass_is_timed_for_each_model_and_the_memory_of_a_step_is_measured_once(measured: list[Any], tmp_path: Path) -> None:
    before = torch.get_num_threads()
    wrap_speed.main([*REQUEST, "--out", str(tmp_path / "new" / "wrap.csv")])
    found = rows(tmp_path / "new" / "wrap.csv")
    keys = [(row["what"], row["batch"], row["threads"], row["way"]) for row in found]
    timed = [(what, batch, "1", way) for what, batch in (("forward", "1"), ("forward", "3"), ("step", "2")) for way in TWO]
    assert keys == [*timed, *(("memory", "2", "", way) for way in TWO)]
    assert all(float(row["speed"]) > 0 and float(row["milliseconds"]) >= 0 for row in found[:6])
    assert [row["speed"] for row in found[:6:2]] == ["1.000"] * 3, "the dense model is the measure"
    assert [row["mib"] for row in found] == [""] * 6 + ["7", "7"]
    assert torch.get_num_threads() == before


def test_a_table_that_was_begun_is_completed_and_a_complete_one_is_left(measured: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "wrap.csv"
    wrap_speed.main([*REQUEST, "--out", str(path)])
    whole = path.read_text(encoding="utf-8")
    measured.clear()
    wrap_speed.main([*REQUEST, "--out", str(path)])
    assert (measured, path.read_text(encoding="utf-8")) == ([], whole)
    kept = [
        line
        for line in whole.splitlines(keepends=True)
        if not line.startswith(("forward,ViT-S/14,3,1,wrap", "memory,ViT-S/14,2,,wrap"))
    ]
    path.write_text("".join(kept), encoding="utf-8")
    wrap_speed.main([*REQUEST, "--out", str(path)])
    assert measured == [("forward", 3, 1), ("memory", "wrap")]
    assert {tuple(row.values())[:5] for row in rows(path)} == {tuple(line.split(",")[:5]) for line in whole.splitlines()[1:]}
