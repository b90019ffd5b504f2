"""What routing costs beside the backbone: scores, selection and head against the forward pass, ViT-S/14 at batch 16.

Weights do not change the time, so the backbone has none of its own here. Also: how long `import medtokenbudget` takes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import timm
import torch

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.config import LATSConfig, TrainConfig
from medtokenbudget.model import inference
from medtokenbudget.routing import LATSSelector
from medtokenbudget.training import MLPHead, RoutedClassifier

BATCH, REPEATS, BUDGET = 16, 3, 0.3
MOST = 0.05
"""Largest share of the backbone's time that routing and head may take."""
IMPORT_SECONDS = 0.2


def fastest(functions: Sequence[Callable[[], object]]) -> list[float]:
    """CPU seconds of the fastest call of each, taken in turns: other programs on the machine do not change them much."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(REPEATS + 1):
        for function, taken in zip(functions, times):
            start = time.process_time()
            function()
            taken.append(time.process_time() - start)
    return [min(taken[1:]) for taken in times]


@torch.inference_mode()
def overhead(neighborhood: str = "raster") -> tuple[float, float]:
    """CPU seconds of the backbone and of routing with head, on one batch."""
    torch.manual_seed(0)
    network = timm.create_model("vit_small_patch14_dinov2.lvd142m", pretrained=False, num_classes=0, img_size=224)
    backbone = Backbone.from_model(network, "vit_small_patch14_dinov2.lvd142m")
    lats = LATSConfig(neighborhood=neighborhood)  # type: ignore[arg-type]
    selector = LATSSelector.from_config(backbone.dim, TrainConfig(lats=lats))
    classifier = RoutedClassifier(selector, MLPHead(backbone.dim, 8)).eval()
    images = torch.randn(BATCH, 3, 224, 224)
    tokens = backbone(images)
    k = selector.count(BUDGET, tokens.n)

    def route() -> object:
        return classifier.head(inference.select(selector, tokens, k)[0].pooled())

    threads = torch.get_num_threads()
    # One thread: threads that wait for one another would be counted as work.
    torch.set_num_threads(1)
    try:
        first, second = fastest([lambda: backbone(images), route])
    finally:
        torch.set_num_threads(threads)
    return first, second


def import_seconds() -> float:
    """Median seconds that `import medtokenbudget` adds to a bare interpreter."""
    script = "import time; t = time.perf_counter(); import medtokenbudget; print(time.perf_counter() - t)"
    return statistics.median(float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(REPEATS))


def main(arguments: list[str] | None = None) -> None:
    for neighborhood in ("raster", "grid8"):
        backbone, routing = overhead(neighborhood)
        share = routing / backbone
        verdict = "ok" if share <= MOST else "TOO SLOW"
        print(
            f"ViT-S/14, batch {BATCH}, {neighborhood}: backbone {1000 * backbone:.0f} ms, routing and head "
            f"{1000 * routing:.1f} ms: {share:.1%} (at most {MOST:.0%}) {verdict}"
        )
    taken = import_seconds()
    print(f"import medtokenbudget: {taken:.3f} s (less than {IMPORT_SECONDS} s) {'ok' if taken < IMPORT_SECONDS else 'TOO SLOW'}")


if __name__ == "__main__":
    main()
