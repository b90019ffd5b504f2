"""Train a small transformer on routed tokens. It sees K instead of N tokens per image, and the position of each.

python examples/tokens_to_transformer.py runs/mine/run runs/mine/manifest.parquet runs/mine/tokens --budget 0.3
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import medtokenbudget as mtb
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.data import Manifest
from medtokenbudget.metrics import accuracy


class SmallTransformer(nn.Module):
    """Maps K tokens [B, K, D] and their patch numbers [B, K] to class logits [B, C]."""

    def __init__(self, dim: int, patches: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.project = nn.Linear(dim, width)
        self.place = nn.Embedding(patches, width)
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.classify = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, indices: Tensor) -> Tensor:
        x = self.project(tokens) + self.place(indices)
        x = torch.cat([self.summary.expand(len(x), -1, -1), x], dim=1)
        return self.classify(self.encoder(x)[:, 0])


def main(model: Path, manifest: Path, store: Path, budget: float = 0.3, epochs: int = 10) -> float:
    """Return the accuracy on the validation images."""
    route = mtb.load(model).router(budget)
    images = Manifest.read(manifest)
    tokens = FeatureStore.open(store, images)

    def part(name: str) -> tuple[Tensor, Tensor, Tensor]:
        kept, places, labels = [], [], []
        for batch in tokens.batches(tokens.rows(images.part(name).ids), 64):
            selection = route(batch)
            kept.append(selection.tokens.float().clone())
            places.append(selection.indices.clone())
            labels.append(batch.label.long().clone())
        return torch.cat(kept), torch.cat(places), torch.cat(labels)

    torch.manual_seed(0)
    train, val = part("train"), part("val")
    network = SmallTransformer(tokens.dim, tokens.grid[0] * tokens.grid[1], len(images.classes))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=1e-2)
    for _ in range(epochs):
        for rows in torch.randperm(len(train[2])).split(32):
            loss = nn.functional.cross_entropy(network(train[0][rows], train[1][rows]), train[2][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval()
    with torch.no_grad():
        score = accuracy(val[2], network(val[0], val[1]).argmax(1))
    most = np.bincount(train[2].numpy()).argmax()
    constant = accuracy(val[2], np.full(len(val[2]), most))
    k = train[0].shape[1]
    print(f"{k} tokens per image: accuracy {score:.3f} on {len(val[2])} images (always the most frequent class: {constant:.3f})")
    return score


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--budget", type=float, default=0.3)
    given = parser.parse_args()
    main(given.model, given.manifest, given.store, given.budget)
