"""From finished units to the files of a run: predictions, results, patch orders, training metrics and `run.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from safetensors import safe_open
from safetensors.numpy import save

from medtokenbudget.runs.results import AS_IS, read_predictions, summarize, write_predictions, write_results
from medtokenbudget.runs.run import describe_run
from medtokenbudget.runs.units import OF_IMAGES, Plan, Unit, status
from medtokenbudget.files import append_line, read_json, read_lines, write_safetensors, write_text

if TYPE_CHECKING:
    from medtokenbudget.runs.sweep import Study


def collect(plan: Plan, studies: Sequence[Study], units: Sequence[Unit]) -> pd.DataFrame:
    """Write the files of the run from its finished units and return the tidy results."""
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
                wanted &= frame["view"] == AS_IS
            parts.append(frame[wanted].assign(study=study.name))
    predictions = pd.concat(parts, ignore_index=True)
    classes = plan.sources.manifest.classes
    write_predictions(plan.out / "predictions.parquet", predictions, classes)
    results = summarize(predictions, classes)
    write_results(plan.out / "results.csv", results)
    _collect_routing(plan, done)
    _collect_metrics(plan, done)
    describe_run(plan, studies, done).write()
    return results


def _collect_routing(plan: Plan, done: Sequence[Unit]) -> None:
    """Patch orders and scores of all units; the images of a view are those of the first unit that saw all of them."""
    tensors: dict[str, np.ndarray] = {}
    ids: dict[str, list[str]] = {}
    for unit in done:
        for view, names in read_json(plan.folder(unit) / "images.json").items():
            if len(names) > len(ids.get(view, [])):
                ids[view] = names
    for unit in done:
        folder = plan.folder(unit)
        own = read_json(folder / "images.json")
        with safe_open(str(folder / "routing.safetensors"), framework="numpy") as stream:
            for key in stream.keys():  # noqa: SIM118
                view, name = key.split("|")
                if own[view] != ids[view]:
                    continue
                prefix = "" if view == AS_IS else f"{view}/"
                label = f"{prefix}{name}" if name in OF_IMAGES else f"{prefix}{name}/{unit.method}/{unit.seed}"
                tensors.setdefault(label, stream.get_tensor(key))
    about = {"image_ids": ids, "grid": list(plan.sources.store.grid)}
    metadata = {"routing": json.dumps(about)}  # one key: safetensors does not keep the order of several
    write_safetensors(plan.out / "routing.safetensors", save(tensors, metadata))


def _collect_metrics(plan: Plan, done: Sequence[Unit]) -> None:
    path = plan.out / "metrics.jsonl"
    write_text(path, "")
    for unit in done:
        source = plan.folder(unit) / "metrics.jsonl"
        if source.exists():
            for row in read_lines(source):
                append_line(path, {"unit": unit.name, "method": str(unit.method), "seed": unit.seed, **row})
