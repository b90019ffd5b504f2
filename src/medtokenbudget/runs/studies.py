"""The paper's studies, and ours: which methods, seeds and budgets each one needs, and how a report shows it.

Units that several studies share run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from medtokenbudget.config import BUDGETS, CONTROLS, HEADLINE_BUDGETS, HEADLINE_SELECTORS, PAPER_METHODS, SEEDS
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.heads import list_heads
from medtokenbudget.routing import list_selectors, selector_class
from medtokenbudget.runs.method import Method, with_heads
from medtokenbudget.runs.paper import MAIN_BUDGETS

OURS = "lats:lesion-first"
IN_CONTEXT = "context:lesion-first"
"""Our recipe with a scorer that sees the neighborhood of each patch."""
MATCHED = ("no-pruning:matched", "random:matched", "tome:matched", "center:matched")
"""Baselines whose heads are trained exactly as our preset's: else its views would be taken for routing."""


@dataclass(frozen=True)
class Unit:
    """A method and a seed."""

    method: Method
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the unit's folder."""
        return f"{str(self.method).replace(':', '~')}-{self.seed}"


@dataclass(frozen=True)
class Study:
    """A named set of cells: every method with every seed, at the given budgets; and how a report shows it.

    Attributes:
        off_center: Also evaluate on the off-center crops of the validation images.
        title: Heading of its table; empty for a sweep of the user's own, and where the report says it.
        form: Shape of its table. 'budgets': mean and deviation over seeds, one row per budget and method; 'sweep': accuracy, one
            column per budget; 'special': a table that the report makes for this study alone.
        paired: Also show the differences of its methods seed by seed.
        metrics: Columns of its table in addition to what every table of this form has.
    """

    name: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (SEEDS[0],)
    budgets: tuple[float, ...] = BUDGETS
    off_center: bool = True
    title: str = ""
    form: Literal["budgets", "sweep", "special"] = "budgets"
    paired: bool = False
    metrics: tuple[str, ...] = ()

    def units(self) -> list[Unit]:
        """Return every method with every seed."""
        return [Unit(Method.parse(method), seed) for seed in self.seeds for method in self.methods]


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study("main", (*PAPER_METHODS, OURS, *CONTROLS), off_center=False, form="special"),
        Study(
            "robustness",
            ("lats", "random", "tome", "no-pruning", OURS, IN_CONTEXT, *MATCHED, *CONTROLS),
            SEEDS,
            HEADLINE_BUDGETS,
            off_center=False,
            title="Robustness over seeds",
            paired=True,
        ),
        Study(
            "seeds",
            (*PAPER_METHODS, OURS, *CONTROLS),
            SEEDS,
            off_center=False,
            title="Ten budgets over seeds: accuracy (%)",
            form="sweep",
        ),
        Study(
            "mask-free",
            ("lats:mask-free", "lats", "random", *CONTROLS),
            SEEDS,
            HEADLINE_BUDGETS,
            off_center=False,
            title="Training without lesion masks",
            metrics=("precision", "enrichment"),
        ),
        Study(
            "signals",
            ("lats", "attention-entropy", "norm", "local-contrast", "random", *CONTROLS),
            budgets=(0.3,),
            off_center=False,
            title="Single signals as selectors",
        ),
        Study(
            "curriculum",
            ("lats", "lats:fixed-0.5", "random", *CONTROLS),
            SEEDS,
            MAIN_BUDGETS,
            off_center=False,
            title="Curriculum against a fixed training budget: accuracy (%)",
            form="sweep",
        ),
        Study(
            "toggles",
            (
                *("lats", "lats:no-attention", "lats:no-norm", "lats:no-contrast", "lats:no-signals"),
                *("lats:attention-only", "lats:norm-only", "lats:contrast-only", "random", *CONTROLS),
            ),
            budgets=HEADLINE_BUDGETS,
            off_center=False,
            title="Signals switched off at inference",
        ),
        Study(
            "epochs",
            ("lats", "random:epoch-matched", "tome:epoch-matched", "no-pruning:epoch-matched", "center", "darkness", "oracle"),
            off_center=False,
            title="Baselines trained for as many epochs as LATS",
        ),
        Study(
            "kvasir",
            PAPER_METHODS,
            off_center=False,
            title="Kvasir v2: accuracy (%) over all budgets",
            form="sweep",
        ),
        Study("subset", ("center", "random"), budgets=HEADLINE_BUDGETS, off_center=False, form="special"),
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
            form="special",
        ),
    )
}
PROTOCOL = Study(
    "protocol",
    (
        *dict.fromkeys((OURS, *PAPER_METHODS, *CONTROLS)),
        *(f"{name}:lesion-first" for name in ("dynamicvit", "sparselearn", "abmil-attention", "cropr")),
        "atc",
    ),
    SEEDS,
    HEADLINE_BUDGETS,
)
"""What `docs/protocol.md` asks for, and the selectors of the zoo that keep most of the lesion. Not a study of `mtb reproduce`: here
every head is trained like that of our preset, there as in the paper."""


def zoo() -> Study:
    """Return every registered selector with the default head, learned ones with and without masks, and a few with every head.

    Not part of 'all': it trains some hundred units.
    """
    methods = []
    for name in list_selectors():
        kind = selector_class(name)
        if kind.reads_pixels:
            continue
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
    return [zoo() if name == "zoo" else STUDIES[name] for name in wanted]
