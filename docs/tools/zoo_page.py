"""The page of every selector and head: `python docs/tools/zoo_page.py [NAME=RUN ...]`, a name for each backbone.

With run directories it first collects `docs/results/zoo.csv` from their predictions, with bootstrap intervals, trained parameters
and the time of a selection. Without, it only writes `zoo.md` again from the CSV; a test does the same and compares.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from medtokenbudget.data import Manifest
from medtokenbudget.experiments.methods import Method
from medtokenbudget.experiments.results import read_predictions
from medtokenbudget.experiments.run import RunInfo
from medtokenbudget.experiments.statistics import intervals
from medtokenbudget.features import FeatureStore
from medtokenbudget.reporting.looks import look
from medtokenbudget.routing import create_selector, selector_class
from medtokenbudget.training.heads import create_head

RESULTS = Path(__file__).resolve().parents[1] / "results"
METRICS = ("retention_of_ceiling", "accuracy", "macro_f1", "balanced_accuracy")
MERGED = ("lesion_dominated", "lesion_mass")
BATCH, BUDGET, REPEATS = 16, 0.3, 5
GROUPS = (
    "Controls",
    "Training-free, patches kept",
    "Training-free, patches merged",
    "Learned, with masks",
    "Learned, without masks",
    "Other heads",
)
TEXT = """# Every selector

Selectors of the literature on the same tokens, each with a head of its own that is trained in the same way. They are in
their post-backbone form: [what differs from the publications](../selectors.md#what-differs-from-the-publications).

- **Data**: 1,663 training and 405 validation images of ISIC 2019 (paper split, all with masks), and one off-center crop of
  each (399 in validation).
- **Backbone**: the embedded one (6 blocks, 256 patches of 192 numbers), with the signals `received_attention`,
  `value_norm`, `mean_key` and `rollout`.
- **Training**: seed 42 alone, the paper's protocol and head; the head sees the budgets 0.1, 0.3 and 0.5 (the study itself:
  ten). The learned selectors trained for 10 epochs (`--epochs 10 --curriculum.epochs 4`) instead of 50. `lats:lesion-first`
  follows its own preset: the strict protocol, and off-center crops in training, which no other row has seen.
- **Command**: `mtb sweep isic.parquet --store stores/embedded --out runs/zoo --preset paper --protocol paper --budgets 0.1
  0.3 0.5 --seeds 42 --methods ...`, commit 63ed5a4. It is a part of `mtb reproduce --study zoo`, which takes hours: the
  other learned selectors, `dpc-knn`, `k-medoids`, `atc`, the other heads, further seeds and larger backbones are not here.

At budget 0.3, numbers in percent, [zoo.csv](zoo.csv) has the other budgets and all intervals:

<embedded>

*Ceiling*: kept lesion patches as a share of what K patches can hold. *Own tokens*: for mergers, the share of the lesion
patches in tokens that are mostly lesion. Intervals: 95 %, bootstrap over lesions. *Parameters*: trained ones, of selector
and head. *ms*: CPU time of selecting from one image, batches of 16 on one thread.

What it says, and what it does not:

- **None of these training-free selectors finds the lesion.** The class token's attention keeps
  [class-attention|as-is|retention_of_ceiling] % of the ceiling, its rollout [rollout|as-is|retention_of_ceiling], ATS
  [ats|as-is|retention_of_ceiling], because it is made to sample less attended places too. Two controls without any model
  keep more: darkness [darkness|as-is|retention_of_ceiling] and center [center|as-is|retention_of_ceiling].
- **Selectors that learn from labels alone come close.** Without masks DynamicViT keeps
  [dynamicvit:mask-free|as-is|retention_of_ceiling] % (off-center [dynamicvit:mask-free|off-center|retention_of_ceiling]) and
  Cropr [cropr:mask-free|as-is|retention_of_ceiling] ([cropr:mask-free|off-center|retention_of_ceiling]); the lesion loss makes it
  [dynamicvit|as-is|retention_of_ceiling] and [cropr|as-is|retention_of_ceiling]. The gradient of a probe finds less:
  [grad-token:mask-free|as-is|retention_of_ceiling] without masks, [grad-token|as-is|retention_of_ceiling] with them.
- **LATS**, with the paper's recipe cut to 10 epochs, keeps [lats|as-is|retention_of_ceiling] %
  (off-center [lats|off-center|retention_of_ceiling]), without masks [lats:mask-free|as-is|retention_of_ceiling]
  ([lats:mask-free|off-center|retention_of_ceiling]). `lats:lesion-first` keeps [lats:lesion-first|as-is|retention_of_ceiling]
  ([lats:lesion-first|off-center|retention_of_ceiling]); off-center that is not a fair comparison, since it trained on crops.
  With masks DynamicViT is above LATS of the paper's recipe on images as they are, and below it off-center.
- **Off-center** the center falls to [center|off-center|retention_of_ceiling], and attention
  ([class-attention|off-center|retention_of_ceiling], rollout [rollout|off-center|retention_of_ceiling]) is above it, still
  below darkness ([darkness|off-center|retention_of_ceiling]). The head behind the center learned centered lesions: its
  balanced accuracy goes from [center|as-is|balanced_accuracy] to [center|off-center|balanced_accuracy].
- **Mergers** that join similar tokens (ToMe, TPS) leave [tome|as-is|lesion_dominated] and [tps|as-is|lesion_dominated] % of the
  lesion in tokens that are mostly lesion; EViT's one fused token takes the rest in ([evit|as-is|lesion_dominated]).
  Comparing keys instead of tokens gives ToMe [tome:keys|as-is|lesion_dominated].
- **Keeping the lesion is not accuracy.** The oracle has [oracle|as-is|accuracy] % and Random, with
  [random|as-is|retention_of_ceiling] % of the ceiling, [random|as-is|accuracy]; off-center Random's balanced accuracy
  ([random|off-center|balanced_accuracy]) is the oracle's ([oracle|off-center|balanced_accuracy]). Tokens of this backbone's
  last block know their surroundings. The intervals are about five points to either side and there is one seed, so no two
  accuracies here that are within five points of each other can be told apart.
"""
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
    store = FeatureStore.open(info.store_path, Manifest.read(info.manifest_path))
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
        return "Learned, without masks" if method.variant == "mask-free" else "Learned, with masks"
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
            own = "lesion_dominated" if pd.notna(here["lesion_dominated"]) else "lesion_mass"
            line = [
                look(text).name,
                str(int(here["seeds"])),
                percent(here, METRICS[0]),
                percent(off, METRICS[0]),
                percent(here, own),
            ]
            line += [percent(here, "accuracy", True), percent(here, "macro_f1"), percent(here, "balanced_accuracy", True)]
            line += [percent(off, "balanced_accuracy"), f"{int(here['parameters']):,}", f"{here['ms']:.2f}"]
            lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    """`zoo.md`, from the CSV beside it."""
    frame = pd.read_csv(RESULTS / "zoo.csv")
    text = TEXT
    for name in dict.fromkeys(frame["backbone"]):
        text = text.replace(f"<{name}>", table(frame[frame["backbone"] == name]))
    return re.sub(r"\[([^\[\]|]+)\|([a-z-]+)\|([a-z_0-9]+)\]", lambda found: value(frame, *found.groups()), text)


def value(frame: pd.DataFrame, method: str, view: str, metric: str) -> str:
    """A number of the text, `[method|view|metric]` of the embedded backbone at budget 0.3."""
    at = (frame["backbone"] == "embedded") & (frame["budget"].round(6) == BUDGET)
    rows = frame[at & (frame["method"] == method) & (frame["view"] == view)]
    return f"{100 * float(rows[metric].iloc[0]):.1f}"


def main(runs: list[str]) -> None:
    if runs:
        named = [run.partition("=") for run in runs]
        frame = pd.concat([collected(Path(run), name) for name, _, run in named], ignore_index=True)
        first = ["backbone", "method", "view", "budget", "seeds"]
        columns = [*first, *(name for name in frame.columns if name not in first)]
        frame[columns].to_csv(RESULTS / "zoo.csv", index=False, float_format="%.5g")
    (RESULTS / "zoo.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
