"""Find all problems of a data set in one pass, and show them as text.

A problem is fatal if it makes results wrong or the extraction fail: images or masks that are missing or cannot be read, and groups
or duplicates in two parts of the split. The paper's split leaks by design, so there the latter is a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

from medtokenbudget.config import Parallel, check_values
from medtokenbudget.data.duplicates import Fingerprint, duplicate_pairs, fingerprint
from medtokenbudget.data.images import DecodeError, decode_image, decode_mask
from medtokenbudget.data.manifest import SPLITS, Manifest
from medtokenbudget.data.masks import patch_labels, prevalence_table, same_aspect
from medtokenbudget.progress import progress

GRID = (16, 16)
GRAY_TOLERANCE = 0.02
"""Share of gray pixels that a binary mask may have: JPEG and resizing blur its border."""
Severity = Literal["fatal", "warning"]
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

    Attributes:
        name: Name of the data set.
        source: Where its rows come from.
        split_rule: How it was split.
        images: Number of images.
        findings: The problems.
        classes: Images per part and class: `{part: {class: n}}`; '-' counts images without a label.
        masks: The same for images that have a mask.
        prevalence: Statistics of lesion patches for each part; see `prevalence_table`.
        prevalence_images: Number of images behind these statistics.
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

    @property
    def fatal(self) -> bool:
        """Whether a finding is fatal."""
        return any(finding.severity == "fatal" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "fatal": self.fatal}


@dataclass(frozen=True)
class _Row:
    """What was read of one row: its problems as (kind, text), the image's fingerprint, and the lesion patches of its mask."""

    problems: list[tuple[str, str]]
    fingerprint: Fingerprint | None
    lesion_patches: int


def check(manifest: Manifest, workers: int = 4) -> Report:
    """Decode every image and mask once and report all problems.

    Args:
        manifest: The data set.
        workers: Threads that read images.

    Returns:
        The findings and the tables that describe the data set.
    """
    check_values({"workers": (workers, Parallel)})
    with ThreadPoolExecutor(max(1, workers)) as pool:
        results = pool.map(lambda index: _read(manifest, index), range(len(manifest)))
        rows = list(progress(results, total=len(manifest), what="Checking", unit="image"))
    items: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for image_id, row in zip(manifest.ids, rows):
        for kind, text in row.problems:
            items[kind].append(f"{image_id}: {text}" if text else image_id)
    items |= _duplicates(manifest, rows) | _split_problems(manifest)
    split = manifest.rows["split"].tolist()
    patches = {part: [row.lesion_patches for row, of in zip(rows, split) if part in ("all", of)] for part in ("all", *SPLITS)}
    with_lesion = {part: [count for count in counts if count] for part, counts in patches.items() if any(counts)}
    return Report(
        name=manifest.name,
        source=manifest.source,
        split_rule=manifest.split_rule,
        images=len(manifest),
        findings=[_finding(kind, names, manifest.split_rule) for kind, names in items.items() if names],
        classes=_by_class(manifest, np.ones(len(manifest), dtype=bool)),
        masks=_by_class(manifest, manifest.rows["mask"].notna().to_numpy()),
        prevalence={part: prevalence_table(counts, GRID[0] * GRID[1]) for part, counts in with_lesion.items()},
        prevalence_images={part: len(counts) for part, counts in with_lesion.items()},
    )


def _read(manifest: Manifest, index: int) -> _Row:
    path, mask_path = manifest.image_path(index), manifest.mask_path(index)
    image, patches = None, 0
    problems: list[tuple[str, str]] = []
    try:
        image = decode_image(path)
    except DecodeError as error:
        problems.append((f"image-{error.kind}" if error.kind in ("missing", "damaged") else "image-unreadable", str(error)))
    if manifest.rows["label"].iat[index] is None:
        problems.append(("unlabeled", ""))
    if mask_path is not None:
        try:
            mask = decode_mask(mask_path)
            patches = int(patch_labels(mask, GRID).sum())
            problems += _mask_problems(mask, image, patches)
        except DecodeError as error:
            kinds = {"missing": "mask-missing", "mask-values": "mask-values"}
            problems.append((kinds.get(error.kind, "mask-unreadable"), str(error)))
    return _Row(problems, None if image is None else fingerprint(path, image), patches)


def _mask_problems(mask: Image.Image, image: Image.Image | None, patches: int) -> list[tuple[str, str]]:
    values = np.asarray(mask)
    problems = []
    if image is not None and not same_aspect(mask.size, image.size):
        problems.append(("mask-aspect", f"mask {mask.width} x {mask.height}, image {image.width} x {image.height}"))
    if values.max() == 0:
        problems.append(("mask-empty", ""))
    elif patches == 0:
        problems.append(("mask-no-patch", ""))
    if values.max() not in (0, 255) or ((values > 15) & (values < 240)).mean() > GRAY_TOLERANCE:
        problems.append(("mask-not-binary", f"values {values.min()} to {values.max()}"))
    return problems


def _duplicates(manifest: Manifest, rows: Sequence[_Row]) -> dict[str, list[str]]:
    exact, near = duplicate_pairs([row.fingerprint for row in rows])
    ids = manifest.ids

    def differing(column: str) -> list[str]:
        values = manifest.rows[column].tolist()
        pairs = [(i, j) for i, j in (*exact, *near) if values[i] != values[j]]
        return [f"{ids[i]} ({values[i]}) = {ids[j]} ({values[j]})" for i, j in pairs]

    return {
        "duplicate-exact": [f"{ids[i]} = {ids[j]}" for i, j in exact],
        "duplicate-near": [f"{ids[i]} = {ids[j]}" for i, j in near],
        "duplicate-labels": differing("label"),
        "duplicate-crosses": differing("split"),
    }


def _split_problems(manifest: Manifest) -> dict[str, list[str]]:
    parts: dict[str, set[str]] = {}
    for group, part in zip(manifest.rows["group"], manifest.rows["split"]):
        if group is not None:
            parts.setdefault(group, set()).add(part)
    expected = [] if manifest.split_rule == "none" else ["train", "val"]
    present = set(manifest.rows["split"])
    trained, validated = (set(manifest.part(part).rows["label"].dropna()) for part in ("train", "val"))
    return {
        "group-crosses": [f"{group} ({', '.join(sorted(of))})" for group, of in parts.items() if len(of) > 1],
        "part-empty": [part for part in expected if part not in present],
        "class-unseen": sorted(validated - trained),
    }


def _finding(kind: str, items: list[str], split_rule: str) -> Finding:
    severity, message = _KINDS[kind]
    if kind in ("duplicate-crosses", "group-crosses") and split_rule.startswith("paper"):
        return Finding(kind, "warning", f"{message} (the paper's split allows this; `--split grouped` does not)", items)
    return Finding(kind, severity, message, items)


def _by_class(manifest: Manifest, chosen: np.ndarray) -> dict[str, dict[str, int]]:
    """Count the images per class, for each part and for all: `{part: {class: n}}`; '-' counts images without a label."""
    rows = manifest.rows[chosen]
    table = {}
    for part in ("all", *SPLITS):
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
            lines.append(f"  and {more:,} more (use --all to list them)")
        blocks.append("\n".join(lines))
    fatal = sum(finding.severity == "fatal" for finding in report.findings)
    warnings = len(report.findings) - fatal
    blocks.append(f"Kinds of problems: {fatal} fatal, {warnings} warnings." if report.findings else "No problems found.")
    return "\n\n".join(blocks)


def _class_table(report: Report) -> str:
    """Show the images per class in each part, and in brackets those with a mask."""
    parts = [part for part in report.classes if part == "all" or any(report.classes[part].values())]
    names = list(report.classes["all"])
    width = max(8, *(len(name) for name in names))
    lines = ["Images per class (with a mask)", " " * width + "".join(f"{part:>18}" for part in parts)]
    for name in [*names, "total"]:
        cells = []
        for part in parts:
            images, masks = (
                sum(counts.values()) if name == "total" else counts.get(name, 0)
                for counts in (report.classes[part], report.masks[part])
            )
            cells.append(f"{f'{images:,} ({masks:,})':>18}")
        lines.append(f"{name:<{width}}" + "".join(cells))
    return "\n".join(lines)


def _prevalence_table(report: Report) -> str:
    patches = GRID[0] * GRID[1]
    parts = list(report.prevalence)
    lines = [
        f"Lesion patches of {patches} (share of the image); paper: its 155 validation masks",
        " " * 20 + "".join(f"{f'{part}, n={report.prevalence_images[part]:,}':>20}" for part in parts) + f"{'paper':>18}",
    ]
    for name, printed in _PAPER_PREVALENCE.items():
        cells = [report.prevalence[part][name]["patches"] for part in parts]
        row = "".join(f"{f'{cell:.1f} ({cell / patches:.1%})':>20}" for cell in cells)
        lines.append(f"{name:<20}{row}{printed:>18}")
    return "\n".join(lines)
