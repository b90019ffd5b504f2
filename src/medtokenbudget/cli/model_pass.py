"""How a model runs over many images, as `mtb predict` and `mtb route` ask for it."""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.cli.parsing import CommandParser
from medtokenbudget.config import Count, Parallel


def add_pass(parser: CommandParser) -> None:
    """Add --weights, --device, --batch-size and --workers."""
    parser.add_argument(
        "--weights",
        type=Path | None,
        default=None,
        help="Weights of the backbone, if they are not where the model expects them.",
    )
    parser.add_argument("--device", default="auto", help="Device to run on: auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    parser.add_argument("--batch_size", type=Count, default=16, help="Images per forward pass.")
    parser.add_argument("--workers", type=Parallel, default=2, help="Threads that decode images.")
