"""Reading a shuffled epoch from a warm store, against a plain copy of the same bytes in memory, in turns within one run.

    python -m benchmarks.reading [--rows 512] [--rounds 7]

Also shows that a store may be larger than memory: private memory (what the kernel cannot take back) at one and at eight times the
rows, and what is read from the disk for an eighth of the rows, drawn at random, when none of them is in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import torch

from medtokenbudget.backbone.extract import settings_of
from medtokenbudget.backbone.store import STORE, FeatureStore, Record, Row, Shards, settings_hash, write_field, write_plan
from medtokenbudget.backbone.views import Geometry
from medtokenbudget.config import ExtractConfig
from medtokenbudget.files import write_sealed

GRID, DIM, SHARD, BATCH = (16, 16), 768, 64, 64


def drawn_store(path: Path, rows: int) -> FeatureStore:
    """A store of ViT-B shape (384 KiB a row in fp16) with random numbers in it."""
    random = np.random.default_rng(0)
    backbone = {"name": "drawn", "weights": "", "layer": 0, "attention": "true", "grid": GRID, "dim": DIM, "image_size": 256}
    settings = settings_of(backbone, ExtractConfig(batch_size=BATCH, shard_size=SHARD))
    shards: Shards = {}
    n = GRID[0] * GRID[1]
    for index in range(rows // SHARD):
        signal = random.random((SHARD, n), dtype=np.float32)
        tensors = {
            "patches": random.standard_normal((SHARD, n, DIM), dtype=np.float32).astype(np.float16),
            "cls": random.standard_normal((SHARD, DIM), dtype=np.float32).astype(np.float16),
            **dict.fromkeys(("attention_entropy", "cls_attention", "luminance"), signal),
        }
        entries = tuple(Row(f"row-{index * SHARD + i:06d}", "identity", (256, 256), Geometry()) for i in range(SHARD))
        fields = {name: write_field(path, index, name, values) for name, values in tensors.items()}
        Record(entries, (), BATCH, settings_hash(settings), fields).write(path, index)
        shards[index] = tuple(entry.key for entry in entries)
    write_sealed(path / STORE, settings)
    write_plan(path, shards)
    return FeatureStore.open(path)


def epoch_seconds(store: FeatureStore, seed: int, dtype: torch.dtype) -> float:
    start = time.perf_counter()
    for batch in store.batches(range(len(store)), BATCH, torch.Generator().manual_seed(seed), dtype=dtype):
        del batch
    return time.perf_counter() - start


def copy_seconds_of_two(source: np.ndarray, target: np.ndarray, threads: ThreadPoolExecutor) -> float:
    """The same copy by as many threads as read a store."""
    start = time.perf_counter()
    list(threads.map(np.copyto, np.array_split(target, 2), np.array_split(source, 2)))
    return time.perf_counter() - start


def copy_seconds(source: np.ndarray, target: np.ndarray) -> float:
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start


def private_kib() -> int:
    """Private memory of this process now, without pages of files that are merely mapped."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def reader_memory(path: Path) -> dict[str, int]:
    """Largest private memory, over the start, while one shuffled epoch is read."""
    store = FeatureStore.open(path)
    before, peak = private_kib(), 0
    for batch in store.batches(range(len(store)), BATCH, torch.Generator().manual_seed(0)):
        peak = max(peak, private_kib())
        del batch
    return {"rows": len(store), "growth_kib": peak - before}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.memory_of is not None:
        print(json.dumps(reader_memory(given.memory_of)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        _speed(Path(folder) / "one", given.rows, given.rounds)
        _memory(Path(folder), given.rows)
        _cold(Path(folder) / "memory-8")
    return 0


def _speed(path: Path, rows: int, rounds: int) -> None:
    store = drawn_store(path, rows)
    other = FeatureStore.open(path)
    source = np.ones((rows, GRID[0] * GRID[1], DIM), np.float16)
    target = np.zeros_like(source)
    copy_seconds(source, target)
    epoch_seconds(store, 0, torch.float16)
    epoch_seconds(other, 0, torch.float32)
    copies, doubles, halves, floats = [], [], [], []
    threads = ThreadPoolExecutor(2)
    copy_seconds_of_two(source, target, threads)
    for seed in range(1, rounds + 1):
        copies.append(copy_seconds(source, target))
        doubles.append(copy_seconds_of_two(source, target, threads))
        halves.append(epoch_seconds(store, seed, torch.float16))
        floats.append(epoch_seconds(other, seed, torch.float32))
    gigabytes = source.nbytes / 1e9
    print(f"shuffled epoch of {rows} rows ({gigabytes:.2f} GB), {rounds} rounds in turns, medians:")
    print("                                       ratio to one thread   to two")
    for name, seconds in (
        ("copy, one thread", copies),
        ("copy, two threads", doubles),
        ("store, fp16", halves),
        ("store, as fp32", floats),
    ):
        speed = gigabytes / median(seconds)
        print(f"  {name:20} {speed:6.2f} GB/s   {_ratio(copies, seconds):12.2f}   {_ratio(doubles, seconds):15.2f}")


def _ratio(base: list[float], ours: list[float]) -> float:
    return median(b / o for b, o in zip(base, ours))


def _memory(folder: Path, rows: int) -> None:
    growth = []
    for times in (1, 8):
        path = folder / f"memory-{times}"
        drawn_store(path, rows * times)
        command = [sys.executable, "-m", "benchmarks.reading", "--memory-of", str(path)]
        growth.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    (one, eight) = growth
    print("private memory of a reader over its start (a process each):")
    print(f"  {one['rows']:5d} rows {one['growth_kib'] / 1024:7.1f} MiB")
    print(f"  {eight['rows']:5d} rows {eight['growth_kib'] / 1024:7.1f} MiB   ratio {eight['growth_kib'] / one['growth_kib']:.2f}")


def bytes_from_disk() -> int:
    """What this process made the disk read until now."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def forget(path: Path) -> None:
    """Put the files of a store out of memory."""
    for file in path.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cold(path: Path) -> None:
    store = FeatureStore.open(path)
    rows = np.random.default_rng(0).permutation(len(store))[: len(store) // 8]
    wanted = len(rows) * GRID[0] * GRID[1] * DIM * 2
    forget(path)
    start, before = time.perf_counter(), bytes_from_disk()
    for batch in store.batches(rows, BATCH, dtype=torch.float16):
        del batch
    seconds, read = time.perf_counter() - start, bytes_from_disk() - before
    print(f"{len(rows)} of {len(store)} rows, none of them in memory before: {wanted / seconds / 1e9:.2f} GB/s,")
    print(f"  {read / wanted:.2f} times their bytes were read from the disk")


if __name__ == "__main__":
    raise SystemExit(main())
