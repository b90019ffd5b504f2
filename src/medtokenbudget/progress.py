"""One progress bar for every command: a bar with rate and time left on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import io
import multiprocessing
import sys
import threading
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_SECONDS = 30.0
"""Between two lines; what is done sooner writes none."""


class _Bar(tqdm):
    """A bar with a lock of its own process: tqdm's is shared with forked ones, and one that is killed would never give it back."""

    monitor_interval = 0  # a thread that a forked process would not have


_Bar.set_lock(threading.RLock())


class _Lines(_Bar):
    """Whole lines for logs, where a bar that is drawn over itself would be one endless line."""

    told: int | float | None = None
    told_at = 0.0
    pace = True

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        state = self.format_dict
        if not self.pace:
            self._display_without_pace(state["elapsed"])
            return
        if state["elapsed"] < _SECONDS or self.n == self.told:
            return
        self.told = self.n
        pace = (self.n - self.initial) / state["elapsed"]
        line = f"{self.desc}: {self.n:,} {self.unit}s"
        if self.total is not None:
            line = f"{self.desc}: {self.n:,} of {self.total:,} {self.unit}s"
        line += f", {pace:,.1f} a second" if pace >= 1 else f", {pace:.2g} a second"
        if self.total is not None and 0 < self.n < self.total and pace > 0:
            line += f", {self.format_interval((self.total - self.n) / pace)} left"
        say(f"{line}, {self.postfix}" if self.postfix else line)

    def _display_without_pace(self, elapsed: float) -> None:
        """A line every half minute even if no unit ended: the postfix says what happens inside the units."""
        if elapsed - self.told_at < _SECONDS:
            return
        self.told_at = elapsed
        line = f"{self.desc}: {self.n:,} of {self.total:,} {self.unit}s"
        say(f"{line}, {self.postfix}" if self.postfix else line)


def progress(
    iterable: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    what: str,
    unit: str = "it",
    initial: int = 0,
    pace: bool = True,
) -> Any:
    """A tqdm bar on standard error, or lines of text where that is not a terminal; nothing in a worker process.

    Args:
        pace: False for units of very different length, whose rate and time left would mean nothing; the postfix tells instead.
    """
    terminal = sys.stderr.isatty()
    # Lines are said by `say`; what tqdm itself writes around a bar goes nowhere.
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
    """A line for the person at the keyboard, on standard error, so that standard output stays for results."""
    print(message, file=sys.stderr, flush=True)
