"""The options of a training run on the command line: a preset, and every field of `TrainConfig` to change it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from medtokenbudget.cli import config_file
from medtokenbudget.cli.parsing import CommandParser, add_config, add_part, require_effect
from medtokenbudget.config import (
    PRESETS,
    ContextConfig,
    CurriculumConfig,
    LATSConfig,
    LossWeights,
    Parallel,
    RouterConfig,
    TrainConfig,
    preset,
    to_dict,
    train_config_from_dict,
)
from medtokenbudget.files import dotted

FIRST = ("epochs", "budgets", "seed", "device")
"""Fields of `TrainConfig` that the help shows before all groups."""


def add_training(parser: CommandParser, arguments: list[str], default: str, skip: Collection[str] = (), **changes: Any) -> None:
    """Add `--preset` and the fields of `TrainConfig`, with the defaults of the preset that `arguments` name.

    Args:
        parser: The parser of a command.
        arguments: The words after the command.
        default: The preset to use if none is named.
        skip: Fields that are no options of this command and keep the value of the preset.
        **changes: Fields of the preset whose default is another one for this command.
    """
    parser.add_argument("--preset", default=default, choices=sorted(PRESETS), help="Settings that the options below change.")
    add_config(parser, TrainConfig, "Training", first=FIRST, skip={"given", *skip})
    add_part(parser, ContextConfig, "context", "Context scorer")
    add_part(parser, LATSConfig, "lats", "LATS scorer")
    add_part(parser, RouterConfig, "router", "Router")
    add_part(parser, CurriculumConfig, "curriculum", "Budget curriculum of the joint recipe")
    add_part(parser, LossWeights, "losses", "Losses")
    name = _named(arguments)
    # An unknown name is rejected when the options are parsed.
    parser.set_defaults(**dotted(to_dict(preset(name if name in PRESETS else default, **changes))))


def add_run(parser: CommandParser) -> None:
    """Add what a run is made from and where it goes."""
    parser.add_argument("manifest", type=Path, help="Manifest whose images are in the store.")
    parser.add_argument("--store", type=Path, required=True, help="Store of tokens, written by `mtb extract`.")
    parser.add_argument("--out", type=Path, required=True, help="Run directory to write.")


def add_engine(parser: CommandParser) -> None:
    """Add where and how the units of a sweep run."""
    section = parser.section("Running")
    section.add_argument(
        "--jobs", type=Parallel, default=0, help="Units (a method with one seed) to run at the same time; 0 runs one per core."
    )
    section.add_argument("--engine", type=Literal["local", "ray"], default="local", help="Local processes or a Ray cluster.")
    section.add_argument("--address", type=str | None, default=None, help="Address of a running Ray cluster: auto or host:port.")


def check_engine(options: Namespace) -> None:
    """Reject options of the other engine: a cluster decides by itself how many units run at the same time."""
    require_effect(options, options.engine == "ray", "--engine ray", "address")
    require_effect(options, options.engine == "local", "--engine local", "jobs")


def training_config(options: Namespace) -> TrainConfig:
    """Build the training configuration from parsed options; it knows which of them were given."""
    values: dict[str, Any] = {}
    names = dotted(to_dict(TrainConfig()))
    for name in names:
        *part, field = name.split(".")
        (values.setdefault(part[0], {}) if part else values)[field] = getattr(options, name)
    return replace(train_config_from_dict(values), given=options.given & names.keys())


def _named(arguments: list[str]) -> str | None:
    """The preset that the command line or else its configuration file names, before anything is parsed."""
    file = config_file.named(arguments)
    named = config_file.value_of("--preset", arguments)
    return named if named is not None or file is None else config_file.read(file).get("preset")
