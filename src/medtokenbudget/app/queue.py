"""One pass at a time behind a bounded queue: whoever finds it full is told when to come back.

Its own file because it is the only place that decides who waits; it knows nothing of HTTP or of models.
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
    """All places are taken; `retry_after` says in how many seconds one should be free."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"all places are taken, try again in {retry_after} s")
        self.retry_after = retry_after


class Queue:
    """A worker thread and `waiting` places before it. Used from one event loop.

    A place is taken before a request's body is read, so that the memory of waiting requests is bounded too.
    """

    def __init__(self, waiting: int) -> None:
        self.places = waiting + 1
        self.taken = 0
        self._seconds = 1.0
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward-pass")

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for one request, from its arrival to its answer; `QueueFullError` when there is none."""
        if self.taken >= self.places:
            raise QueueFullError(self.retry_after)
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    async def run(self, work: Callable[[], Answer]) -> Answer:
        """The result of `work`, done in the worker thread after what came before."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._timed, work)

    @property
    def retry_after(self) -> int:
        """Whole seconds until the requests of today's pace are done, between 1 and 60."""
        return min(60, max(1, math.ceil(self._seconds * self.taken)))

    def _timed(self, work: Callable[[], Answer]) -> Answer:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self._seconds = 0.8 * self._seconds + 0.2 * (time.perf_counter() - start)

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
