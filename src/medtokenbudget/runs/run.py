"""`run.json` as a type: what a run was made from (settings, versions, seeds, hashes of data, weights and split), without a clock.

Every number of a report can be traced to it, and two equal runs write equal bytes.
"""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from medtokenbudget.config import HEADLINE_METHODS, TrainConfig, to_dict, train_config_from_dict
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError
from medtokenbudget.runs.results import read_predictions, read_results, summarize, write_results
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.files import read_json, read_lines, sha256_file, unsealed, write_sealed
from medtokenbudget.progress import say
from medtokenbudget.training.trainer import log_hash

if TYPE_CHECKING:
    from medtokenbudget.runs.sweep import Study
    from medtokenbudget.runs.units import Plan, Unit

FILE = "run.json"
FORMAT_VERSION = 3
RESULTS, PREDICTIONS, ROUTING, METRICS, ATTRIBUTES = FILES = (
    "results.csv",
    "predictions.parquet",
    "routing.safetensors",
    "metrics.jsonl",
    "attributes.parquet",
)
"""What a report reads; `run.json` has the hashes."""
_AGAIN = "Delete it and run the command that made the run again; finished trainings are kept."
PACKAGES = ("medtokenbudget", "torch", "timm", "numpy", "pandas", "pyarrow", "scipy", "safetensors", "pillow")


@dataclass(frozen=True)
class MethodInfo:
    """One method of a run: its parts and the settings it was trained with."""

    selector: str
    head: str
    variant: str
    learned: bool
    config: dict[str, Any]

    @property
    def train_config(self) -> TrainConfig:
        """The settings as a typed configuration."""
        return train_config_from_dict(self.config)


@dataclass(frozen=True)
class RunInfo:
    """The content of a run's `run.json`.

    Attributes:
        path: The run directory (not stored).
        dataset: Name of the data set, as the user calls it.
        source: Kind of source that the manifest came from (isic, kvasir, folder, csv, synthetic).
        classes: Class names in the order of the logits.
        manifest: Path of the manifest, relative to the run directory.
        store: Path of the token store, relative to the run directory.
        config: Common training settings.
        methods: Method text to its parts and settings.
        main: The method that becomes the saved model and the headline of the report; None if no selector was trained.
        studies: Name, methods, seeds and budgets of each study.
        units: Finished units (a method with a seed).
        seeds: Seeds of the finished units.
        versions: Versions of Python and the packages that results depend on.
        hashes: Of the manifest, the split and the store.
        backbone: What the tokens came from.
        counts: Images, masks and classes of each part.
        files: Hash of each file that a report reads.
        command: The command line that made the run, if it was made from the command line.
        evaluation: Of `mtb evaluate`: the model, its own validation, how classes were matched. None for a run that trained.
    """

    path: Path
    dataset: str
    source: str
    classes: tuple[str, ...]
    manifest: str
    store: str
    config: dict[str, Any]
    methods: dict[str, MethodInfo]
    main: str | None
    studies: tuple[dict[str, Any], ...]
    units: tuple[str, ...]
    seeds: tuple[int, ...]
    versions: dict[str, str]
    hashes: dict[str, str]
    backbone: dict[str, Any]
    counts: dict[str, Any]
    files: dict[str, str]
    command: str | None = None
    evaluation: dict[str, Any] | None = None
    format_version: int = field(default=FORMAT_VERSION)

    @classmethod
    def read(cls, run: Path | str) -> RunInfo:
        """Read and check `run.json` of a run directory.

        Raises:
            RequestError: There is no such file, another version wrote it, or it is damaged.
        """
        path = Path(run)
        if not (path / FILE).is_file():
            what = "does not exist" if not path.exists() else f"is not a run directory: it has no {FILE}"
            raise RequestError(f"{path} {what}. Make a run with `mtb train`, `mtb sweep` or `mtb reproduce`.")
        values = read_json(path / FILE)
        if not isinstance(values, dict):
            raise RequestError(f"{path / FILE} is damaged: expected a JSON object. {_AGAIN}")
        found = values.get("format_version", 1)
        if found != FORMAT_VERSION:
            made = f"`{values['command']}`" if isinstance(values.get("command"), str) else "the command that made it"
            raise RequestError(
                f"{path} has run format version {found}; this version reads {FORMAT_VERSION}. Run {made} again with a new --out."
            )
        return cls(path=path, **_checked(path / FILE, unsealed(path / FILE, values, _AGAIN)))

    def write(self) -> None:
        """Write `run.json`; equal content gives equal bytes."""
        values = asdict(self)
        del values["path"]
        write_sealed(self.path / FILE, values)

    def file(self, name: str) -> Path:
        """The path of one of `FILES`.

        Raises:
            RequestError: The file is missing, or its content is not what the run wrote.
        """
        path = self.path / name
        if not path.is_file() or content_hash(path) != self.files.get(name):
            what = "is damaged: its content does not match its hash in run.json" if path.is_file() else "does not exist"
            made = f"`{self.command}`" if self.command else "the command that made the run"
            raise RequestError(f"{path} {what}. Run {made} again; finished trainings are kept.")
        return path

    def predictions(self) -> tuple[pd.DataFrame, tuple[str, ...]]:
        """`predictions.parquet`, and the class names."""
        return read_predictions(self.file(PREDICTIONS))

    def results(self) -> pd.DataFrame:
        """`results.csv`, which is made again from the predictions if it is missing or damaged."""
        path = self.path / RESULTS
        if not path.is_file() or content_hash(path) != self.files.get(RESULTS):
            table = summarize(*self.predictions())
            say(f"{path} is missing or damaged. It is made again from {PREDICTIONS}.")
            write_results(path, table)
        return read_results(path)

    @property
    def manifest_path(self) -> Path:
        """Where the manifest is, seen from anywhere."""
        return (self.path / self.manifest).resolve()

    @property
    def store_path(self) -> Path:
        """Where the token store is, seen from anywhere."""
        return (self.path / self.store).resolve()


_KINDS: dict[str, tuple[type, ...]] = {
    "dataset": (str,),
    "source": (str,),
    "classes": (list,),
    "manifest": (str,),
    "store": (str,),
    "config": (dict,),
    "methods": (dict,),
    "main": (str, type(None)),
    "studies": (list,),
    "units": (list,),
    "seeds": (list,),
    "versions": (dict,),
    "hashes": (dict,),
    "backbone": (dict,),
    "counts": (dict,),
    "files": (dict,),
    "command": (str, type(None)),
    "evaluation": (dict, type(None)),
    "format_version": (int,),
}


def _checked(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `RunInfo` out of parsed JSON."""
    wrong = [name for name, kinds in _KINDS.items() if not isinstance(values.get(name), kinds)]
    unknown = [name for name in values if name not in _KINDS]
    parts = {entry.name for entry in fields(MethodInfo)}
    methods = values.get("methods")
    if isinstance(methods, dict) and any(not isinstance(m, dict) or set(m) != parts for m in methods.values()):
        wrong.append("methods")
    if wrong or unknown:
        raise RequestError(f"{file} is damaged: check {', '.join(dict.fromkeys([*wrong, *unknown]))}. {_AGAIN}")
    tuples = {name: tuple(values[name]) for name in ("classes", "studies", "units", "seeds")}
    return {**values, **tuples, "methods": {text: MethodInfo(**parts) for text, parts in values["methods"].items()}}


def describe_run(plan: Plan, studies: Sequence[Study], done: Sequence[Unit]) -> RunInfo:
    """The `RunInfo` of a sweep or a reproduction whose units `done` are finished."""
    manifest, store = plan.sources.manifest, plan.sources.store
    methods = {
        str(unit.method): MethodInfo(
            unit.method.selector,
            unit.method.head if manifest.classes else "none",
            unit.method.variant,
            unit.method.learned,
            to_dict(unit.method.config(plan.config)),
        )
        for unit in done
    }
    return RunInfo(
        path=plan.out,
        dataset=plan.dataset,
        source=manifest.source.split()[0],
        classes=manifest.classes,
        manifest=os.path.relpath(plan.manifest, plan.out),
        store=os.path.relpath(plan.store, plan.out),
        config=to_dict(plan.config),
        methods=methods,
        main=main_method(done, store.fixed_budget is not None),
        studies=tuple(
            {"name": s.name, "methods": [str(m) for m in s.methods], "seeds": list(s.seeds), "budgets": list(s.budgets)}
            for s in studies
        ),
        units=tuple(unit.name for unit in done),
        seeds=tuple(sorted({unit.seed for unit in done})),
        versions=versions(),
        hashes={"manifest": manifest.hash, "split": manifest.split_hash, "store": store.identity},
        backbone=store.config["backbone"],
        counts=counts(manifest, store),
        files=hashes(plan.out),
    )


def content_hash(path: Path) -> str:
    """Hash of a file of a run or of a unit; that of a log leaves out the clock, so that equal runs have equal hashes."""
    return log_hash(read_lines(path)) if path.suffix == ".jsonl" else sha256_file(path)


def hashes(run: Path) -> dict[str, str]:
    """Hash of each of `FILES` that a run has."""
    return {name: content_hash(run / name) for name in FILES if (run / name).is_file()}


def main_method(done: Sequence[Unit], routed: bool = False) -> str | None:
    """The method that becomes the saved model: the preferred recipe if the run has it, else the first learned selector.

    On tokens that were routed before or inside the backbone it is the method that reads them all: no selector is left to learn.
    """
    seed = min((unit.seed for unit in done), default=None)
    learned = [str(u.method) for u in done if u.seed == seed and u.method.learned and u.method.ablation is None]
    if routed:
        return next((str(unit.method) for unit in done if unit.seed == seed), None)
    return next((name for name in (*HEADLINE_METHODS, *learned) if name in learned), None)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def record_command(run: Path, name: str, arguments: Sequence[str]) -> None:
    """Record in `run.json` the command line that made the run, of paths elsewhere only the last name: runs are shared."""
    replace(RunInfo.read(run), command=shlex.join(["mtb", name, *map(_short, arguments)])).write()


def _short(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    return f"{option}{equals}{path.name}" if path.is_absolute() or ".." in path.parts else argument


def counts(manifest: Manifest, store: FeatureStore) -> dict[str, Any]:
    """Images, masks and classes of each part, and the lesion sizes of the validation masks: the supplement's two tables."""
    parts: dict[str, Any] = {}
    for part in ("train", "select", "val"):
        rows = store.rows(manifest.part(part).ids, strict=False)
        label, masked = store.label.numpy()[rows], store.has_mask.numpy()[rows]
        parts[part] = {
            "images": len(rows),
            "masks": int(masked.sum()),
            "classes": {name: int((label == index).sum()) for index, name in enumerate(manifest.classes)},
            "masked_classes": {name: int((label[masked] == index).sum()) for index, name in enumerate(manifest.classes)},
            "lesion_patches": store.lesion.numpy()[rows[masked]].sum(1).astype(int).tolist() if part == "val" else None,
        }
    return parts
