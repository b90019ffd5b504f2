"""Train a router on your own images: one folder per class, and a folder of masks if you have any.

    python examples/train_on_your_folder.py photos --masks masks --out runs/mine

The backbone is the small one in the package, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import medtokenbudget as mtb
from medtokenbudget.config import LossWeights, preset
from medtokenbudget.data import apply_split, folder_manifest


def main(images: Path, masks: Path | None, out: Path, epochs: int = 12, head_epochs: int = 30) -> Path:
    """Return the folder of the saved model."""
    # The manifest lists image, label, mask, group and split. Keep it: everything else can be computed from it again.
    manifest = apply_split(folder_manifest(images, masks), "grouped", select=0.1)
    path = manifest.write(out / "manifest.parquet")

    # The backbone runs once over every image. If this is interrupted, the same call resumes.
    mtb.extract(manifest, out / "tokens", backbone="embedded")

    # With masks, train the scorer on the lesions first. Without masks, use the paper's recipe without the lesion loss.
    config = preset("lesion-first") if masks else preset("paper", losses=LossWeights(lesion=0.0))
    config = replace(config, epochs=epochs, head_epochs=head_epochs)
    run = mtb.train(path, out / "tokens", out / "run", config)
    columns = ["method", "budget", "n", "accuracy", "retention"]
    print(run.results.loc[run.results["budget"] == 0.3, columns].to_string(index=False))

    first = next(path for path in sorted(images.rglob("*")) if path.is_file())
    (prediction,) = run.model.predict(first, budget=0.3)
    print(f"{prediction.image}: {prediction.label} ({prediction.probability:.0%}), {prediction.k} tokens kept")
    return out / "run" / "model"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--masks", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/mine"))
    given = parser.parse_args()
    main(given.images, given.masks, given.out)
