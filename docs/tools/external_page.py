"""The page of a model on another archive, and its figure, from `docs/results/external*.csv`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from results_tables import BUDGETS, METRICS, facts, number, read, table

from medtokenbudget.model.looks import look
from medtokenbudget.reporting.style import legend_below, new_figure, percent_axis

COMMIT = "e3ff12d"
SHOWN = ("lats:lesion-first", "center", "darkness", "random")


def external_page() -> str:
    own = read("external").set_index(["metric", "budget"])
    results, strata = read("external-results"), read("external-strata")

    def here(method: str, budget: float, view: str = "as-is", metric: str = "retention_of_ceiling") -> str:
        found = results.query("method == @method and view == @view and budget == @budget")
        return number(float(found[metric].iloc[0]))

    ceiling = []
    for budget in BUDGETS:
        row = own.loc["retention_of_ceiling", budget]
        interval = f"{number(row['low'])} to {number(row['high'])}"
        controls = [here(m, budget) for m in SHOWN[1:]]
        ceiling.append(
            [f"{budget:g}", number(row["own"]), number(row["here"]), interval, number(row["lost"], sign=True), *controls]
        )
    off = [[f"{b:g}", *(here(m, b, "off-center") for m in SHOWN)] for b in BUDGETS]
    scores = []
    for metric in ("accuracy", "macro_f1", "balanced_accuracy"):
        row = own.loc[metric, 0.3]
        scores.append(
            [
                METRICS[metric],
                number(row["own"]),
                number(row["here"]),
                here("center", 0.3, metric=metric),
                here("random", 0.3, metric=metric),
            ]
        )
    n = {view: int(part["n"].max()) for view, part in results.groupby("view")}
    where = facts(
        data="trained on the images of ISIC 2019 with masks of ISIC 2018 task 1 (537, three classes), measured on images of the "
        "validation side with HAM10000 masks (eight classes); no lesion is on both sides",
        n=f"{n['as-is']} images, {n['off-center']} off-center crops",
        seeds="42",
        backbone="the embedded one",
        command="`mtb evaluate runs/isic2018 ham-val.parquet --store tokens --out runs/external`",
        commit=f"`{COMMIT}`",
        download="[own validation](external.csv), [all measures](external-results.csv), [strata](external-strata.csv)",
    )
    return f"""# From one archive to another

[External validation](../evaluate.md) of a router and its head, `lesion-first`, on images by other photographers with masks by
other annotators, five of the eight classes never seen in training. In percent.

**Share of the ceiling**, images as they are:

{table(ceiling, ["budget", "own validation", "here", "95 % interval", "lost", "center", "darkness", "random"])}

**Share of the ceiling**, off-center crops:

{table(off, ["budget", "router", *SHOWN[1:]])}

**By class and appearance**, budget 0.3:

![Share of the ceiling by class, router and controls](figures/external.svg)

{table(_strata(strata), ["property", "stratum", "n", "router", "center", "darkness", "random"])}

**Classification**, budget 0.3:

{table(scores, ["measure", "own validation", "here", "center", "random"])}

Read from it: the router travels better than its head. It loses {number(own.loc["retention_of_ceiling", 0.3]["lost"])} points of the
ceiling at 0.3 and stays above every control on average, but it is below `center` for {_below(strata)}: pale lesions that its
training has none of. The head cannot name classes that it never saw, and says so with too much confidence. How the properties are
measured: [strata](../evaluate.md#strata); groups of a few images prove nothing.

{where}
"""


def _strata(frame: pd.DataFrame) -> list[list[str]]:
    rows = []
    for (kind, stratum), part in frame.groupby(["property", "stratum"], sort=False):
        of = part.set_index("method")
        rows.append(
            [str(kind), str(stratum), str(int(part["n"].iloc[0])), *(number(of["value"].get(m, float("nan"))) for m in SHOWN)]
        )
    return rows


def _below(strata: pd.DataFrame) -> str:
    """Classes in which the center keeps more than the router."""
    of = strata[strata["property"] == "class"].pivot_table(index="stratum", columns="method", values="value")
    worse = of[of["lats:lesion-first"] < of["center"]]
    return ", ".join(
        f"{name} ({number(row['lats:lesion-first'])} against {number(row['center'])})" for name, row in worse.iterrows()
    )


def external_figure() -> Figure:
    """Share of the ceiling of each class with its interval, router and controls."""
    frame = read("external-strata").query("property == 'class'")
    classes = frame[frame["method"] == SHOWN[0]].sort_values("value")
    figure, axes = new_figure(5.2)
    axes.grid(True, axis="x")
    for offset, method in zip((0.24, 0.08, -0.08, -0.24), SHOWN, strict=True):
        rows, style = frame[frame["method"] == method].set_index("stratum").loc[classes["stratum"]], look(method)
        for place, (_, row) in enumerate(rows.iterrows()):
            axes.plot([row["low"], row["high"]], [place + offset] * 2, color=style.color, alpha=0.4, linewidth=1.2)
        axes.plot(
            rows["value"],
            [place + offset for place in range(len(rows))],
            linestyle="",
            marker=style.marker,
            color=style.color,
            label=style.title,
        )
    axes.set_yticks(range(len(classes)), [f"{name}, n = {n}" for name, n in zip(classes["stratum"], classes["n"], strict=True)])
    percent_axis(axes, "x", "share of the ceiling (%)")
    legend_below(figure, axes)
    return figure
