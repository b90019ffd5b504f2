"""Find all problems of a data set in one pass.

A problem is fatal if it makes results wrong or the extraction fail: images or masks that are missing or cannot be read, and groups
or duplicates in two parts of the split. The paper's split leaks by design, so there the latter is a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from medtokenbudget.config import Parallel, check_values
from medtokenbudget.data import isic, kvasir
from medtokenbudget.data.decode import DecodeError, decode_image, decode_mask
from medtokenbudget.data.duplicates import Fingerprint, exact_pairs, fingerprint, near_pairs
from medtokenbudget.data.folder import folder_manifest
from medtokenbudget.data.manifest import SPLITS, Manifest
from medtokenbudget.data.masks import patch_labels, prevalence_table, same_aspect
from medtokenbudget.progress import progress

GRID = (16, 16)
GRAY_TOLERANCE = 0.02
Severity = Literal["fatal", "warning"]


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
        """The report as JSON values."""
        return {**asdict(self), "fatal": self.fatal}


@dataclass(frozen=True)
class _Seen:
    """What was found on disk for one row."""

    image_fault: DecodeError | None = None
    mask_fault: DecodeError | None = None
    print: Fingerprint | None = None
    lesion_patches: int | None = None
    mask_notes: list[str] = field(default_factory=list)


def open_data(target: Path | str) -> Manifest:
    """Open a data set, given as a manifest or as a folder in a known layout.

    Args:
        target: A manifest file, or a folder with the layout of ISIC 2019 or Kvasir v2 (both get the paper's split) or with class
            folders.

    Returns:
        The manifest.
    """
    path = Path(target)
    if not path.is_dir():
        return Manifest.read(path)
    if (path / isic.GROUND_TRUTH).exists():
        has_masks = any((path / folder).is_dir() for folder in isic.MASK_FOLDERS.values())
        return isic.isic_manifest(path, "by-id" if has_masks else "none")
    if all((path / name).is_dir() for name in kvasir.CLASSES):
        return kvasir.kvasir_manifest(path)
    return folder_manifest(path)


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
        bar = progress(
            pool.map(lambda i: _look(manifest, i), range(len(manifest))), total=len(manifest), what="Checking", unit="image"
        )
        seen: list[_Seen] = list(bar)
    findings = [
        *_image_findings(manifest, seen),
        *_mask_findings(manifest, seen),
        *_duplicate_findings(manifest, seen),
        *_split_findings(manifest),
    ]
    split = manifest.rows["split"].to_numpy(dtype=object)
    counts = {
        part: [one.lesion_patches or 0 for one, of in zip(seen, split) if one.lesion_patches and part in ("all", of)]
        for part in ("all", *SPLITS)
    }
    counts = {part: values for part, values in counts.items() if values}
    has_mask = manifest.rows["mask"].notna().to_numpy()
    return Report(
        name=manifest.name,
        source=manifest.source,
        split_rule=manifest.split_rule,
        images=len(manifest),
        findings=[finding for finding in findings if finding.items],
        classes=_by_class(manifest, np.ones(len(manifest), dtype=bool)),
        masks=_by_class(manifest, has_mask),
        prevalence={part: prevalence_table(values, GRID[0] * GRID[1]) for part, values in counts.items()},
        prevalence_images={part: len(values) for part, values in counts.items()},
    )


def _look(manifest: Manifest, index: int) -> _Seen:
    path, mask_path = manifest.image_path(index), manifest.mask_path(index)
    image, image_fault, mask_fault = None, None, None
    try:
        image = decode_image(path)
    except DecodeError as error:
        image_fault = error
    notes: list[str] = []
    patches = None
    if mask_path is not None:
        try:
            mask = decode_mask(mask_path)
            patches = int(patch_labels(mask, GRID).sum())
            notes = _mask_notes(mask, image, patches)
        except DecodeError as error:
            mask_fault = error
    return _Seen(image_fault, mask_fault, None if image is None else fingerprint(path, image), patches, notes)


def _mask_notes(mask: Image.Image, image: Image.Image | None, patches: int) -> list[str]:
    values = np.asarray(mask)
    notes = []
    if image is not None and not same_aspect(mask.size, image.size):
        notes.append(f"mask-aspect|mask {mask.width} x {mask.height}, image {image.width} x {image.height}")
    if values.max() == 0:
        notes.append("mask-empty|")
    elif patches == 0:
        notes.append("mask-no-patch|")
    if values.max() not in (0, 255) or ((values > 15) & (values < 240)).mean() > GRAY_TOLERANCE:
        notes.append(f"mask-not-binary|values {values.min()} to {values.max()}")
    return notes


def _image_findings(manifest: Manifest, seen: Sequence[_Seen]) -> Iterable[Finding]:
    missing = [f"{i}: {s.image_fault}" for i, s in zip(manifest.ids, seen) if s.image_fault and s.image_fault.kind == "missing"]
    damaged = [f"{i}: {s.image_fault}" for i, s in zip(manifest.ids, seen) if s.image_fault and s.image_fault.kind == "damaged"]
    others = [
        f"{i}: {s.image_fault}"
        for i, s in zip(manifest.ids, seen)
        if s.image_fault and s.image_fault.kind not in ("missing", "damaged")
    ]
    yield Finding("image-missing", "fatal", "images that do not exist", missing)
    yield Finding("image-damaged", "fatal", "images that are damaged or incomplete", damaged)
    yield Finding("image-unreadable", "fatal", "images that cannot be read", others)
    unlabeled = [i for i, label in zip(manifest.ids, manifest.rows["label"]) if label is None]
    yield Finding("unlabeled", "warning", "images without a label (not used in training and evaluation)", unlabeled)


def _mask_findings(manifest: Manifest, seen: Sequence[_Seen]) -> Iterable[Finding]:
    faults = [(i, s.mask_fault) for i, s in zip(manifest.ids, seen) if s.mask_fault]
    yield Finding("mask-missing", "fatal", "masks that do not exist", [f"{i}: {e}" for i, e in faults if e.kind == "missing"])
    dark = [f"{i}: {e}" for i, e in faults if e.kind == "mask-values"]
    yield Finding("mask-values", "fatal", "masks that are not empty, but in which no pixel counts as lesion", dark)
    others = [f"{i}: {e}" for i, e in faults if e.kind not in ("missing", "mask-values")]
    yield Finding("mask-unreadable", "fatal", "masks that cannot be read", others)
    messages = {
        "mask-aspect": "masks whose aspect ratio is not that of the image",
        "mask-empty": "empty masks",
        "mask-no-patch": f"masks without a lesion patch on a {GRID[0]} x {GRID[1]} grid (retention cannot be measured)",
        "mask-not-binary": "masks that are not binary (a pixel counts as lesion above half of 255)",
    }
    notes = [(i, *note.split("|", 1)) for i, s in zip(manifest.ids, seen) for note in s.mask_notes]
    for kind, message in messages.items():
        severity: Severity = "fatal" if kind == "mask-aspect" else "warning"
        yield Finding(kind, severity, message, [f"{i}: {text}" if text else i for i, noted, text in notes if noted == kind])


def _duplicate_findings(manifest: Manifest, seen: Sequence[_Seen]) -> Iterable[Finding]:
    at = [index for index, one in enumerate(seen) if one.print is not None]
    prints = [one.print for one in seen if one.print is not None]
    exact = [(at[i], at[j]) for i, j in exact_pairs(prints)]
    near = [(at[i], at[j]) for i, j in near_pairs(prints)]
    ids, labels, split = manifest.ids, list(manifest.rows["label"]), list(manifest.rows["split"])

    def named(pairs: Iterable[tuple[int, int]], values: list[Any] | None = None) -> list[str]:
        if values is None:
            return [f"{ids[i]} = {ids[j]}" for i, j in pairs]
        return [f"{ids[i]} ({values[i]}) = {ids[j]} ({values[j]})" for i, j in pairs]

    both = [*exact, *near]
    yield Finding("duplicate-exact", "warning", "pairs of files with the same content", named(exact))
    yield Finding("duplicate-near", "warning", "pairs of files that show the same picture", named(near))
    yield Finding(
        "duplicate-labels",
        "warning",
        "duplicates with different labels",
        named([p for p in both if labels[p[0]] != labels[p[1]]], labels),
    )
    crossing = [pair for pair in both if split[pair[0]] != split[pair[1]]]
    yield Finding(
        "duplicate-crosses",
        _crossing(manifest),
        f"duplicates in two parts of the split{_advice(manifest)}",
        named(crossing, split),
    )


def _split_findings(manifest: Manifest) -> Iterable[Finding]:
    parts: dict[str, set[str]] = {}
    for group, split in zip(manifest.rows["group"], manifest.rows["split"]):
        if group is not None:
            parts.setdefault(group, set()).add(split)
    crossing = [f"{group} ({', '.join(sorted(found))})" for group, found in parts.items() if len(found) > 1]
    yield Finding("group-crosses", _crossing(manifest), f"groups in two parts of the split{_advice(manifest)}", crossing)
    used = set(manifest.rows["split"])
    wanted = [] if manifest.split_rule == "none" else ["train", "val"]
    yield Finding("part-empty", "warning", "parts of the split without images", [name for name in wanted if name not in used])
    trained = set(manifest.part("train").rows["label"])
    unseen = sorted({label for label in manifest.part("val").rows["label"] if label is not None and label not in trained})
    yield Finding("class-unseen", "warning", "classes of the validation part that the training part does not have", unseen)


def _crossing(manifest: Manifest) -> Severity:
    return "warning" if manifest.split_rule.startswith("paper") else "fatal"


def _advice(manifest: Manifest) -> str:
    return " (the paper's split allows this; `--split grouped` does not)" if manifest.split_rule.startswith("paper") else ""


def _by_class(manifest: Manifest, chosen: np.ndarray) -> dict[str, dict[str, int]]:
    """Images per class, for each part and for all: `{part: {class: n}}`; '-' counts images without a label."""
    rows = manifest.rows[chosen]
    table = {}
    for part in ("all", *SPLITS):
        counts = Counter("-" if label is None else label for label, of in zip(rows["label"], rows["split"]) if part in ("all", of))
        table[part] = {name: counts[name] for name in (*manifest.classes, "-") if name != "-" or counts["-"]}
    return table
