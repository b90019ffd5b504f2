"""The rows of `zoo.csv` and `zoo-heads.csv`, collected from run directories: metrics with intervals and spread, parameters, time.

Several runs make one table: runs of other seeds or methods on the same images. Where two have the same method and seed, the later
one counts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.config import train_config_from_dict
from medtokenbudget.files import load_tensors
from medtokenbudget.heads import create_head
from medtokenbudget.routing import create_selector, selector_class
from medtokenbudget.runs.method import Method
from medtokenbudget.runs.run import Run
from medtokenbudget.runs.statistics import intervals
from medtokenbudget.runs.studies import Unit

METRICS = ("retention_of_ceiling", "accuracy", "macro_f1", "balanced_accuracy")
MERGED = ("lesion_dominated", "lesion_mass")
CELL = ["method", "view", "budget"]
BATCH, BUDGET, REPEATS = 16, 0.3, 5


def collected(runs: list[Path], backbone: str) -> pd.DataFrame:
    """One row per method, view and budget: the mean over seeds, its bootstrap interval and the deviation between seeds."""
    infos = [Run(run) for run in runs]
    predictions = _latest([info.predictions for info in infos])
    results = _latest([pd.read_csv(run / "results.csv") for run in runs]).drop_duplicates([*CELL, "seed"])
    found = intervals(predictions, METRICS)
    wide = found.pivot_table(index=[*CELL, "seeds"], columns="metric", values=["value", "low", "high"], sort=False)
    wide.columns = [metric if kind == "value" else f"{metric}_{kind}" for kind, metric in wide.columns]
    wide = wide.reset_index().groupby(CELL, sort=False).first().reset_index()
    cells = results.groupby(CELL, sort=False)
    spread = cells[[*METRICS, *MERGED]].std(ddof=1).add_suffix("_spread").reset_index()
    wide = wide.merge(cells[["n", "k", *MERGED]].mean().reset_index(), on=CELL).merge(spread, on=CELL)
    store = infos[0].store
    torch.set_num_threads(1)
    times, counts, epochs = {}, {}, {}
    for text in wide["method"].unique():
        method = Method.parse(text)
        times[text] = milliseconds(method, store)
        counts[text] = trained(method, next(info for info in reversed(infos) if text in info.methods), store.dim)
        epochs[text] = kept_epochs(method, infos)
    wide["ms"], wide["parameters"], wide["epochs"] = (wide["method"].map(by) for by in (times, counts, epochs))
    return wide.assign(backbone=backbone)


def _latest(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """All rows, without those whose method and seed a later frame has too."""
    seen: set[tuple[str, int]] = set()
    kept = []
    for frame in reversed(frames):
        pairs = list(zip(frame["method"], frame["seed"]))
        kept.append(frame[[pair not in seen for pair in pairs]])
        seen.update(pairs)
    return pd.concat(reversed(kept), ignore_index=True)


def milliseconds(method: Method, store: FeatureStore) -> float:
    """CPU milliseconds of selecting K tokens of one image at budget 0.3, batches of 16 on one thread; the fastest of five."""
    tokens = store.read(range(BATCH), signals=store.signals)
    kind = selector_class(method.selector)
    selector: Any = create_selector(method.selector, **({"dim": store.dim} if kind.learns else method.options))
    if kind.learns:
        selector.eval()
    taken = []
    with torch.inference_mode():
        for _ in range(REPEATS):
            start = time.process_time()
            selector.select(tokens, selector.count(BUDGET, tokens.n), torch.Generator().manual_seed(0))
            taken.append(time.process_time() - start)
    return 1000 * min(taken) / BATCH


def trained(method: Method, info: Run, dim: int) -> int:
    """Trained parameters of selector and head."""
    modules: list[Any] = [create_head(method.head, dim, len(info.classes))]
    if method.learned:
        kind: Any = selector_class(method.selector)
        modules.append(kind.from_config(dim, train_config_from_dict(info.methods[str(method)]["config"]), len(info.classes)))
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def kept_epochs(method: Method, infos: list[Run]) -> str:
    """The epoch that the training of each seed kept, in the order of the seeds; empty for what does not learn."""
    found = {}
    for info in infos if method.learned else []:
        for seed in {seed for study in info.studies for seed in study["seeds"]}:
            if (name := Unit(method, seed).name) in info.units:
                found[seed] = load_tensors(info.path / "units" / name / "checkpoint.safetensors")[1]["best_epoch"] + 1
    return " ".join(str(found[seed]) for seed in sorted(found))
