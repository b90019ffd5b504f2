"""Progress of long work: a bar with rate and time left on a terminal, and a line every 30 seconds elsewhere."""

from __future__ import annotations

import io
import multiprocessing
import sys
import threading
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_SECONDS = 30.0
"""Between two lines; shorter work writes none."""


class _Bar(tqdm):
    """A bar whose lock belongs to this process: tqdm shares one with forked processes, and a killed one would never release it."""

    monitor_interval = 0  # no monitor thread, which a forked process would not have


_Bar.set_lock(threading.RLock())


class _Lines(_Bar):
    """Lines of text for logs, where a bar that overwrites itself would become one endless line."""

    pace = True
    last_n: int | float | None = None
    last_elapsed = 0.0

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        elapsed = self.format_dict["elapsed"]
        # Without a pace, a line is due even if no unit has ended: the postfix shows the progress inside the units.
        due = elapsed >= _SECONDS and self.n != self.last_n if self.pace else elapsed - self.last_elapsed >= _SECONDS
        if not due:
            return
        self.last_n, self.last_elapsed = self.n, elapsed
        parts = [f"{self.desc}: {self.n:,} {'' if self.total is None else f'of {self.total:,} '}{self.unit}s"]
        if self.pace:
            pace = (self.n - self.initial) / elapsed
            parts.append(f"{pace:,.1f} per second" if pace >= 1 else f"{pace:.2g} per second")
            if self.total is not None and 0 < self.n < self.total and pace > 0:
                parts.append(f"{self.format_interval((self.total - self.n) / pace)} left")
        say(", ".join(parts + [self.postfix] * bool(self.postfix)))


def progress(
    iterable: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    what: str,
    unit: str = "it",
    initial: int = 0,
    pace: bool = True,
) -> Any:
    """Return a tqdm bar on standard error, or lines of text if that is not a terminal; nothing in a worker process.

    `pace=False` is for units of very different length, whose rate and time left would mean nothing.
    """
    terminal = sys.stderr.isatty()
    # `say` writes the lines; what tqdm itself writes around a bar is discarded.
    file = sys.stderr if terminal else io.StringIO()
    bar = (_Bar if terminal else _Lines)(
        iterable,
        total=total,
        desc=what,
        unit=unit,
        initial=initial,
        file=file,
        disable=multiprocessing.parent_process() is not None,
        dynamic_ncols=True,
        mininterval=0.2 if terminal else _SECONDS,
        miniters=1,
        bar_format=None if pace else "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}s [{elapsed}{postfix}]",
    )
    bar.pace = pace
    return bar


def say(message: str) -> None:
    """Write a line for the user to standard error; standard output is for results."""
    print(message, file=sys.stderr, flush=True)
