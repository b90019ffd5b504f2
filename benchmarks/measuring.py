"""What the benchmarks share: calls timed in turns, private memory while something runs, and where real images and weights are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch

from benchmarks.reading import private_kib

SHARED = Path(__file__).resolve().parents[2] / "shared"
IMAGES = SHARED / "data/isic/ISIC_2019_Training_Input"
VIT_S, VIT_B = "vit_small_patch14_dinov2.lvd142m", "vit_base_patch14_dinov2.lvd142m"
VIT_S_WEIGHTS = SHARED / "weights/vit_small_patch14_dinov2_saliency.safetensors"


def random_vit(name: str, side: int = 224) -> Any:
    """Return a backbone with random weights: time does not depend on them."""
    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, num_classes=0, img_size=side).eval().requires_grad_(False)


def in_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter, warm_up: bool = True
) -> dict[str, list[float]]:
    """Return the seconds of every call in each round.

    All calls take turns in a round, so that a busy machine slows them alike. With `time.process_time` other programs on the machine
    hardly count; on one thread, because threads that wait for one another would count as work.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + warm_up):
        for name, call in calls.items():
            start = clock()
            call()
            if number or not warm_up:
                seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], slow: str, fast: str) -> float:
    """Return how many times as fast one call is as another: the median of the ratios within each round."""
    return median(one / other for one, other in zip(seconds[slow], seconds[fast]))


def peak_growth(work: Callable[..., object], *arguments: object) -> int:
    """Return the largest private memory while `work` runs, over the one before, in KiB."""
    thread = threading.Thread(target=work, args=arguments)
    before, peak = private_kib(), 0
    thread.start()
    while thread.is_alive():
        peak = max(peak, private_kib())
        thread.join(0.01)
    return peak - before
