"""`mtb distill`: a small backbone from a large one, on anybody's images."""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.cli.parsing import add_config, command_parser, pick
from medtokenbudget.config import BackboneConfig, DistillConfig


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "distill",
        "Train a small vision transformer to give a large one's patch and class tokens, on the training part of a manifest.",
        "mtb distill M.parquet --teacher vit_small_patch14_dinov2.lvd142m --weights teacher.safetensors --layer 5 --out small",
    )
    parser.add_argument(
        "manifest", type=Path, help="Manifest; its training images are learned from, its labels and masks are not read."
    )
    parser.add_argument("--out", type=Path, required=True, help="Folder of the new backbone; use it with --backbone FOLDER.")
    parser.add_argument("--teacher", type=str, default=BackboneConfig.name, help="The large backbone, any timm vision transformer.")
    parser.add_argument("--weights", type=Path, default=None, help="Its weights (safetensors); without it they come from the hub.")
    parser.add_argument("--layer", type=int, default=-1, help="Its block whose tokens are learned; -1 is the last.")
    parser.add_argument("--image_size", type=int, default=224, help="Side of the square image, in pixels.")
    parser.add_argument("--license", type=str, default="as the teacher's and the images'", help="License to write on the card.")
    add_config(parser, DistillConfig)
    options = parser.parse_args(arguments)

    from medtokenbudget.data import Manifest
    from medtokenbudget.features.distill import distill

    teacher = BackboneConfig(options.teacher, options.weights, options.image_size, options.layer)
    out = distill(Manifest.read(options.manifest), teacher, pick(options, DistillConfig), options.out, options.license)
    print(f"The backbone is in {out}. Use it: mtb extract MANIFEST --store S --backbone {out}")
    return 0
