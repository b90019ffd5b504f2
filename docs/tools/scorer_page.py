"""Write docs/results/scorer.md from the CSV files next to it: `python docs/tools/scorer_page.py`.

`scorer.csv` has the rows of results.csv of the compared runs with the backbone in front, `scorer-exploration.csv` the prototypes
that were compared on an inner split of the training images, `scorer-loss.csv` where the lost places went, `scorer-router.csv` what
the router in the package keeps, with a second seed, its predecessor and the one trained from real masks alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from results_tables import BUDGETS, number, read, render, table, write_page

NAMES = {
    "lats:lesion-first": "LATS lesion-first",
    "context:lesion-first": "Context",
    "center": "Center",
    "darkness": "Darkness",
    "random": "Random",
}
ROUTERS = {
    "dermoscopy": "in the package, seed 42",
    "second-seed": "seed 43",
    "three-crops": "three crops of each image, seed 42",
    "stale-crops": "the former router, seed 42, with stale crops: cannot be made again",
    "masks-alone": "from the real masks alone",
}
CHOSEN = {"dermoscopy": 98.26, "second-seed": 97.8, "three-crops": 97.89, "stale-crops": 98.39}
"""Share of the ceiling kept on the masks that choose the epoch, in percent (`selection` in metrics.jsonl)."""
ATTENTION, DICE, WIDE, CROPS, BLOCKS = (
    "attention instead of convolution",
    "context, Dice loss beside the cross-entropy",
    "context, 128 channels",
    "context, three crops of each image, half the epochs",
    "context, tokens of two blocks",
)
TRIED = {
    ATTENTION: "Attention over the whole grid instead of convolution, with learned positions and twice the parameters, is no clear "
    "win",
    DICE: "A Dice loss beside the cross-entropy",
    WIDE: "128 channels instead of 64",
    CROPS: "Three off-center crops of each image instead of one, with as many steps",
    BLOCKS: "Tokens of two blocks of the backbone, side by side",
}
LEFT = {
    WIDE: "wider networks",
    "context, deeper": "deeper networks",
    CROPS: "several crops of each image",
    BLOCKS: "tokens of two blocks of the backbone",
}
VIEWS = {"as-is": "as they are", "off-center": "off-center"}
BACKBONES = {"embedded": "Embedded backbone", "vit-small": "ViT-S/14"}


def page() -> str:
    """Return the text of the page."""
    results, tried, measured = read("scorer"), read("scorer-exploration"), read("scorer-router")
    tables = {name.replace("-", "_"): results[results["backbone"] == name] for name in BACKBONES}
    known = set(tried["prototype"])
    return render(
        "scorer",
        **{name: comparison(rows) for name, rows in tables.items()},
        exploration=exploration(tried),
        loss=losses(read("scorer-loss")),
        router=router(measured[measured["router"] == "dermoscopy"]),
        routers=routers(measured),
        gain_ranking=gain(tried, "context, ranking loss"),
        gains={text: gain(tried, name) for name, text in TRIED.items() if name in known},
        left=[text for name, text in LEFT.items() if name not in known],
        verdict=verdict(results),
        best=best(results),
        **differences(measured, results),
    )


def cells_of(results: pd.DataFrame, backbone: str, method: str) -> pd.Series:
    """Share of the ceiling in percent by view and budget, the mean over the seeds."""
    own = results[(results["method"] == method) & (results["backbone"] == backbone)]
    return 100 * own.groupby(["view", own["budget"].round(6)])["retention_of_ceiling"].mean()


def verdict(results: pd.DataFrame) -> str:
    """How the two scorers compare on each backbone, in words."""
    lines = ["With 1,663 training images, the mean over the seeds of the scorer that sees the neighborhood is"]
    for backbone, name in BACKBONES.items():
        gain = cells_of(results, backbone, "context:lesion-first") - cells_of(results, backbone, "lats:lesion-first")
        seeds = min(
            results[(results["backbone"] == backbone) & (results["method"] == method)]["seed"].nunique()
            for method in list(NAMES)[:2]
        )
        lines.append(
            f"- **{name}**, {seeds} seed{'s' if seeds > 1 else ''}: ahead in {(gain > 0).sum()} and behind in "
            f"{(gain < 0).sum()} of six cells, from {gain.min():+.2f} to {gain.max():+.2f} points".replace("-0.", "−0.")
        )
    return "\n".join([lines[0], "", *lines[1:]])


def best(results: pd.DataFrame) -> str:
    """The highest and lowest mean of the learned scorers, as they are and off-center, as text."""
    found = pd.concat([cells_of(results, backbone, method) for backbone in BACKBONES for method in list(NAMES)[:2]])
    return " and ".join(f"{found[view].max():.1f} % {name}" for view, name in VIEWS.items())


def differences(measured: pd.DataFrame, results: pd.DataFrame) -> dict[str, str]:
    """How far the routers are from each other, from LATS trained from all masks and what the center keeps, as texts."""
    cells = measured.pivot(index=["view", "budget"], columns="router", values="of_ceiling")
    behind = cells_of(results, "embedded", "lats:lesion-first") - cells["dermoscopy"]
    center = cells_of(results, "embedded", "center")

    def apart(one: str, other: str) -> str:
        return f"{(cells[one] - cells[other]).abs().max():.2f}"

    return {
        "behind": f"{behind.min():.1f} to {behind.max():.1f}",
        "center": f"{triple(center['as-is'])} as they are and {triple(center['off-center'])} off-center",
        "second": apart("dermoscopy", "second-seed"),
        "stale": apart("dermoscopy", "stale-crops"),
        "chosen": ", ".join(f"{ROUTERS[name].split(',')[0]} {share:.1f} %" for name, share in CHOSEN.items()),
    }


def routers(measured: pd.DataFrame) -> str:
    """A row per router: share of the ceiling in the six cells."""
    cells = measured.set_index(["router", "view"])
    lines = [[name, *(triple(cells.loc[(key, view)]["of_ceiling"]) for view in VIEWS)] for key, name in ROUTERS.items()]
    return table(lines, ["router", "as they are, 0.1 / 0.3 / 0.5", "off-center"])


def comparison(rows: pd.DataFrame) -> str:
    """A row per method: share of the ceiling, as they are and off-center, at three budgets."""
    lines = []
    for method in (method for method in NAMES if (rows["method"] == method).any()):
        own = rows[rows["method"] == method]
        cells = [
            spread(own[(own["view"] == view) & (own["budget"].round(6) == budget)]["retention_of_ceiling"])
            for view in VIEWS
            for budget in BUDGETS
        ]
        lines.append([NAMES[method], str(own["seed"].nunique()), *cells])
    return table(lines, ["method", "seeds", "as they are, 0.1", "0.3", "0.5", "off-center, 0.1", "0.3", "0.5"])


def spread(values: pd.Series) -> str:
    """The mean over seeds and, where there are several, their standard deviation in parentheses."""
    return number(values.mean()) + (f" ({100 * values.std(ddof=1):.2f})" if len(values) > 1 else "")


def exploration(rows: pd.DataFrame) -> str:
    """A row per prototype."""
    parts = ("as", "off", "as_smooth", "off_smooth")
    lines = [
        [
            row["prototype"],
            f"{int(row['parameters']):,}",
            *(triple(row[f"{part}_{budget}"] for budget in BUDGETS) for part in parts),
        ]
        for row in rows.to_dict("records")
    ]
    head = ["prototype", "parameters", "as they are, 0.1 / 0.3 / 0.5", "off-center", "the same, smoothed 3 x 3", "off-center"]
    return table(lines, head)


def gain(tried: pd.DataFrame, name: str) -> str:
    """What a prototype keeps more than the plain one, in points: lowest and highest of three budgets."""
    rows = tried.set_index("prototype")
    more = rows.loc[name] - rows.loc["context"]
    parts = (
        f"{words} {low:+.1f} to {high:+.1f}"
        for words, low, high in (
            (words, min(more[f"{part}_{b}"] for b in BUDGETS), max(more[f"{part}_{b}"] for b in BUDGETS))
            for part, words in (("as", "as they are"), ("off", "off-center"))
        )
    )
    return f"{', '.join(parts)} points against `context`".replace("-0.", "−0.").replace("-1.", "−1.")


def triple(values: Iterable[float]) -> str:
    """Figures in percent at the three budgets."""
    return " / ".join(f"{value:.1f}" for value in values)


def losses(rows: pd.DataFrame) -> str:
    """A row per method and budget: where the loss is."""
    names = ("lost", "to_ambiguous", "core_of_ceiling", "hard_images", "loss_of_hard")
    lines = [
        [NAMES[row["method"]].split(":")[0], f"{row['budget']:g}", *(number(row[name]) for name in names)]
        for row in rows.to_dict("records")
    ]
    head = ["lost, % of the ceiling", "to ambiguous patches", "core kept", "images below 90 %", "their share of the loss"]
    return table(lines, ["method", "budget", *head])


def router(rows: pd.DataFrame) -> str:
    """A row per view and budget: what a router keeps, by lesion size."""
    names = ("of_ceiling", "smallest", "small", "large", "largest", "images_below_90")
    lines = [
        [VIEWS[row["view"]], f"{row['budget']:g}", str(row["n"]), *(f"{row[name]:.1f}" for name in names)]
        for row in rows.to_dict("records")
    ]
    head = ["share of the ceiling", "smallest", "small", "large", "largest", "images below 90 %"]
    return table(lines, ["images", "budget", "n", *head])


if __name__ == "__main__":
    write_page("scorer", page())
