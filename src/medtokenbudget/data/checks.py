"""Find all problems of a data set in one pass, and show them as text.

A problem is fatal if it makes results wrong or the extraction fail: images or masks that are missing or cannot be read, and groups
or duplicates in two parts of the split. The paper's split leaks by design, so there the latter is a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from medtokenbudget.config import Parallel, check_values
from medtokenbudget.data.duplicates import Fingerprint, exact_pairs, fingerprint, near_pairs
from medtokenbudget.data.images import DecodeError, decode_image, decode_mask
from medtokenbudget.data.manifest import SPLITS, Manifest
from medtokenbudget.data.masks import patch_labels, prevalence_table, same_aspect
from medtokenbudget.runtime import progress

GRID = (16, 16)
PARTS = ("all", *SPLITS)
GRAY_TOLERANCE = 0.02
"""Share of gray pixels that a binary mask may have: JPEG and resizing blur its border."""
Severity = Literal["fatal", "warning"]
Problem = tuple[str, str]
"""The kind of a problem, and the image, pair or group that has it."""
_KINDS: dict[str, tuple[Severity, str]] = {
    "image-missing": ("fatal", "images that do not exist"),
    "image-damaged": ("fatal", "images that are damaged or incomplete"),
    "image-unreadable": ("fatal", "images that cannot be read"),
    "unlabeled": ("warning", "images without a label (not used in training and evaluation)"),
    "mask-missing": ("fatal", "masks that do not exist"),
    "mask-values": ("fatal", "masks that are not empty, but in which no pixel counts as lesion"),
    "mask-unreadable": ("fatal", "masks that cannot be read"),
    "mask-aspect": ("fatal", "masks whose aspect ratio is not that of the image"),
    "mask-empty": ("warning", "empty masks"),
    "mask-no-patch": (
        "warning",
        f"masks without a lesion patch on a {GRID[0]} x {GRID[1]} grid (retention cannot be measured)",
    ),
    "mask-not-binary": ("warning", "masks that are not binary (a pixel counts as lesion above half of 255)"),
    "duplicate-exact": ("warning", "pairs of files with the same content"),
    "duplicate-near": ("warning", "pairs of files that show the same picture"),
    "duplicate-labels": ("warning", "duplicates with different labels"),
    "duplicate-crosses": ("fatal", "duplicates in two parts of the split"),
    "group-crosses": ("fatal", "groups in two parts of the split"),
    "part-empty": ("warning", "parts of the split without images"),
    "class-unseen": ("warning", "classes of the validation part that the training part does not have"),
}
"""Every kind of problem, in the order of the report."""

# Supplement of the paper: lesion patches of the 155 validation masks on the 16 x 16 grid, and their share as printed there.
_PAPER_PREVALENCE = {
    "minimum": "6 (2.3%)",
    "25th percentile": "35 (13.7%)",
    "median": "71 (27.7%)",
    "75th percentile": "104 (40.6%)",
    "maximum": "248 (96.9%)",
    "mean": "81.1 (31.6%)",
    "standard deviation": "58.3 (22.8%)",
}


@dataclass(frozen=True)
class Finding:
    """One kind of problem, what it means, and every image, pair or group that has it."""

    kind: str
    severity: Severity
    message: str
    items: list[str]


@dataclass(frozen=True)
class Report:
    """The result of a check.

    `classes` and `masks` count images, and images that have a mask, as `{part: {class: n}}`; '-' is no label. `prevalence` has the
    statistics of lesion patches for each part (see `prevalence_table`), from `prevalence_images` images. `broken` has the
    numbers of the rows whose image or mask is fatal.
    """

    name: str
    source: str
    split_rule: str
    images: int
    findings: list[Finding]
    classes: dict[str, dict[str, int]]
    masks: dict[str, dict[str, int]]
    prevalence: dict[str, dict[str, dict[str, float]]]
    prevalence_images: dict[str, int]
    broken: dict[str, list[int]]

    @property
    def fatal(self) -> bool:
        return any(finding.severity == "fatal" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fatal": self.fatal}


def check(manifest: Manifest, workers: int = 4) -> Report:
    """Decode every image and mask once, in `workers` threads, and report all problems."""
    check_values({"workers": (workers, Parallel)})
    with ThreadPoolExecutor(max(1, workers)) as pool:
        results = pool.map(lambda index: _read(manifest, index), range(len(manifest)))
        read = list(progress(results, total=len(manifest), what="Checking", unit="image"))
    problems = [problem for of_image, _, _ in read for problem in of_image]
    prints = {row: one for row, (_, one, _) in enumerate(read) if one is not None}
    problems += [*_duplicates(manifest, prints), *_split_problems(manifest)]
    split = manifest.rows["split"].tolist()
    patches = {part: [count for (_, _, count), of in zip(read, split) if count and part in ("all", of)] for part in PARTS}
    return Report(
        name=manifest.name,
        source=manifest.source,
        split_rule=str(manifest.split_rule),
        images=len(manifest),
        findings=_findings(problems, leaks_allowed=manifest.split_rule.kind == "paper"),
        classes=_by_class(manifest, manifest.rows),
        masks=_by_class(manifest, manifest.rows[manifest.rows["mask"].notna()]),
        prevalence={part: prevalence_table(counts, GRID[0] * GRID[1]) for part, counts in patches.items() if counts},
        prevalence_images={part: len(counts) for part, counts in patches.items() if counts},
        broken={
            what: [
                row
                for row, (found, _, _) in enumerate(read)
                if any(kind.startswith(what) and _KINDS[kind][0] == "fatal" for kind, _ in found)
            ]
            for what in ("image", "mask")
        },
    )


def without_broken(manifest: Manifest, report: Report) -> Manifest:
    bad = set(report.broken["mask"])
    cleared = manifest.with_columns(mask=[None if row in bad else mask for row, mask in enumerate(manifest.rows["mask"])])
    return cleared.take(sorted(set(range(len(manifest))) - set(report.broken["image"])))


def _read(manifest: Manifest, index: int) -> tuple[list[Problem], Fingerprint | None, int]:
    path, mask_path = manifest.image_path(index), manifest.mask_path(index)
    image, patches = None, 0
    problems: list[Problem] = []

    def add(kind: str, detail: object = "") -> None:
        image_id = str(manifest.rows["image_id"].iat[index])
        problems.append((kind, f"{image_id}: {detail}" if detail else image_id))

    try:
        image = decode_image(path)
    except DecodeError as error:
        add(f"image-{error.kind}" if error.kind in ("missing", "damaged") else "image-unreadable", error)
    if manifest.rows["label"].iat[index] is None:
        add("unlabeled")
    if mask_path is not None:
        try:
            mask = decode_mask(mask_path)
            patches = int(patch_labels(mask, GRID).sum())
            values = np.asarray(mask)
            if image is not None and not same_aspect(mask.size, image.size):
                add("mask-aspect", f"mask {mask.width} x {mask.height}, image {image.width} x {image.height}")
            if values.max() == 0:
                add("mask-empty")
            elif patches == 0:
                add("mask-no-patch")
            if values.max() not in (0, 255) or ((values > 15) & (values < 240)).mean() > GRAY_TOLERANCE:
                add("mask-not-binary", f"values {values.min()} to {values.max()}")
        except DecodeError as error:
            add({"missing": "mask-missing", "mask-values": "mask-values"}.get(error.kind, "mask-unreadable"), error)
    return problems, None if image is None else fingerprint(path, image), patches


def _duplicates(manifest: Manifest, prints: Mapping[int, Fingerprint]) -> Iterator[Problem]:
    exact, near = exact_pairs(prints), near_pairs(prints)
    ids = manifest.ids
    for kind, pairs in (("duplicate-exact", exact), ("duplicate-near", near)):
        yield from ((kind, f"{ids[i]} = {ids[j]}") for i, j in pairs)
    for kind, column in (("duplicate-labels", "label"), ("duplicate-crosses", "split")):
        values = manifest.rows[column].tolist()
        for i, j in (*exact, *near):
            if values[i] != values[j]:
                yield kind, f"{ids[i]} ({values[i]}) = {ids[j]} ({values[j]})"


def _split_problems(manifest: Manifest) -> Iterator[Problem]:
    for group, parts in manifest.rows.groupby("group", sort=False)["split"].unique().items():
        if len(parts) > 1:
            yield "group-crosses", f"{group} ({', '.join(sorted(parts))})"
    if manifest.split_rule.kind != "none":
        yield from (("part-empty", part) for part in ("train", "val") if part not in set(manifest.rows["split"]))
    trained, validated = (set(manifest.part(part).rows["label"].dropna()) for part in ("train", "val"))
    yield from (("class-unseen", label) for label in sorted(validated - trained))


def _findings(problems: Sequence[Problem], leaks_allowed: bool) -> list[Finding]:
    findings = []
    for kind, (severity, message) in _KINDS.items():
        if leaks_allowed and kind in ("duplicate-crosses", "group-crosses"):
            severity, message = "warning", f"{message} (the paper's split allows this; the split 'grouped' does not)"
        if items := [item for of, item in problems if of == kind]:
            findings.append(Finding(kind, severity, message, items))
    return findings


def _by_class(manifest: Manifest, rows: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Count rows per class, for each part and for all: `{part: {class: n}}`; '-' counts images without a label."""
    table = {}
    for part in PARTS:
        counts = Counter("-" if label is None else label for label, of in zip(rows["label"], rows["split"]) if part in ("all", of))
        table[part] = {name: counts[name] for name in (*manifest.classes, "-") if name != "-" or counts["-"]}
    return table


def to_text(report: Report, limit: int = 8) -> str:
    """Format a report for a terminal, with at most `limit` items of each finding (0 for all)."""
    head = f"{report.name}: {report.images:,} images · {report.source} · split {report.split_rule}"
    blocks = [head, _class_table(report)]
    if report.prevalence:
        blocks.append(_prevalence_table(report))
    for finding in report.findings:
        items = finding.items[:limit] if limit else finding.items
        lines = [f"{finding.severity.upper()} {finding.kind} ({len(finding.items):,}): {finding.message}"]
        lines += [f"  {item}" for item in items]
        if more := len(finding.items) - len(items):
            lines.append(f"  and {more:,} more (the option `all` lists them)")
        blocks.append("\n".join(lines))
    fatal = sum(finding.severity == "fatal" for finding in report.findings)
    warnings = len(report.findings) - fatal
    blocks.append(f"Kinds of problems: {fatal} fatal, {warnings} warnings." if report.findings else "No problems found.")
    return "\n\n".join(blocks)


def _class_table(report: Report) -> str:
    """Show the images per class in each part, and in brackets those with a mask."""
    cells = {}
    for part in [part for part in report.classes if part == "all" or any(report.classes[part].values())]:
        images, masks = ({**counts, "total": sum(counts.values())} for counts in (report.classes[part], report.masks[part]))
        cells[part] = {name: f"{images.get(name, 0):,} ({masks.get(name, 0):,})" for name in (*report.classes["all"], "total")}
    return f"Images per class (with a mask)\n{pd.DataFrame(cells).to_string()}"


def _prevalence_table(report: Report) -> str:
    columns = {
        f"{part}, n={report.prevalence_images[part]:,}": {
            name: f"{row['patches']:.1f} ({row['prevalence']:.1%})" for name, row in table.items()
        }
        for part, table in report.prevalence.items()
    }
    title = f"Lesion patches of {GRID[0] * GRID[1]} (share of the image); paper: its 155 validation masks"
    return f"{title}\n{pd.DataFrame(columns | {'paper': _PAPER_PREVALENCE}).to_string()}"
