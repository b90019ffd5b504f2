"""Results beyond the paper: what a guarantee costs, and a model on another archive. Pages and figures from their CSV files."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from results_tables import BUDGETS, METRICS, RESULTS, facts, number, read, table

from medtokenbudget.reporting.looks import look
from medtokenbudget.reporting.style import house_style, legend_below, new_figure, percent_axis, save

GUARANTEE_COMMIT = "f49467e"
EXTERNAL_COMMIT = "e3ff12d"
SCORES = ("router", "center", "darkness")
STYLES = {"router": "lats:lesion-first", "center": "center", "darkness": "darkness"}
SHOWN = ("lats:lesion-first", "center", "darkness", "random")


def guarantee_page() -> str:
    frame = read("guarantee")
    expected, covered = frame[frame["coverage"].isna()], frame[frame["coverage"].notna()]
    first = frame.iloc[0]
    n, groups, calibration = (int(first[key]) for key in ("images", "groups", "calibration"))
    rows = [
        [row["scores"], f"{100 * row['retention']:.0f} %", *_measured(row)]
        for _, row in pd.concat([expected[expected["scores"] == s] for s in SCORES]).iterrows()
    ]
    strict = [
        [row["scores"], f"{100 * row['retention']:.0f} %", f"{100 * row['coverage']:.0f} %", *_measured(row)]
        for _, row in pd.concat([covered[covered["scores"] == s] for s in SCORES]).iterrows()
    ]
    measured = ["reached", "error", "tokens", "fixed budget", "saved"]
    where = facts(
        data=f"{n:,} images of ISIC 2019 with HAM10000 masks ({groups:,} lesions), none of them in the training of the router",
        n=f"{int(first['splits']):,} random splits: {calibration} lesions to calibrate on, {groups - calibration} to measure",
        seeds="the splits are seeded; the router is the one trained file of the package",
        backbone="the embedded one, with the router `dermoscopy`",
        command="`python -m benchmarks.guarantee dermoscopy ham.parquet --store tokens --out guarantee.csv`",
        commit=f"`{GUARANTEE_COMMIT}`",
        download="[guarantee.csv](guarantee.csv)",
    )
    return f"""# What a guarantee costs

A [guarantee](../guarantee.md) keeps the patches above a calibrated threshold: few of a small lesion, many of a large one. Is
the promise kept on new lesions, and how many tokens does it take? *Fixed budget* is the smallest number of tokens for every image
that keeps as much on average, with the same scores.

![Mean tokens for a promised share of the lesion, by a threshold and by one budget for all images](figures/guarantee.svg)

**The expected share of the lesion**, in percent, with the Monte Carlo error over the splits:

{table(rows, ["scores", "promised", *measured])}

**The stricter form**, a share of the lesion in most images:

{table(strict, ["scores", "at least, of the lesion", "in, of the images", *measured])}

Read from it: every promise is kept within the error, whatever the scores, as the theory says. What good scores change is the
price. The controls do not know how large a lesion is, so a threshold on them saves next to nothing.

{where}
"""


def _measured(row: pd.Series) -> list[str]:
    saved = f"{round(100 * row['saving']) + 0:.0f} %".replace("-", "−")
    return [f"{100 * row['reached']:.2f}", f"{100 * row['error']:.2f}", f"{row['tokens']:.1f}", f"{row['fixed']:.0f}", saved]


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
        commit=f"`{EXTERNAL_COMMIT}`",
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


def guarantee_figure() -> Figure:
    """Mean tokens over the promised share: filled with a threshold, hollow with one budget for all images."""
    frame = read("guarantee").query("coverage.isna()")
    figure, axes = new_figure(4.0)
    for scores in SCORES:
        rows, style = frame[frame["scores"] == scores], look(STYLES[scores])
        axes.plot(
            rows["retention"], rows["tokens"], color=style.color, marker=style.marker, markersize=7, label=f"{scores}, threshold"
        )
        axes.plot(
            rows["retention"],
            rows["fixed"],
            color=style.color,
            marker=style.marker,
            markersize=7,
            markerfacecolor="none",
            linestyle=":",
            label=f"{scores}, one budget",
        )
    axes.set(ylim=(0, 256), ylabel="tokens of 256, on average", xticks=sorted(set(frame["retention"])))
    percent_axis(axes, "x", "promised share of the lesion (%)")
    legend_below(figure, axes)
    return figure


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
            label=style.name,
        )
    axes.set_yticks(range(len(classes)), [f"{name}, n = {n}" for name, n in zip(classes["stratum"], classes["n"], strict=True)])
    percent_axis(axes, "x", "share of the ceiling (%)")
    legend_below(figure, axes)
    return figure


def draw() -> None:
    """Write the figures of both pages."""
    with house_style():
        for name, figure in (("guarantee", guarantee_figure()), ("external", external_figure())):
            save(figure, RESULTS / "figures", name)
            (RESULTS / "figures" / f"{name}.png").unlink()
