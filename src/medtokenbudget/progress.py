"""One progress bar for every command: a bar with rate and time left on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def progress(
    iterable: Iterable[Any] | None = None, *, total: int | None = None, what: str, unit: str = "it", initial: int = 0
) -> Any:
    """A tqdm bar on standard error; silent when standard error is not a terminal."""
    from tqdm import tqdm

    return tqdm(
        iterable,
        total=total,
        desc=what,
        unit=unit,
        initial=initial,
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
        mininterval=0.2,
    )


def say(message: str) -> None:
    """A line for the person at the keyboard, on standard error, so that standard output stays for results."""
    print(message, file=sys.stderr, flush=True)
