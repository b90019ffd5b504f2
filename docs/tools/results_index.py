"""The page that puts every headline number next to the paper's, and the table of the README."""

from __future__ import annotations

from results_tables import BUDGETS, METRICS, mean, number, read, smaller_image, table

from medtokenbudget.runs import paper

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
| [What a guarantee costs](guarantee.md) | is the promise kept, and how many tokens does it take? | [guarantee.csv](guarantee.csv) |
| [From one archive to another](external.md) | what is lost on other people's images? | [external.csv](external.csv) |
| [Early routing](early-routing.md) | what does routing before the backbone save? | [early-routing.csv](early-routing.csv) |
| [Every selector](zoo.md) | what do the methods of the literature keep? | [zoo.csv](zoo.csv) |
"""


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
