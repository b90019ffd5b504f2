"""Every number has its range, which is checked in one place before work starts, from Python as from the command line."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import medtokenbudget as mtb
from medtokenbudget.cli import COMMANDS, command, main
from medtokenbudget.cli.options import Command, options
from medtokenbudget.config import BackboneConfig, Kind, Range, RouterConfig, Settings, TrainConfig, preset, to_dict
from medtokenbudget.data import Drawings, apply_split, synthetic_manifest
from medtokenbudget.errors import RequestError
from medtokenbudget.files import dotted
from tests.conftest import REPOSITORY
from tests.drawn import Drawn, quick


def _classes() -> list[type]:
    """Every dataclass of the package that holds settings."""
    found: set[type] = set()
    for module in pkgutil.walk_packages(mtb.__path__, "medtokenbudget."):
        if not module.name.endswith("__main__"):
            for entry in vars(importlib.import_module(module.name)).values():
                if (
                    isinstance(entry, type)
                    and is_dataclass(entry)
                    and not issubclass(entry, Command)
                    and (issubclass(entry, Settings) or entry.__name__.endswith("Config"))
                ):
                    found.add(entry)
    return sorted(found, key=lambda entry: entry.__name__)


CLASSES = _classes()


def _kind(config: type, name: str) -> Kind:
    return Kind.of(get_type_hints(config, include_extras=True)[name])


NUMBERS = [(config, entry) for config in CLASSES for entry in fields(config) if _kind(config, entry.name).type in (int, float)]


def _outside(kind: type, limits: Range) -> list[Any]:
    """Values just outside a range, and what is no number of this kind."""
    step = 1 if kind is int else 1e-6
    wrong: list[Any] = [kind(limits.low) if limits.above else limits.low - step, math.nan, math.inf, -math.inf, "3", True]
    if limits.high < math.inf:
        wrong.append(kind(limits.high) if limits.below else limits.high + step)
    if limits.odd:
        wrong.append(4)
    if kind is int:
        wrong.append(limits.low + 0.5)
    return wrong


def _required(config: type) -> dict[str, Any]:
    return {entry.name: 64 for entry in fields(config) if entry.default is MISSING and entry.default_factory is MISSING}


def test_classes_of_settings_check_their_values() -> None:
    assert {"TrainConfig", "ExtractConfig", "BackboneConfig", "RouteConfig", "ServeConfig", "Execution"} <= {
        config.__name__ for config in CLASSES
    }
    assert [config.__name__ for config in CLASSES if not issubclass(config, Settings)] == []


@pytest.mark.parametrize(("config", "entry"), NUMBERS, ids=[f"{config.__name__}.{entry.name}" for config, entry in NUMBERS])
def test_a_number_just_outside_its_range_is_refused_by_the_name_of_its_field(config: type[Settings], entry: Field[Any]) -> None:
    allowed = _kind(config, entry.name)
    kind, limits, optional, several = allowed.type, allowed.limits, allowed.optional, allowed.several
    assert limits is not None, f"{config.__name__}.{entry.name} needs a range"
    for value in [*_outside(kind, limits), *([] if optional else [None])]:
        with pytest.raises(RequestError, match=rf"^`{config.prefix}{entry.name}` must be "):
            config(**{**_required(config), entry.name: (value,) if several else value})
    edge: Any = limits.low + (0 if not limits.above else 1 if kind is int else 1e-9)
    config(**{**_required(config), entry.name: (kind(edge),) if several else kind(edge)})


def test_many_faults_are_told_at_once() -> None:
    with pytest.raises(RequestError, match=r"`epochs` must be at least 1, got 0\. `lr` must be above 0, got -1\.") as raised:
        TrainConfig(epochs=0, lr=-1)
    assert "--" not in str(raised.value)
    with pytest.raises(RequestError, match=r"Unknown recipe 'jiont'. Did you mean 'joint'\?"):
        TrainConfig(recipe="jiont")
    with pytest.raises(RequestError, match="`lats` must be a LATSConfig, got None"):
        TrainConfig(lats=None)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_number_on_the_command_line_has_a_range(name: str) -> None:
    for option in options(command(name)).values():
        if option.kind.type in (int, float):
            assert option.kind.limits is not None, f"mtb {name} {option.spelling}"


REFUSED = {
    "train M --store S --out x --clip -1": "--clip must be above 0, got -1.0.",
    "train M --store S --out x --lr nan": "Error parsing --lr: 'nan' is not a number.",
    "train M --store S --out x --selection-fraction 1": "--selection-fraction must be above 0 and below 1, got 1.0.",
    "train M --store S --out x --router.minimum 9999": "router.minimum must be at most 100, the patches of an image",
    "extract M --store x --backbone embedded --image-size -224": "--image-size must be at least 1",
    "extract M --store x --backbone embedded --threads 99999": "--threads must be at least 0 and at most 1024, got 99999.",
    "extract M --store x --backbone embedded --crops 0": "--crops must be at least 1, got 0.",
    "extract M --store x --backbone embedded --shards 3": "I/N",
    "extract M --store x --backbone embedded --shards 4/2": "4/2 does not exist",
    "extract M --store x --backbone embedded --budget 0.3": "--budget is only used with --route",
    "extract M --store x --weights nowhere.safetensors": "nowhere.safetensors do not exist",
    "extract M --store x --backbone embedded --crops 1": "--crops only matters with --views off-center or --views augmented.",
    "extract M --store x --backbone embedded --view-seed 3": "--view-seed only matters with --views off-center or --views",
    "extract M --store x --backbone embedded --address auto": "--address only matters with --engine ray.",
    "predict IMAGE --model MODEL --out x --tokens-dtype fp32": "--tokens-dtype only matters with --tokens.",
    "route IMAGE --out x --tokens-dtype fp32": "--tokens-dtype only matters with --tokens.",
    "route IMAGE --out x --address auto": "--address only matters with --engine ray.",
    "route IMAGE --out x --engine ray --jobs 3": "--jobs only matters with --engine local.",
    "export MODEL --format hub --budget 0.3 --graph whole --out x": "--budget and --graph only matter with --format onnx.",
    "export MODEL --format web --selector lats --out x": "--selector only matters with --format onnx.",
    "export MODEL --push someone/router --out x": "--push only matters with --format hub.",
    "sweep M --store S --out x --address auto": "--address only matters with --engine ray.",
    "sweep M --store S --out x --engine ray --jobs 3": "--jobs only matters with --engine local.",
    "reproduce M --store S --out x --address auto": "--address only matters with --engine ray.",
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_option_out_of_range_or_without_effect_is_refused_and_nothing_is_written(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"M": str(drawn.manifest_path), "S": str(drawn.store_path)}
    assert main([places.get(word, word) for word in words.split()]) == 2
    assert REFUSED[words] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_functions_check_their_numbers_like_settings(drawn: Drawn, tmp_path: Path) -> None:
    paths = drawn.manifest_path, drawn.store_path, tmp_path / "run"
    for words, call in {
        "`jobs` must be at least 0 and at most 1024, got -1": lambda: mtb.sweep(*paths, ["center"], jobs=-1),
        "`seeds` must be at least 0": lambda: mtb.sweep(*paths, ["center"], seeds=[-3]),
        "`budgets` must be above 0 and at most 1, got 1.5": lambda: mtb.sweep(*paths, ["center"], budgets=[1.5]),
        "router.minimum must be at most 100": lambda: mtb.train(*paths, preset("lesion-first", router=RouterConfig(minimum=101))),
        "`image_size` must be at least 1": lambda: mtb.extract(drawn.manifest, tmp_path / "s", BackboneConfig(image_size=-224)),
        "`threads` must be at least 0": lambda: mtb.extract(drawn.manifest, tmp_path / "s", threads=-1),
        "`select` must be at least 0 and below 1": lambda: apply_split(drawn.manifest, "grouped", select=math.nan),
        "`workers` must be at least 0": lambda: synthetic_manifest(tmp_path / "drawn", Drawings(4), workers=-1),
        "`clip` must be above 0": lambda: quick("paper", clip=0.0),
    }.items():
        with pytest.raises(RequestError, match=words):
            call()
    assert list(tmp_path.iterdir()) == []


def test_the_settings_on_the_page_of_differences_are_those_of_the_preset_paper() -> None:
    page = (REPOSITORY / "docs" / "differences.md").read_text(encoding="utf-8")
    stated = re.findall(r"`([a-z_.]+) = ([^`]+)`", page)
    values = dotted(to_dict(preset("paper")))
    assert len(stated) >= 20
    assert {name: values[name] for name, _ in stated} == {name: float(value) for name, value in stated}
