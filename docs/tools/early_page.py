"""The page of early routing: `python docs/tools/early_page.py [STUDY [SPEED...]]`.

STUDY is the folder of `benchmarks/early_study.py`, SPEED are outputs of `benchmarks/early_speed.py`. With them it first collects
`docs/results/early-routing.csv`. Without, it writes `early-routing.md` and its figure again from the CSV; a test does the same with
the page and compares.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from results_tables import RESULTS, number, read, render, smaller_image, table, write_figure, write_page

from medtokenbudget.reporting.style import house_style

TABLES = ("inner", "validation", "retention", "time", "speed")
COLORS = ("#444444", "#0072b2", "#d55e00", "#009e73", "#aa3377", "#cc79a7", "#999999", "#e69f00", "#56b4e9", "#000000")


NAMES = {
    "dense": "dense, all 256 patches",
    "after": "routed after the backbone, 76 of 256 (the paper's way)",
    "after-0.5": "routed after the backbone, 128 of 256",
    "after-center": "control: the 76 patches in the middle, after the backbone",
    "after-masks": "control: the lesion masks choose 76, after the backbone",
    "scout-0.3": "scout, 76 from block 0",
    "scout-0.5": "scout, 128 from block 0",
    "scout-ring": "scout, 51 and a ring of 25 around them, from block 0",
    "scout-center": "control: the 76 patches in the middle, from block 0",
    "inside-2-token": "inside, before block 2, one background token",
    "inside-4-token": "inside, before block 4, one background token",
    "inside-6-token": "inside, before block 6, one background token",
    "inside-4-own-token": "inside, before block 4, own scorer, one background token",
    "inside-4-evit": "inside, before block 4, by class attention, dropped",
    "inside-4-frequency": "inside, before block 4, by received attention, dropped",
    "inside-4-center": "control: inside, before block 4, the 76 in the middle, dropped",
    "tome": "ToMe in every block, down to 76",
    "evit": "EViT at blocks 3 and 6, down to 76",
    "dense-140px": "a smaller dense image, 140 pixels",
    "dense-154px": "a smaller dense image, 154 pixels",
    "dense-308px": "a larger dense image, 308 pixels",
    "embedded": "the embedded backbone alone, dense",
    "embedded-after": "the embedded backbone alone, routed after it",
}
CHOICES = {
    "scout": "the scout",
    "scout-ring": "the scout, with a ring",
    "inside-4-evit": "class attention of block 3",
    "inside-4-frequency": "received attention of block 3",
    "inside-4-center": "the middle of the image",
    "inside-4-own": "a scorer of its own on the tokens of block 3",
    "evit": "class attention of blocks 3 and 6 (EViT)",
}
FAMILIES = {
    "dense": ("dense", "dense-140px", "dense-154px", "dense-308px"),
    "after the backbone": ("after", "after-0.5"),
    "scout": ("scout-0.3", "scout-0.5", "scout-ring"),
    "inside": tuple(name for name in NAMES if name.startswith("inside") and name != "inside-4-center"),
    "the middle, early": ("scout-center", "inside-4-center"),
    "ToMe": ("tome",),
    "EViT": ("evit",),
    "embedded backbone": ("embedded", "embedded-after"),
}


def collect(study: Path, speeds: list[Path]) -> pd.DataFrame:
    """The tables of a study and of the bench, one below the other; without a bench, the speeds that are there."""
    parts = [pd.read_csv(study / f"{name}.csv").assign(table=name) for name in TABLES[:-1] if (study / f"{name}.csv").exists()]
    line = re.compile(r"^(\S+)\s+(ViT-\S+)\s+batch (\d+)\s+([\d.]+)x\s+([\d.]+) ms")
    for path in speeds:
        threads = re.search(r"(\d+) CPU thread", text := path.read_text(encoding="utf-8"))
        rows = [found.groups() for row in text.splitlines() if (found := line.match(row))]
        frame = pd.DataFrame(rows, columns=["way", "shape", "batch", "ratio", "milliseconds"])
        parts.append(frame.assign(table="speed", threads=int(threads[1]) if threads else 1))
    if not speeds:
        measured = frame_of("speed").dropna(axis=1, how="all")
        parts.append(measured.assign(ratio=measured["ratio"].map("{:.2f}".format)))
    joined = pd.concat(parts, ignore_index=True)
    for whole in ("block", "n", "seeds", "batch", "threads"):
        joined[whole] = pd.to_numeric(joined[whole]).astype("Int64")
    return joined[["table", *(name for name in joined.columns if name != "table")]]


@cache
def numbers() -> pd.DataFrame:
    return read("early-routing")


def frame_of(name: str, **wanted: Any) -> pd.DataFrame:
    frame = numbers()[numbers()["table"] == name]
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    return frame


def over(line: Any, base: str) -> str:
    """A difference in macro F1 with its interval."""
    value = line.get(f"over_{base}")
    if value is None or pd.isna(value) or f"{line['way']}@{int(line['block'])}" == base:
        return "–"
    return f"{value:+.1f} ({line[f'low_{base}']:+.1f} to {line[f'high_{base}']:+.1f})"


def base_of(way: str) -> str:
    """'way@block' of a way that others are compared with."""
    columns = [column.removeprefix("over_") for column in frame_of("validation").columns if column.startswith(f"over_{way}@")]
    best = chosen_block(way)
    return f"{way}@{best}" if f"{way}@{best}" in columns else columns[0]


def chosen_block(way: str) -> int:
    """The block at which a way is read: of those that were confirmed, the one that the inner folds prefer."""
    lines = frame_of("inner", way=way).sort_values("macro_f1")
    confirmed = lines[lines["block"].isin(frame_of("validation", way=way)["block"])]
    return int((lines if confirmed.empty else confirmed)["block"].iloc[-1])


def blocks_table() -> str:
    """Dense and routed after each block, on the inner folds."""
    dense, after = (frame_of("inner", way=way).set_index("block") for way in ("dense", "after"))
    rows = []
    for block in sorted(dense.index.intersection(after.index)):
        one, other = dense.loc[block], after.loc[block]
        values = [one["macro_f1"], one["balanced_accuracy"], other["macro_f1"], other["balanced_accuracy"]]
        rows.append([str(int(block)), *(f"{value:.1f}" for value in values), f"{other['macro_f1'] - one['macro_f1']:+.1f}"])
    return table(rows, ["block", "dense: macro F1", "balanced", "routed: macro F1", "balanced", "F1, routed over dense"])


def ways_table() -> str:
    """Every way at the block that the inner folds chose: time, inner folds, validation."""
    dense = base_of("dense")
    times = frame_of("time").set_index(["way", "block"])["milliseconds"]
    inner = frame_of("inner").set_index(["way", "block"])["macro_f1"]
    lines = frame_of("validation", view="as-is")
    rows = []
    for way, name in NAMES.items():
        for _, line in lines[lines["way"] == way].iterrows():
            key = (way, line["block"])
            f1 = f"{line['macro_f1']:.1f} ({line['low_macro_f1']:.1f} to {line['high_macro_f1']:.1f})"
            row = [name, str(int(line["block"])), f"{times[key]:.0f}" if key in times.index else "–"]
            row += [f"{inner[key]:.1f}" if key in inner.index else "–", f1, f"{line['balanced_accuracy']:.1f}"]
            rows.append([*row, over(line, dense)])
    head = ["way", "block", "ms", "inner: F1", "validation: macro F1", "balanced", f"F1 over dense, block {dense[-1]}"]
    return table(rows, head)


def off_center_table() -> str:
    """Every way that was judged on off-center crops, beside the images as they are."""
    dense, seen = base_of("dense"), frame_of("validation", view="as-is").set_index(["way", "block"])["macro_f1"]
    lines = frame_of("validation", view="off-center")
    rows = []
    for way, name in NAMES.items():
        for _, line in lines[lines["way"] == way].iterrows():
            f1 = f"{line['macro_f1']:.1f} ({line['low_macro_f1']:.1f} to {line['high_macro_f1']:.1f})"
            row = [name, str(int(line["block"])), f"{seen[way, line['block']]:.1f}", f1, f"{line['balanced_accuracy']:.1f}"]
            rows.append([*row, over(line, dense)])
    head = ["way", "block", "as they are: F1", "off-center: macro F1", "balanced", f"F1 over dense, block {dense[-1]}"]
    return table(rows, head)


def retention_table() -> str:
    """How much of the lesion the 76 patches of each choice keep, of images as they are and off-center."""
    lines = frame_of("retention").set_index(["view", "way"])
    rows = []
    for way, name in CHOICES.items():
        keys = [(metric, (view, way)) for view in ("as-is", "off-center") for metric in ("retention", "of_ceiling")]
        rows.append([name, *(number(lines[metric].get(key, float("nan"))) for metric, key in keys)])
    head = ["76 patches chosen by", "retention", "share of the ceiling", "off-center: retention", "share of the ceiling"]
    return table(rows, head)


def speed_table() -> str:
    """Ratios to the dense pass of the same run, a row per shape, batch and number of threads."""
    lines = frame_of("speed")
    rows = []
    for (shape, batch, threads), at in lines.groupby(["shape", "batch", "threads"], sort=False):
        ratio = at.set_index("way")["ratio"]
        smaller = smaller_image(ratio.index)
        dense = at.set_index("way")["milliseconds"]["dense"]
        cells = [f"{dense:.0f}", *(f"{ratio[way]:.2f}x" for way in ("scout", "inside", "tome"))]
        where = f"{shape}, batch {batch:.0f}, {threads:.0f} thread{'s' * (threads > 1)}"
        rows.append([where, *cells, f"{ratio[smaller]:.2f}x ({smaller.removeprefix('dense-')})"])
    return table(rows, ["", "dense, ms", "scout", "inside", "ToMe", "a smaller dense image"])


def front(frame: pd.DataFrame, metric: str) -> list[int]:
    """Rows that no other one beats in both time and the metric, from the fastest on."""
    found: list[int] = []
    for index, line in frame.sort_values("milliseconds").iterrows():
        if not found or line[metric] > frame.loc[found[-1], metric]:
            found.append(int(str(index)))
    return found


def timed() -> pd.DataFrame:
    """Validation scores of images as they are, with the time of each way."""
    lines = frame_of("validation", view="as-is").drop(columns=["milliseconds"])
    return lines.merge(frame_of("time")[["way", "block", "milliseconds"]], on=["way", "block"]).reset_index(drop=True)


def figure() -> Figure:
    """Time against macro F1 and balanced accuracy, with intervals and the Pareto front."""
    frame = timed()
    with house_style():
        drawn = Figure(figsize=(9.4, 4.6), layout="constrained")
        axes = drawn.subplots(1, 2)
        for axis, (metric, label) in zip(axes, (("macro_f1", "macro F1"), ("balanced_accuracy", "balanced accuracy"))):
            for color, (family, ways) in zip(COLORS, FAMILIES.items()):
                own = frame[frame["way"].isin(ways)]
                if own.empty:
                    continue
                spread = [own[metric] - own[f"low_{metric}"], own[f"high_{metric}"] - own[metric]]
                axis.errorbar(own["milliseconds"], own[metric], yerr=spread, fmt="none", ecolor=color, alpha=0.25, lw=1)
                axis.plot(own["milliseconds"], own[metric], "*" if "embedded" in family else "o", color=color, ms=6, label=family)
            controls = [way for way, name in NAMES.items() if name.startswith("control:")]
            best = frame.loc[front(frame[~frame["way"].isin(controls)], metric)]
            axis.step(best["milliseconds"], best[metric], where="post", color="#444444", lw=0.8, ls="--", zorder=0)
            for _, line in best.iterrows():
                axis.annotate(
                    f"{line['way']}@{int(line['block'])}",
                    (line["milliseconds"], line[metric]),
                    xytext=(4, 5),
                    textcoords="offset points",
                    fontsize=7,
                )
            axis.set_xlabel("milliseconds per image, one thread, batches of 16")
            axis.set_ylabel(f"{label} (%)")
            axis.set_xlim(left=0)
        drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
        return drawn


def page() -> str:
    """Return `early-routing.md`, from the CSV next to it."""
    tables = {"blocks": blocks_table(), "ways": ways_table(), "off_center": off_center_table()}
    return render("early-routing", value, **tables, retention=retention_table(), speed=speed_table())


def value(name: str, way: str, column: str) -> str:
    """A number of the text, `[table|way|column]` or `[table|way@block|column]`, by default at the block that was chosen.

    `[speed|scout|S-16-1]` is the ratio of the bench for ViT-S/14, batches of 16 and one thread; `[ratio|way|other]` the speed over
    another way, and `[gain|way|other]` the difference in macro F1 on the inner folds.
    """
    if name == "ratio":
        return f"{spent(column) / spent(way):.2f}x"
    if name == "gain":
        return f"{line_of('inner', way)['macro_f1'] - line_of('inner', column)['macro_f1']:+.1f}"
    if name == "speed":
        shape, batch, threads = column.split("-")
        found = frame_of(name, way=way, shape=f"ViT-{shape}/14", batch=int(batch), threads=int(threads))
        return f"{found['ratio'].iloc[0]:.2f}x"
    line = line_of(name, way)
    if column.startswith("over_"):
        base = column.removeprefix("over_")
        return over(line, base if "@" in base else base_of(base))
    found = float(line[column])
    if column in ("retention", "of_ceiling"):
        return number(found)
    return f"{found:.0f}" if column in ("block", "milliseconds") else f"{found:.1f}"


def line_of(name: str, way: str) -> Any:
    """The row of 'way' or 'way@block', by default at the block that was chosen. 'off-...' is a table of the off-center crops."""
    way, _, block = way.partition("@")
    view, name = ("off-center", name.removeprefix("off-")) if name.startswith("off-") else ("as-is", name)
    lines = frame_of(name, way=way)
    if name in ("validation", "retention"):
        lines = lines[lines["view"] == view]
    if block:
        lines = lines[lines["block"] == int(block)]
    elif name != "retention" and way in set(frame_of("inner")["way"]):
        lines = lines[lines["block"] == chosen_block(way)]
    return lines.iloc[0]


def spent(way: str) -> float:
    """Milliseconds of a way at the block that the inner folds chose."""
    return float(line_of("time", way)["milliseconds"])


def main(arguments: list[str]) -> None:
    if arguments:
        frame = collect(Path(arguments[0]), [Path(path) for path in arguments[1:]])
        frame.to_csv(RESULTS / "early-routing.csv", index=False, float_format="%.5g")
        numbers.cache_clear()
    write_figure("early-routing", figure)
    write_page("early-routing", page())


if __name__ == "__main__":
    main(sys.argv[1:])
