"""The speed of early routing: every way is timed in turns, and each line says its name and its ratio to the dense pass."""

from __future__ import annotations

import re

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import medtokenbudget as mtb
from medtokenbudget.experiments.early_speed import measure


@pytest.mark.slow
def test_every_way_has_a_line_with_its_ratio_and_fewer_patches_take_less_time() -> None:
    torch.manual_seed(0)
    models = {
        side: VisionTransformer(img_size=side, patch_size=14, embed_dim=192, depth=8, num_heads=3, num_classes=0).eval()
        for side in (224, 112, 154)
    }
    lines = [str(speed) for speed in measure(models, "tiny", mtb.load("dermoscopy", device="cpu"), 0.3, 2, 2)]
    names = [line.split()[0] for line in lines]
    assert names[:5] == ["dense", "scout", "inside", "zoom", "tome"]
    assert re.fullmatch(r"dense-(112|154)px", names[5])
    ratios = {line.split()[0]: float(re.search(r"(\d+\.\d\d)x", line).group(1)) for line in lines}  # type: ignore[union-attr]
    assert ratios["dense"] == 1.0
    assert ratios["zoom"] < 1
    assert ratios["inside"] > 1
