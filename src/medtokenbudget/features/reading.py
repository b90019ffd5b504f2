"""What makes reading fast: rows joined without Python between them, in buffers that are used again, by threads that read ahead.

Apart from the store because no part knows what is read. A fresh buffer of many megabytes costs a page fault every 4 KiB, which
is as dear as the copy itself; hence the pool. A row that is not in memory costs a page fault with megabytes of its neighbors read
around it, which a store larger than memory throws away before they are needed; hence the advice to the kernel.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

P = TypeVar("P")
T = TypeVar("T")
_READERS = 2
"""Threads; one core alone does not reach the bandwidth of the memory."""
_PIECE = 1 << 15
"""Elements; torch spreads a longer copy over its threads, and those belong to the training that runs meanwhile."""
_WIDE = torch.complex128
"""The longest elements there are, 16 bytes: a row of 256 patches of 1,024 halves is then one piece."""


_madvise = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_WILLNEED") else None
"""Of the system, where it has one; Python's own works only on maps that keep a file open."""
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class BufferPool:
    """Tensors over memory that comes back when the last tensor over it is gone, and never before.

    A caller who keeps a batch keeps its memory: the pool then makes a new buffer.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[np.ndarray]] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """An uninitialized tensor of `shape`; `dtype` is numpy's."""
        free = self._free.setdefault((shape, np.dtype(dtype)), [])
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(shape, dtype)
        # The tensor's storage holds this view, and nothing else does: it dies with the last tensor over the storage.
        view = memory.view()
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.from_numpy(view)


class MappedRows:
    """The rows of one tensor `[n, ...]` of a shard, over its memory map.

    array  the tensor itself
    flat   as torch sees it, `[n, elements]`
    wide   the same in elements of 16 bytes, for copies; None where rows do not start at multiples of 16
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        flat = array.reshape(len(array), math.prod(array.shape[1:]))
        flat.flags.writeable = True  # torch knows no read-only memory; a write would not leave the private mapping
        self.flat = torch.from_numpy(flat)
        self.wide = _widened(self.flat)
        self._size = self.flat.shape[1] * array.itemsize
        self._memory = flat.reshape(-1).view(np.uint8).data

    def bytes(self, row: int) -> memoryview:
        return self._memory[row * self._size : (row + 1) * self._size]

    def announce(self, first: int, last: int) -> None:
        """Have the rows `first` to `last - 1` fetched in one piece if they are not in memory, before they are touched."""
        address = self.flat.data_ptr()
        _advise(address + first * self._size, address + last * self._size, "MADV_WILLNEED")


def read_nothing_around(memory: np.ndarray) -> None:
    """Have a page of mapped memory that is touched fetched alone. Called before anything is touched."""
    _advise(memory.ctypes.data, memory.ctypes.data + memory.nbytes, "MADV_RANDOM")


class Fetching:
    """Announces rows as long as reading them touches the disk; for rows that are in memory that would cost a fifth of the copy."""

    def __init__(self) -> None:
        self.from_disk = True

    @contextmanager
    def of(self, rows: Sequence[MappedRows], places: Sequence[int]) -> Iterator[None]:
        """Around the reading of row `places[i]` of `rows[i]`."""
        before = _disk_reads()
        if self.from_disk:
            for one, place in zip(rows, places):
                one.announce(place, place + 1)
        yield
        self.from_disk = before is None or _disk_reads() != before


def _disk_reads() -> int | None:
    """A number that grows whenever this thread waits for a page or has the disk read; None where the system does not tell."""
    try:
        import resource

        usage = resource.getrusage(resource.RUSAGE_THREAD)
    except (ImportError, AttributeError):
        return None
    return usage.ru_majflt + usage.ru_inblock


def _advise(start: int, end: int, advice: str) -> None:
    """Tell the kernel about addresses, where it takes advice; one that it refuses makes reading slower and nothing else."""
    if _madvise is not None:
        start -= start % mmap.PAGESIZE
        _madvise(start, end - start, getattr(mmap, advice))


def _widened(flat: Tensor) -> Tensor | None:
    fits = flat.data_ptr() % _WIDE.itemsize == 0 and flat.shape[1] * flat.itemsize % _WIDE.itemsize == 0
    return flat.view(_WIDE) if fits else None


def join_small(rows: Sequence[MappedRows], places: Sequence[int]) -> Tensor:
    """Row `places[i]` of `rows[i]`, one after the other. For rows of a few KiB: what an array costs is more than their copy."""
    joined = bytearray().join([one.bytes(place) for one, place in zip(rows, places)])
    array = rows[0].array
    return torch.from_numpy(np.frombuffer(joined, array.dtype).reshape(len(rows), *array.shape[1:]))


def join_large(rows: Sequence[MappedRows], places: Sequence[int], target: Tensor) -> None:
    """Row `places[i]` of `rows[i]`, one after the other, in `target` and its number format.

    It is one call of torch, which lets go of Python's lock once for all rows: two readers do not wait for each other.
    """
    flat = target.view(len(rows), -1)
    if rows[0].flat.dtype != flat.dtype:
        pieces = [piece for one, place in zip(rows, places) for piece in one.flat[place].split(_PIECE)]
        torch.cat(pieces, out=flat.view(-1))
        return
    whole = _widened(flat)
    sources = [one.wide[place] for one, place in zip(rows, places) if one.wide is not None]
    if whole is not None and len(sources) == len(rows):
        torch.stack(sources, out=whole)
    else:
        torch.stack([one.flat[place] for one, place in zip(rows, places)], out=flat)


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Numpy's name of a torch number format."""
    return torch.empty(0, dtype=dtype).numpy().dtype


def prefetched(read: Callable[[P], T], parts: Iterable[P], depth: int) -> Iterator[T]:
    """`read` of each part, in their order, up to `depth` ahead by threads; an error appears in its place. `depth` 0: no threads."""
    if depth < 1:
        yield from map(read, parts)
        return
    readers = ThreadPoolExecutor(min(depth, _READERS), thread_name_prefix="mtb-read")
    ahead: deque[Future[T]] = deque()
    try:
        for part in parts:
            ahead.append(readers.submit(read, part))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        readers.shutdown(cancel_futures=True)
