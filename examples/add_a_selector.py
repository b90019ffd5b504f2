"""Add a selector of your own and compare it with the controls in a sweep.

    python examples/add_a_selector.py runs/mine/manifest.parquet runs/mine/tokens --out runs/edges

To use it in every command, put it into a package and name the class in the entry-point group `medtokenbudget.selectors`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

import medtokenbudget as mtb
from medtokenbudget.config import preset
from medtokenbudget.routing import Ranker, TokenBatch, register_selector


@register_selector("edges")
class Edges(Ranker):
    """Keeps the patches whose brightness differs most from the patch to the left and the one above."""

    requires = ("luminance",)

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        assert tokens.luminance is not None
        field = tokens.luminance.float().view(-1, *tokens.grid)
        left = torch.diff(field, dim=2, prepend=field[:, :, :1]).abs()
        above = torch.diff(field, dim=1, prepend=field[:, :1]).abs()
        return (left + above).flatten(1)


def main(manifest: Path, store: Path, out: Path, head_epochs: int = 30) -> pd.DataFrame:
    config = preset("lesion-first", head_epochs=head_epochs)
    methods, budgets = ("edges", "center", "random"), (0.1, 0.3, 0.5)
    # One job: worker processes know the selectors of installed packages, not those of a script.
    results = mtb.sweep(manifest, store, out, methods, budgets, config=config, jobs=1).results
    print(results[["method", "view", "budget", "k", "n", "accuracy", "n_masked", "retention", "ceiling"]].to_string(index=False))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/edges"))
    given = parser.parse_args()
    main(given.manifest, given.store, given.out)
