"""A small drawn data set and its store of tokens, for tests that train: real files, a real small ViT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medtokenbudget.config import ContextConfig, ExtractConfig, LATSConfig, TrainConfig, preset
from medtokenbudget.data import Drawings, Manifest, synthetic_manifest
from medtokenbudget.features import FeatureStore, extract
from medtokenbudget.tokens import SIGNALS
from tests.small_model import small_backbone


@dataclass(frozen=True)
class Drawn:
    """Paths of a manifest and of its store."""

    manifest_path: Path
    store_path: Path

    @property
    def manifest(self) -> Manifest:
        return Manifest.read(self.manifest_path)

    @property
    def store(self) -> FeatureStore:
        return FeatureStore.open(self.store_path, self.manifest)


def drawn_store(folder: Path, n: int = 96) -> Drawn:
    """`n` drawings of 96 pixels with their off-center views and every signal."""
    manifest = synthetic_manifest(folder / "data", Drawings(n, seed=3, size=96))
    config = ExtractConfig(views="off-center", signals=SIGNALS, threads=1)
    extract(Manifest.read(manifest), folder / "tokens", small_backbone(folder), config)
    return Drawn(manifest, folder / "tokens")


def quick(name: str, **changes: object) -> TrainConfig:
    """A preset made small: two epochs of a narrow scorer."""
    small = {"epochs": 2, "head_epochs": 2, "batch_size": 16, "device": "cpu", "evaluate_every": 1, "min_steps": 0}
    base = preset(name)
    lats = LATSConfig(hidden=16, layers=2, neighborhood=base.lats.neighborhood)
    context = ContextConfig(channels=16, blocks=2, kernel=3)
    return preset(name, **{**small, "lats": lats, "context": context, **changes})
