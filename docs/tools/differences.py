"""Measure what two details of an implementation change: python docs/tools/differences.py ISIC_FOLDER BACKBONE WEIGHTS [N].

Prints the numbers of docs/differences.md, on every n-th validation image of the paper's split.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

from medtokenbudget.backbone.attention import normalized_entropy
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import decode_image, isic_manifest
from medtokenbudget.routing import local_contrast

KEPT = 76


def entropy_of(attention: torch.nn.Module, tokens: torch.Tensor, prefix: int) -> torch.Tensor:
    """Compute the attention entropy `[B, N]` of a timm attention from the tokens `[B, T, D]` that its projection reads."""
    b, t = tokens.shape[:2]
    query, key, _ = attention.qkv(tokens).reshape(b, t, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    weights = ((query * attention.scale) @ key.transpose(-2, -1)).softmax(-1)
    return normalized_entropy(weights[:, :, prefix:, prefix:].mean(1))


def agreement(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Return the mean rank correlation of two scores `[n, N]`, and the share of the 76 highest patches that both have."""
    correlation = np.mean([spearmanr(a, b).statistic for a, b in zip(first, second)])
    best = [set(np.argsort(-a)[:KEPT]) & set(np.argsort(-b)[:KEPT]) for a, b in zip(first, second)]
    return float(correlation), float(np.mean([len(both) / KEPT for both in best]))


@torch.no_grad()
def main(root: str, name: str, weights: str, n: int = 100) -> None:
    backbone = Backbone.load(BackboneConfig(name=name, weights=Path(weights)))
    manifest = isic_manifest(root, "none").part("val")
    rows = np.linspace(0, len(manifest) - 1, min(n, len(manifest))).astype(int)
    block, entered = backbone.model.blocks[-1], []
    block.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    values: dict[str, list[np.ndarray]] = {}
    for row in rows:
        image = decode_image(manifest.image_path(row))
        for kind in ("bicubic", "bilinear"):
            pixels = torch.from_numpy(replace(backbone.preprocessing, interpolation=kind).prepare(image))[None]
            entered.clear()
            tokens = backbone(backbone.preprocessing.normalize(pixels))
            own = entropy_of(block.attn, block.norm1(entered[0]), backbone.prefix)
            torch.testing.assert_close(own, tokens.attention_entropy, atol=1e-4, rtol=1e-3)  # the block's own
            scores = {"entropy": own, "contrast": local_contrast(tokens.patches, backbone.grid)}
            scores["entropy without norm1"] = entropy_of(block.attn, entered[0], backbone.prefix)
            for score, of in scores.items():
                values.setdefault(f"{score}, {kind}", []).append(of[0].numpy())
    stacked = {name: np.stack(of) for name, of in values.items()}
    print(f"{len(rows)} images, {name}")
    for label, first, second in (
        ("entropy with and without norm1", "entropy, bicubic", "entropy without norm1, bicubic"),
        ("entropy, bicubic and bilinear", "entropy, bicubic", "entropy, bilinear"),
        ("local contrast, bicubic and bilinear", "contrast, bicubic", "contrast, bilinear"),
    ):
        correlation, both = agreement(stacked[first], stacked[second])
        print(f"{label}: rank correlation {correlation:.3f}, {both:.1%} of the {KEPT} highest patches in both")


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
