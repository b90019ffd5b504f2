"""Worker processes that end with the process that started them, even if that one is killed.

Common ground because drawing and sweeping both use worker processes. They are spawned, not forked: the parent may have threads.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from medtokenbudget.errors import WorkError

_PR_SET_PDEATHSIG = 1
_SECONDS = 1.0
"""Between two looks at the parent process."""


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned processes, each of which ends with this one.

    Raises:
        WorkError: If one of them dies inside the block.
    """
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, mp_context=context, initializer=end_with_parent, initargs=(os.getpid(),)) as pool:
            yield pool
    except BrokenProcessPool:
        raise WorkError(
            'A worker process died. In a Python script, use several processes only below `if __name__ == "__main__":`, or one '
            "(jobs=1, workers=1). Otherwise memory may have run out: use fewer."
        ) from None


def end_with_parent(parent: int) -> None:
    """End this process as soon as its parent is gone: at once on Linux, within a second elsewhere.

    Args:
        parent: Process id of the parent; it may be gone by the time this runs.
    """
    if sys.platform == "linux":
        # Tied to the parent's thread that started this process; the watch below covers the rest.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), name="mtb-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os._exit(1)
