"""The speed of early routing: what every way computes, and a line for each with its name and its ratio to the dense pass."""

from __future__ import annotations

import re

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import medtokenbudget as mtb
from medtokenbudget.experiments.early_speed import measure, passes

BUDGET, BATCH, DIM = 0.3, 2, 24
K = 76  # floor(0.3 * 256)


@pytest.fixture(scope="module")
def models() -> dict[int, VisionTransformer]:
    torch.manual_seed(0)
    return {
        side: VisionTransformer(img_size=side, patch_size=14, embed_dim=DIM, depth=6, num_heads=2, num_classes=0).eval()
        for side in (224, 112, 154)
    }


def test_every_way_computes_the_tokens_that_it_is_timed_for(models: dict[int, VisionTransformer]) -> None:
    ways = passes(models, mtb.load("dermoscopy", device="cpu"), BUDGET, BATCH)
    with torch.inference_mode():
        found = {name: tuple(run().shape) for name, run in ways.items()}
    assert found == {
        "dense": (BATCH, 1 + 256, DIM),
        "scout": (BATCH, K, DIM),
        "inside": (BATCH, K, DIM),
        "zoom": (BATCH, 1 + 256, DIM),
        "tome": (BATCH, K, DIM),
        "dense-112px": (BATCH, 1 + 64, DIM),
        "dense-154px": (BATCH, 1 + 121, DIM),
    }


def test_every_way_has_a_line_with_its_time_and_its_ratio(models: dict[int, VisionTransformer]) -> None:
    lines = [str(speed) for speed in measure(models, "tiny", mtb.load("dermoscopy", device="cpu"), BUDGET, BATCH, 1)]
    names = [line.split()[0] for line in lines]
    assert names[:5] == ["dense", "scout", "inside", "zoom", "tome"]
    assert re.fullmatch(r"dense-(112|154)px", names[5])
    assert len(names) == 6
    assert re.search(r" 1\.00x .* ms per image$", lines[0]), "the dense pass is what the others are compared with"
    assert all(re.search(r"\d\.\d\dx +\d+\.\d ms per image$", line) for line in lines)
