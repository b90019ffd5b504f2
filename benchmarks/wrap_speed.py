"""What `mtb.wrap` saves on this machine: `python -m benchmarks.wrap_speed`, with ToMe's repository on PYTHONPATH to compare.

Ratios to the dense model in the same run, for the forward pass and for one training step with its memory. The weights are random,
since time does not depend on them. On one thread the time is that of the CPU, so that other programs hardly count.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
    found[f"dense-{small}px"] = (timm.create_model(name, num_classes=CLASSES, img_size=small), small)
    return found


def pictures(batch: int, side: int) -> Tensor:
    return torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(0))


def step(model: Any, images: Tensor) -> None:
    """One training step without the optimizer, whose cost is that of the weights."""
    torch.nn.functional.cross_entropy(model(images), torch.arange(len(images)) % CLASSES).backward()
    model.zero_grad()


def forward_speed(shape: str, batch: int, rounds: int, clock: Callable[[], float]) -> Iterator[str]:
    """Time forward passes in turns; a line for each way."""
    calls = {way: (model.eval(), pictures(batch, side)) for way, (model, side) in ways(shape).items()}
    with torch.inference_mode():
        run = {way: lambda model=model, images=images: model(images) for way, (model, images) in calls.items()}
        seconds = in_turns(run, rounds, clock)
    for way in seconds:
        yield line("forward", shape, batch, way, ratio(seconds, "dense", way), 1000 * median(seconds[way]) / batch, "ms per image")


def step_speed(shape: str, batch: int, rounds: int, clock: Callable[[], float]) -> Iterator[str]:
    """Time training steps in turns, and measure the memory that each adds in a process of its own."""
    calls = {way: (model.train(), pictures(batch, side)) for way, (model, side) in ways(shape).items()}
    seconds = in_turns({way: lambda model=m, images=x: step(model, images) for way, (m, x) in calls.items()}, rounds, clock)
    for way in seconds:
        command = [sys.executable, "-m", "benchmarks.wrap_speed", "--memory-of", shape, way, str(batch)]
        kib = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
        yield line("step", shape, batch, way, ratio(seconds, "dense", way), int(kib) / 1024, "MiB")


def memory_of(shape: str, way: str, batch: int) -> int:
    """Return the peak of a training step over the memory of the model, in KiB."""
    model, side = ways(shape)[way]
    model.train()
    return peak_growth(step, model, pictures(batch, side))


def line(what: str, shape: str, batch: int, way: str, times: float, number: float, unit: str) -> str:
    return f"{what:<8}{shape:<17}batch {batch:<4}{way:<14}{times:5.2f}x{number:10.1f} {unit}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; 0 uses the default of PyTorch.")
    parser.add_argument("--rounds", type=int, default=5, help="Measured rounds.")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16], help="Of the forward pass; none leaves it out.")
    parser.add_argument("--step", type=int, default=8, help="Batch of the training step; 0 leaves it out.")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.memory_of:
        shape, way, batch = options.memory_of
        print(memory_of(shape, way, int(batch)))
        return
    with cpu_threads(options.threads):
        clock = time.process_time if options.threads == 1 else time.perf_counter
        load = os.getloadavg()[0]
        print(f"Budget {DEFAULT_BUDGET}, {torch.get_num_threads()} CPU threads, load {load:.1f}; x: speed over the dense model.")
        for shape in options.shapes:
            for batch in options.batches:
                for text in forward_speed(shape, batch, options.rounds, clock):
                    print(text, flush=True)
            for text in step_speed(shape, options.step, max(2, options.rounds // 2), clock) if options.step else ():
                print(text, flush=True)


if __name__ == "__main__":
    main()
