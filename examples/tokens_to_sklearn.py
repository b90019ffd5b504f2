"""Train a scikit-learn classifier on routed tokens: logistic regression on their mean and standard deviation.

    python examples/tokens_to_sklearn.py runs/mine/run runs/mine/manifest.parquet --budget 0.3

Needs `pip install scikit-learn`. The model reads the images here, so no store is needed. `mtb predict --tokens` writes the same
tokens to a file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import medtokenbudget as mtb
from medtokenbudget.data import Manifest


def main(model: Path, manifest: Path, budget: float = 0.3) -> float:
    """Return the balanced accuracy on the validation images."""
    router, images = mtb.load(model), Manifest.read(manifest)

    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        rows = images.part(name)
        found = router.stream(rows, budget)
        features = [np.concatenate([p.tokens.mean(0), p.tokens.std(0)]) for p in found]
        return np.stack(features), rows.label_index

    x, y = part("train")
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, class_weight="balanced", C=0.1))
    classifier.fit(x, y)
    x_val, y_val = part("val")
    score = float(balanced_accuracy_score(y_val, classifier.predict(x_val)))
    print(f"logistic regression on {router.k(budget)} tokens per image: balanced accuracy {score:.3f} on {len(y_val)} images")
    return score


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--budget", type=float, default=0.3)
    given = parser.parse_args()
    main(given.model, given.manifest, given.budget)
