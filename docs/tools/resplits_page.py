"""The page of the study `resplits`: `python docs/tools/resplits_page.py [STUDY ...]`, directories that the study wrote.

With directories it first collects `docs/results/resplits.csv` from their results, a row for each fold, seed, method and budget.
Without, it only writes `resplits.md` again from the CSV; a test does the same and compares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pandas as pd
from results_tables import RESULTS, number, read, table

from medtokenbudget.experiments.resplits import variance_table
from medtokenbudget.reporting.looks import look

COLUMNS = ["fold", "seed", "method", "budget", "k", "n", "retention_of_ceiling", "accuracy", "macro_f1", "balanced_accuracy"]
METRICS = {"retention_of_ceiling": "ceiling", "accuracy": "accuracy", "macro_f1": "F1", "balanced_accuracy": "balanced"}
BUDGET = 0.3
TEXT = """# Other splits

The paper trains and validates on one split and leaves stratified re-splits to future work. Here the 2,068 images are split five
times by the study `resplits`: five folds, stratified by class, no lesion and no duplicate in two of them, each the validation
part once. Every method is trained on every fold with two seeds. How much of the spread comes from the split, and how much from
the seed?

- **Data**: 2,068 images of ISIC 2019, all with masks; about 1,654 for training and 414 for validation in each fold.
- **Backbone**: the embedded one, budget 0.3 (the others are in [resplits.csv](resplits.csv)).
- **Training**: seeds 42 and 43 (the study itself: three), heads for 30 epochs on the budgets 0.1, 0.3 and 0.5, strict protocol.
  LATS lesion-first trained for 3 epochs (its preset: 8, and at least 1,000 steps); the paper's LATS was left out for time.
  Commit 2a39e82.
- **Commands**: `mtb reproduce isic.parquet --store stores/embedded --out runs/resplits --study resplits --protocol strict
  --budgets 0.1 0.3 0.5 --seeds 42 43 --methods center random no-pruning oracle evit tome`, and for LATS with another `--out`,
  `--methods lats:lesion-first` and `--preset lesion-first --epochs 3 --evaluate-every 3 --min-steps 0`.

Mean over folds and seeds and, in parentheses, the standard deviation between folds (without what the seeds add to it) and
between the seeds of one fold, in percent; *ceiling* is the share of the retention ceiling:

<table>

How often a method is above another, of the five folds (mean of the seeds):

<pairs>

<reading>
"""


def collect(studies: list[Path]) -> pd.DataFrame:
    frame = pd.concat([pd.read_csv(study / "results.csv") for study in studies], ignore_index=True)
    return frame[frame["view"] == "as-is"].drop_duplicates(["fold", "seed", "method", "budget"])[COLUMNS]


def at(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["budget"].round(6) == BUDGET]


def components(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean, deviation between folds and between seeds, by method and metric."""
    return variance_table(at(frame), tuple(METRICS)).set_index(["method", "metric"])


def methods_table(frame: pd.DataFrame) -> str:
    found = components(frame)
    lines = []
    for method in dict.fromkeys(frame["method"]):
        line = [look(method).name]
        for metric in METRICS:
            row = found.loc[(method, metric)] if (method, metric) in found.index else None
            parts = [] if row is None else [number(row[part]) for part in ("mean", "between_folds", "between_seeds")]
            line.append(f"{parts[0]} ({parts[1]} / {parts[2]})" if parts else "–")
        lines.append(line)
    return table(lines, ["method", *METRICS.values()])


PAIRS = (
    ("center", "random"),
    ("oracle", "random"),
    ("evit", "random"),
    ("tome", "random"),
    ("no-pruning", "random"),
    ("center", "oracle"),
    ("lats:lesion-first", "random"),
    ("lats:lesion-first", "center"),
    ("lats", "center"),
)


def pairs(frame: pd.DataFrame) -> str:
    """In how many folds one method is above another, by metric."""
    means = at(frame).groupby(["method", "fold"])[list(METRICS)].mean()
    lines = []
    known = set(frame["method"])
    for one, other in (pair for pair in PAIRS if known.issuperset(pair)):
        above = means.loc[one] - means.loc[other]
        cells = ["–" if above[metric].isna().all() else f"{int((above[metric] > 0).sum())} of {len(above)}" for metric in METRICS]
        lines.append([f"{look(one).name} above {look(other).name}", *cells])
    return table(lines, ["", *METRICS.values()])


def page() -> str:
    """`resplits.md`, from the CSV beside it."""
    frame = read("resplits")
    found = components(frame)
    text = TEXT.replace("<table>", methods_table(frame)).replace("<pairs>", pairs(frame)).replace("<reading>\n", READING)

    def filled(match: re.Match[str]) -> str:
        method, metric, part = match.groups()
        if method == "*":
            return number(found.xs(metric, level="metric")[part].median())
        return number(found.loc[(method, metric)][part])

    return re.sub(r"\[([^\[\]|]+)\|([a-z_0-9]+)\|([a-z_]+)\]", filled, text)


READING = """- **A seed moves macro F1 about as much as another split, accuracy somewhat less.** In the median over methods accuracy
  deviates by [*|accuracy|between_folds] points between folds and by [*|accuracy|between_seeds] between seeds, macro F1 by
  [*|macro_f1|between_folds] and [*|macro_f1|between_seeds], balanced accuracy by [*|balanced_accuracy|between_folds] and
  [*|balanced_accuracy|between_seeds]. With two seeds and five folds these deviations are themselves rough: where the seeds
  explain all of the spread, the part of the folds is cut at zero.
- **What is kept of the lesion hardly depends on the split**: the center's share of the ceiling deviates by
  [center|retention_of_ceiling|between_folds] points around [center|retention_of_ceiling|mean], that of LATS lesion-first by
  [lats:lesion-first|retention_of_ceiling|between_folds] around [lats:lesion-first|retention_of_ceiling|mean], above the center
  on every fold.
- **So one split and one seed cannot order methods that are two or three points apart; five splits can.** EViT is only
  [evit|accuracy|mean] against [random|accuracy|mean] in accuracy, and above Random on every fold. The center is above the
  oracle on every fold ([center|accuracy|mean] against [oracle|accuracy|mean]): heads of mean tokens like what is in the middle,
  lesion or not. LATS lesion-first is above Random in accuracy on every fold, and below the center on four of five, though it
  keeps more of the lesion.
"""


def main(studies: list[str]) -> None:
    if studies:
        collect([Path(study) for study in studies]).to_csv(RESULTS / "resplits.csv", index=False, float_format="%.5g")
    (RESULTS / "resplits.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
