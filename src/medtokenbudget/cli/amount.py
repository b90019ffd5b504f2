"""How much is kept, as the commands that use a model ask for it: a token budget, or a calibrated promise about the lesion."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from medtokenbudget.cli.parsing import CommandParser
from medtokenbudget.cli.values import share
from medtokenbudget.config import Budget
from medtokenbudget.errors import RequestError

if TYPE_CHECKING:
    from medtokenbudget.model import Guarantee, MedTokenBudget


def add_amount(parser: CommandParser) -> None:
    """Add --budget, --retention and --coverage."""
    parser.add_argument(
        "--budget", type=Budget | None, default=None, help="Share of the patches to keep, such as 0.3 or 30%. Default: 0.3."
    )
    parser.add_argument(
        "--retention",
        type=share,
        default=None,
        help="Instead of a budget: keep this share of the lesion, for a model that `mtb calibrate` has calibrated for it.",
    )
    parser.add_argument(
        "--coverage",
        type=share,
        default=None,
        help="With --retention: the calibrated share of images that keep at least so much. Default: the promise on average.",
    )


def amount_of(options: argparse.Namespace, model: MedTokenBudget, selector: str | None) -> float | Guarantee:
    """The budget or the guarantee that the options ask for."""
    if options.retention is None:
        if options.coverage is not None:
            raise RequestError("--coverage belongs to --retention: it is the share of the images that keep at least so much.")
        return model.budget(options.budget)
    if options.budget is not None:
        raise RequestError("--budget and --retention exclude each other: a guarantee decides for each image how much is kept.")
    return model.guarantee(options.retention, options.coverage, selector)
