"""The flip matrix: every kind of file that the product writes, with flipped bits, other digits, zeroed blocks and truncations.

Damage is noticed with a message that names the file and what to do, or it is harmless: the file is made again, or the result is the
same. It is never used silently and never ends in a traceback. The kinds come from a real flow, so a new one cannot be forgotten.

`MTB_FLIPS` is the number of damages of each kind (default 12).
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

import medtokenbudget as mtb
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.cli import main
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest
from medtokenbudget.errors import MedTokenBudgetError
from medtokenbudget.files import read_json, sha256_json
from medtokenbudget.reporting.intervals import ReportRun
from medtokenbudget.runs.method import Method
from medtokenbudget.runs.run import Run
from medtokenbudget.runs.studies import Unit
from medtokenbudget.runs.sweep import is_done
from medtokenbudget.training.pooled import is_whole
from tests.backbone.tiny import SIZE, tiny_backbone

pytestmark = pytest.mark.slow
DAMAGES = int(os.environ.get("MTB_FLIPS", "12"))
SIGNALS = ("rollout", "mean_key")
CPU = ["--device", "cpu"]
TRAINING = ["--epochs", 2, "--head-epochs", 2, "--batch-size", 8, "--lats.hidden", 8, "--router.minimum", 2, *CPU]
ADVICE = re.compile(r"\b([Rr]un|Delete|Copy|Restore|[Cc]reate|Train|Choose|Use)\b")


@dataclass(frozen=True)
class World:
    """One small flow through the product; the tests damage its files one at a time and put them back."""

    root: Path

    def __truediv__(self, name: str) -> Path:
        return self.root / name

    def routing(self) -> list[object]:
        out = self / "routed"
        return ["route", self / "other/images", "--model", self / "hub", "--out", out, "--tokens", "--shard-size", 4, *CPU]

    def drawing(self) -> list[object]:
        return ["data", "synthetic", "--out", self / "data", "--n", 24, "--size", 48, "--workers", 1]

    @cached_property
    def begun(self) -> Run:
        return Run.begin(self / "run", self / "data/manifest.parquet", self / "store", Run(self / "run").config)

    def files(self) -> dict[str, list[Path]]:
        """Every file by its kind."""
        kinds: dict[str, list[Path]] = {}
        for path in sorted(self.root.rglob("*")):
            if path.is_file():
                kinds.setdefault(kind_of(path.relative_to(self.root)), []).append(path)
        return kinds


def run(*words: object) -> int:
    return main([str(word) for word in words])


def kind_of(path: Path) -> str:
    """A name for all files of the same kind: numbers, hashes and names of methods become stars."""
    text = path.as_posix()
    for pattern, new in (
        (r"^other/", "data/"),
        (r"^external/tokens/", "store/"),
        (r"^(hub|run/model)/", "model/"),
        (r"^external/", "run/"),
        (r"/units/[^/]+/", "/units/*/"),
        (r"(images|masks|overlays|figures|tables)/.*$", r"\1/*"),
        (r"pooled/[\w.-]+\.", "pooled/*."),
        (r"/\w+-\d{5}\.npy", "/*.npy"),
        (r"/[0-9a-f]{16}\.", "/*."),
        (r"-\d{5,}", "-*"),
    ):
        text = re.sub(pattern, new, text)
    return text


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)
    made = World(tmp_path_factory.mktemp("flips"))
    manifest, store = made / "data/manifest.parquet", made / "store"
    backbone = tiny_backbone(made / "backbone")
    extract = ["extract", manifest, "--store", store, "--backbone", backbone.name, "--image-size", SIZE]
    extract += ["--shard-size", 8, "--batch-size", 4, "--views", "off-center", *CPU]
    sweep = ["sweep", manifest, "--store", store, "--out", made / "run", "--jobs", 1, *TRAINING]
    for words in (
        made.drawing(),
        ["data", "synthetic", "--out", made / "other", "--n", 8, "--size", 48, "--seed", 1, "--workers", 1],
        extract,
        [*extract, "--signals", *SIGNALS],
        [*sweep, "--methods", "lats:lesion-first", "center"],
    ):
        assert run(*words) == 0
    mtb.calibrate(made / "run", manifest, 0.3, store=store)
    # As a command, so that it writes its report too.
    assert run("evaluate", made / "other/manifest.parquet", "--model", made / "run", "--out", made / "external") == 0
    assert run("export", made / "run", "--format", "hub", "--out", made / "hub") == 0
    assert run(*made.routing()) == 0
    assert run("route", made / "other/images", "--model", made / "hub", "--out", made / "routed-once", "--overlay", *CPU) == 0
    assert run("predict", made / "other/images", "--model", made / "hub", "--out", made / "predicted/p.csv", *CPU) == 0
    return made


# Readers: what a file says to those who use it -----------------------------------------------------------------------


class Noticed(MedTokenBudgetError):
    """Damage that a command reported, or that makes it do the work again."""


def the_manifest(world: World, path: Path) -> Any:
    found = Manifest.read(path)
    return found.rows.to_dict("list"), found.classes, found.name, found.source, found.split_rule, found.hash


def the_drawings(world: World, path: Path) -> Any:
    if path.is_relative_to(world / "other"):
        return None
    return obey(world.drawing())


def the_backbone(world: World, path: Path) -> Any:
    return Backbone.load(BackboneConfig(name=str(path.parent), image_size=SIZE)).fingerprint


def the_store(world: World, path: Path) -> Any:
    """Everything that training reads of a store. `store info` and `extract --verify` notice what is not as it was written."""
    top = next(folder for folder in path.parents if (folder / "store.json").is_file())
    own = (world / "store") == top
    damaged = FeatureStore.open(top, partial=True).damaged()
    try:
        store = FeatureStore.open(top, Manifest.read(world / ("data" if own else "other") / "manifest.parquet"))
        batch = store.read(range(len(store)), signals=SIGNALS if own else ())
        tensors = [value.numpy().tobytes() for _, value in sorted(vars(batch).items()) if isinstance(value, torch.Tensor)]
    except MedTokenBudgetError as error:
        if not any(Path(name).stem == path.stem for name in damaged):
            raise AssertionError(f"store info is content, but {error}") from None
        raise Noticed(f"{path.name}: {error}") from None
    said = [store.ids, store.views, store.classes, store.config, [vars(error) for error in store.errors], store.identity]
    if path.suffix != ".json" and path in whole_files:
        # Rebuilt or not read now, it is noticed.
        assert damaged or path.read_bytes() == whole_files[path], f"store info is content with {path.name}"
    return hashlib.sha256(b"".join([*tensors, store.covered.numpy().tobytes()])).hexdigest(), said


def the_run(world: World, path: Path) -> Any:
    """Everything that a report is made of."""
    found = ReportRun.read(path.parent)
    tables = [found.results, found.predictions, found.training.drop(columns="seconds", errors="ignore"), found.attributes]
    orders = None if found.orders is None else [value.tobytes() for _, value in sorted(found.orders.order.items())]
    extra = None if found.orders is None else (found.orders.image_ids, found.orders.lesion.tobytes(), found.orders.grid)
    return [None if table is None else table.to_csv() for table in tables], found.info.classes, vars(found.info), orders, extra


def the_unit(world: World, path: Path) -> Any:
    """A unit that is not done runs again, and takes nothing from a damaged file: see tests/runs/test_sweep.py."""
    name, _, seed = path.parent.name.rpartition("-")
    state = "done" if is_done(world.begun, Unit(Method.parse(name.replace("~", ":")), int(seed))) else "missing"
    if state != "done":
        raise Noticed(f"{path.name}: {state}, run again")
    return None if path.name in ("unit.json", "metrics.jsonl") else path.read_bytes()


def the_pooled_tokens(world: World, path: Path) -> Any:
    if not is_whole(path.with_suffix(".npy")):
        raise Noticed(f"{path.name}: run again")
    return path.with_suffix(".npy").read_bytes()


def the_model(world: World, path: Path) -> Any:
    model = mtb.load(path.parent, device="cpu")
    promises = [guarantee.to_json() for guarantee in model.guarantees]
    image = min((world / "other/images").iterdir())
    kept = model.route([image], budget=model.guarantees[0])[0].kept.tolist()
    return model.fingerprint, promises, model.info, vars(model.backbone_config), model.train_config, kept


def the_routes(world: World, path: Path) -> Any:
    """The same command again: finished shards stay, damaged ones are made again."""
    obey(world.routing())
    parts = [file.read_bytes() for file in sorted((world / "routed/routes").glob("part-*.parquet"))]
    return parts, read_json(world / "routed/summary.json")


def obey(words: list[object]) -> None:
    """Run a command; its message becomes an error."""
    _output.readouterr()
    if run(*words) != 0:
        said = _output.readouterr().err
        raise Noticed(said) if "Traceback" not in said else AssertionError(said)


NOBODY = None
"""For people and other programs; no command of the product reads it."""
INPUT = None
"""Images and masks: what is in them counts, and `mtb extract --verify` says which have changed."""
Reader = Callable[[World, Path], Any]
MATRIX: dict[str, Reader | None] = {
    "backbone/config.json": the_backbone,
    "backbone/weights.safetensors": the_backbone,
    "data/drawings.json": the_drawings,
    "data/images/*": INPUT,
    "data/manifest.parquet": the_manifest,
    "data/masks/*": INPUT,
    "model/README.md": NOBODY,
    "model/config.json": the_model,
    "model/heads.safetensors": the_model,
    "model/model.safetensors": the_model,
    "predicted/p.csv": NOBODY,
    "routed-once/overlays/*": NOBODY,
    "routed-once/routes.parquet": NOBODY,
    "routed-once/summary.json": NOBODY,
    "routed/routes/_part-*.json": the_routes,
    "routed/routes/_request.json": the_routes,
    "routed/routes/part-*.parquet": the_routes,
    "routed/summary.json": NOBODY,
    "routed/tokens/part-*.safetensors": NOBODY,
    "run/attributes.parquet": the_run,
    "run/figures/*": NOBODY,
    "run/metrics.jsonl": the_run,
    "run/pooled/*.json": the_pooled_tokens,
    "run/pooled/*.npy": the_pooled_tokens,
    "run/predictions.parquet": the_run,
    "run/report.html": NOBODY,
    "run/results.csv": the_run,
    "run/routing.safetensors": the_run,
    "run/run.json": the_run,
    "run/tables/*": NOBODY,
    "run/units/*/checkpoint.safetensors": the_unit,
    "run/units/*/head.safetensors": the_unit,
    "run/units/*/images.json": the_unit,
    "run/units/*/metrics.jsonl": the_unit,
    "run/units/*/predictions.parquet": the_unit,
    "run/units/*/routing.safetensors": the_unit,
    "run/units/*/unit.json": the_unit,
    "store/cache/*.safetensors": the_store,
    "store/cache/files.json": the_store,
    "store/errors.jsonl": NOBODY,
    "store/plan.json": the_store,
    "store/shard-*.json": the_store,
    "store/*.npy": the_store,
    "store/store.json": the_store,
}
READ = [kind for kind, reader in MATRIX.items() if reader is not None]


# Damage --------------------------------------------------------------------------------------------------------------


def damages(data: bytes, chance: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """What was done, with offset and bytes, and the damaged content."""
    digits = [match.start() for match in re.finditer(rb"\d", data)] if b"\0" not in data else []
    kinds = ("flip", "digit", "zeros", "flip", "digit", "truncate") if digits else ("flip", "zeros", "flip", "truncate")
    for number in range(count):
        kind, place = kinds[number % len(kinds)], chance.randrange(len(data))
        if kind == "truncate":
            yield f"truncated to {place} of {len(data)} bytes", data[:place]
            continue
        if kind == "zeros":
            old = data[place : place + chance.choice((1, 16, 64))]
            new = bytes(len(old))
        elif kind == "digit":
            place = chance.choice(digits)
            old = data[place : place + 1]
            new = str((int(old) + chance.randrange(1, 10)) % 10).encode()
        else:
            old = data[place : place + 1]
            new = bytes([old[0] ^ 1 << chance.randrange(8)])
        if new != old:
            yield f"{kind} at {place}: {old!r} became {new!r}", data[:place] + new + data[place + len(old) :]


whole_files: dict[Path, bytes] = {}
_output: pytest.CaptureFixture[str]


def test_every_kind_of_file_that_the_product_writes_is_in_the_matrix(world: World) -> None:
    assert sorted(world.files().keys() - MATRIX.keys()) == [], "new kinds of files: say in the matrix who reads them"
    assert sorted(MATRIX.keys() - world.files().keys()) == []


@pytest.mark.parametrize("kind", READ)
def test_damage_is_noticed_or_harmless(world: World, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    global _output
    _output = capsys
    reader, chance, faults = MATRIX[kind], random.Random(kind), []
    files = world.files()[kind]
    chosen = chance.sample(files, min(len(files), 3))
    effects = 0
    for path in chosen:
        expected = sha256_json(reader(world, path))
        whole = whole_files.setdefault(path, path.read_bytes())
        for what, data in damages(whole, chance, -(-DAMAGES // len(chosen))):
            path.write_bytes(data)
            try:
                same = sha256_json(reader(world, path)) == expected
                effects += path.read_bytes() != data
                if not same:
                    faults.append(f"{path}: {what}: used silently")
            except MedTokenBudgetError as error:
                effects += 1
                if path.stem not in str(error) or not ADVICE.search(str(error)):
                    faults.append(f"{path}: {what}: the message does not say which file or what to do: {error}")
            except Exception as error:
                faults.append(f"{path}: {what}: {type(error).__name__}: {error}")
            finally:
                path.write_bytes(whole)
    assert not faults, "\n".join(faults)
    assert effects, "no damage was noticed: does the reader read this file?"
