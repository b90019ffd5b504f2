"""The page of every selector and head: `python docs/tools/zoo_page.py [EMBEDDED_RUN] [VIT_RUN]`.

With run directories it first collects `docs/results/zoo.csv` from their predictions, with bootstrap intervals, trained parameters
and the time of a selection. Without, it only writes `zoo.md` again from the CSV; a test does the same and compares.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from medtokenbudget.experiments.methods import Method
from medtokenbudget.experiments.results import read_predictions
from medtokenbudget.experiments.run import RunInfo
from medtokenbudget.experiments.statistics import intervals
from medtokenbudget.features import FeatureStore
from medtokenbudget.reporting.looks import look
from medtokenbudget.routing import create_selector, selector_class
from medtokenbudget.training.heads import create_head

RESULTS = Path(__file__).resolve().parents[1] / "results"
CSV, TEXT = RESULTS / "zoo.csv", RESULTS / "zoo.txt"
METRICS = ("retention_of_ceiling", "accuracy", "macro_f1", "balanced_accuracy")
MERGED = ("lesion_dominated", "lesion_mass")
BATCH, BUDGET, REPEATS = 16, 0.3, 5
GROUPS = {
    "Controls": "knows the mask, or no model at all",
    "Training-free, patches kept": "rankers and samplers",
    "Training-free, patches merged": "mergers",
    "Learned": "with masks (the paper's recipe), `mask-free`, and `lesion-first`",
    "Other heads": "the same selectors behind heads that read the tokens",
}
CONTROLS = ("oracle", "box-prior", "center", "darkness", "random", "no-pruning")


def milliseconds(method: Method, store: FeatureStore) -> float:
    """CPU milliseconds of selecting K tokens of one image at budget 0.3, batches of 16 on one thread; the fastest of five."""
    tokens = store.read(range(BATCH), signals=store.signals)
    kind = selector_class(method.selector)
    selector: Any = create_selector(method.selector, **({"dim": store.dim} if kind.learns else method.options))
    if kind.learns:
        selector.eval()
    taken = []
    with torch.inference_mode():
        for _ in range(REPEATS):
            start = time.process_time()
            selector.select(tokens, selector.count(BUDGET, tokens.n), torch.Generator().manual_seed(0))
            taken.append(time.process_time() - start)
    return 1000 * min(taken) / BATCH


def collected(run: Path, backbone: str) -> pd.DataFrame:
    """One row per method, view and budget of a run."""
    info = RunInfo.read(run)
    store = FeatureStore.open(info.store_path)
    found = intervals(read_predictions(run / "predictions.parquet")[0], METRICS)
    cells = ["method", "view", "budget"]
    wide = found.pivot_table(index=[*cells, "seeds"], columns="metric", values=["value", "low", "high"], sort=False)
    wide.columns = [metric if kind == "value" else f"{metric}_{kind}" for kind, metric in wide.columns]
    wide = wide.reset_index()
    results = pd.read_csv(run / "results.csv").drop_duplicates([*cells, "seed"])
    merged = results.groupby(cells, sort=False)[["n", "k", *MERGED]].mean().reset_index()
    wide = wide.groupby([*cells], sort=False).first().reset_index().merge(merged, on=cells)
    times, counts = {}, {}
    torch.set_num_threads(1)
    for text in wide["method"].unique():
        method = Method.parse(text)
        times[text] = milliseconds(method, store)
        counts[text] = trained(method, info, store.dim)
    wide["ms"], wide["parameters"] = wide["method"].map(times), wide["method"].map(counts)
    return wide.assign(backbone=backbone)


def trained(method: Method, info: RunInfo, dim: int) -> int:
    """Trained parameters of selector and head."""
    modules: list[Any] = [create_head(method.head, dim, len(info.classes))]
    if method.learned:
        kind: Any = selector_class(method.selector)
        modules.append(kind.from_config(dim, info.methods[str(method)].train_config, len(info.classes)))
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def group_of(method: Method) -> str:
    if method.head != "mlp":
        return "Other heads"
    if method.selector in CONTROLS:
        return "Controls"
    kind = selector_class(method.selector)
    if kind.learns:
        return "Learned"
    return "Training-free, patches merged" if kind.kind == "merger" else "Training-free, patches kept"


def percent(row: Any, metric: str, interval: bool = False) -> str:
    if row is None or pd.isna(row[metric]):
        return "–"
    text = f"{100 * row[metric]:.1f}"
    return f"{text} ({100 * row[f'{metric}_low']:.1f} to {100 * row[f'{metric}_high']:.1f})" if interval else text


def table(frame: pd.DataFrame) -> str:
    """One backbone at budget 0.3: the images as they are and off-center beside each other."""
    head = ["method", "seeds", "ceiling", "ceiling, off-center", "own tokens", "accuracy", "macro F1", "balanced accuracy"]
    head += ["balanced accuracy, off-center", "parameters", "ms"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    at = frame[frame["budget"].round(6) == BUDGET]
    grouped: dict[str, list[str]] = {name: [] for name in GROUPS}
    for text in dict.fromkeys(at["method"]):
        grouped[group_of(Method.parse(text))].append(text)
    for name, methods in grouped.items():
        if methods:
            lines.append([f"**{name}**", *[""] * (len(head) - 1)])
        for text in methods:
            rows = {view: row for view, (_, row) in zip(at[at["method"] == text]["view"], at[at["method"] == text].iterrows())}
            here, off = rows.get("as-is"), rows.get("off-center")
            if here is None:
                continue
            method = Method.parse(text)
            label = look(text).name + ("" if method.head == "mlp" else f" + {method.head}")
            own = "lesion_dominated" if pd.notna(here["lesion_dominated"]) else "lesion_mass"
            line = [label, str(int(here["seeds"])), percent(here, METRICS[0]), percent(off, METRICS[0]), percent(here, own)]
            line += [percent(here, "accuracy", True), percent(here, "macro_f1"), percent(here, "balanced_accuracy", True)]
            line += [percent(off, "balanced_accuracy"), f"{int(here['parameters']):,}", f"{here['ms']:.2f}"]
            lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(frame: pd.DataFrame, text: str) -> str:
    """`zoo.md`: the text with a table in place of each `{{NAME}}`, the name of a backbone in the CSV."""
    for name in dict.fromkeys(frame["backbone"]):
        text = text.replace("{{" + name + "}}", table(frame[frame["backbone"] == name]))
    return text


def main(runs: list[str]) -> None:
    if runs:
        parts = [collected(Path(run), name) for run, name in zip(runs, ("embedded", "vit-small"))]
        first = ["backbone", "method", "view", "budget", "seeds"]
        frame = pd.concat(parts, ignore_index=True)
        frame[[*first, *(name for name in frame.columns if name not in first)]].to_csv(CSV, index=False, float_format="%.5g")
    (RESULTS / "zoo.md").write_text(page(pd.read_csv(CSV), TEXT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
