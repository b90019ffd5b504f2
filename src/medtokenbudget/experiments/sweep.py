"""The sweep: methods x seeds as independent units, in local processes or on a Ray cluster, collected into one run directory.

A second call goes on: finished units are kept, `only="failed"` runs nothing but those that failed before.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from safetensors import safe_open
from safetensors.numpy import save_file

from medtokenbudget.config import BUDGETS, TrainConfig, preset
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.experiments import preflight
from medtokenbudget.experiments.provenance import write_run
from medtokenbudget.experiments.results import read_predictions, summarise, write_predictions, write_results
from medtokenbudget.experiments.units import Plan, Unit, run_unit, status
from medtokenbudget.experiments.variants import variant
from medtokenbudget.features import FeatureStore
from medtokenbudget.features.pipeline import cpu_threads
from medtokenbudget.files import append_line, read_json, read_lines, write_safetensors, write_text
from medtokenbudget.progress import progress, say

Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Study:
    """A named set of cells: every method with every seed, shown at the budgets, on the images as they are or off-center too."""

    name: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (42,)
    budgets: tuple[float, ...] = BUDGETS
    off_center: bool = True

    def units(self) -> list[Unit]:
        return [Unit(method, seed) for seed in self.seeds for method in self.methods]


def sweep(
    manifest: Path | str,
    store: Path | str,
    out: Path | str,
    methods: Sequence[str],
    budgets: Sequence[float] = BUDGETS,
    seeds: Sequence[int] = (42,),
    config: TrainConfig | None = None,
    engine: Engine = "local",
    jobs: int = 0,
    only: Literal["all", "failed"] = "all",
    address: str | None = None,
) -> pd.DataFrame:
    """Train and evaluate every method with every seed; returns the tidy results, which also stand in `out/results.csv`."""
    study = Study("sweep", tuple(methods), tuple(seeds), tuple(budgets))
    config = replace(config or preset("lesion-first"), budgets=tuple(budgets))
    return run_studies([study], Path(manifest), Path(store), Path(out), config, engine, jobs, only, address)


def run_studies(
    studies: Sequence[Study],
    manifest: Path,
    store: Path,
    out: Path,
    config: TrainConfig,
    engine: Engine = "local",
    jobs: int = 0,
    only: Literal["all", "failed"] = "all",
    address: str | None = None,
    required: Sequence[str] = (),
) -> pd.DataFrame:
    """Run the units that the studies need, each once, and collect their predictions under the studies' names.

    Without the methods in `required` the others are worth nothing: when one of them fails, so does the whole.
    """
    preflight.check_config(config)
    read = Manifest.read(manifest)
    preflight.check_data(read, FeatureStore.open(store))
    plan = Plan(manifest.resolve(), store.resolve(), out.resolve(), config, read.source.split()[0])
    units = unique_units(studies, config)
    preflight.check_run(plan, units)
    states = {unit: status(plan, unit) for unit in units}
    todo = [unit for unit in units if states[unit] == "failed" or (only == "all" and states[unit] != "done")]
    # Of the whole run, whatever is left of it: how many threads a unit has follows from it, and another number changes the last bit
    # of a training. A run that goes on must end as if it had never stopped.
    jobs = min(jobs or os.cpu_count() or 1, len(units))
    run_units(plan, todo, engine, jobs, address)
    failed = [unit for unit in units if status(plan, unit) != "done"]
    for unit in failed:
        path = plan.folder(unit) / "unit.json"
        reason = read_json(path).get("error", "what is there was made with other options") if path.exists() else "it was not run"
        if unit.method in required:
            raise WorkError(reason)
        say(f"{unit.method} with seed {unit.seed} is missing: {reason}")
    if len(failed) == len(units):
        raise WorkError("no unit of the sweep finished; the reasons stand above. The same command tries again.")
    return collect(plan, studies, read, units)


def unique_units(studies: Iterable[Study], config: TrainConfig) -> list[Unit]:
    """Every unit once, trainings before the toggles that use them; names are checked here, before hours of work."""
    units: list[Unit] = []
    for study in studies:
        for unit in study.units():
            chosen = variant(unit.method, config)
            for needed in (Unit(chosen.trained_as, unit.seed), unit):
                if needed not in units:
                    units.append(needed)
    return units


def run_units(plan: Plan, units: Sequence[Unit], engine: Engine, jobs: int, address: str | None) -> None:
    """Run units that do not depend on each other side by side; toggles wait for their training."""
    owners = {unit: Unit(variant(unit.method, plan.config).trained_as, unit.seed) for unit in units}
    first = [unit for unit in units if owners[unit] == unit]
    second = [unit for unit in units if owners[unit] != unit]
    bar = progress(total=len(units), what="sweep", unit="unit")
    for wave in (first, second):
        if engine == "ray":
            from medtokenbudget.experiments.ray_sweep import run_on_ray

            run_on_ray(plan, wave, address, bar.update)
        else:
            _run_local(plan, wave, jobs, bar.update)
    bar.close()


def _run_local(plan: Plan, units: Sequence[Unit], jobs: int, tick: Callable[[], Any]) -> None:
    """Processes of one thread each beat one process of many threads here: the tensors of a step are small."""
    threads = 0 if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    if jobs == 1 or len(units) <= 1:
        with cpu_threads(threads):
            for unit in units:
                run_unit(plan, unit)
                tick()
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(units)), mp_context=context) as pool:
        futures = [pool.submit(run_unit, plan, unit, threads) for unit in units]
        try:
            for future in as_completed(futures):
                future.result()
                tick()
        except BrokenProcessPool:
            raise WorkError(
                'a worker process ended at once. A script that starts several must do so below `if __name__ == "__main__":`; '
                "jobs=1 needs none. If it did, memory may have run out: fewer jobs at a time take less."
            ) from None


def collect(plan: Plan, studies: Sequence[Study], manifest: Manifest, units: Sequence[Unit]) -> pd.DataFrame:
    """Write `predictions.parquet`, `results.csv`, `routing.safetensors`, `metrics.jsonl` and `run.json` of the run."""
    done = [unit for unit in units if status(plan, unit) == "done"]
    frames = {unit: read_predictions(plan.folder(unit) / "predictions.parquet")[0] for unit in done}
    parts = []
    for study in studies:
        for unit in study.units():
            if unit not in frames:
                continue
            frame = frames[unit]
            wanted = frame["budget"].isin(study.budgets)
            if not study.off_center:
                wanted &= ~frame["dataset"].str.endswith("@off-center")
            parts.append(frame[wanted].assign(study=study.name))
    predictions = pd.concat(parts, ignore_index=True)
    write_predictions(plan.out / "predictions.parquet", predictions, manifest.classes)
    results = summarise(predictions, manifest.classes)
    write_results(plan.out / "results.csv", results)
    _collect_routing(plan, done)
    _collect_metrics(plan, done)
    write_run(plan, studies, manifest, done)
    return results


def _collect_routing(plan: Plan, done: Sequence[Unit]) -> None:
    """Patch orders and scores of all units; a data set's images are those of the first unit that saw all of them."""
    tensors: dict[str, np.ndarray] = {}
    ids: dict[str, list[str]] = {}
    for unit in done:
        for dataset, names in read_json(plan.folder(unit) / "images.json").items():
            if len(names) > len(ids.get(dataset, [])):
                ids[dataset] = names
    for unit in done:
        folder = plan.folder(unit)
        own = read_json(folder / "images.json")
        with safe_open(str(folder / "routing.safetensors"), framework="numpy") as stream:
            for key in stream.keys():  # noqa: SIM118
                dataset, name = key.split("|")
                if own[dataset] != ids[dataset]:
                    continue
                prefix = "" if dataset == plan.dataset else f"{dataset}/"
                label = f"{prefix}{name}" if name in ("lesion", "has_mask") else f"{prefix}{name}/{unit.method}/{unit.seed}"
                tensors.setdefault(label, stream.get_tensor(key))
    about = {"image_ids": ids, "grid": list(FeatureStore.open(plan.store).grid), "dataset": plan.dataset}
    metadata = {"routing": json.dumps(about)}  # one key: the order of several is not the same in every call
    write_safetensors(plan.out / "routing.safetensors", lambda target: save_file(tensors, target, metadata=metadata))


def _collect_metrics(plan: Plan, done: Sequence[Unit]) -> None:
    path = plan.out / "metrics.jsonl"
    write_text(path, "")
    for unit in done:
        source = plan.folder(unit) / "metrics.jsonl"
        if source.exists():
            for row in read_lines(source):
                append_line(path, {"unit": unit.name, "method": unit.method, "seed": unit.seed, **row})


def require_run(out: Path) -> dict[str, Any]:
    """`run.json` of a run directory, or an error that says how to make one."""
    if not (out / "run.json").exists():
        raise RequestError(
            f"{out} is not a run directory: it has no run.json. Make one with `mtb train`, `mtb sweep` or `mtb reproduce`."
        )
    return dict(read_json(out / "run.json"))
