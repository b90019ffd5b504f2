"""Fill in the tables of the results pages and the README, and draw the figure:
`python docs/tools/results.py [BACKBONE=RUN ...] [SPLIT=RUN ...]`.

With run directories it first copies the tables that `mtb report` wrote of them. A table stands between `<!-- table: NAME -->` and
`<!-- end -->`; the text around it is written by hand. A test fills them in again and compares.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from medtokenbudget.config import CONTROLS
from medtokenbudget.model.looks import look
from medtokenbudget.reporting.style import BACKGROUND, INK, MUTED, house_style, legend_below, percent_axis, save
from medtokenbudget.routing import selector_class
from medtokenbudget.runs import paper
from medtokenbudget.runs.method import Method

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
BUDGET, OURS = 0.3, "lats:lesion-first"
COPIED = {"leaderboard": "leaderboard", "protocol": "center-bias"}
"""CSV file here -> table of a report."""
VIT, SMALL = "vit-small", "embedded"
SPLITS = {
    "grouped": "other lesions",
    "without-HAM10000": "HAM10000",
    "without-MSK": "MSK",
}
ON_SPLITS = (OURS, "lats", "border-contrast", "center", "random", "no-pruning")
ORIGINAL, OFF = "as-is", "off-center"
KEPT, F1 = "retention_of_ceiling", "macro_f1"
PAPER_CEILING, PAPER_CENTER = 69.0, 65.2
"""Not in the paper; measured on its 155 masks at budget 0.3: the ceiling, and what the center keeps."""
TIES = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
KINDS = ("Controls", "Kept, untrained", "Merged, untrained", "Learned from masks", "Learned without masks")


def read(name: str) -> pd.DataFrame:
    return pd.read_csv(RESULTS / f"{name}.csv")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(value: float) -> str:
    """A share in percent with one digit; a dash where nothing was measured."""
    return "–" if pd.isna(value) else f"{100 * value:.1f}"


def name_of(method: str) -> str:
    """The title of a method: ours in bold, controls in italics."""
    control = Method.parse(method).selector in (*CONTROLS, "no-pruning")
    return f"**{look(method).title}**" if method == OURS else f"*{look(method).title}*" if control else look(method).title


def milliseconds() -> dict[str, str]:
    return {row.selector: f"{row.milliseconds:.1f}" for row in read("milliseconds").itertuples()}


def board(backbone: str) -> pd.DataFrame:
    """The ranking: a row per method, columns (value or tie, measure, view); what keeps most off-center first."""
    rows = read("leaderboard").query("backbone == @backbone")
    wide = rows.pivot_table(["value", "low", "high", "tie", "seeds"], "method", ["metric", "view"], dropna=False)
    return wide.sort_values([("value", KEPT, OFF), ("value", F1, OFF)], ascending=False)


def protocol_table() -> str:
    """Every row of the protocol on the ViT-S/14, next to the paper's numbers."""
    wide, taken, theirs = board(VIT), milliseconds(), published()
    rows = []
    for method, row in wide.iterrows():
        cells = []
        for metric, view in ((KEPT, ORIGINAL), (KEPT, OFF), (F1, ORIGINAL), (F1, OFF)):
            value, tie = row["value", metric, view], row["tie", metric, view]
            cells.append("–" if pd.isna(value) else percent(value) + f"{tie:.0f}".translate(TIES))
        said = [f"{value:.1f}" if value else "–" for value in theirs.get(str(method), (0.0, 0.0))]
        once = " (one seed)" if row["seeds", F1, OFF] == 1 else ""
        rows.append([name_of(str(method)) + once, *cells, taken[Method.parse(str(method)).selector], *said])
    return markdown(["method", "lesion kept", "off-center", "macro F1", "off-center", "ms", "paper: kept", "paper: F1"], rows)


def published() -> dict[str, tuple[float, float]]:
    """What the paper has at this budget: share of the ceiling and macro F1 in percent, 0 where it says nothing."""
    tables = [paper.table(study).query("budget == @BUDGET") for study in ("main", "robustness")]
    frame = (
        pd.concat(tables).drop_duplicates(["method", "metric"], keep="last").pivot(index="method", columns="metric", values="paper")
    )
    found = {str(method): (100 * row["retention"] / PAPER_CEILING, row[F1]) for method, row in frame.fillna(0).iterrows()}
    return found | {"center": (100 * PAPER_CENTER / PAPER_CEILING, 0.0), "no-pruning": (100.0, 0.0)}


def center_bias_table() -> str:
    """What each method keeps on both views and backbones, of small lesions, and in how many images it loses much."""
    frame = read("protocol").query("budget == @BUDGET")
    values = frame.set_index(["backbone", "method", "view", "metric"])["value"]
    kept = frame.query("metric == @KEPT and view == @OFF and backbone == @VIT").sort_values("value", ascending=False)
    columns = [(backbone, view, KEPT) for backbone in (VIT, SMALL) for view in (ORIGINAL, OFF)]
    columns += [(VIT, OFF, "smallest_quarter"), (VIT, OFF, "below_90")]
    rows = [
        [
            name_of(method),
            *(percent(values.get((backbone, method, view, metric), float("nan"))) for backbone, view, metric in columns),
        ]
        for method in kept["method"]
        if method not in ("no-pruning", "oracle")
    ]
    return markdown(["method", "ViT-S", "off-center", "embedded", "off-center", "small, off-center", "< 90 %, off-center"], rows)


def kind_of(method: Method) -> str:
    if method.selector in (*CONTROLS, "no-pruning", "box-prior"):
        return KINDS[0]
    kind = selector_class(method.selector)
    if kind.learns:
        return KINDS[4] if method.variant == "mask-free" else KINDS[3]
    return KINDS[2] if kind.kind == "merger" else KINDS[1]


def zoo_table() -> str:
    """What every selector keeps: mergers, in italics, as the lesion in tokens of its own or under their attention."""
    zoo = read("zoo").query("budget == @BUDGET")
    values = (
        zoo[KEPT]
        .fillna(zoo["lesion_dominated"])
        .fillna(zoo["lesion_mass"])
        .set_axis(pd.MultiIndex.from_frame(zoo[["backbone", "method", "view"]]))
    )
    later = read("protocol").query("budget == @BUDGET and metric == @KEPT").set_index(["backbone", "method", "view"])["value"]
    values = later.combine_first(values)
    taken = milliseconds()
    grouped: dict[str, list[tuple[float, list[str]]]] = {kind: [] for kind in KINDS}
    for name in values.index.unique("method"):
        method = Method.parse(name)
        merged = selector_class(method.selector).kind == "merger"
        shown = [values.get((backbone, name, view), float("nan")) for backbone in (VIT, SMALL) for view in (ORIGINAL, OFF)]
        cells = [f"*{percent(value)}*" if merged and not pd.isna(value) else percent(value) for value in shown]
        grouped[kind_of(method)].append((shown[1], [look(name).title, *cells, taken[method.selector]]))
    rows = []
    for kind, members in grouped.items():
        rows.append([f"**{kind.replace(' ', '&nbsp;')}**", *[""] * 5])
        rows += [row for _, row in sorted(members, key=lambda member: -member[0])]
    return markdown(["method", "ViT-S", "off-center", "embedded", "off-center", "ms"], rows)


WAYS = {
    "dense@7": "all 256 patches, block 7",
    "after@6": "routed after the backbone (the paper's way)",
    "scout-0.3@6": "scout, 76 patches from block 0",
    "inside-4-own-token@6": "inside, before block 4, own scorer",
    "inside-4-token@6": "inside, before block 4, ranked by the scout",
    "tome@7": "ToMe in every block, down to 76",
    "evit@7": "EViT at blocks 3 and 6, down to 76",
    "dense-154px@7": "a smaller image, 154 pixels",
    "dense-140px@7": "a smaller image, 140 pixels",
    "after-center@6": "*the 76 patches in the middle, after the backbone*",
    "scout-center@6": "*the 76 patches in the middle, from block 0*",
    "inside-4-center@6": "*the 76 patches in the middle, before block 4*",
    "after-masks@6": "*the lesion masks choose 76, after the backbone*",
}


def early_table() -> str:
    """Time and macro F1 of each way to run the backbone on a part of the image, from the finished study."""
    frame = read("early-routing")
    frame = frame.assign(at=frame["way"] + "@" + frame["block"].fillna(0).astype(int).astype(str))
    taken = frame.query("table == 'time'").set_index("at")["milliseconds"]
    values = frame.query("table == 'validation'").set_index(["at", "view"])
    rows = []
    for at, title in WAYS.items():
        cells = [title, f"{taken[at]:.0f}" if at in taken else "–"]
        for view in (ORIGINAL, OFF):
            if (at, view) not in values.index:
                cells += ["–", "–"]
                continue
            row = values.loc[(at, view)]
            over = f"{row['over_dense@7']:+.1f} ({row['low_dense@7']:+.1f} to {row['high_dense@7']:+.1f})".replace("-", "−")
            cells += [f"{row['macro_f1']:.1f}", "–" if at == "dense@7" else over]
        rows.append(cells)
    return markdown(["way", "ms", "macro F1", "over dense", "off-center: F1", "over dense"], rows)


def further_table() -> str:
    """What a promise about the lesion costs, and what a router keeps on images of another archive."""
    promises = read("guarantee").query("retention == 0.95 and coverage.isna()").set_index("scores")
    rows = [
        [
            f"tokens to keep 95 % of the lesion on average, ranked by {'' if name == 'darkness' else 'the '}{name}",
            *(f"{row['tokens']:.1f}", f"{row['fixed']:.0f}", f"{row['images']:,.0f}"),
        ]
        for name, row in promises.iterrows()
    ]
    external = read("external").query("metric == @KEPT and budget == @BUDGET").iloc[0]
    what = "lesion kept on images of another archive, `lats:lesion-first`, embedded backbone"
    return markdown(["question", "measured", "next to", "n"], [*rows, [what, *map(percent, external[["here", "own"]]), "267"]])


WRAPPED = {
    "wrap": "`dermoscopy`",
    "wrap-free": "free router",
    "wrap-block:4": "`block:4`, `norm`",
    "tome-patch": "ToMe's patch",
    "dense-half": "half the side",
}


def wrap_table(what: str) -> str:
    """How many times as fast as the dense model each way is; training steps with the memory that they add to the model."""
    frame = read("wrap").drop_duplicates(["what", "shape", "batch", "threads", "way"], keep="last")
    timed = frame[frame["what"] == what].astype({"threads": int})
    shapes, threads, batches = (list(dict.fromkeys(timed[name])) for name in ("shape", "threads", "batch"))
    shown = WRAPPED if what == "forward" else ("wrap", "tome-patch", "dense-half")
    titles = {way: WRAPPED[way] for way in shown if way in set(timed["way"])}
    speed = timed.set_index(["shape", "way", "threads", "batch"])["speed"]
    mib = frame[frame["what"] == "memory"].set_index(["shape", "way"])["mib"]

    def cells(shape: str, cores: Sequence[int]) -> list[str]:
        found = [[speed.get((shape, way, number, batch)) for number in cores for batch in batches] for way in titles]
        texts = [", ".join(f"{value:.2f}x" for value in values if value is not None) for values in found]
        if what == "step":
            texts = [text and f"{text}, {mib[shape, way]:.0f}" for text, way in zip(texts, titles)]
        return [text or "–" for text in texts]

    rounds = " to ".join(f"{count:.0f}" for count in dict.fromkeys([timed["rounds"].min(), timed["rounds"].max()]))
    about = f"{what}, batch {' and '.join(map(str, batches))}, {rounds} rounds"
    if what == "step":  # all numbers of threads in one row, because the memory is the same
        rows = [[shape, f"{mib[shape, 'dense']:.0f}", *cells(shape, threads)] for shape in shapes]
        return markdown([f"{about}, threads: {' and '.join(map(str, threads))}; MiB", "dense", *titles.values()], rows)
    rows = [[shape, str(number), *cells(shape, [number])] for shape in shapes for number in threads]
    return markdown([about, "threads", *titles.values()], rows)


def splits_table() -> str:
    """What is kept, and macro F1, where the images that validate are of other lesions or of another center."""
    frame = read("splits").query("budget == @BUDGET")
    values = frame.set_index(["split", "view", "method", "metric"])["value"]
    rows = []
    for split, title in SPLITS.items():
        for view in (ORIGINAL, OFF):
            here = frame.query("split == @split and view == @view").iloc[0]
            parts = [title, f"{here['train']:,}", str(here["crossing"])] if view == ORIGINAL else ["off-center", "", ""]
            cells = [percent(values[split, view, method, F1]) for method in ON_SPLITS]
            for place, method in enumerate(ON_SPLITS[:-1]):
                cells[place] = f"{percent(values[split, view, method, KEPT])}/{cells[place]}"
            rows.append([*parts, f"{here['n']:,}", *cells])
    head = ["validated on", "trained on", "lesions in both", "n", *(name_of(method) for method in ON_SPLITS)]
    return markdown(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "protocol": protocol_table,
    "splits": splits_table,
    "further": further_table,
    "center-bias": center_bias_table,
    "zoo": zoo_table,
    "early-routing": early_table,
    "wrap-forward": partial(wrap_table, "forward"),
    "wrap-step": partial(wrap_table, "step"),
}
PAGES = [ROOT / "README.md", ROOT / "docs" / "wrap.md"]
PAGES += [RESULTS / f"{name}.md" for name in ("index", "center-bias", "zoo", "early-routing")]


def filled(text: str) -> str:
    """Return a page with its tables made anew."""
    return re.sub(
        r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}",
        text,
        flags=re.S,
    )


def draw() -> Figure:
    """Draw what each method keeps, and macro F1, on original images and off-center views, with 95 % intervals."""
    import matplotlib.pyplot as plt

    wide = board(VIT).iloc[::-1]
    figure, panels = plt.subplots(1, 2, figsize=(7.6, 0.31 * len(wide) + 1.3), sharey=True, width_ratios=[1.35, 1])
    for axes, metric, label in zip(panels, (KEPT, F1), ("lesion kept (% of the ceiling)", "macro F1 (%)"), strict=True):
        for place, (method, row) in enumerate(wide.iterrows()):
            color = look(str(method)).color
            ends = [row["value", metric, view] for view in (ORIGINAL, OFF)]
            axes.plot(ends, [place, place], color=color, linewidth=1.2, alpha=0.5)
            for view, shift, face in ((ORIGINAL, 0.14, color), (OFF, -0.14, "white")):
                low, high = row["low", metric, view], row["high", metric, view]
                axes.plot([low, high], [place + shift] * 2, color=color, linewidth=0.9, alpha=0.6)
                axes.plot(row["value", metric, view], place, "o", color=color, markerfacecolor=face, markersize=6.5, zorder=3)
        percent_axis(axes, "x", label)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.tick_params(axis="x", length=3)
        axes.spines["left"].set_visible(False)
    panels[0].set_yticks(range(len(wide)), [look(str(method)).title for method in wide.index])
    for text, method in zip(panels[0].get_yticklabels(), wide.index):
        text.set_color(INK if Method.parse(str(method)).selector not in CONTROLS else MUTED)
        text.set_fontweight("bold" if method == OURS else "normal")
    for face, label in ((BACKGROUND, "original images"), ("white", "off-center views")):
        panels[0].plot([], [], "o", color=BACKGROUND, markerfacecolor=face, markersize=6.5, label=label)
    legend_below(figure, panels[0])
    return figure


def of_split(run: Path) -> pd.DataFrame:
    """Return what a run kept on both views, with the size of its parts and the lesions that are in both."""
    counts = json.loads((run / "run.json").read_text(encoding="utf-8"))["counts"]
    frame = pd.read_csv(run / "tables" / "center-bias.csv")
    frame["n"] = frame["view"].map(pd.read_csv(run / "results.csv").groupby("view")["n"].max())
    return frame.assign(train=counts["train"]["images"], crossing=counts["crossing"]["groups"])


def copy(file: str, key: str, frames: dict[str, pd.DataFrame]) -> None:
    """Write tables of several runs to one CSV file, with the name of each in the first column."""
    if frames:
        frame = pd.concat(frames, names=[key]).droplevel(1).drop(columns="run", errors="ignore")
        frame.to_csv(RESULTS / f"{file}.csv")


def main(runs: list[str]) -> None:
    named = {name: Path(run) for name, _, run in (run.partition("=") for run in runs)}
    backbones = {name: run / "tables" for name, run in named.items() if name not in SPLITS}
    for file, table in COPIED.items():
        copy(file, "backbone", {name: pd.read_csv(tables / f"{table}.csv") for name, tables in backbones.items()})
    copy("splits", "split", {name: of_split(named[name]) for name in SPLITS if name in named})
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    with house_style():
        save(draw(), RESULTS / "figures", "protocol")
    (RESULTS / "figures" / "protocol.png").unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
