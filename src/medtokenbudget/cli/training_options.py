"""The options of a training on the command line: a preset, and every field of `TrainConfig` to change it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser, Namespace

from medtokenbudget.cli.parsing import add_config
from medtokenbudget.config import PRESETS, TrainConfig, preset, to_dict, train_config_from_dict
from medtokenbudget.errors import UnknownNameError
from medtokenbudget.files import dotted

if TYPE_CHECKING:
    from medtokenbudget.experiments.execution import Execution


def add_training(parser: ArgumentParser, arguments: list[str], default: str, **changes: Any) -> None:
    """`--preset` and the fields of `TrainConfig`, whose defaults are those of the preset named in `arguments`."""
    parser.add_argument("--preset", default=default, choices=sorted(PRESETS), help="Where the options below start from.")
    add_config(parser, TrainConfig)
    name = _named(arguments, default)
    if name not in PRESETS:
        raise UnknownNameError.of("preset", name, PRESETS)
    parser.set_defaults(dotted(to_dict(preset(name, **changes))))


def add_run(parser: ArgumentParser) -> None:
    """What a run is made from, and where it goes."""
    parser.add_argument("manifest", type=Path, help="The manifest that the store was made from.")
    parser.add_argument("--store", type=Path, required=True, help="The store of tokens.")
    parser.add_argument("--out", type=Path, required=True, help="The run directory.")


def add_engine(parser: ArgumentParser) -> None:
    """Where the units of a sweep run."""
    parser.add_argument("--engine", type=Literal["local", "ray"], default="local", help="Local processes, or a Ray cluster.")
    parser.add_argument("--address", type=str | None, default=None, help="Address of a running Ray cluster.")
    parser.add_argument("--jobs", type=int, default=0, help="Units at the same time; 0 takes one per core.")
    parser.add_argument("--only", type=Literal["all", "failed"], default="all", help="'failed': only what failed before.")


def execution(options: Namespace) -> Execution:
    """Where and how the units run, out of parsed options."""
    from medtokenbudget.experiments.execution import Execution

    return Execution(options.engine, options.jobs, options.only, options.address)


def training_config(options: Namespace) -> TrainConfig:
    """The training configuration out of parsed options."""
    plain = options.as_dict()
    return train_config_from_dict({name: plain[name] for name in to_dict(TrainConfig())})


def _named(arguments: list[str], default: str) -> str:
    for index, argument in enumerate(arguments):
        if argument.startswith("--preset="):
            return argument.split("=", 1)[1]
        if argument == "--preset" and index + 1 < len(arguments):
            return arguments[index + 1]
    return default
