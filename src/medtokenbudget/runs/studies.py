"""The paper's studies, and ours: which methods, seeds and budgets each one needs. Units that several studies share run once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import (
    CONTROLS,
    HEADLINE_BUDGETS,
    HEADLINE_SELECTORS,
    PAPER_METHODS,
    SEEDS,
    TrainConfig,
    given_settings,
    preset,
)
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.heads import list_heads
from medtokenbudget.jobs import Execution
from medtokenbudget.progress import say
from medtokenbudget.routing import list_selectors, selector_class
from medtokenbudget.runs.method import with_heads
from medtokenbudget.runs.paper import MAIN_BUDGETS
from medtokenbudget.runs.preflight import supported_methods
from medtokenbudget.runs.sweep import Sources, Study, run_studies

OURS = "lats:lesion-first"
IN_CONTEXT = "context:lesion-first"
"""Our recipe with a scorer that sees the neighborhood of each patch."""
MATCHED = ("no-pruning:matched", "random:matched", "tome:matched", "center:matched")
"""Baselines whose heads are trained exactly as that of our preset: else its views would be taken for routing."""

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study(
            "main",
            (*PAPER_METHODS, OURS, *CONTROLS),
            off_center=False,
            title="All methods",
            section="retention",
            form="special",
            tables=("main",),
        ),
        Study(
            "robustness",
            ("lats", "random", "tome", "no-pruning", OURS, IN_CONTEXT, *MATCHED, *CONTROLS),
            SEEDS,
            HEADLINE_BUDGETS,
            off_center=False,
            title="Robustness over seeds",
            tables=("robustness", "paired-seeds", "paired-seeds-paper"),
        ),
        Study(
            "mask-free",
            ("lats:mask-free", "lats", "random", *CONTROLS),
            SEEDS,
            HEADLINE_BUDGETS,
            off_center=False,
            title="Training without lesion masks",
            tables=("mask-free",),
            metrics=("precision", "enrichment"),
        ),
        Study(
            "signals",
            ("lats", "attention-entropy", "norm", "local-contrast", "random", *CONTROLS),
            budgets=(0.3,),
            off_center=False,
            title="Single signals as selectors",
            tables=("signals",),
        ),
        Study(
            "curriculum",
            ("lats", "lats:fixed-0.5", "random", *CONTROLS),
            budgets=MAIN_BUDGETS,
            off_center=False,
            title="Curriculum against a fixed training budget: accuracy (%)",
            form="sweep",
            tables=("curriculum",),
        ),
        Study(
            "toggles",
            ("lats", "lats:no-attention", "lats:no-norm", "lats:no-contrast", "lats:no-signals", "random", *CONTROLS),
            budgets=HEADLINE_BUDGETS,
            off_center=False,
            title="Signals switched off at inference",
            tables=("toggles",),
        ),
        Study(
            "epochs",
            ("lats", "random:epoch-matched", "tome:epoch-matched", "no-pruning:epoch-matched", "center", "darkness", "oracle"),
            off_center=False,
            title="Baselines trained for as many epochs as LATS",
            tables=("epochs",),
        ),
        Study(
            "kvasir",
            PAPER_METHODS,
            off_center=False,
            title="Kvasir v2: accuracy (%) over all budgets",
            form="sweep",
            tables=("kvasir",),
        ),
        Study(
            "subset",
            ("center", "random"),
            budgets=HEADLINE_BUDGETS,
            off_center=False,
            title="Images per class",
            section="data",
            form="special",
            tables=("subset", "prevalence"),
        ),
        Study(
            "center-bias",
            (*PAPER_METHODS, OURS, IN_CONTEXT, *MATCHED, *CONTROLS),
            SEEDS,
            HEADLINE_BUDGETS,
            title="Original images and off-center views",
            section="center",
            form="special",
            tables=("center-bias",),
        ),
        Study(
            "recipe",
            (
                *("lats", OURS, IN_CONTEXT),
                *(f"context:lesion-first-{part}" for part in ("without-views", "fixed-grid", "smoothed")),
                *(f"lats:lesion-first-{part}" for part in ("without-views", "one-view", "raster", "zero-padding", "all-patches")),
                *(f"lats:lesion-first-{part}" for part in ("balanced", "joint")),
                *("random", *CONTROLS),
            ),
            budgets=HEADLINE_BUDGETS,
            title="Parts of the lesion-first recipe",
            section="recipe",
            form="special",
            tables=("recipe",),
        ),
    )
}
ALSO: dict[str, Study] = {
    "center-bias": Study("center-bias", ("lats:with-views", "lats:lesion-first-without-views"), (SEEDS[0],), HEADLINE_BUDGETS),
}
"""Further cells of a study, with fewer seeds: the controlled variants that take long to train."""


def zoo() -> Study:
    """Return every registered selector with the default head, learned ones with and without masks, and a few with every head.

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
    """Return studies by name; 'all' is every one that fits the data set (Kvasir has no masks and its own table), but not `zoo`."""
    known = [*STUDIES, "zoo"]
    for name in names:
        if name not in known and name != "all":
            raise UnknownNameError.of("study", name, [*known, "all"])
    if "kvasir" in names and source != "kvasir":
        raise RequestError(f"Study 'kvasir' is about Kvasir v2, but this manifest comes from {source}.")
    if "all" in names:
        fitting = [name for name in STUDIES if (name == "kvasir") == (source == "kvasir")]
        names = [*fitting, "zoo"] if "zoo" in names else fitting
    wanted = list(dict.fromkeys(names))
    studies = [zoo() if name == "zoo" else STUDIES[name] for name in wanted]
    return studies + [ALSO[name] for name in wanted if name in ALSO]


def reproduce(
    manifest: Manifest | Path | str,
    store: FeatureStore | Path | str,
    out: Path | str,
    study: str | Sequence[str] = "all",
    config: TrainConfig | None = None,
    execution: Execution | None = None,
) -> pd.DataFrame:
    """Run studies of the paper.

    Args:
        study: Names of studies, or 'all'.
        config: Common settings. Default: those of the paper; its protocol also where `config` does not choose one.

    Returns:
        The tidy results, also written to `out/results.csv`.
    """
    names = [study] if isinstance(study, str) else list(study)
    sources = Sources.of(manifest, store, out)
    studies = chosen_studies(names, sources.manifest.source.split()[0])
    if OFF_CENTER not in sources.store.views and any(study.name == "center-bias" for study in studies):
        if "center-bias" in names:
            raise RequestError("Study 'center-bias' needs off-center views. Run `mtb extract` with --views off-center.")
        say("Skipping study 'center-bias': the store has no off-center views (see `mtb extract --views off-center`).")
        studies = [study for study in studies if study.name != "center-bias"]
    config = config or preset("paper")
    if "protocol" not in given_settings(config):
        config = replace(config, protocol="paper")
    studies = [replace(study, methods=supported_methods(sources, study.methods, config)) for study in studies]
    return run_studies([study for study in studies if study.methods], sources, out, config, execution, own=("protocol",))
