"""Write the pages of docs/results/ from the CSV files beside them: `python docs/tools/results_pages.py`.

Every number on these pages is computed here from a CSV that the page links to, so that none is typed. A test runs this again and
compares. Pages of results that other scripts make (`zoo.md`, `scorer.md`, ...) are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from medtokenbudget.experiments import paper
from medtokenbudget.reporting.looks import look

RESULTS = Path(__file__).resolve().parents[1] / "results"
BUDGETS = (0.1, 0.3, 0.5)
COMMIT = "f45e29c"
HEADLINE = ("lats:lesion-first", "lats", "center", "darkness", "random", "tome", "no-pruning", "oracle")
METRICS = {
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "retention": "retention",
    "retention_of_ceiling": "share of the ceiling",
}
NOTE = "All numbers in percent. What the columns of the CSV mean: [file formats](../reference/formats.md#resultscsv)."


def read(name: str) -> pd.DataFrame:
    """The CSV of a page."""
    return pd.read_csv(RESULTS / f"{name}.csv")


def table(rows: Sequence[Sequence[str]], head: Sequence[str], text: bool = False) -> str:
    """A Markdown table: text in the first column, numbers in the others, or text in all of them."""
    lines = [head, ["---"] + ["---" if text else "---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float, sign: bool = False) -> str:
    """A share in percent with one digit; a dash where nothing was measured."""
    if pd.isna(value):
        return "–"
    return f"{100 * value:+.1f}".replace("-", "−") if sign else f"{100 * value:.1f}"


def mean(frame: pd.DataFrame, method: str, budget: float, metric: str, view: str = "as-is") -> float:
    """The mean over seeds of one cell of the results, NaN if it is not there."""
    found = frame[(frame["method"] == method) & (frame["budget"].round(6) == budget) & (frame["view"] == view)]
    return float(found[metric].mean())


def over_budgets(frame: pd.DataFrame, metric: str, budgets: Sequence[float]) -> str:
    """A row per method, a column per budget."""
    methods = list(dict.fromkeys(frame["method"]))
    if metric != "accuracy":  # what keeps everything, or merges, has nothing to show here
        methods = [m for m in methods if m not in ("no-pruning", "tome") and not m.endswith(":matched")]
    rows = [[look(m).name, *(number(mean(frame, m, b, metric)) for b in budgets)] for m in methods]
    return table(rows, ["method", *(f"{b:g}" for b in budgets)])


def at_budget(frame: pd.DataFrame, budget: float, metrics: Sequence[str] = tuple(METRICS)) -> str:
    """A row per method, a column per metric, at one budget."""
    rows = [[look(m).name, *(number(mean(frame, m, budget, x)) for x in metrics)] for m in dict.fromkeys(frame["method"])]
    return table(rows, ["method", *(METRICS[x] for x in metrics)])


def both_views(frame: pd.DataFrame, methods: Sequence[str], budget: float = 0.3) -> str:
    """A row per method; share of the ceiling, macro F1 and balanced accuracy as they are and off-center."""
    metrics, views = ("retention_of_ceiling", "macro_f1", "balanced_accuracy"), ("as-is", "off-center")
    keeps = [m for m in methods if m not in ("no-pruning", "tome") and not m.endswith(":matched")]
    rows = []
    for method in methods:
        cells = [number(mean(frame, method, budget, x, v) if x != metrics[0] or method in keeps else float("nan"))
                 for x in metrics for v in views]  # fmt: skip
        rows.append([look(method).name, *cells])
    return table(rows, ["method", *(f"{METRICS[x]}, {v}" for x in metrics for v in views)])


def about(name: str, frame: pd.DataFrame, study: str) -> str:
    """Data, n, seeds, backbone, command and commit of a page."""
    seeds = " ".join(str(seed) for seed in sorted(set(frame["seed"]))) if "seed" in frame else "42 43 44"
    n = {view: int(part["n"].max()) for view, part in frame.groupby("view")} if "view" in frame else {"as-is": 405}
    images = f"{n['as-is']} validation images with a mask" + (f", {n['off-center']} off-center crops" if "off-center" in n else "")
    rows = [
        ["data", "ISIC 2019, the paper's split restricted to the files at hand; masks by id (ISIC 2018, HAM10000)"],
        ["n", f"1,663 training images; {images}"],
        ["seeds", seeds],
        ["backbone", "a ViT-S/14 that descends from DINOv2 and was fine-tuned for saliency; not the official checkpoint"],
        ["command", f"`mtb reproduce isic.parquet --store tokens --out runs/isic --study {study}` ([all of it](../reproduce.md))"],
        ["commit", f"`{COMMIT}`"],
        ["download", f"[{name}.csv]({name}.csv)"],
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {text} |" for key, text in rows)])


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
            cells = [look(method).name]
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
        head = ["stratum", "n", *(look(m).name for m in shown)]
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
            rows.append([look(row["method_b"]).name, METRICS[row["metric"]], *cells, p])
        where = "images as they are" if view == "as-is" else "off-center crops"
        n = int(part["n"].max())
        head = ["against", "measure", "difference", "low", "high", "p"]
        parts.append(f"## {look(method).name}, {where}, n = {n}\n\n{table(rows, head)}")
    tables = "\n\n".join(parts)
    return f"""# Significance

Differences at budget 0.3 in points, with 95 % intervals from a bootstrap over groups of images and p from a paired permutation
test, over three seeds. The CSV has all budgets and Holm-corrected p. A difference whose interval contains 0 is not shown to be one.

{tables}

{about("significance", frame, "robustness center-bias")}
"""


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
        ceiling = paper.CEILING[budget]
        center = paper.CONTROL_RETENTION["center"][budget]
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
            "[a guarantee](../guarantee.md#is-it-kept-and-what-does-it-save) ([CSV](guarantee.csv))",
        ]
    )
    outside = read("external").query("metric == 'retention_of_ceiling' and budget == 0.3").iloc[0]
    rows.append(
        [
            "share of the ceiling on another archive, budget 0.3",
            number(outside["here"]),
            f"{number(outside['own'])} on its own validation images",
            "267",
            "[external validation](../evaluate.md#an-example-from-one-archive-to-another) ([CSV](external.csv))",
        ]
    )
    zoo = (
        read("zoo")
        .query("backbone == 'embedded' and view == 'as-is' and budget == 0.3")
        .set_index("method")["retention_of_ceiling"]
    )
    rows.append(
        [
            "share of the ceiling by class attention, budget 0.3",
            number(zoo["class-attention"]),
            f"center {number(zoo['center'])}, darkness {number(zoo['darkness'])}",
            "405",
            "[every selector](zoo.md)",
        ]
    )
    speeds = read("early-routing").query("table == 'speed' and shape == 'ViT-S/14' and batch == 16").set_index("way")["ratio"]
    rows.append(
        [
            "speed of a ViT-S/14 that runs where a scout says, over the dense pass (batch 16)",
            f"{speeds['scout']:.2f}x",
            f"ToMe in every block {speeds['tome']:.2f}x, a smaller dense image {speeds['dense-154px']:.2f}x",
            "–",
            "[early routing](early-routing.md) ([CSV](early-routing.csv))",
        ]
    )
    return rows


def index_page() -> str:
    head = ["measure, budget", "paper: LATS", "paper: Random", "paper: ToMe",
            "lesion-first", "LATS", "center", "random", "ToMe"]  # fmt: skip
    share = ["budget", "paper: LATS", "paper: Random", "its masks: center", "lesion-first", "LATS", "random", "center"]
    return f"""# Results beside the paper's

Three seeds each. The paper: DINOv2 ViT-B/14, 20,264 training and 5,067 validation images, retention on 155 masks. Ours: a ViT-S/14,
1,663 training and 405 validation images, all with masks. So compare the shape, not the level: fewer images of rarer classes make
accuracy lower, and other lesions have another ceiling.

{table(paper_rows(), head)}

Retention depends on how large the lesions are; its share of the ceiling does not. The ceiling of the paper's 155 masks, and
what the patches nearest the center keep of them without a model, were computed by us:

{table(ceiling_rows(), share)}

## Beyond the paper

{table(beyond_rows(), ["question", "measured", "beside it", "n", "page"], text=True)}

## All pages

| page | question | download |
|---|---|---|
| [Eleven selectors, ten budgets](main.md) | what is kept, and does accuracy show it? | [main.csv](main.csv) |
| [Three seeds](robustness.md) | how much does a training vary? | [robustness.csv](robustness.csv) |
| [Center bias](center-bias.md) | is it more than the middle of the image? | [center-bias.csv](center-bias.csv) |
| [Parts of the preset](recipe.md) | what does each part bring? | [recipe.csv](recipe.csv) |
| [A scorer that sees the neighborhood](scorer.md) | does context help, and where is the last percent? | [scorer.csv](scorer.csv) |
| [The paper's ablations](ablations.md) | masks, signals, curriculum, epochs | [ablations.csv](ablations.csv) |
| [Size and class](strata.md) | for whom does it fail? | [strata.csv](strata.csv) |
| [Significance](significance.md) | which differences are real? | [significance.csv](significance.csv) |
| [Early routing](early-routing.md) | what does routing before the backbone save? | [early-routing.csv](early-routing.csv) |
| [Every selector](zoo.md) | what do the methods of the literature keep? | [zoo.csv](zoo.csv) |
"""


def readme_table() -> str:
    """The table of the README: budget 0.3, mean over three seeds, every baseline with a head that is trained as ours."""
    frame = read("center-bias")
    rows = []
    for name, method, head in README_ROWS:
        kept = [number(mean(frame, method, 0.3, "retention_of_ceiling", v)) if method else "–" for v in ("as-is", "off-center")]
        scores = [number(mean(frame, head, 0.3, x, v)) for x, v in (("accuracy", "as-is"), ("macro_f1", "off-center"))]
        rows.append([name, scores[0], *kept, scores[1]])
    head_row = ["at 76 of 256 tokens", "accuracy", "lesion kept", "lesion kept, off-center", "macro F1, off-center"]
    return table(rows, head_row)


README_ROWS = (
    ("**LATS, `lesion-first`**", "lats:lesion-first", "lats:lesion-first"),
    ("LATS, the paper's recipe", "lats", "lats"),
    ("center of the image, no model", "center", "center:matched"),
    ("random", "random", "random:matched"),
    ("ToMe (merges, keeps no patch)", "", "tome:matched"),
    ("all 256 tokens", "", "no-pruning:matched"),
)
"""Name, method whose retention is shown, method whose head is shown."""
PAGES: dict[str, Callable[[], str]] = {
    "index": index_page,
    "main": main_page,
    "robustness": robustness_page,
    "center-bias": center_bias_page,
    "recipe": recipe_page,
    "ablations": ablations_page,
    "strata": strata_page,
    "significance": significance_page,
}


if __name__ == "__main__":
    for name, write in PAGES.items():
        (RESULTS / f"{name}.md").write_text(write(), encoding="utf-8")
        print(f"docs/results/{name}.md")
