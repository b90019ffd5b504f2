"""The page of what a guarantee costs, and its figure, from `docs/results/guarantee.csv`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from results_tables import facts, read, table

from medtokenbudget.model.looks import look
from medtokenbudget.reporting.style import legend_below, new_figure, percent_axis

COMMIT = "3c82a77"
SCORES = ("router", "center", "darkness")
STYLES = {"router": "lats:lesion-first", "center": "center", "darkness": "darkness"}


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
        commit=f"`{COMMIT}`",
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
