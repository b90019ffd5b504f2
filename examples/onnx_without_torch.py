"""Use an exported model without PyTorch and without this package: only onnxruntime, numpy and Pillow are needed.

    mtb export runs/mine/run --format onnx --graph whole --budget 0.3 --out exported
    python examples/onnx_without_torch.py exported/whole-lats-lesion-first-0.3.onnx photo.jpg

Research software, not a medical device.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def main(model: Path, images: list[Path]) -> list[dict[str, float]]:
    """Return the class probabilities of each image; without classes, print only the kept patches."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    classes, preprocessing = json.loads(facts["classes"]), json.loads(facts["preprocessing"])
    size = preprocessing["image_size"]
    answers = []
    for path in images:
        picture = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        picture = picture.resize((size, size), RESAMPLING[preprocessing["interpolation"]])
        # RGB in [0, 1], shape [1, 3, S, S]; the graph itself subtracts the mean and divides by the standard deviation.
        pixels = np.asarray(picture, dtype=np.float32).transpose(2, 0, 1)[None] / 255
        logits, indices = session.run(None, {"image": pixels})  # without classes: the scores of all patches in place of logits
        found = ""
        if classes:
            shares = np.exp(logits[0] - logits[0].max())
            shares /= shares.sum()
            answers.append(dict(zip(classes, shares.tolist())))
            best = int(shares.argmax())
            found = f"{classes[best]} ({shares[best]:.0%}), "
        print(f"{path}: {found}patches {indices[0][:5].tolist()} ... of K = {facts['k']}")
    return answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path, nargs="+")
    given = parser.parse_args()
    main(given.model, given.images)
