"""Names of methods and what they stand for; a setting that the user gives reaches every method that reads it, or is refused."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.config import Range, TrainConfig, preset, settings_of, with_settings
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.routing import create_selector
from medtokenbudget.runs.method import FIXED, LEARNED, Method, method_of, unused_settings
from medtokenbudget.runs.run import Run
from medtokenbudget.runs.studies import Unit
from medtokenbudget.runs.sweep import config_of
from tests.drawn import Drawn, fit, quick


def another(value: Any, kind: Any) -> Any:
    """A valid value of a field that is not `value`."""
    if get_origin(kind) is Annotated:
        limits = next(entry for entry in get_args(kind) if isinstance(entry, Range))
        if get_args(kind)[0] is int:
            return value + 2 if limits.odd else value + 1
        return value / 2 if value else min(0.5, limits.high / 2 if limits.high < math.inf else 0.5)
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != value)
    if kind is bool:
        return not value
    if get_origin(kind) is tuple:
        return value[:-1]
    return "cpu"


def kinds(config: type, prefix: str = "") -> dict[str, Any]:
    """Type annotation of every setting by dotted name."""
    hints = get_type_hints(config, include_extras=True)
    found: dict[str, Any] = {}
    for entry in fields(config):
        kind = hints[entry.name]
        if is_dataclass(kind):
            found |= kinds(kind, f"{entry.name}.")
        elif entry.name != "given":
            found[f"{prefix}{entry.name}"] = kind
    return found


KINDS = kinds(TrainConfig)
METHODS = [
    *(
        Method(name, variant=text)
        for name in ("lats", "context")
        for text, variant in LEARNED.items()
        if variant.only in (None, name)
    ),
    *(Method(name, variant=variant) for name in ("cropr", "dynamicvit", "query-pool") for variant in ("", "lesion-first")),
    *(Method("center", variant=variant) for variant in FIXED),
]


def changed(base: TrainConfig, name: str) -> TrainConfig:
    return with_settings(base, {name: another(settings_of(base)[name], KINDS[name]), "given": frozenset({name})})


@pytest.mark.parametrize("base", ["paper", "lesion-first"])
@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("scout.")])
def test_a_setting_that_was_given_is_in_the_training_of_each_method_or_the_request_is_refused(name: str, base: str) -> None:
    # Another value, and the preset's own: a choice that is its default still reaches the other recipe.
    for config in (changed(preset(base), name), replace(preset(base), given=frozenset({name}))):
        applied = [method for method in METHODS if name not in unused_settings([method], config)]
        assert applied, "an option that no method reads is no option"
        for method in applied:
            trained = settings_of(method.config(config))
            assert trained[name] == settings_of(config)[name], f"{method} neither uses {name} nor refuses it"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, TrainConfig]:
    """The settings that each method would be trained with; nothing is trained."""
    configs: dict[str, TrainConfig] = {}

    def record(run: Run, units: list[Unit], *_: object) -> None:
        configs.update({str(unit.method): config_of(run, unit) for unit in units})
        raise RequestError("enough")

    monkeypatch.setattr("medtokenbudget.runs.sweep._run_units", record)
    return configs


@pytest.mark.parametrize("name", KINDS)
def test_a_sweep_of_both_recipes_trains_with_what_was_given_or_names_it(
    drawn: Drawn, tmp_path: Path, trained: dict[str, TrainConfig], name: str
) -> None:
    methods, config = ["lats", "lats:lesion-first", "center"], changed(preset("lesion-first"), name)
    refused = name in unused_settings([Method.parse(text) for text in methods], config)
    with pytest.raises(RequestError, match=name if refused else "enough"):
        mtb.sweep(drawn.manifest_path, drawn.store_path, tmp_path, methods, config=config)
    assert bool(trained) is not refused
    if not refused:
        reading = {text for text in methods if name in Method.parse(text).reads(config)}
        fixing = {"patches": "lats"} | dict.fromkeys(("recipe", "protocol", "selection_metric"), "lats:lesion-first")
        wanted = settings_of(config)[name]
        assert {text for text in reading if settings_of(trained[text])[name] == wanted} == reading - {fixing.get(name)}


def test_what_was_given_on_the_command_line_reaches_every_method(
    drawn: Drawn, tmp_path: Path, trained: dict[str, TrainConfig]
) -> None:
    paths = [str(drawn.manifest_path), "--store", str(drawn.store_path), "--out", str(tmp_path)]
    given = ["--lr", "5e-5", "--class-balance", "loss", "--epochs", "8"]
    assert main(["sweep", *paths, "--methods", "lats", "lats:lesion-first", *given]) == 2
    for config in trained.values():
        assert (config.lr, config.class_balance, config.epochs) == (5e-5, "loss", 8)
    assert (trained["lats"].min_steps, trained["lats:lesion-first"].min_steps) == (0, 1000), "the preset decides the rest"
    (tmp_path / "options.yaml").write_text("lr: 0.00005\nepochs: 8\n")
    assert main(["sweep", *paths, "--methods", "lats", "--config", str(tmp_path / "options.yaml")]) == 2
    assert trained["lats"].lr == 5e-5
    assert trained["lats"].epochs == 50, "a file may list every option: what equals the default does not count"


@pytest.mark.parametrize(
    ("method", "setting", "value"),
    [
        ("lats:fixed-0.5", "curriculum.start", 0.3),
        ("lats:mask-free", "losses.lesion", 2.0),
        ("lats:lesion-first-raster", "lats.neighborhood", "grid4"),
        ("lats:lesion-first", "selection_metric", "accuracy"),
        ("context:lesion-first", "patches", 7),
        ("center", "epochs", 3),
        ("lats", "head_epochs", 3),
        ("no-pruning", "precision", "bf16"),
    ],
)
def test_a_setting_that_a_method_fixes_or_ignores_is_refused_before_anything_is_trained(
    drawn: Drawn, tmp_path: Path, method: str, setting: str, value: object
) -> None:
    config = with_settings(preset("paper" if ":lesion" not in method else "lesion-first"), {setting: value})
    with pytest.raises(RequestError, match=rf"No method of this run \({method}\) uses {setting} = "):
        mtb.sweep(drawn.manifest_path, drawn.store_path, tmp_path / "run", [method], config=config, jobs=1)
    assert not (tmp_path / "run").exists()


def test_seeds_and_budgets_come_from_the_settings_unless_they_are_given(drawn: Drawn, tmp_path: Path) -> None:
    paths = drawn.manifest_path, drawn.store_path
    run = mtb.sweep(*paths, tmp_path / "a", ["center"], config=quick("paper", "center", seed=7, budgets=(0.3,)), jobs=1)
    assert (set(run.results["seed"]), set(run.results["budget"])) == ({7}, {0.3})
    with pytest.raises(RequestError, match="uses seed = 7"):
        mtb.sweep(*paths, tmp_path / "b", ["center"], seeds=[1], config=quick("paper", "center", seed=7))
    with pytest.raises(RequestError, match="budgets were given twice"):
        mtb.sweep(*paths, tmp_path / "b", ["center"], budgets=[0.5], config=quick("paper", "center", budgets=(0.3,)))
    with pytest.raises(RequestError, match=r"uses seed = 7, budgets = \(0.35,\)"):
        mtb.reproduce(*paths, tmp_path / "b", "subset", quick("paper", "center", seed=7, budgets=(0.35,)))
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        *("lats", "lats:lesion-first", "context", "context:lesion-first", "cropr:lesion-first", "dynamicvit", "center"),
        *("sparselearn:lesion-first", "query-pool:lesion-first", "abmil-attention:lesion-first", "random:epoch-matched"),
    ],
)
def test_settings_that_are_refused_change_nothing(drawn: Drawn, text: str) -> None:
    method = Method.parse(text)
    base = quick("lesion-first" if "lesion-first" in text else "paper", text, budgets=(0.3, 0.5))
    # A head without a learned selector chooses no epoch; what is held out for that only changes the order of its images.
    order = () if method.learned else ("protocol", "selection_fraction", "selection_metric")
    ignored = [name for name in KINDS if name not in method.reads(base) and name not in order]
    assert ignored
    other = base
    for name in ignored:
        other = changed(other, name)
    selector = method.selector if method.learned else create_selector(method.selector)
    torch.set_num_threads(1)
    first, second = (fit(drawn, method.config(config), selector, method.head) for config in (base, other))
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


@pytest.mark.parametrize("base", ["paper", "lesion-first"])
def test_a_name_means_the_same_recipe_whatever_the_settings_of_the_run(base: str) -> None:
    assert Method.parse("lats").config(preset(base)) == preset("paper")
    assert Method.parse("lats:lesion-first").config(preset(base)) == preset("lesion-first")
    assert Method.parse("lats:mask-free").config(preset(base)).losses.lesion == 0
    changed = preset(base, lr=0.5)
    assert method_of("lats", changed).config(changed) == changed, "the run's own recipe keeps the options that were typed"
    short = Method.parse("lats:lesion-first").config(quick(base, epochs=5))
    assert (short.epochs, short.min_steps, short.lats.hidden, short.lats.neighborhood) == (5, 0, 16, "grid8")


@pytest.mark.parametrize("text", ["lats", "center", "lats:lesion-first", "lats:no-norm", "random:matched"])
def test_the_text_of_a_method_comes_back(text: str) -> None:
    assert str(Method.parse(text)) == text
    assert Method.parse(f"{text.partition(':')[0]}+mlp") == Method(text.partition(":")[0])


def test_an_ablation_uses_the_training_of_its_selector() -> None:
    method = Method.parse("lats:no-norm")
    assert (method.ablation, method.trained_as) == ("no-norm", Method("lats"))
    assert method.config(preset("paper")) == preset("paper")
    assert Method.parse("lats:mask-free").trained_as == Method.parse("lats:mask-free")


def test_what_is_not_a_method_or_a_variant_is_refused_with_the_nearest_name() -> None:
    for text in ("", ":x", "+mlp", "lats+", "lats+:lesion-first"):
        with pytest.raises(RequestError, match="is not a method"):
            Method.parse(text)
    with pytest.raises(UnknownNameError, match="Did you mean 'mask-free'"):
        Method.parse("lats:maskfree")
    with pytest.raises(UnknownNameError, match="variant of center"):
        Method.parse("center:keys")
