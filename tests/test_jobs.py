"""The runner: units are made everywhere alike, in order where order counts, and what goes wrong is a message."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.jobs import Advance, Execution, process_pool, ray_cluster, run_units
from medtokenbudget.runtime import ordered_map

UNITS = ["a", "bb", "ccc", "dddd"]


def open_state(folder: Path, device: str) -> str:
    (folder / f"opened-by-{os.getpid()}").write_text(device)
    return device


def lengths(state: str, units: Sequence[str], advance: Advance) -> Iterator[tuple[str, int]]:
    for unit in units:
        advance(len(unit))
        yield state, len(unit)


def wrong(state: Any, units: Any, advance: Any) -> Any:
    raise RequestError("no such thing")


def test_in_this_process_all_units_are_given_at_once_with_the_state() -> None:
    counted: list[int] = []
    given: list[Sequence[str]] = []

    def make(state: str, units: Sequence[str], advance: Advance) -> Iterator[tuple[str, int]]:
        given.append(units)
        return lengths(state, units, advance)

    results = list(run_units(UNITS, make, Execution(), state="here", advance=counted.append))
    assert results == [("here", n) for n in (1, 2, 3, 4)]
    assert (given, counted) == ([UNITS], [1, 2, 3, 4])


@pytest.mark.slow
def test_other_processes_open_their_state_once_and_make_every_unit(tmp_path: Path) -> None:
    counted: list[int] = []
    options: dict[str, Any] = {"open_worker": partial(open_state, tmp_path), "advance": counted.append}
    results = run_units(UNITS, lengths, Execution(), processes=2, device="cpu", **options)
    assert sorted(results) == [("cpu", n) for n in (1, 2, 3, 4)]
    assert sorted(counted) == [1, 2, 3, 4]
    opened = list(tmp_path.iterdir())
    assert 1 <= len(opened) <= 2
    assert f"opened-by-{os.getpid()}" not in {path.name for path in opened}


@pytest.mark.slow
def test_an_error_in_a_worker_is_raised_here() -> None:
    with pytest.raises(RequestError, match="no such thing"):
        list(run_units(UNITS, wrong, Execution(), processes=2, device="cpu"))


def test_a_worker_that_dies_is_a_message_that_says_what_to_do() -> None:
    with pytest.raises(WorkError, match=r"A worker process died.*`if __name__ == .__main__.:`.*use fewer"), process_pool(1) as pool:
        pool.submit(os._exit, 1).result()


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from medtokenbudget.data.synthetic import Drawings, synthetic_manifest\n"
        f"synthetic_manifest({str(tmp_path / 'data')!r}, Drawings(n=20, size=32), workers=2)\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert 'only below `if __name__ == "__main__":`, or one (jobs=1, workers=1)' in ended.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "127.0.0.1:99999"])
def test_a_wrong_address_is_a_message(address: str) -> None:
    pytest.importorskip("ray")
    with (
        pytest.raises(WorkError, match=rf"No Ray cluster answers at '{address}' .*Check `address`.*`engine=.local.`"),
        ray_cluster(address),
    ):
        pass


def test_an_error_ahead_reaches_the_reader_in_its_place() -> None:
    def broken(part: int) -> int:
        if part == 2:
            raise WorkError("the disk is gone")
        return part

    items = ordered_map(broken, range(6), ahead=3, threads=2)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(WorkError, match="disk is gone"):
        next(items)


def test_results_keep_their_order_however_long_each_takes() -> None:
    waits = {part: threading.Event() for part in range(9)}

    def late(part: int) -> int:
        if part % 2 == 0:  # an even part ends only after the odd one behind it, computed by the other thread
            assert waits[min(part + 1, 7)].wait(10)
        waits[part].set()
        return part

    assert list(ordered_map(late, range(9), ahead=2, threads=2)) == list(range(9))
