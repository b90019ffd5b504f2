"""A bounded queue in front of one worker thread: one forward pass at a time, and clients are told when to retry.

It knows nothing about HTTP or models.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Answer = TypeVar("Answer")


class QueueFullError(Exception):
    """All places are taken; `retry_after` is the estimated number of seconds until one is free."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"The queue is full. Try again in {retry_after} s.")
        self.retry_after = retry_after


class Queue:
    """One worker thread with `waiting` places in front of it. Use it from a single event loop.

    A request takes its place before its body is read, so the memory of waiting requests is bounded too.
    """

    def __init__(self, waiting: int) -> None:
        self.places = waiting + 1
        self.taken = 0
        self._seconds = 1.0
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward-pass")

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place for one request until it is answered.

        Raises:
            QueueFullError: If no place is free.
        """
        if self.taken >= self.places:
            raise QueueFullError(self.retry_after)
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    async def run(self, work: Callable[[], Answer]) -> Answer:
        """Run `work` in the worker thread, after all earlier work, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._timed, work)

    @property
    def retry_after(self) -> int:
        """Estimated whole seconds until the current requests are done, between 1 and 60."""
        return min(60, max(1, math.ceil(self._seconds * self.taken)))

    def _timed(self, work: Callable[[], Answer]) -> Answer:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self._seconds = 0.8 * self._seconds + 0.2 * (time.perf_counter() - start)

    def close(self) -> None:
        """Finish the running work and drop the rest."""
        self._worker.shutdown(wait=True, cancel_futures=True)
