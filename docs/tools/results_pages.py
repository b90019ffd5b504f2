"""Write the pages of docs/results/ from the CSV files next to them: `python docs/tools/results_pages.py`.

A test runs this again and compares. `zoo.md` has a script of its own; `scorer.md` and `early-routing.md` are records of
finished studies.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure
from results_tables import BUDGETS, HEADLINE, METRICS, mean, number, read, render, smaller_image, table, write_figure, write_page

from medtokenbudget.model.looks import look
from medtokenbudget.reporting.style import legend_below, new_figure, percent_axis
from medtokenbudget.runs import paper

# Not in the paper; measured on its 155 masks: the ceiling, and the control that needs no model.
PAPER_CEILING = {0.1: 29.3, 0.2: 52.3, 0.3: 69.0, 0.5: 87.1}
PAPER_CENTER = {0.1: 28.0, 0.3: 65.2, 0.5: 84.1}

README_ROWS = (
    ("**LATS, `lesion-first`**", "lats:lesion-first", "lats:lesion-first"),
    ("LATS, the paper's recipe", "lats", "lats"),
    ("the same, with our off-center crops (one seed)", "lats:with-views", "lats:with-views"),
    ("center of the image, no model", "center", "center:matched"),
    ("random", "random", "random:matched"),
    ("ToMe (merges, keeps no patch)", "", "tome:matched"),
    ("all 256 tokens", "", "no-pruning:matched"),
)
"""Name, method whose retention is shown, method whose head is shown."""


SHOWN = ("lats:lesion-first", "center", "darkness", "random")
"""Methods of the page about another archive."""
SCORES = {"router": "lats:lesion-first", "center": "center", "darkness": "darkness"}
"""Scores of the page about guarantees, and the methods whose look they have."""


def main_page() -> str:
    frame = read("main")
    methods = [m for m in dict.fromkeys(frame["method"]) if m not in ("oracle", "no-pruning")]
    values = {metric: [mean(frame, m, 0.3, metric) for m in methods] for metric in ("accuracy", "retention")}
    between = {metric: [number(end(v for v in of if not pd.isna(v))) for end in (min, max)] for metric, of in values.items()}
    return render("main", frame=frame, between=between, MAIN_BUDGETS=paper.MAIN_BUDGETS)


def robustness_page() -> str:
    frame = read("robustness")
    parts = []
    for budget in BUDGETS:
        rows = []
        for method in dict.fromkeys(frame["method"]):
            cells = [look(method).title]
            for metric in ("accuracy", "macro_f1", "retention_of_ceiling"):
                part = frame[(frame["method"] == method) & (frame["budget"].round(6) == budget)][metric]
                hidden = metric == "retention_of_ceiling" and (method in ("no-pruning", "tome") or method.endswith(":matched"))
                cells += ["–", "–"] if hidden else [number(part.mean()), number(part.std(ddof=1))]
            rows.append(cells)
        head = ["method", "accuracy", "sd", "macro F1", "sd", "share of the ceiling", "sd"]
        parts.append(f"**Budget {budget:g}**\n\n{table(rows, head)}")
    tables = "\n\n".join(parts)
    return render("robustness", frame=frame, tables=tables)


def center_bias_page() -> str:
    frame = read("center-bias")
    methods = list(dict.fromkeys(frame["method"]))
    shown = [m for m in HEADLINE if m in methods] + [m for m in methods if m not in HEADLINE]
    off = frame[frame["view"] == "off-center"].assign(view="as-is")

    def falls(method: str) -> str:
        return " to ".join(number(mean(frame, method, 0.3, "retention_of_ceiling", view)) for view in ("as-is", "off-center"))

    return render("center-bias", frame=frame, shown=shown, off=off, falls=falls)


def recipe_page() -> str:
    frame = read("recipe")
    off = frame[frame["view"] == "off-center"].assign(view="as-is")
    return render("recipe", frame=frame, methods=list(dict.fromkeys(frame["method"])), off=off)


def ablations_page() -> str:
    frame = read("ablations")
    return render("ablations", frame=frame, part=dict(iter(frame.groupby("study"))), MAIN_BUDGETS=paper.MAIN_BUDGETS)


def strata_page() -> str:
    frame = read("strata")
    shown = [m for m in HEADLINE if m in set(frame["method"])]
    parts = []
    for kind, title, figure in (("size", "By lesion size", "size-strata"), ("class", "By class", "class-strata")):
        rows = []
        for stratum, part in frame[frame["by"] == kind].groupby("stratum", sort=False):
            of = part.set_index("method")["value"]
            rows.append([str(stratum), str(part["n"].iloc[0]), *(number(of.get(m, float("nan"))) for m in shown)])
        head = ["stratum", "n", *(look(m).title for m in shown)]
        parts.append(f"## {title}\n\n{table(rows, head)}\n\n![{title}](figures/{figure}.svg)")
    tables = "\n\n".join(parts)
    return render("strata", frame=frame, tables=tables)


def significance_page() -> str:
    frame = read("significance")
    parts = []
    for (method, view), part in frame.groupby(["method_a", "view"], sort=False):
        chosen = part[(part["budget"].round(6) == 0.3) & part["metric"].isin(["macro_f1", "accuracy", "retention"])]
        rows = []
        for _, row in chosen.iterrows():
            if row["method_b"] in ("oracle",) or (row["metric"] == "retention" and row["method_b"] == "no-pruning"):
                continue
            p = "< 0.001" if row["p"] < 0.001 else f"{row['p']:.3f}"
            cells = [number(row[x], sign=True) for x in ("difference", "low", "high")]
            rows.append([look(row["method_b"]).title, METRICS[row["metric"]], *cells, p])
        where = "images as they are" if view == "as-is" else "off-center crops"
        n = int(part["n"].max())
        head = ["against", "measure", "difference", "low", "high", "p"]
        parts.append(f"## {look(method).title}, {where}, n = {n}\n\n{table(rows, head)}")
    tables = "\n\n".join(parts)
    return render("significance", frame=frame, tables=tables)


def paper_rows() -> list[list[str]]:
    """Headline numbers beside the paper's: three seeds, budgets 0.1, 0.3 and 0.5."""
    frame = read("robustness")
    rows = []
    for metric in ("accuracy", "macro_f1", "balanced_accuracy", "retention"):
        theirs = paper.table("robustness").query("metric == @metric").set_index(["method", "budget"])["paper"]
        for budget in BUDGETS:
            published = [theirs.get((m, budget), float("nan")) / 100 for m in ("lats", "random", "tome")]
            ours = [mean(frame, m, budget, metric) for m in ("lats:lesion-first", "lats", "center", "random", "tome")]
            rows.append([f"{METRICS[metric]}, {budget:g}", *map(number, (*published, *ours))])
    return rows


def ceiling_rows() -> list[list[str]]:
    """Share of the ceiling: the paper's retention over the ceiling of its 155 masks, and ours."""
    frame = read("robustness")
    theirs = paper.table("robustness").query("metric == 'retention'").set_index(["method", "budget"])["paper"]
    rows = []
    for budget in BUDGETS:
        ceiling = PAPER_CEILING[budget]
        center = PAPER_CENTER[budget]
        shares = [f"{100 * value / ceiling:.1f}" for value in (theirs["lats", budget], theirs["random", budget], center)]
        ours = [number(mean(frame, m, budget, "retention_of_ceiling")) for m in ("lats:lesion-first", "lats", "random", "center")]
        rows.append([f"{budget:g}", *shares, *ours])
    return rows


def beyond_rows() -> list[list[str]]:
    """What the paper does not have: one line per question, its number, the control beside it, and where it stands."""
    rows = []
    promised = read("guarantee").query("coverage.isna() and retention == 0.95").set_index("scores")
    router, center = promised.loc["router"], promised.loc["center"]
    rows.append(
        [
            "tokens to keep 95 % of the lesion on average, guaranteed",
            f"{router['tokens']:.1f}",
            f"{router['fixed']:.0f} with one budget for all; center {center['tokens']:.1f}",
            f"{int(router['images']):,}",
            "[what a guarantee costs](guarantee.md)",
        ]
    )
    outside = read("external").query("metric == 'retention_of_ceiling' and budget == 0.3").iloc[0]
    rows.append(
        [
            "share of the ceiling on another archive, budget 0.3",
            number(outside["here"]),
            f"{number(outside['own'])} on its own validation images",
            str(int(read("external-results")["n"].max())),
            "[from one archive to another](external.md)",
        ]
    )
    zoo = read("zoo").query("backbone == 'embedded' and view == 'as-is' and budget == 0.3").set_index("method")
    kept = zoo["retention_of_ceiling"]
    rows.append(
        [
            "share of the ceiling by class attention, budget 0.3",
            number(kept["class-attention"]),
            f"center {number(kept['center'])}, darkness {number(kept['darkness'])}",
            str(int(zoo["n"].max())),
            "[every selector](zoo.md)",
        ]
    )
    speeds = (
        read("early-routing")
        .query("table == 'speed' and shape == 'ViT-S/14' and batch == 16 and threads == 1")
        .set_index("way")["ratio"]
    )
    rows.append(
        [
            "speed of a ViT-S/14 that runs where a scout says, over the dense pass (batch 16)",
            f"{speeds['scout']:.2f}x",
            f"ToMe in every block {speeds['tome']:.2f}x, a smaller dense image {speeds[smaller_image(speeds.index)]:.2f}x",
            "–",
            "[early routing](early-routing.md)",
        ]
    )
    return rows


def index_page() -> str:
    return render("index", paper_rows=paper_rows(), ceiling_rows=ceiling_rows(), beyond_rows=beyond_rows())


def readme_table() -> str:
    """The table of the README: budget 0.3, mean over seeds, every baseline with a head that is trained as ours."""
    frame = read("center-bias")
    rows = []
    for name, method, head in README_ROWS:
        kept = [number(mean(frame, method, 0.3, "retention_of_ceiling", v)) if method else "–" for v in ("as-is", "off-center")]
        scores = [number(mean(frame, head, 0.3, x, v)) for x, v in (("accuracy", "as-is"), ("macro_f1", "off-center"))]
        rows.append([name, scores[0], *kept, scores[1]])
    head_row = ["at 76 of 256 tokens", "accuracy", "lesion kept", "lesion kept, off-center", "macro F1, off-center"]
    return table(rows, head_row)


def guarantee_page() -> str:
    frame = read("guarantee")
    expected, covered = frame[frame["coverage"].isna()], frame[frame["coverage"].notna()]
    first = frame.iloc[0]

    rows = [
        [row["scores"], f"{100 * row['retention']:.0f} %", *_measured(row)]
        for _, row in pd.concat([expected[expected["scores"] == s] for s in SCORES]).iterrows()
    ]
    strict = [
        [row["scores"], f"{100 * row['retention']:.0f} %", f"{100 * row['coverage']:.0f} %", *_measured(row)]
        for _, row in pd.concat([covered[covered["scores"] == s] for s in SCORES]).iterrows()
    ]
    return render(
        "guarantee", first={key: int(first[key]) for key in ("images", "groups", "splits", "calibration")}, rows=rows, strict=strict
    )


def _measured(row: pd.Series) -> list[str]:
    saved = f"{round(100 * row['saving']) + 0:.0f} %".replace("-", "−")
    return [f"{100 * row['reached']:.2f}", f"{100 * row['error']:.2f}", f"{row['tokens']:.1f}", f"{row['fixed']:.0f}", saved]


def guarantee_figure() -> Figure:
    """Mean tokens over the promised share: filled with a threshold, hollow with one budget for all images."""
    frame = read("guarantee").query("coverage.isna()")
    figure, axes = new_figure(4.0)
    for scores in SCORES:
        rows, style = frame[frame["scores"] == scores], look(SCORES[scores])
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
    lost = number(own.loc["retention_of_ceiling", 0.3]["lost"])
    values = {"ceiling": ceiling, "off": off, "scores": scores, "strata": _strata(strata), "lost": lost, "below": _below(strata)}
    return render("external", n=n, controls=SHOWN[1:], **values)


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


PAGES: dict[str, Callable[[], str]] = {
    "index": index_page,
    "main": main_page,
    "robustness": robustness_page,
    "center-bias": center_bias_page,
    "recipe": recipe_page,
    "ablations": ablations_page,
    "strata": strata_page,
    "significance": significance_page,
    "guarantee": guarantee_page,
    "external": external_page,
}
FIGURES: dict[str, Callable[[], Figure]] = {"guarantee": guarantee_figure, "external": external_figure}
"""Figures that are drawn here; those of the other pages come from the report of their run."""


if __name__ == "__main__":
    for name, draw in FIGURES.items():
        write_figure(name, draw)
    for name, write in PAGES.items():
        write_page(name, write())
