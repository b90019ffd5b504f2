"""`mtb data`: create, split and check manifests. One command per source; the work is done in `medtokenbudget.data`."""

from __future__ import annotations

import json
import os
import sys
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tyro.conf import Positional

from medtokenbudget.cli.options import Command, options, spelled
from medtokenbudget.config import Count, DrawnSide, Folds, Fraction, Natural, Parallel, Seed
from medtokenbudget.errors import RequestError
from medtokenbudget.runtime import say

if TYPE_CHECKING:
    from medtokenbudget.data.manifest import Manifest

Rule = Literal["paper", "grouped", "kfold", "center"]
WORKERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class WriteManifest(Command):
    """Base of the commands that split images and write a manifest."""

    first = frozenset(
        {"root", "file", "manifest", "out", "masks", "mask_pattern", "classes", "name", "split", "folds", "fold", "select", "seed"}
        | {"n", "size", "off_center"}
    )

    out: Path
    """Manifest file to write (.parquet)."""
    overwrite: bool = False
    """Replace a different manifest at `out`."""
    workers: Parallel = WORKERS
    """Number of images to read or draw at once."""
    split: Rule | None = "grouped"
    """How to split. grouped: 80/20, with no lesion, patient or duplicate in two parts. kfold: the same, in folds. center: validate
    on one center, the fold-th by name. paper: the paper's 80/20 of single images."""
    folds: Folds = 5
    """Number of folds for `split="kfold"`."""
    fold: Natural = 0
    """Fold or center to validate on, counted from 0."""
    select: Fraction = 0.0
    """Share of the training part to set aside for model selection, in whole groups."""

    def split_options(self, seed: str) -> dict[str, Any]:
        """Return how to split, or reject options that the chosen split does not read; `seed` is the option that seeds it."""
        self.require_effect(self.split == "kfold", '`split="kfold"`', "folds")
        self.require_effect(self.split in ("kfold", "center"), '`split="kfold"` or `split="center"`', "fold")
        drawn = self.split not in ("paper", "center") or self.select > 0
        self.require_effect(drawn, "`select` or a split that is drawn", seed)
        return {name: getattr(self, name) for name in ("folds", "fold", "select", "workers", seed)}


@dataclass(frozen=True, kw_only=True)
class FromSource(WriteManifest):
    """Base of the commands that read the images of a source."""

    again: ClassVar[bool] = False
    """Whether the source may have a selection part of an earlier split, which is then drawn anew."""

    keep_split: Path | None = None
    """Older manifest whose images keep the part they have there."""
    only: Path | None = None
    """CSV or Parquet file with a column image_id: keep only these images, such as docs/results/isic.ids.csv."""
    columns: Path | None = None
    """CSV or Parquet file with further columns, joined by its column image_id, to show results by."""
    seed: Seed = 42
    """Random seed of the split. The paper's split always uses 42."""

    @abstractmethod
    def read(self) -> Manifest:
        """Return the manifest of the source."""

    def run(self) -> None:
        from medtokenbudget.data.readers import join_columns, only_images

        manifest = self.read() if self.only is None else only_images(self.read(), self.only)
        manifest = self._split(manifest if self.columns is None else join_columns(manifest, self.columns))
        _summarize(manifest, manifest.write(self.out, self.overwrite))

    def _split(self, manifest: Manifest) -> Manifest:
        """Apply the requested split; the split of the data itself stays if it is the same one, or if none was requested."""
        from medtokenbudget.data.manifest import Manifest
        from medtokenbudget.data.splits import apply_split, check_request, cut_selection, keep_split

        options, rule = self.split_options("seed"), self.split or "grouped"
        # Checked first, because finding duplicates below reads every image.
        if self.out.suffix != ".parquet":
            raise RequestError(f"`out` must end in .parquet, got {self.out}.")
        check_request(rule, **options)
        if self.keep_split is not None and self.split == "paper":
            raise RequestError("`keep_split` cannot be combined with the paper's split, which is the same for every manifest.")
        old = None if self.keep_split is None else Manifest.read(self.keep_split)
        came_with = manifest.split_rule.kind
        if self.split == came_with == "paper" or (self.split is None and came_with == "given"):
            self.require_effect(self.select > 0, "`select` or `split`", "seed")
            split = cut_selection(manifest, self.select, self.seed) if self.select or self.again else manifest
        else:
            split = apply_split(manifest, rule, **options)
        return split if old is None else keep_split(split, old)


@dataclass(frozen=True, kw_only=True)
class Isic(FromSource):
    """Create a manifest of ISIC 2019 with the masks of ISIC 2018 and HAM10000."""

    example = "mtb data isic data/isic --masks by-id --split grouped --out isic.parquet"

    root: Positional[Path]
    """Folder with the official ISIC 2019 files. The images may be incomplete."""
    masks: Literal["exact", "by-id", "none"] = "by-id"
    """How masks are matched to images: by-id ignores the suffix _downsampled, exact (as in the paper) does not."""
    mask_sources: str | None = None
    """Sources of masks: isic2018, ham10000 or both, separated by a comma; the first one that has a mask is used. Default: isic2018
    for exact, all available for by-id."""
    ignore_unlabeled: bool = False
    """Skip images that have no row in the CSV."""
    name: str = "ISIC 2019"
    """Name of the data set in results and reports."""

    def read(self) -> Manifest:
        from medtokenbudget.data.readers import isic_manifest

        self.require_effect(self.masks != "none", '`masks="exact"` or `masks="by-id"`', "mask_sources")
        sources = _names(self.mask_sources)
        return isic_manifest(self.root, self.masks, sources, ignore_unlabeled=self.ignore_unlabeled, name=self.name)


@dataclass(frozen=True, kw_only=True)
class Kvasir(FromSource):
    """Create a manifest of Kvasir v2."""

    example = "mtb data kvasir data/kvasir-dataset-v2 --out kvasir.parquet"

    root: Positional[Path]
    """Folder with the eight class folders of Kvasir v2."""
    split: Rule | None = "paper"
    name: str = "Kvasir v2"
    """Name of the data set in results and reports."""

    def read(self) -> Manifest:
        from medtokenbudget.data.readers import kvasir_manifest

        return kvasir_manifest(self.root, name=self.name)


@dataclass(frozen=True, kw_only=True)
class OwnImages(FromSource):
    """Base of the commands for your own images, which may come with a split."""

    split: Rule | None = None
    """How to split. grouped: 80/20, with no lesion, patient or duplicate in two parts. kfold: the same, in folds. center: validate
    on one center, the fold-th by name. paper: the paper's 80/20 of single images. Default: the split of the data itself, or
    grouped."""


@dataclass(frozen=True, kw_only=True)
class Folder(OwnImages):
    """Create a manifest of your own images, one folder per class."""

    example = "mtb data folder photos --masks photo-masks --out photos.parquet"

    root: Positional[Path]
    """Folder with one folder per class, with train/ and val/ that contain class folders, or with images."""
    masks: Path | None = None
    """Folder with the masks: a.png, a_mask.png, a_segmentation.png, a_seg.png, a_gt.png and the like for a.jpg. Where an image has
    several (a_mask.png, a_mask_1.png), one joined mask is written to a folder next to the manifest."""
    mask_pattern: str | None = None
    """Path of a mask in `masks` for other names, such as '{{stem}}_roi.png' or '{{stem}}/*.png'; {{stem}} is the image's name
    without its ending. Upper and lower case are the same."""
    annotators: Literal["union", "majority", "each"] = "union"
    """What several masks of one image are. union: several lesions. majority: one lesion by several annotators, where at least half
    of them marked it. each: majority, and `mtb evaluate` also measures against each annotator and shows how well people agree."""
    name: str | None = None
    """Name of the data set in results and reports. Default: the folder's name."""

    def read(self) -> Manifest:
        from medtokenbudget.data.readers import folder_manifest

        self.require_effect(self.masks is not None, "`masks`", "mask_pattern", "annotators")
        merged = self.out.with_name(f"{self.out.stem}-{'masks' if self.annotators == 'union' else 'majority'}")
        return folder_manifest(
            self.root,
            self.masks,
            name=self.name,
            merged=merged if self.masks else None,
            pattern=self.mask_pattern,
            annotators=self.annotators,
        )


@dataclass(frozen=True, kw_only=True)
class Csv(OwnImages):
    """Create a manifest of your own images, listed in a CSV file."""

    example = "mtb data csv photos.csv --out photos.parquet"

    file: Positional[Path]
    """CSV or Parquet file with a column image, and optionally image_id, label, mask, group, split."""
    classes: str | None = None
    """Class names in order, separated by commas. Default: the sorted labels."""
    allow_unlabeled: bool = False
    """Accept rows without a label."""
    name: str | None = None
    """Name of the data set in results and reports. Default: the file's name."""

    def read(self) -> Manifest:
        from medtokenbudget.data.readers import csv_manifest

        return csv_manifest(self.file, _names(self.classes), allow_unlabeled=self.allow_unlabeled, name=self.name)


@dataclass(frozen=True, kw_only=True)
class SplitAgain(FromSource):
    """Split a manifest again."""

    example = "mtb data split isic.parquet --split kfold --folds 5 --fold 0 --out isic-fold0.parquet"
    again = True

    manifest: Positional[Path]
    """Manifest to split again."""

    def read(self) -> Manifest:
        from medtokenbudget.data.manifest import Manifest

        manifest = Manifest.read(self.manifest)
        if self.split == "paper" and manifest.source.startswith("isic") and manifest.split_rule.kind != "paper":
            raise RequestError(
                "The paper's split of ISIC needs all rows of the official CSV, which a manifest does not have. "
                "Run `mtb data isic ROOT --split paper` instead."
            )
        return manifest


@dataclass(frozen=True, kw_only=True)
class Synthetic(WriteManifest):
    """Draw dermoscopic images with masks and create a manifest of them."""

    example = "mtb data synthetic --n 1000 --seed 0 --out drawn"

    out: Path
    """Folder to write to, or NAME.parquet to put the images into the folder NAME."""
    n: Count = 1000
    """Number of images."""
    seed: Seed = 0
    """Random seed of the drawings."""
    size: DrawnSide = 256
    """Side of the square images, in pixels."""
    off_center: bool = False
    """Move the lesions away from the center."""
    split_seed: Seed = 42
    """Random seed of the split. The paper's split always uses 42."""
    name: str = "drawn dermoscopy"
    """Name of the data set in results and reports."""

    def run(self) -> None:
        from medtokenbudget.data.manifest import Manifest
        from medtokenbudget.data.synthetic import Drawings, synthetic_manifest

        drawings = Drawings(n=self.n, seed=self.seed, size=self.size, off_center=self.off_center)
        options = self.split_options("split_seed")
        rule = self.split or "grouped"
        out = synthetic_manifest(self.out, drawings, split=rule, overwrite=self.overwrite, name=self.name, **options)
        _summarize(Manifest.read(out), out)


@dataclass(frozen=True, kw_only=True)
class Download(Command):
    """Download a public data set in its official layout; a broken download resumes.

    Sizes and checksums are compared with published ones. What is there already stays, also an archive from a browser, which is
    verified and unpacked.
    """

    example = "mtb data download isic2019 --out ISIC --accept-license"

    dataset: Positional[str]
    """isic2019, isic2018-masks, ham10000-masks, kvasir-v2, kvasir-seg or busi."""
    out: Path
    """Folder to write to. Give ISIC 2019 and its masks the same one."""
    accept_license: bool = False
    """Accept the license that the command shows. Default: ask on a terminal, refuse elsewhere."""

    def run(self) -> None:
        from medtokenbudget.data.download import dataset, download

        asked = dataset(self.dataset)
        accepted = self.accept_license
        if accepted or sys.stdin.isatty():
            say(asked.text)
            accepted = accepted or input("Accept these terms? [y/N] ").strip().lower() in ("y", "yes")
        paths = download(self.dataset, self.out, accepted)
        print(f"{', '.join(map(str, paths))} complete. Next: {asked.then.format(out=self.out)}")


@dataclass(frozen=True, kw_only=True)
class CheckData(Command):
    """Find all problems of a data set."""

    example = "mtb data check isic.parquet"

    data: Positional[Path]
    """Manifest, or folder with ISIC 2019, Kvasir v2 or class folders."""
    json: bool = False
    """Print the full report as JSON."""
    all: bool = False
    """List every item of every finding instead of the first few."""
    drop: Path | None = None
    """Also write a manifest (.parquet) without the images that cannot be read, and without masks that cannot be used."""
    workers: Parallel = WORKERS
    """Number of images to read at once."""

    def run(self) -> int:
        from medtokenbudget.data.checks import check, to_text, without_broken
        from medtokenbudget.data.readers import open_data

        if self.drop is not None and (self.drop.suffix != ".parquet" or self.drop.exists()):
            raise RequestError(f"`drop` must be a new file that ends in .parquet, got {self.drop}.")
        manifest = open_data(self.data)
        report = check(manifest, workers=self.workers)
        if self.json:
            print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        else:
            print(spelled(to_text(report, limit=0 if self.all else 8), options(type(self))))
            fix = "fix the fatal problems and run the check again, or write a manifest without broken files with --drop."
            print(f"Next: {fix if report.fatal else self._next()}")
        if self.drop is not None:
            left = without_broken(manifest, report)
            before, after = ((len(one), int(one.rows["mask"].notna().sum())) for one in (manifest, left))
            say(f"Wrote {left.write(self.drop)}: {after[0]:,} of {before[0]:,} images, {after[1]:,} of {before[1]:,} masks.")
        return 1 if report.fatal else 0

    def _next(self) -> str:
        if self.data.suffix == ".parquet":
            return f"mtb extract {self.data} --store STORE"
        return f"create a manifest of {self.data} with `mtb data`."


def _summarize(manifest: Manifest, out: Path) -> None:
    from medtokenbudget.data.splits import balance_text

    counts = manifest.rows["split"].value_counts()
    parts = ", ".join(f"{counts[name]:,} {name}" for name in ("train", "select", "val") if name in counts)
    masks = int(manifest.rows["mask"].notna().sum())
    print(balance_text(manifest))
    print(f"Wrote {out}: {len(manifest):,} images ({parts}; {masks:,} with a mask). Next: mtb data check {out}")


def _names(value: str | None) -> list[str] | None:
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]
