"""Fast reading: rows are joined without Python between them, in reused buffers, by threads that read ahead.

A new buffer of many megabytes costs a page fault every 4 KiB, which is as expensive as the copy itself; hence the pool. A row that
is not in memory costs a page fault that also reads megabytes around it, which a store larger than memory drops before they are
needed; hence the advice to the kernel.
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
"""Threads; one core cannot use the full bandwidth of the memory."""
_PIECE = 1 << 15
"""Elements; torch would spread a longer copy over its threads, which the training needs at the same time."""
_WIDE = torch.complex128
"""The longest element type, 16 bytes: a row of 256 patches of 1,024 halves is then one piece."""


_madvise = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_WILLNEED") else None
"""The system's madvise, if there is one; Python's own needs a map that keeps a file open."""
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class BufferPool:
    """Reuses memory once the last tensor over it is gone, and never before.

    As long as a caller keeps a batch, the pool allocates new buffers.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[np.ndarray]] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """An uninitialized tensor of `shape`; `dtype` is a numpy type."""
        free = self._free.setdefault((shape, np.dtype(dtype)), [])
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(shape, dtype)
        # Only the storage of the tensor references this view, so it is deleted with the last tensor over the storage.
        view = memory.view()
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.from_numpy(view)


class MappedRows:
    """The rows of one memory-mapped tensor `[n, ...]` of a shard.

    Attributes:
        array: The tensor as an array.
        flat: The same for torch, `[n, elements]`.
        wide: The same in elements of 16 bytes, for copies; None if rows do not start at multiples of 16.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        flat = array.reshape(len(array), math.prod(array.shape[1:]))
        flat.flags.writeable = True  # torch has no read-only memory; the mapping is private, so a write would not reach the file
        self.flat = torch.from_numpy(flat)
        self.wide = _widened(self.flat)
        self._size = self.flat.shape[1] * array.itemsize
        self._memory = flat.reshape(-1).view(np.uint8).data

    def bytes(self, row: int) -> memoryview:
        return self._memory[row * self._size : (row + 1) * self._size]

    def announce(self, first: int, last: int) -> None:
        """Ask the kernel to fetch the rows `first` to `last - 1` in one piece, before they are used."""
        address = self.flat.data_ptr()
        _advise(address + first * self._size, address + last * self._size, "MADV_WILLNEED")


def read_nothing_around(memory: np.ndarray) -> None:
    """Ask the kernel not to read around the pages that are used. Called before the first use."""
    _advise(memory.ctypes.data, memory.ctypes.data + memory.nbytes, "MADV_RANDOM")


class Fetching:
    """Announces rows while reading comes from the disk; for rows in memory this would cost a fifth of the copy."""

    def __init__(self) -> None:
        self.from_disk = True

    @contextmanager
    def of(self, rows: Sequence[MappedRows], places: Sequence[int]) -> Iterator[None]:
        """A context for reading row `places[i]` of `rows[i]`."""
        before = _disk_reads()
        if self.from_disk:
            for one, place in zip(rows, places):
                one.announce(place, place + 1)
        yield
        self.from_disk = before is None or _disk_reads() != before


def _disk_reads() -> int | None:
    """A counter that grows when this thread waits for a page or reads from the disk; None if the system has none."""
    try:
        import resource

        usage = resource.getrusage(resource.RUSAGE_THREAD)
    except (ImportError, AttributeError):
        return None
    return usage.ru_majflt + usage.ru_inblock


def _advise(start: int, end: int, advice: str) -> None:
    """Give the kernel advice about a range of addresses. It is optional: without it, reading is only slower."""
    if _madvise is not None:
        start -= start % mmap.PAGESIZE
        _madvise(start, end - start, getattr(mmap, advice))


def _widened(flat: Tensor) -> Tensor | None:
    fits = flat.data_ptr() % _WIDE.itemsize == 0 and flat.shape[1] * flat.itemsize % _WIDE.itemsize == 0
    return flat.view(_WIDE) if fits else None


def join_small(rows: Sequence[MappedRows], places: Sequence[int]) -> Tensor:
    """Stack row `places[i]` of `rows[i]`. For rows of a few KiB, where creating arrays costs more than the copy."""
    joined = bytearray().join([one.bytes(place) for one, place in zip(rows, places)])
    array = rows[0].array
    return torch.from_numpy(np.frombuffer(joined, array.dtype).reshape(len(rows), *array.shape[1:]))


def join_large(rows: Sequence[MappedRows], places: Sequence[int], target: Tensor) -> None:
    """Stack row `places[i]` of `rows[i]` in `target`, in its number format.

    This is one call of torch, which releases the GIL once for all rows, so that two readers do not wait for each other.
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
    """The numpy type of a torch type."""
    return torch.empty(0, dtype=dtype).numpy().dtype


def prefetched(read: Callable[[P], T], parts: Iterable[P], depth: int) -> Iterator[T]:
    """Yield `read(part)` in order, with threads that read up to `depth` parts ahead; 0 uses no threads."""
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
