"""What makes reading fast: batches prepared ahead by a thread, in buffers that are used again.

Apart from the store because neither part knows what is read. A fresh buffer of many megabytes costs a page fault every 4 KiB,
which is as dear as the copy itself; hence the pool.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
_PIECE = 1 << 15
"""Elements; torch goes parallel above this."""


class BufferPool:
    """Tensors over memory that comes back when the last tensor over it is gone, and never before.

    A caller who keeps a batch keeps its memory: the pool then makes a new buffer.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[np.ndarray]] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """An uninitialised tensor of `shape`; `dtype` is numpy's."""
        free = self._free.setdefault((shape, np.dtype(dtype)), [])
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(shape, dtype)
        # The tensor's storage holds this view, and nothing else does: it dies with the last tensor over the storage.
        view = memory.view()
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.from_numpy(view)


def copy_rows(target: Tensor, rows: Iterable[tuple[int, np.ndarray]]) -> None:
    """Copy arrays to their places along the first axis of `target`, in its number format.

    A row is converted while it is in the processor's cache, and in pieces that torch does not spread over its threads: those
    belong to the training that runs meanwhile.
    """
    array, scratch = target.numpy(), None
    for place, row in rows:
        if row.dtype == array.dtype:
            array[place] = row
            continue
        if scratch is None:
            scratch = np.empty(row.shape, row.dtype)
            sources = torch.from_numpy(scratch).view(-1).split(_PIECE)
        np.copyto(scratch, row)
        for piece, source in zip(target[place].view(-1).split(_PIECE), sources):
            piece.copy_(source)


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Numpy's name of a torch number format."""
    return torch.empty(0, dtype=dtype).numpy().dtype


def prefetched(source: Iterator[T], depth: int) -> Iterator[T]:
    """The items of `source`, made up to `depth` ahead by a thread; its errors appear here. `depth` 0 works without a thread."""
    if depth < 1:
        yield from source
        return
    ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
    stop = threading.Event()
    done = object()

    def put(item: Any) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in source:
                if not put((item, None)):
                    return
                del item
            put((done, None))
        except BaseException as error:
            put((done, error))

    thread = threading.Thread(target=work, name="mtb-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is done:
                return
            yield item
            del item
    finally:
        stop.set()
        thread.join()
