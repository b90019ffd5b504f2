"""A tiny world for the tests of faults: data, a store, a model and a run, and every command that writes something."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.cli import main
from medtokenbudget.data import Manifest
from tests.small_model import CLASSES, draw_images, small_backbone, small_model

SMALL = ["--epochs", "1", "--head-epochs", "1", "--batch-size", "8", "--device", "cpu"]
COMMANDS = (
    *("data", "split", "extract", "train", "sweep", "report", "export"),
    *("calibrate", "route", "shards", "predict"),
)
LONG = ("evaluate", "reproduce", "web")
"""Commands that take too long to be disturbed in every run of the tests."""
_CLOCK = ("seconds", "images_per_second")


@dataclass(frozen=True)
class World:
    """Inputs in `root`; every command writes below `place`, which is made anew before each try."""

    root: Path

    @property
    def place(self) -> Path:
        return self.root / "place"

    @property
    def backbone(self) -> str:
        return f"--backbone test_vit --weights {self.root}/vit-0.safetensors --image-size 160 --threads 1"

    def command(self, name: str) -> list[str]:
        """The words after `mtb`."""
        out, root, data = self.place / "out", self.root, self.root / "data" / "manifest.parquet"
        run = f"{data} --store {root}/store --out {out} {' '.join(SMALL)}"
        route = f"route {root}/images --model {root}/model --out {out} --overlay --device cpu"
        words = {
            "data": f"data synthetic --out {out} --n 2 --size 48 --workers 1",
            "split": f"data split {data} --split kfold --out {out}/kfold.parquet",
            "extract": f"extract {data} --store {out} {self.backbone} --shard-size 8",
            "train": f"train {run} --lats.hidden 8 --lats.layers 1",
            "sweep": f"sweep {run} --methods lats center --jobs 1 --lats.hidden 8 --lats.layers 1",
            "reproduce": f"reproduce {run} --study epochs --jobs 1",
            "report": f"report {root}/run --out {out}",
            "evaluate": f"evaluate {data} --model {root}/model --out {out} --classes {root}/classes.json",
            "export": f"export {root}/model --format hub --out {out}",
            "web": f"export {root}/model --format web --out {out}",
            "calibrate": f"calibrate {data} --model {root}/model --store {root}/store --retention 0.5 --out {out}",
            "route": route,
            "shards": f"{route} --tokens --shard-size 1",
            "predict": f"predict {root}/images --model {root}/model --out {out}/p.csv --device cpu",
        }
        return words[name].split()

    def begin(self) -> None:
        """Leave nothing of the try before."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()

    def contents(self) -> dict[str, bytes]:
        """Every file that was written, without clocks and locks."""
        found = {}
        for path in sorted(self.place.rglob("*")):
            if path.is_file():
                found[str(path.relative_to(self.place))] = _without_clock(path)
        return found

    def rows(self) -> dict[tuple[str, str], bytes]:
        """The tokens that the store of a command shows for the manifest, by image and view; nothing without a store."""
        found: dict[tuple[str, str], bytes] = {}
        for file in self.place.rglob("store.json"):
            store = FeatureStore.open(file.parent, Manifest.read(self.root / "data" / "manifest.parquet"))
            patches = store.read(range(len(store))).patches.numpy()
            found |= {key: patches[row].tobytes() for row, key in enumerate(zip(store.ids, store.views))}
        return found


def _without_clock(path: Path) -> bytes:
    data = path.read_bytes()
    if path.name != "metrics.jsonl":
        return data
    rows = [json.loads(line) for line in data.decode().splitlines()]
    return json.dumps([{key: value for key, value in row.items() if key not in _CLOCK} for row in rows]).encode()


def make_world(root: Path) -> World:
    world = World(root)
    small_backbone(root)
    data = root / "data" / "manifest.parquet"
    for words in (
        f"data synthetic --out {root}/data --n 20 --size 48 --workers 1",
        f"extract {data} --store {root}/store {world.backbone}",
        f"sweep {data} --store {root}/store --out {root}/run {' '.join(SMALL[2:])} --methods center random --jobs 1",
    ):
        assert main(words.split()) == 0
    drawn = Manifest.read(data)
    (root / "classes.json").write_text(json.dumps({name: "MEL" for name in drawn.classes if name not in CLASSES}))
    small_model(root, baselines=("center",)).save_pretrained(root / "model")
    draw_images(root / "images", 3, size=64)
    return world
