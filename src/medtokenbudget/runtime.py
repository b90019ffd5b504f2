"""The machine that the work runs on: its devices and threads, and the progress and messages that people see meanwhile.

PyTorch is imported where it is used: the command line shows messages and help without it.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from medtokenbudget.errors import RequestError

if TYPE_CHECKING:
    import torch

Part = TypeVar("Part")
Result = TypeVar("Result")
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


def available_devices() -> list[str]:
    """List the devices of this machine, such as `['cpu', 'cuda:0', 'cuda:1']`."""
    import torch

    names = ["cpu"]
    if torch.cuda.is_available():
        names += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    if torch.xpu.is_available():
        names += [f"xpu:{index}" for index in range(torch.xpu.device_count())]
    return names


def resolve_device(name: str | torch.device) -> torch.device:
    """Turn a device name into a device that this machine has; 'auto' is a CUDA GPU if there is one, and otherwise the CPU."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = available_devices()
    advice = f"Available: {', '.join(available)}. Use one of these, or 'auto'."
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(f"'{name}' is not a device name. {advice}") from None
    # Without a number, and for devices that have no numbers, the first one is meant.
    wanted = {device.type, f"{device.type}:0"} if not device.index else {f"{device.type}:{device.index}"}
    if not wanted.intersection(available):
        raise RequestError(f"Device '{name}' is not available on this machine. {advice}")
    return device


def worker_devices(name: str, processes: int = 0) -> list[str]:
    """Name the device of each worker process: 'cuda' means all GPUs, in turn; 0 processes mean one per GPU, or one per core."""
    import torch

    device = resolve_device(name)
    if device.type == "cuda" and device.index is None:
        gpus = torch.cuda.device_count()
        # In turn: two processes may share a GPU, but none stays idle.
        return [f"cuda:{process % gpus}" for process in range(processes or gpus)]
    return [str(device)] * (processes or (os.cpu_count() or 1 if device.type == "cpu" else 1))


def idle_threads() -> int:
    """Return the number of torch threads for which this machine has idle cores: at least 1, at most the default of PyTorch."""
    import torch

    try:
        busy = round(os.getloadavg()[0])  # of the last minute, on all cores
    except (AttributeError, OSError):  # Windows has none
        busy = 0
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else torch.get_num_threads()
    return max(1, min(torch.get_num_threads(), mine, (os.cpu_count() or 1) - busy))


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Run a block with this number of torch threads; 0 changes nothing."""
    import torch

    before = torch.get_num_threads()
    if number > 0:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ordered_map(function: Callable[[Part], Result], parts: Iterable[Part], ahead: int, threads: int) -> Iterator[Result]:
    """Yield `function(part)` in order, computed by threads up to `ahead` parts before they are needed."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="mtb-ahead")
    waiting: deque[Future[Result]] = deque()
    try:
        for part in parts:
            waiting.append(pool.submit(function, part))
            # Bounded: results that nobody has asked for yet stay in memory.
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
