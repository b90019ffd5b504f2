"""What `mtb.wrap` saves on this machine: `python -m benchmarks.wrap_speed`, with ToMe's repository on PYTHONPATH to compare.

Ratios to the dense model in the same run, for the forward pass and for one training step with its memory, on one thread and on all
cores. The weights are random, since time does not depend on them. On one thread the time is that of the CPU, so that other programs
hardly count. Every row goes into a table at once; stopped, the same command goes on with what is missing. `docs/tools/results.py`
makes the tables of docs/wrap.md of it.
"""

from __future__ import annotations

import argparse
import copy
import csv
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
from torch import Tensor

import medtokenbudget as mtb
from benchmarks.measuring import in_turns, peak_growth, ratio
from medtokenbudget.config import DEFAULT_BUDGET
from medtokenbudget.runtime import cpu_threads

SHAPES = {
    "ViT-S/14": ("vit_small_patch14_dinov2", 224, 112),
    "ViT-B/14": ("vit_base_patch14_dinov2", 224, 112),
    "DINOv3 ViT-S/16": ("vit_small_patch16_dinov3", 256, 128),
}
"""timm name, side of the images for 16 x 16 patches, and of those of a smaller dense model with 8 x 8."""
PER_BLOCK = 15
"""Patches that ToMe merges in each of 12 blocks: 256 become 76, as at a budget of 0.3."""
CLASSES = 8
COLUMNS = ("what", "shape", "batch", "threads", "way", "speed", "milliseconds", "mib", "rounds", "load")
"""`speed` is over the dense model, `milliseconds` are per image (forward) or per step, `load` is the machine's before the row was
measured. Memory does not depend on threads and has rows of its own."""
Ways = dict[str, tuple[Any, int]]
"""Models by name, with the side of their images."""


def ways(shape: str) -> Ways:
    """The models to compare, two with a router that costs nothing; ToMe's patch knows no rotary positions."""
    name, side, small = SHAPES[shape]
    torch.manual_seed(0)
    dense = timm.create_model(name, num_classes=CLASSES, img_size=side)
    found: Ways = {"dense": (dense, side), "wrap": (mtb.wrap(dense, "dermoscopy", DEFAULT_BUDGET), side)}
    found["wrap-free"] = (mtb.wrap(dense, lambda images: images[:, 0, :: side // 16, :: side // 16], DEFAULT_BUDGET), side)
    found["wrap-block:4"] = (mtb.wrap(dense, "norm", DEFAULT_BUDGET, at="block:4"), side)
    if importlib.util.find_spec("tome") is not None and "dinov3" not in name:
        import tome

        merged = copy.deepcopy(dense)
        # Its block predates LayerScale and leaves it out, which only makes it faster.
        tome.patch.timm(merged)
        merged.r = PER_BLOCK
        found["tome-patch"] = (merged, side)
    found["dense-half"] = (timm.create_model(name, num_classes=CLASSES, img_size=small), small)
    return found


def pictures(batch: int, side: int) -> Tensor:
    return torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(0))


def step(model: Any, images: Tensor) -> None:
    """One training step without the optimizer, whose cost is that of the weights."""
    torch.nn.functional.cross_entropy(model(images), torch.arange(len(images)) % CLASSES).backward()
    model.zero_grad()


def seconds_of(what: str, found: Ways, batch: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Time forward passes or training steps of all models in turns."""
    clock = time.process_time if threads == 1 else time.perf_counter
    work = step if what == "step" else torch.inference_mode()(lambda model, images: model(images))
    calls = {way: (model.train(what == "step"), pictures(batch, side)) for way, (model, side) in found.items()}
    return in_turns({way: lambda model=m, images=x: work(model, images) for way, (m, x) in calls.items()}, rounds, clock)


def memory(shape: str, way: str, batch: int) -> float:
    """Return the MiB that a training step adds to the model, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.wrap_speed", "--memory-of", shape, way, str(batch)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]) / 1024


def peak_of(shape: str, way: str, batch: int) -> int:
    model, side = ways(shape)[way]
    model.train()
    return peak_growth(step, model, pictures(batch, side))


class Table:
    """The rows that were measured, in a CSV file that grows row by row."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, set[tuple[str, ...]]()
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                self.known = {tuple(row[name] for name in COLUMNS[:5]) for row in csv.DictReader(file)}

    def has(self, what: str, shape: str, batch: int, threads: int | str, way: str) -> bool:
        return (what, shape, str(batch), str(threads), way) in self.known

    def add(self, row: Mapping[str, Any]) -> None:
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            lines = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                lines.writeheader()
            lines.writerow(row)
        print("  ".join(f"{name} {value}" for name, value in row.items() if value != ""), flush=True)


def measure(table: Table, shape: str, batches: Sequence[int], training: int, threads: Sequence[int], rounds: int) -> None:
    """Measure what the table does not have of one shape."""
    found = ways(shape)
    wanted = [("forward", batch, rounds) for batch in batches] + [("step", training, max(2, rounds // 2))] * bool(training)
    for number in threads:
        with cpu_threads(number):
            cores = torch.get_num_threads()
            for what, batch, count in wanted:
                # Ratios are those within a round, so all ways are measured again if one is missing.
                if all(table.has(what, shape, batch, cores, way) for way in found):
                    continue
                load = round(os.getloadavg()[0], 2)
                seconds = seconds_of(what, found, batch, count, cores)
                for way, taken in seconds.items():
                    each = 1000 * median(taken) / (batch if what == "forward" else 1)
                    values = (what, shape, batch, cores, way, f"{ratio(seconds, 'dense', way):.3f}", f"{each:.1f}", "", count, load)
                    table.add(dict(zip(COLUMNS, values)))
    for way in found if training else ():
        if not table.has("memory", shape, training, "", way):
            values = ("memory", shape, training, "", way, "", "", f"{memory(shape, way, training):.0f}", 1, "")
            table.add(dict(zip(COLUMNS, values)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/wrap.csv"), help="The table. Default: runs/wrap.csv.")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 0], help="CPU threads; 0 is the default of PyTorch.")
    parser.add_argument("--rounds", type=int, default=5, help="Measured rounds of the forward pass; half as many of the step.")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16], help="Of the forward pass; none leaves it out.")
    parser.add_argument("--step", type=int, default=8, help="Batch of the training step; 0 leaves it out.")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.memory_of:
        shape, way, batch = options.memory_of
        print(peak_of(shape, way, int(batch)))
        return
    table = Table(options.out)
    for shape in options.shapes:
        measure(table, shape, options.batches, options.step, options.threads, options.rounds)


if __name__ == "__main__":
    main()
