"""A small drawn data set and its store of tokens, for tests that train: real files, a real small ViT."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.config import ExtractConfig, TrainConfig, preset, with_settings
from medtokenbudget.data import Drawings, Manifest, synthetic_manifest
from medtokenbudget.data.synthetic import draw
from medtokenbudget.routing import Selector
from medtokenbudget.runs.method import Method
from medtokenbudget.tokens import SIGNALS
from medtokenbudget.training import RoutedClassifier
from medtokenbudget.training.rows import TrainingRows
from medtokenbudget.training.trainer import train
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


def drawn_folder(root: Path, n: int, size: int = 96, classes: tuple[str, ...] = ("MEL", "NV", "BCC")) -> list[tuple[Path, Path]]:
    """Write drawings to `root/photos/CLASS/p00.jpg` and their masks to `root/masks/p00.png`; return the paths of both."""
    paths = []
    for number in range(n):
        drawing = draw(label := classes[number % len(classes)], number, size=size)
        image, mask = root / "photos" / label / f"p{number:02d}.jpg", root / "masks" / f"p{number:02d}.png"
        for path in (image, mask):
            path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawing.image).save(image, quality=92)
        Image.fromarray(drawing.mask).convert("L").save(mask)
        paths.append((image, mask))
    return paths


SMALL: dict[str, object] = {
    **{"epochs": 2, "head_epochs": 2, "batch_size": 16, "device": "cpu", "evaluate_every": 1, "min_steps": 0},
    **{"lats.hidden": 16, "lats.layers": 2, "context.channels": 16, "context.blocks": 2, "context.kernel": 3},
}


def quick(name: str, *methods: str, labels: bool = True, **changes: object) -> TrainConfig:
    """A preset made small, two epochs of a narrow scorer, for a run of `methods`; a setting that none of them reads is refused."""
    base = preset(name)
    chosen = methods or ("lats" if name == "paper" else "lats:lesion-first", "center")
    read = {setting for method in chosen for setting in Method.parse(method).reads(base, labels)}
    values = {setting: value for setting, value in SMALL.items() if setting in read}
    given = frozenset({*values, *changes})
    return replace(with_settings(base, {**values, "given": given}), **changes)


def fit(
    drawn: Drawn, config: TrainConfig, selector: str | Selector = "lats", head: str = "mlp", folder: Path | None = None
) -> RoutedClassifier:
    """Train on the drawings, in memory unless there is a folder."""
    store = drawn.store
    return train(store, TrainingRows.of(drawn.manifest, store, config), config, selector, head, folder)
