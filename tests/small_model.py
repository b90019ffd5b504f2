"""A whole model in a second: a real small ViT with seeded weights on disk, a LATS router and heads that were never trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.partial import Way
from medtokenbudget.config import BackboneConfig, LATSConfig, RouterConfig, TrainConfig, preset
from medtokenbudget.model import EarlyRouting, MedTokenBudget
from medtokenbudget.routing import LATSSelector, Selector, create_selector, selector_class
from medtokenbudget.routing.selectors.scout import Scout
from medtokenbudget.training import MLPHead, RoutedClassifier

CLASSES = ("MEL", "NV", "BCC")
BASELINES = ("random", "center", "darkness", "tome", "local-contrast", "no-pruning", "oracle")


def small_backbone(folder: Path, seed: int = 0) -> BackboneConfig:
    """timm's `test_vit` (64 numbers a token, 10 x 10 patches) with seeded weights in `folder`."""
    path = folder / f"vit-{seed}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = timm.create_model("test_vit", pretrained=False, num_classes=0, img_size=160)
        save_file(model.state_dict(), path)
    return BackboneConfig(name="test_vit", weights=path, image_size=160)


def small_model(
    folder: Path, baselines: tuple[str, ...] = BASELINES, seed: int = 0, main: str = "lats", head: bool = True
) -> MedTokenBudget:
    backbone = small_backbone(folder, seed)
    loaded = Backbone.load(backbone)
    config = TrainConfig(lats=LATSConfig(hidden=32, layers=2), router=RouterConfig(minimum=8))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        selectors: dict[str, Selector] = {main: LATSSelector.from_config(loaded.dim, config)}
        for name in baselines:
            learned = {"dim": loaded.dim} if selector_class(name).learns else {}
            selectors[name] = create_selector(name, minimum=8, **learned)
        classifiers = {
            name: RoutedClassifier(s, MLPHead(loaded.dim, len(CLASSES)) if head else None) for name, s in selectors.items()
        }
    classes = CLASSES if head else ()
    model = MedTokenBudget(backbone, loaded.fingerprint, classes, classifiers, config, main=main, device="cpu")
    return model.use_backbone(loaded)


def early_model(folder: Path, way: Way, main: str = "no-pruning") -> MedTokenBudget:
    """A model whose backbone is routed early, with a head that was never trained."""
    scout, config = small_model(folder / "scout", ("center",), seed=1), small_backbone(folder)
    loaded = EarlyRouting(scout, way, 0.3).wrap(Backbone.load(config))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        classifiers = {main: RoutedClassifier(create_selector(main, minimum=8), MLPHead(loaded.dim, len(CLASSES)))}
    made = MedTokenBudget(
        config, loaded.fingerprint, CLASSES, classifiers, scout.train_config, main=main, scout=scout, device="cpu"
    )
    return made.use_backbone(loaded)


def scout_model(seed: int = 0) -> MedTokenBudget:
    """A scout of 64 pixels that was never trained, with tokens of the embedded backbone."""
    backbone = BackboneConfig(name="pixels", image_size=64)
    loaded = Backbone.load(backbone)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        scout = Scout(loaded.dim, width=0.5, plain=True)
    classifiers = {"scout": RoutedClassifier(scout, None), "center": RoutedClassifier(create_selector("center"), None)}
    embedded = BackboneConfig(name="embedded")
    tokens_from = (embedded, Backbone.load(embedded).fingerprint)
    return MedTokenBudget(
        backbone, loaded.fingerprint, (), classifiers, preset("scout"), main="scout", tokens_from=tokens_from, device="cpu"
    )


def draw_images(folder: Path, count: int, size: int = 200, seed: int = 0) -> list[Path]:
    """JPEG files with a dark blob somewhere on skin-colored noise."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size]
    paths = []
    for number in range(count):
        pixels = np.array([224, 172, 150]) + generator.normal(0, 8, (size, size, 3))
        cy, cx = generator.uniform(0.3, 0.7, 2) * size
        pixels[(y - cy) ** 2 + (x - cx) ** 2 < (0.2 * size) ** 2] = (90, 55, 45)
        paths.append(folder / f"image-{number:03d}.jpg")
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths
