"""Write the pages of docs/results/ from the CSV files beside them: `python docs/tools/results_pages.py`.

Every number on these pages is computed here from a CSV that the page links to, so that none is typed. A test runs this again and
compares. Pages of results that other scripts make (`zoo.md`, `scorer.md`, ...) are not touched.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from external_page import external_figure, external_page
from guarantee_page import guarantee_figure, guarantee_page
from matplotlib.figure import Figure
from results_index import index_page
from results_tables import (
    BUDGETS,
    HEADLINE,
    METRICS,
    NOTE,
    RESULTS,
    about,
    at_budget,
    both_views,
    mean,
    number,
    over_budgets,
    read,
    table,
)

from medtokenbudget.model.looks import look
from medtokenbudget.reporting.style import house_style, save
from medtokenbudget.runs import paper


def main_page() -> str:
    frame = read("main")
    return f"""# Eleven selectors at ten budgets

The paper's main study: its seven methods, our preset `lesion-first` and the controls, one training of each.

![Lesion patches kept, over the budget](figures/retention.svg)

The dashed line is the ceiling: with K patches no selector can keep more. Bands are 95 % intervals.

**Accuracy** over the budget:

{over_budgets(frame, "accuracy", paper.MAIN_BUDGETS)}

**Lesion retention** over the budget, pooled over the images. The oracle is the ceiling:

{over_budgets(frame, "retention", paper.MAIN_BUDGETS)}

**As a share of the ceiling**:

![Retention as a share of what is possible](figures/share-of-ceiling.svg)

{over_budgets(frame, "retention_of_ceiling", paper.MAIN_BUDGETS)}

![Accuracy against retention](figures/accuracy-against-retention.svg)

Read from it: accuracy at 0.3 lies between {lowest(frame, "accuracy")} and {highest(frame, "accuracy")} % for every method,
a spread that 405 images cannot resolve; retention lies between {lowest(frame, "retention")} and {highest(frame, "retention")} %.
Accuracy does not show what was kept. The center, without a model, comes close to the learned scorers as long as
lesions lie in the middle; [center bias](center-bias.md) shows what happens when they do not.

![Accuracy over the budget](figures/accuracy.svg)

![Macro F1 over the budget](figures/macro-f1.svg)

{about("main", frame, "main")}

{NOTE}
"""


def lowest(frame: pd.DataFrame, metric: str) -> str:
    return number(min(_competitors(frame, metric)))


def highest(frame: pd.DataFrame, metric: str) -> str:
    return number(max(_competitors(frame, metric)))


def _competitors(frame: pd.DataFrame, metric: str) -> list[float]:
    methods = [m for m in dict.fromkeys(frame["method"]) if m not in ("oracle", "no-pruning")]
    return [v for v in (mean(frame, m, 0.3, metric) for m in methods) if not pd.isna(v)]


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
    return f"""# Three seeds at the headline budgets

Mean and standard deviation over three trainings. This is the spread of the training, not of the images:
[significance](significance.md) has intervals over the images. *Matched* heads are trained exactly as the head of `lesion-first`.

**Training differs between machines.** The same code and seeds on another machine gave macro F1 51.2 ± 5.5 for the paper's
recipe at 0.3, not 55.5 ± 0.5; retention agreed within 0.6 points. So read its F1 as uncertain by several points, whatever the
deviation below says. The cause is rounding: on one machine a training repeats bit by bit, but after four epochs one thread
and two differ by 1e-7 of the weights, AVX2 and AVX-512 instructions by 2e-7. Noise in the choice of patches and the choice of
one epoch on 405 images make different models of it.

{tables}

{about("robustness", frame, "robustness")}

{NOTE}
"""


def center_bias_page() -> str:
    frame = read("center-bias")
    methods = list(dict.fromkeys(frame["method"]))
    shown = [m for m in HEADLINE if m in methods] + [m for m in methods if m not in HEADLINE]
    off = frame[frame["view"] == "off-center"].assign(view="as-is")

    def falls(method: str) -> str:
        return " to ".join(number(mean(frame, method, 0.3, "retention_of_ceiling", view)) for view in ("as-is", "off-center"))

    return f"""# Center bias

Every method on the images as they are, and on crops of the same images whose lesion is not in the middle. Mean over three seeds
at budget 0.3.

![Share of the ceiling, images as they are and off-center](figures/center-bias.svg)

{both_views(frame, shown)}

*Matched* heads are trained exactly as the head of `lesion-first`, off-center crops included; a dash stands where a method has no
retention, or the same as without *matched*. The rows *+ views* and *without views* are seed 42 alone.

Share of the ceiling off-center over the budgets:

{over_budgets(off, "retention_of_ceiling", BUDGETS)}

Read from it: what tells a router from a center prior is a lesion that is not in the center. `center` falls from
{falls("center")} % of the ceiling, `lesion-first` from {falls("lats:lesion-first")} %. In macro F1
the head matters as much as the selector: a center crop with a matched head is within the noise of 399 images
([significance](significance.md)). More about this control: [the center prior](../explanation/center-prior.md).

{about("center-bias", frame, "center-bias")}

{NOTE}
"""


def recipe_page() -> str:
    frame = read("recipe")
    methods = list(dict.fromkeys(frame["method"]))
    off = frame[frame["view"] == "off-center"].assign(view="as-is")
    return f"""# What each part of the preset brings

Our preset `lesion-first`, one part taken back at a time, at budget 0.3. One seed: two rows that differ by less than a point of F1
are not different.

{both_views(frame, methods)}

Share of the ceiling off-center over the budgets:

{over_budgets(off, "retention_of_ceiling", BUDGETS)}

How to read it: [reproduce the paper](../reproduce.md#what-was-measured-on-real-images).

{about("recipe", frame, "recipe")}

{NOTE}
"""


def ablations_page() -> str:
    frame = read("ablations")
    part = dict(iter(frame.groupby("study")))
    return f"""# The paper's ablations

## Without lesion masks

LATS with the lesion loss switched off, mean over three seeds at budget 0.3:

{at_budget(part["mask-free"], 0.3)}

## One signal alone

Single signals as selectors, budget 0.3, one seed:

{at_budget(part["signals"], 0.3)}

## Curriculum against a fixed budget

Accuracy over the budget of evaluation, one seed:

{over_budgets(part["curriculum"], "accuracy", paper.MAIN_BUDGETS)}

![Curriculum and fixed budget](figures/curriculum.svg)

## Signals switched off in a finished scorer

Budget 0.3, one seed. The tokens carry the lesion; the signals hardly matter once they are there:

{at_budget(part["toggles"], 0.3)}

## Baselines trained as long as LATS

Accuracy over the budget, one seed:

{over_budgets(part["epochs"], "accuracy", paper.MAIN_BUDGETS)}

{about("ablations", frame, "mask-free signals curriculum toggles epochs")}

{NOTE}
"""


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
    return f"""# By lesion size and class

Share of the retention ceiling at budget 0.3, seed 42. The CSV has the 95 % bootstrap intervals; with few images in a stratum they
are wide.

{tables}

## Calibration

![Reliability](figures/reliability.svg)

{about("strata", frame.assign(seed=42).drop(columns="n"), "main")}

{NOTE}
"""


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
    return f"""# Significance

Differences at budget 0.3 in points, with 95 % intervals from a bootstrap over groups of images and p from a paired permutation
test, over three seeds. The CSV has all budgets and Holm-corrected p. A difference whose interval contains 0 is not shown to be one.

{tables}

{about("significance", frame, "robustness center-bias")}
"""


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
    with house_style():
        for name, draw in FIGURES.items():
            save(draw(), RESULTS / "figures", name)
            (RESULTS / "figures" / f"{name}.png").unlink()
    for name, write in PAGES.items():
        (RESULTS / f"{name}.md").write_text(write(), encoding="utf-8")
        print(f"docs/results/{name}.md")
