"""A real but tiny ViT as a folder of weights, and a few drawn images with asymmetric masks, for the tests of the store."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from medtokenbudget.backbone.backbone import Recipe
from medtokenbudget.config import BackboneConfig, ExtractConfig
from medtokenbudget.data import Manifest

SIZE, PATCH = 32, 8
GRID = (SIZE // PATCH, SIZE // PATCH)
DIM = 24
CONFIG = ExtractConfig(shard_size=4, batch_size=3, workers=2, device="cpu", threads=1)
OFF_CENTER = replace(CONFIG, views="off-center")


def tiny_backbone(folder: Path, depth: int = 2) -> BackboneConfig:
    """Random but fixed weights in a folder that a backbone can be loaded from."""
    arguments = {"patch_size": PATCH, "embed_dim": DIM, "depth": depth, "num_heads": 2}
    mean = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bicubic"}
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=0, img_size=SIZE, **arguments)
    save_file(model.state_dict(), folder / "weights.safetensors")
    Recipe("vit_tiny_patch16_224", arguments, mean, "CC0-1.0").write(folder)
    return BackboneConfig(name=str(folder), image_size=SIZE)


def tiny_manifest(folder: Path, n: int, bad: tuple[int, ...] = (), masks: bool = True) -> Manifest:
    """`n` images of 48 x 40 noise; every second has a mask whose lesion is a block that no flip leaves in place."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    records = []
    for i in range(n):
        name = f"image-{i:03d}"
        path = folder / f"{name}.png"
        if i in bad:
            path.write_bytes(b"this is no picture")
        else:
            Image.fromarray(random.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)
        mask = folder / f"{name}-mask.png" if masks and i % 2 == 0 else None
        if mask is not None:
            lesion_mask().save(mask)
        label = None if i == 1 else ("MEL", "NV")[i % 2]
        records.append({"image_id": name, "image": str(path), "mask": None if mask is None else str(mask), "label": label})
        records[-1] |= {"group": None, "split": "val" if i % 4 == 3 else "train"}
    return Manifest.from_records(records, ("MEL", "NV"), source="tiny")


def lesion_mask() -> Image.Image:
    """Twice the size of the image; the lesion is two patches wide and one high, in the second row, at the left edge."""
    pixels = np.zeros((80, 96), np.uint8)
    pixels[20:40, 0:48] = 255
    return Image.fromarray(pixels)


def contents(store: Path) -> dict[str, bytes]:
    """Every file of a store that is neither hidden (leftovers, lock) nor in its cache."""
    files = [path for path in sorted(store.iterdir()) if path.is_file() and not path.name.startswith(".")]
    return {path.name: path.read_bytes() for path in files}


def extract_arguments(manifest: Path, store: Path, backbone: BackboneConfig, *more: str) -> list[str]:
    """`mtb extract` with shards and batches as in CONFIG."""
    settings = ["--image_size", str(SIZE), "--shard_size", "4", "--batch_size", "3", "--device", "cpu"]
    return ["extract", str(manifest), "--store", str(store), "--backbone", backbone.name, *settings, *more]


def ended_process() -> int:
    """The id of a process that has just ended."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid
