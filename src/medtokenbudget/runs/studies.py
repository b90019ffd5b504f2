"""The paper's studies, and ours: which methods, seeds and budgets each one needs. Units that several studies share run once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from medtokenbudget.config import BUDGETS, CONTROLS, HEADLINE_BUDGETS, HEADLINE_SELECTORS, PAPER_METHODS, TrainConfig, preset
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.runs.execution import Execution
from medtokenbudget.runs.methods import with_heads
from medtokenbudget.runs.preflight import that_fit
from medtokenbudget.runs.sources import Sources
from medtokenbudget.runs.sweep import Study, run_studies
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.progress import say
from medtokenbudget.routing import list_selectors, selector_class
from medtokenbudget.heads import list_heads

SEEDS = (42, 43, 44)
MAIN_BUDGETS = (0.1, 0.2, 0.3, 0.5, 1.0)
OURS = "lats:lesion-first"
IN_CONTEXT = "context:lesion-first"
"""Our recipe with a scorer that sees the neighborhood of each patch."""
MATCHED = ("no-pruning:matched", "random:matched", "tome:matched", "center:matched")
"""Baselines whose heads are trained exactly as that of our preset: else its views would be taken for routing."""

STUDIES: dict[str, Study] = {
    "main": Study("main", (*PAPER_METHODS, OURS, *CONTROLS), (42,), BUDGETS, off_center=False),
    "robustness": Study(
        "robustness",
        ("lats", "random", "tome", "no-pruning", OURS, IN_CONTEXT, *MATCHED, *CONTROLS),
        SEEDS,
        HEADLINE_BUDGETS,
        off_center=False,
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
    "center-bias": Study("center-bias", (*PAPER_METHODS, OURS, IN_CONTEXT, *MATCHED, *CONTROLS), SEEDS, HEADLINE_BUDGETS),
    "recipe": Study(
        "recipe",
        (
            "lats",
            OURS,
            IN_CONTEXT,
            "context:lesion-first-without-views",
            "context:lesion-first-fixed-grid",
            "context:lesion-first-smoothed",
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


def zoo() -> Study:
    """Every registered selector with the default head, learned ones with and without masks, and a few with every head.

    Not part of 'all': it trains some hundred units.
    """
    methods = []
    for name in list_selectors():
        kind = selector_class(name)
        variants = ("mask-free", "lesion-first") if kind.learns else kind.variants
        methods += [name, *(f"{name}:{variant}" for variant in variants)]
    methods += with_heads(HEADLINE_SELECTORS, list_heads())
    return Study("zoo", tuple(dict.fromkeys(methods)), SEEDS, HEADLINE_BUDGETS)


def chosen_studies(names: Sequence[str], source: str) -> list[Study]:
    """Studies by name; 'all' is every one that fits the data set (Kvasir has no masks and its own table), but not `zoo`."""
    known = [*STUDIES, "zoo"]
    for name in names:
        if name not in known and name != "all":
            raise UnknownNameError.of("study", name, [*known, "all"])
    if "kvasir" in names and source != "kvasir":
        raise RequestError(f"Study 'kvasir' is about Kvasir v2, but this manifest comes from {source}.")
    wanted = dict.fromkeys(names)
    if "all" in names:
        wanted = dict.fromkeys(["kvasir"] if source == "kvasir" else [name for name in STUDIES if name != "kvasir"])
    if "zoo" in names:
        wanted["zoo"] = None
    studies = [zoo() if name == "zoo" else STUDIES[name] for name in wanted]
    return studies + [ALSO[name] for name in wanted if name in ALSO]


def _without_center_bias(names: Sequence[str], studies: list[Study]) -> list[Study]:
    """For a store without off-center views: 'all' leaves the study out, asking for it by name is an error."""
    if "center-bias" in names:
        raise RequestError("Study 'center-bias' needs off-center views. Run `mtb extract` with --views off-center.")
    if any(study.name == "center-bias" for study in studies):
        say("Skipping study 'center-bias': the store has no off-center views (see `mtb extract --views off-center`).")
    return [study for study in studies if study.name != "center-bias"]


def reproduce(
    manifest: Manifest | Path | str,
    store: FeatureStore | Path | str,
    out: Path | str,
    study: str | Sequence[str] = "all",
    config: TrainConfig | None = None,
    execution: Execution | None = None,
) -> pd.DataFrame:
    """Run studies of the paper under its own protocol.

    Returns:
        The tidy results, also written to `out/results.csv`.
    """
    names = [study] if isinstance(study, str) else list(study)
    sources = Sources.of(manifest, store, out)
    studies = chosen_studies(names, sources.manifest.source.split()[0])
    if OFF_CENTER not in sources.store.views:
        studies = _without_center_bias(names, studies)
    config = config or preset("paper", protocol="paper")
    studies = [replace(study, methods=that_fit(sources, study.methods, config)) for study in studies]
    return run_studies([study for study in studies if study.methods], sources, out, config, execution, own=("protocol",))
