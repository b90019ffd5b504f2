"""Extraction of real images (decode, forward, signals, write) against timm's bare forward pass on decoded tensors, in turns.

    python -m benchmarks.extraction [--images ../shared/data/isic/ISIC_2019_Training_Input] [--weights FILE] [--rounds 5]

Same batches, number format and threads. Also shows that memory does not grow with the number of images: largest private memory
over the start at one and at eight times the images, a process each, with the embedded backbone, which is through with them sooner.
(Below some 700 images the allocator is still growing to its size.)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

from benchmarks.measuring import IMAGES, VIT_S, VIT_S_WEIGHTS, in_turns, peak_growth, ratio
from medtokenbudget.backbone import Backbone
from medtokenbudget.backbone.extract import Item, ShardUnit, make_shards
from medtokenbudget.backbone.views import IDENTITY
from medtokenbudget.config import BackboneConfig, ExtractConfig
from medtokenbudget.data import Manifest, decode_image
from medtokenbudget.files import sha256_file

MEMORY_OF = (1024, 8192)


def manifest_of(images: Path, n: int) -> Manifest:
    """The first `n` pictures of a folder, without labels; again from the start where the folder has fewer."""
    found = sorted(images.glob("*.jpg"))
    if not found:
        raise SystemExit(f"no .jpg in {images}: name a folder of real images with --images.")
    paths = [found[i % len(found)] for i in range(n)]
    records = [{"image_id": f"{i:05d}-{path.stem}", "image": str(path), "split": "train"} for i, path in enumerate(paths)]
    return Manifest.from_records(records, (), source=str(images))


@torch.inference_mode()
def bare(backbone: Backbone, batches: list[torch.Tensor]) -> None:
    """Run the network alone."""
    for batch in batches:
        backbone.model.forward_features(batch)


def extraction(backbone: Backbone, manifest: Manifest, config: ExtractConfig) -> None:
    """Run everything from files on disk to a finished shard, with a backbone that is already loaded."""
    with tempfile.TemporaryDirectory() as folder:
        # Not `extract`: it makes equal images once, and the memory is measured on more images than the folder has.
        paths = [str(manifest.image_path(i)) for i in range(len(manifest))]
        items = [Item(sha256_file(path), IDENTITY, name, path) for name, path in zip(manifest.ids, paths)]
        size = config.shard_size
        units = [
            ShardUnit(index, tuple(items[first : first + size]), backbone.default_signals)
            for index, first in enumerate(range(0, len(items), size))
        ]
        for _ in make_shards(Path(folder), config, "", backbone, units, lambda count: None):
            pass


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--weights", type=Path, default=VIT_S_WEIGHTS)
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves it to torch")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    small = BackboneConfig(name="embedded")
    backbone = Backbone.load(small if given.memory_of else BackboneConfig(name=VIT_S, weights=given.weights))
    config = ExtractConfig(batch_size=given.batch, shard_size=given.batch, device="cpu", threads=given.threads)
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.memory_of is not None:
        manifest = manifest_of(given.images, given.memory_of)
        growth = peak_growth(extraction, backbone, manifest, config)
        print(json.dumps({"images": given.memory_of, "growth_kib": growth}))
        return 0
    _speed(backbone, manifest_of(given.images, given.n), config, given.rounds)
    _memory(given)
    return 0


def _speed(backbone: Backbone, manifest: Manifest, config: ExtractConfig, rounds: int) -> None:
    pixels = [torch.from_numpy(backbone.prepare(decode_image(manifest.image_path(i)))) for i in range(len(manifest))]
    batches = [backbone.normalize(torch.stack(pixels[i : i + config.batch_size])) for i in range(0, len(pixels), config.batch_size)]
    calls = {"bare forward pass": lambda: bare(backbone, batches), "extraction": lambda: extraction(backbone, manifest, config)}
    seconds = in_turns(calls, rounds)
    threads = torch.get_num_threads()
    print(f"{VIT_S}, {len(manifest)} images, batch {config.batch_size}, {threads} threads, {rounds} rounds in turns:")
    for name, taken in seconds.items():
        print(f"  {name:<20}{len(manifest) / median(taken):7.2f} images/s")
    print(f"  ratio               {ratio(seconds, 'bare forward pass', 'extraction'):7.3f}")


def _memory(given: argparse.Namespace) -> None:
    growth = []
    for n in MEMORY_OF:
        command = [sys.executable, "-m", "benchmarks.extraction", "--memory-of", str(n), "--images", str(given.images)]
        command += ["--batch", str(given.batch), "--threads", str(given.threads)]
        growth.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["growth_kib"])
    print("private memory of an extraction over its start (a process each):")
    print(f"  {MEMORY_OF[0]:5d} images {growth[0] / 1024:7.1f} MiB")
    print(f"  {MEMORY_OF[1]:5d} images {growth[1] / 1024:7.1f} MiB   ratio {growth[1] / growth[0]:.2f}")


if __name__ == "__main__":
    raise SystemExit(main())
