"""The paper's studies, and ours: which methods, seeds and budgets each one needs. Units that two studies share run once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pandas as pd

from medtokenbudget.config import BUDGETS, CONTROLS, HEADLINE_BUDGETS, PAPER_METHODS, TrainConfig, preset
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.experiments.sweep import Engine, Study, run_studies
from medtokenbudget.features import FeatureStore
from medtokenbudget.features.views import OFF_CENTER
from medtokenbudget.progress import say

SEEDS = (42, 43, 44)
MAIN_BUDGETS = (0.1, 0.2, 0.3, 0.5, 1.0)
OURS = "lats:lesion-first"
MATCHED = ("no-pruning:matched", "random:matched", "tome:matched", "center:matched")
"""Baselines whose heads are trained exactly as that of our preset: else its views would be taken for routing."""

STUDIES: dict[str, Study] = {
    "main": Study("main", (*PAPER_METHODS, OURS, *CONTROLS), (42,), BUDGETS, off_center=False),
    "robustness": Study(
        "robustness", ("lats", "random", "tome", "no-pruning", OURS, *MATCHED, *CONTROLS), SEEDS, HEADLINE_BUDGETS, off_center=False
    ),
    "mask-free": Study("mask-free", ("lats:mask-free", "lats", "random", *CONTROLS), SEEDS, HEADLINE_BUDGETS, off_center=False),
    "signals": Study(
        "signals", ("lats", "attention-entropy", "norm", "local-contrast", "random", *CONTROLS), (42,), (0.3,), off_center=False
    ),
    "curriculum": Study("curriculum", ("lats", "lats:fixed-0.5", "random", *CONTROLS), (42,), MAIN_BUDGETS, off_center=False),
    "toggles": Study(
        "toggles",
        ("lats", "lats:no-attention", "lats:no-norm", "lats:no-contrast", "lats:no-signals", "random", *CONTROLS),
        (42,),
        HEADLINE_BUDGETS,
        off_center=False,
    ),
    "epochs": Study(
        "epochs",
        ("lats", "random:epoch-matched", "tome:epoch-matched", "no-pruning:epoch-matched", *CONTROLS),
        (42,),
        off_center=False,
    ),
    "kvasir": Study("kvasir", PAPER_METHODS, (42,), BUDGETS, off_center=False),
    "subset": Study("subset", ("center", "random"), (42,), HEADLINE_BUDGETS, off_center=False),
    "center-bias": Study("center-bias", (*PAPER_METHODS, OURS, *MATCHED, *CONTROLS), SEEDS, HEADLINE_BUDGETS),
    "recipe": Study(
        "recipe",
        (
            "lats",
            OURS,
            "lats:lesion-first-without-views",
            "lats:lesion-first-one-view",
            "lats:lesion-first-raster",
            "lats:lesion-first-zero-padding",
            "lats:lesion-first-all-patches",
            "lats:lesion-first-balanced",
            "lats:lesion-first-joint",
            "random",
            *CONTROLS,
        ),
        (42,),
        HEADLINE_BUDGETS,
    ),
}
ALSO: dict[str, Study] = {
    "center-bias": Study("center-bias", ("lats:with-views", "lats:lesion-first-without-views"), (SEEDS[0],), HEADLINE_BUDGETS),
}
"""Further cells of a study, with fewer seeds: the controlled variants that take long to train."""


def chosen_studies(names: Sequence[str], source: str) -> list[Study]:
    """Studies by name; 'all' is every one that fits the data set (Kvasir has no masks and its own table)."""
    for name in names:
        if name not in STUDIES and name != "all":
            raise UnknownNameError.of("study", name, [*STUDIES, "all"])
    if "kvasir" in names and source != "kvasir":
        raise RequestError(f"the study 'kvasir' has the paper's numbers for Kvasir v2; this manifest is of {source}.")
    wanted = dict.fromkeys(names)
    if "all" in names:
        wanted = dict.fromkeys(["kvasir"] if source == "kvasir" else [name for name in STUDIES if name != "kvasir"])
    return [STUDIES[name] for name in wanted] + [ALSO[name] for name in wanted if name in ALSO]


def _without_center_bias(names: Sequence[str], studies: list[Study]) -> list[Study]:
    """For a store without off-center views: 'all' means the others, asking for this study by name is refused."""
    if "center-bias" in names:
        raise RequestError(
            "the store has no off-center views, which the study 'center-bias' is about. Extract with --views off-center."
        )
    if any(study.name == "center-bias" for study in studies):
        say("the study 'center-bias' is left out: the store has no off-center views (mtb extract --views off-center).")
    return [study for study in studies if study.name != "center-bias"]


def reproduce(
    manifest: Path | str,
    store: Path | str,
    out: Path | str,
    study: str | Sequence[str] = "all",
    config: TrainConfig | None = None,
    engine: Engine = "local",
    jobs: int = 0,
    only: Literal["all", "failed"] = "all",
    address: str | None = None,
) -> pd.DataFrame:
    """Run studies of the paper under its own protocol; returns the tidy results."""
    names = [study] if isinstance(study, str) else list(study)
    studies = chosen_studies(names, Manifest.read(manifest).source.split()[0])
    if OFF_CENTER not in FeatureStore.open(store).views:
        studies = _without_center_bias(names, studies)
    config = config or preset("paper", protocol="paper")
    return run_studies(studies, Path(manifest), Path(store), Path(out), config, engine, jobs, only, address)
