"""`mtb data`: create, split and check manifests. One subcommand per source; the work is done in `medtokenbudget.data`."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from medtokenbudget.cli.options import CommandParser, command_list, command_parser, require_effect
from medtokenbudget.config import Count, DrawnSide, Folds, Fraction, Natural, Parallel, Seed
from medtokenbudget.errors import RequestError, UnknownNameError

if TYPE_CHECKING:
    from medtokenbudget.data.manifest import Manifest

Rule = Literal["paper", "grouped", "kfold"]


def data(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        summaries = {name: summary for name, (summary, _, _) in COMMANDS.items()}
        last = "Run `mtb data COMMAND --help` for the options of a command."
        print(
            command_list(
                "mtb data COMMAND ...", "Create, split and check manifests: tables with one row per image.", summaries, last
            )
        )
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        raise UnknownNameError.of("command of mtb data", name, COMMANDS)
    summary, build, run = COMMANDS[name]
    parser = command_parser(f"data {name}", f"{summary[0].upper()}{summary[1:]}.", f"mtb data {name} {EXAMPLES[name]}")
    build(parser)
    return run(parser.parse_args(arguments[1:]))


def _split_options(parser: CommandParser, default: str | None, seed: str = "--seed", keep: bool = True) -> None:
    parser.add_argument(
        "--split",
        type=Rule if default else Rule | None,
        default=default,
        help="How to split. grouped: 80/20, with no lesion, patient or duplicate in two parts. kfold: the same, in folds. "
        "paper: the paper's 80/20 of single images." + ("" if default else " Default: the split of the data itself, or grouped."),
    )
    parser.add_argument(
        "--workers", type=Parallel, default=min(4, os.cpu_count() or 1), help="Number of images to read or draw at once."
    )
    section = parser.section("Split")
    section.add_argument("--folds", type=Folds, default=5, help="Number of folds for --split kfold.")
    section.add_argument("--fold", type=Natural, default=0, help="Fold to validate on, counted from 0.")
    section.add_argument(
        "--select", type=Fraction, default=0.0, help="Share of the training part to set aside for model selection, in whole groups."
    )
    if keep:
        section.add_argument(
            "--keep-split", type=Path | None, default=None, help="Older manifest whose images keep the part they have there."
        )
    section.add_argument(seed, type=Seed, default=42, help="Random seed of the split. The paper's split always uses 42.")


def _name(parser: CommandParser, default: str) -> None:
    parser.add_argument(
        "--name", type=str | None, default=None, help=f"Name of the data set in results and reports. Default: {default}."
    )


def _out(parser: CommandParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="Manifest file to write (.parquet).")
    _overwrite(parser)


def _overwrite(parser: CommandParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="Replace a different manifest at --out.")


def _isic_options(parser: CommandParser) -> None:
    parser.add_argument("root", type=Path, help="Folder with the official ISIC 2019 files. The images may be incomplete.")
    _out(parser)
    parser.add_argument(
        "--masks",
        type=Literal["exact", "by-id", "none"],
        default="by-id",
        help="How masks are matched to images: by-id ignores the suffix _downsampled, exact (as in the paper) does not.",
    )
    parser.add_argument(
        "--mask-sources",
        metavar="NAMES",
        type=str | None,
        default=None,
        help="Sources of masks: isic2018, ham10000 or both, separated by a comma; the first one that has a mask is used. "
        "Default: isic2018 for exact, all available for by-id.",
    )
    parser.add_argument("--ignore-unlabeled", action="store_true", help="Skip images that have no row in the CSV.")
    _name(parser, "ISIC 2019")
    _split_options(parser, "grouped")


def _kvasir_options(parser: CommandParser) -> None:
    parser.add_argument("root", type=Path, help="Folder with the eight class folders of Kvasir v2.")
    _out(parser)
    _name(parser, "Kvasir v2")
    _split_options(parser, "paper")


def _folder_options(parser: CommandParser) -> None:
    parser.add_argument(
        "root", type=Path, help="Folder with one folder per class, with train/ and val/ that contain class folders, or with images."
    )
    _out(parser)
    parser.add_argument(
        "--masks",
        type=Path | None,
        default=None,
        help="Folder with the masks: a.png, a_segmentation.png or a_mask.png for a.jpg. Where an image has several (a_mask.png, "
        "a_mask_1.png), their union is written to a folder beside the manifest.",
    )
    _name(parser, "the folder's name")
    _split_options(parser, None)


def _csv_options(parser: CommandParser) -> None:
    parser.add_argument(
        "file",
        type=Path,
        help="CSV or Parquet file with a column image, and optionally image_id, label, mask, group, split.",
    )
    _out(parser)
    parser.add_argument(
        "--classes",
        type=str | None,
        metavar="NAMES",
        default=None,
        help="Class names in order, separated by commas. Default: the sorted labels.",
    )
    parser.add_argument("--allow-unlabeled", action="store_true", help="Accept rows without a label.")
    _name(parser, "the file's name")
    _split_options(parser, None)


def _synthetic_options(parser: CommandParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, help="Folder to write to, or NAME.parquet to put the images into the folder NAME."
    )
    parser.add_argument("--n", type=Count, default=1000, help="Number of images.")
    parser.add_argument("--seed", type=Seed, default=0, help="Random seed of the drawings.")
    parser.add_argument("--size", type=DrawnSide, default=256, help="Side of the square images, in pixels.")
    parser.add_argument("--off-center", action="store_true", help="Move the lesions away from the center.")
    _name(parser, "drawn dermoscopy")
    _split_options(parser, "grouped", seed="--split-seed", keep=False)
    _overwrite(parser)


def _split_command_options(parser: CommandParser) -> None:
    parser.add_argument("manifest", type=Path, help="Manifest to split again.")
    _out(parser)
    _split_options(parser, "grouped")


def _check_options(parser: CommandParser) -> None:
    parser.add_argument("data", type=Path, help="Manifest, or folder with ISIC 2019, Kvasir v2 or class folders.")
    parser.add_argument("--json", action="store_true", help="Print the full report as JSON.")
    parser.add_argument("--all", action="store_true", help="List every item of every finding instead of the first few.")
    parser.add_argument("--workers", type=Parallel, default=min(4, os.cpu_count() or 1), help="Number of images to read at once.")


def _isic(options: Namespace) -> int:
    from medtokenbudget.data.readers import isic_manifest

    require_effect(options, options.masks != "none", "--masks exact or by-id", "mask_sources")
    sources = _names(options.mask_sources)
    manifest = isic_manifest(options.root, options.masks, sources, ignore_unlabeled=options.ignore_unlabeled, **_named(options))
    return _write(_resplit(manifest, options), options)


def _kvasir(options: Namespace) -> int:
    from medtokenbudget.data.readers import kvasir_manifest

    return _write(_resplit(kvasir_manifest(options.root, **_named(options)), options), options)


def _folder(options: Namespace) -> int:
    from medtokenbudget.data.readers import folder_manifest

    merged = options.out.with_name(f"{options.out.stem}-masks")
    manifest = folder_manifest(options.root, options.masks, name=options.name, merged=merged if options.masks else None)
    return _write(_resplit(manifest, options), options)


def _csv(options: Namespace) -> int:
    from medtokenbudget.data.readers import csv_manifest

    manifest = csv_manifest(options.file, _names(options.classes), allow_unlabeled=options.allow_unlabeled, name=options.name)
    return _write(_resplit(manifest, options), options)


def _check_split(options: Namespace, seed: str = "seed") -> None:
    """Reject options that the chosen split does not read."""
    require_effect(options, options.split == "kfold", "--split kfold", "folds", "fold")
    require_effect(options, options.split != "paper" or options.select > 0, "--select or another split than the paper's", seed)


def _synthetic(options: Namespace) -> int:
    _check_split(options, "split_seed")
    from medtokenbudget.data.manifest import Manifest
    from medtokenbudget.data.synthetic import Drawings, synthetic_manifest

    request = Drawings(n=options.n, seed=options.seed, size=options.size, off_center=options.off_center)
    out = synthetic_manifest(
        options.out,
        request,
        split=options.split or "grouped",
        folds=options.folds,
        fold=options.fold,
        select=options.select,
        split_seed=options.split_seed,
        workers=options.workers,
        overwrite=options.overwrite,
        **_named(options),
    )
    return _summarize(Manifest.read(out), out)


def _split(options: Namespace) -> int:
    from medtokenbudget.data.manifest import Manifest

    manifest = Manifest.read(options.manifest)
    if options.split == "paper" and manifest.source.startswith("isic") and manifest.split_rule.kind != "paper":
        raise RequestError(
            "The paper's split of ISIC needs all rows of the official CSV, which a manifest does not have. "
            "Run `mtb data isic ROOT --split paper` instead."
        )
    return _write(_resplit(manifest, options, again=True), options)


def _check(options: Namespace) -> int:
    from medtokenbudget.data.checks import check, to_text
    from medtokenbudget.data.readers import open_data

    report = check(open_data(options.data), workers=options.workers)
    if options.json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    else:
        print(to_text(report, limit=0 if options.all else 8))
        print(f"Next: {'fix the fatal problems and run the check again.' if report.fatal else _next(options.data)}")
    return 1 if report.fatal else 0


def _resplit(manifest: Manifest, options: Namespace, again: bool = False) -> Manifest:
    """Apply the requested split; the split of the data itself stays if it is the same one, or if none was requested."""
    from medtokenbudget.data.manifest import Manifest
    from medtokenbudget.data.splits import apply_split, check_request, cut_selection, keep_split

    _check_split(options)
    # Checked first, because finding duplicates below reads every image.
    if options.out.suffix != ".parquet":
        raise RequestError(f"--out must end in .parquet, got {options.out}.")
    check_request(options.split or "grouped", options.folds, options.fold, options.select, options.seed)
    if options.keep_split is not None and options.split == "paper":
        raise RequestError("--keep-split cannot be combined with the paper's split, which is the same for every manifest.")
    old = None if options.keep_split is None else Manifest.read(options.keep_split)
    came_with = manifest.split_rule.kind
    if options.split == came_with == "paper" or (options.split is None and came_with == "given"):
        require_effect(options, options.select > 0, "--select or --split", "seed")
        split = cut_selection(manifest, options.select, options.seed) if options.select or again else manifest
    else:
        split = apply_split(
            manifest,
            options.split or "grouped",
            folds=options.folds,
            fold=options.fold,
            select=options.select,
            seed=options.seed,
            workers=options.workers,
        )
    return split if old is None else keep_split(split, old)


def _write(manifest: Manifest, options: Namespace) -> int:
    return _summarize(manifest, manifest.write(options.out, options.overwrite))


def _summarize(manifest: Manifest, out: Path) -> int:
    from medtokenbudget.data.splits import balance_text

    counts = manifest.rows["split"].value_counts()
    parts = ", ".join(f"{counts[name]:,} {name}" for name in ("train", "select", "val") if name in counts)
    masks = int(manifest.rows["mask"].notna().sum())
    print(balance_text(manifest))
    print(f"Wrote {out}: {len(manifest):,} images ({parts}; {masks:,} with a mask). Next: mtb data check {out}")
    return 0


def _next(data: Path) -> str:
    return f"mtb extract {data} --store STORE" if data.suffix == ".parquet" else f"create a manifest of {data} with `mtb data`."


def _named(options: Namespace) -> dict[str, str]:
    """The given name as a keyword, or nothing so that the default of the source applies."""
    return {} if options.name is None else {"name": options.name}


def _names(value: str | None) -> list[str] | None:
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


COMMANDS: dict[str, tuple[str, Callable[[CommandParser], None], Callable[[Namespace], int]]] = {
    "isic": ("create a manifest of ISIC 2019 with the masks of ISIC 2018 and HAM10000", _isic_options, _isic),
    "kvasir": ("create a manifest of Kvasir v2", _kvasir_options, _kvasir),
    "folder": ("create a manifest of your own images, one folder per class", _folder_options, _folder),
    "csv": ("create a manifest of your own images, listed in a CSV file", _csv_options, _csv),
    "synthetic": ("draw dermoscopic images with masks and create a manifest of them", _synthetic_options, _synthetic),
    "split": ("split a manifest again", _split_command_options, _split),
    "check": ("find all problems of a data set", _check_options, _check),
}
EXAMPLES: dict[str, str] = {
    "isic": "data/isic --masks by-id --split grouped --out isic.parquet",
    "kvasir": "data/kvasir-dataset-v2 --out kvasir.parquet",
    "folder": "photos --masks photo-masks --out photos.parquet",
    "csv": "photos.csv --out photos.parquet",
    "synthetic": "--n 1000 --seed 0 --out drawn",
    "split": "isic.parquet --split kfold --folds 5 --fold 0 --out isic-fold0.parquet",
    "check": "isic.parquet",
}
