"""A bounded queue in front of one worker thread: one forward pass at a time, and clients are told when to retry.

It knows nothing about HTTP or models.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Answer = TypeVar("Answer")


class QueueFullError(Exception):
    """All places are taken; `retry_after` is the estimated number of seconds until one is free."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"The queue is full. Try again in {retry_after} s.")
        self.retry_after = retry_after


class DeadlineError(QueueFullError):
    """A request was not answered in time."""


class Queue:
    """One worker thread with `waiting` places in front of it. Use it from a single event loop.

    A request takes its place when its body is complete, so slow clients hold none.

    Args:
        waiting: Number of places besides that of the running request.
        deadline: Seconds after which a request that waits or runs is given up.
    """

    def __init__(self, waiting: int, deadline: float = 60.0) -> None:
        self.places, self.deadline = waiting + 1, deadline
        self.taken = 0
        self._seconds = 1.0
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward-pass")

    @property
    def full(self) -> bool:
        """Whether all places are taken."""
        return self.taken >= self.places

    def require_place(self) -> None:
        """Raise QueueFullError if no place is free."""
        if self.full:
            raise QueueFullError(self.retry_after)

    async def run(self, work: Callable[[], Answer]) -> Answer:
        """Take a place, run `work` in the worker thread after all earlier work, and return its result.

        Raises:
            QueueFullError: If no place is free.
            DeadlineError: If there is no result in time. Work that has started keeps its place until it ends.
        """
        self.require_place()
        self.taken += 1
        latest = time.monotonic() + self.deadline
        future = asyncio.get_running_loop().run_in_executor(self._worker, self._timed, work, latest)
        future.add_done_callback(self._leave)
        try:
            return await asyncio.wait_for(asyncio.shield(future), self.deadline)
        except TimeoutError:
            raise DeadlineError(self.retry_after) from None

    def _leave(self, future: asyncio.Future[Answer]) -> None:
        self.taken -= 1
        if not future.cancelled():
            future.exception()  # looked at, so that work nobody waits for any more is not reported as lost

    @property
    def retry_after(self) -> int:
        """Estimated whole seconds until the current requests are done, between 1 and 60."""
        return min(60, max(1, math.ceil(self._seconds * self.taken)))

    def _timed(self, work: Callable[[], Answer], latest: float) -> Answer:
        if time.monotonic() > latest:
            raise DeadlineError(self.retry_after)
        start = time.perf_counter()
        try:
            return work()
        finally:
            self._seconds = 0.8 * self._seconds + 0.2 * (time.perf_counter() - start)

    def close(self) -> None:
        """Finish the running work and drop the rest."""
        self._worker.shutdown(wait=True, cancel_futures=True)
