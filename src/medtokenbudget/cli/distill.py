"""`mtb distill`: train a small backbone to imitate a large one."""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.cli.parsing import add_config, command_parser, pick
from medtokenbudget.config import BackboneConfig, Block, DistillConfig, Side

LICENSE = "as the teacher's and the images'"


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "distill",
        "Train a small vision transformer (the student) to reproduce the tokens of a large one (the teacher) on the training "
        "images of a manifest. Labels and masks are not used. Run the same command again to resume.",
        "mtb distill M.parquet --teacher vit_small_patch14_dinov2.lvd142m --weights teacher.safetensors --layer 5 --out small",
    )
    parser.add_argument("manifest", type=Path, help="Manifest created by `mtb data`.")
    parser.add_argument("--out", type=Path, required=True, help="Folder for the new backbone, to be used as --backbone FOLDER.")
    parser.add_argument("--teacher", type=str, default=BackboneConfig.name, help="Name of the teacher, a timm vision transformer.")
    parser.add_argument(
        "--weights",
        type=Path,
        default=None,
        help="Weights of the teacher (.safetensors). Default: download them from the Hugging Face Hub.",
    )
    parser.add_argument("--layer", type=Block, default=-1, help="Block of the teacher to imitate, counted from 0; -1 is the last.")
    parser.add_argument("--image-size", type=Side, default=224, help="Side of the square input image, in pixels.")
    parser.add_argument("--license", type=str, default=LICENSE, help="License to write on the model card.")
    add_config(parser, DistillConfig, "Student and training", first={"epochs", "device"})
    options = parser.parse_args(arguments)

    from medtokenbudget.data import Manifest
    from medtokenbudget.features.distill import distill

    teacher = BackboneConfig(options.teacher, options.weights, options.image_size, options.layer)
    out = distill(Manifest.read(options.manifest), teacher, pick(options, DistillConfig), options.out, options.license)
    print(f"Wrote the backbone {out}. Next: mtb extract MANIFEST --store STORE --backbone {out}")
    return 0
