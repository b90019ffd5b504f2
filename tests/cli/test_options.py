"""Options of commands: from words, from a file, from a preset; which were given; and how messages spell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from medtokenbudget.cli import COMMANDS, command, main
from medtokenbudget.cli.learn import Extract, Reproduce, Sweep, Train
from medtokenbudget.cli.options import Command, options, parse, spelled
from medtokenbudget.cli.use import Route
from medtokenbudget.config import BUDGET, TrainConfig, preset, to_dict
from medtokenbudget.errors import RequestError

REQUIRED = ["m.parquet", "--store", "s", "--out", "o"]


def parsed(words: list[str]) -> Train:
    """What `mtb train WORDS` is asked to do."""
    command = parse(Train, "train", words)
    return command


def test_a_budget_is_a_share_or_a_percentage() -> None:
    for text, value in {"30%": 0.3, "0.3": 0.3, "1": 1.0, "100%": 1.0, "12.5%": 0.125, "1e-1": 0.1}.items():
        assert options(Route)["budget"].read([text]) == pytest.approx(value, abs=1e-12)
    for text in ("30 %%", "nan", "inf", "a third", ""):
        with pytest.raises(ValueError, match=f"'{text}' is not a number"):
            options(Route)["budget"].read([text])
    for text in ("0", "101%", "-0.3"):
        with pytest.raises(RequestError, match=r"`selection_budget` must be above 0 and at most 1, got"):
            parsed([*REQUIRED, "--selection-budget", text])


def test_every_option_called_budget_takes_a_share_of_the_patches() -> None:
    budgets = {
        f"{name} {key}": option
        for name in COMMANDS
        for key, option in options(command(name)).items()
        if key.rsplit(".")[-1].rsplit("_")[-1] in ("budget", "budgets") and not key.startswith("losses.")
    }
    assert {"predict budget", "export budget", "extract budget", "sweep budgets", "train selection_budget"} <= budgets.keys()
    assert all(option.kind.limits is BUDGET for option in budgets.values())


@pytest.mark.parametrize("words", [["--image-size", "112"], ["--image_size", "112"], ["--image-size=112"], ["--image_size=112"]])
def test_options_are_accepted_with_hyphens_and_with_underscores(words: list[str]) -> None:
    command = parse(Extract, "extract", ["m.parquet", "--store", "s", *words])
    assert command.transformer.image_size == 112
    assert "image_size" in command.given


def test_the_options_of_a_training_are_its_configuration() -> None:
    assert parsed(REQUIRED).config == preset("lesion-first")
    assert parsed([*REQUIRED, "--preset", "paper"]).config == TrainConfig()
    changed = parsed(
        [*REQUIRED, "--budgets", "10%", "0.5", "--lats.signals", "norm", "--losses.lesion", "0", "--context.turns", "no"]
    )
    config = changed.config
    assert (config.budgets, config.lats.signals, config.losses.lesion, config.context.turns) == ((0.1, 0.5), ("norm",), 0.0, False)
    assert config.given == {"budgets", "lats.signals", "losses.lesion", "context.turns"}


@pytest.mark.parametrize(("command", "name"), [(Sweep, "sweep"), (Reproduce, "reproduce")])
def test_commands_of_many_trainings_have_seeds_of_their_own(command: type[Command], name: str) -> None:
    assert "seed" not in options(command)
    made = parse(command, name, REQUIRED)
    assert isinstance(made, (Sweep, Reproduce))
    assert made.config == (preset("lesion-first") if name == "sweep" else preset("paper", protocol="paper"))
    assert made.config.given == frozenset()


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_options_come_from_a_file_and_the_command_line_overrides_them(tmp_path: Path) -> None:
    text = (
        "preset: paper\nstore: s\nout: o\nmanifest: x\nepochs: 50\nbatch-size: 32\nlr: 1e-4\nlats: {hidden: 8}\nbudgets: [30%, 0.5]"
    )
    file = write(tmp_path / "options.yaml", text)
    command = parsed(["m.parquet", "--config", file, "--batch-size", "16"])
    config = command.config
    assert (command.store, command.manifest) == (Path("s"), Path("m.parquet"))
    assert (config.recipe, config.batch_size, config.lr, config.lats.hidden) == ("joint", 16, 1e-4, 8)
    assert config.budgets == (0.3, 0.5)
    assert config.given == {"batch_size", "lr", "lats.hidden", "budgets"}, "what the file repeats of the preset was not chosen"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"epoch: 3", "FILE: Unknown option 'epoch'. Did you mean 'epochs'?"),
        (b"epochs: many", "FILE: epochs cannot be read: 'many' is not a whole number."),
        (b"head: nothing", "FILE: head cannot be read: 'nothing' is not one of auto, none."),
        (b"epochs: null", "FILE: epochs has no value. Give it one, or leave it out."),
        (b"router: {minimum: 0}", "--router.minimum must be at least 1, got 0."),
        (b"{a: [", "FILE is neither YAML nor JSON"),
        (b"\xff\xfe", "FILE is neither YAML nor JSON"),
        (b"[" * 5_000, "FILE is neither YAML nor JSON"),
        (b"a: !!python/object/apply:os.system [x]\n", "FILE is neither YAML nor JSON"),
        (b"- 1\n- 2\n", "FILE has no options"),
        (b"", "FILE has no options"),
        (None, "Cannot read the configuration file FILE: No such file"),
    ],
)
def test_a_wrong_file_of_options_is_named(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.yaml"
    if content is not None:
        file.write_bytes(content)
    assert main(["train", *REQUIRED, "--config", str(file)]) == 2
    assert message.replace("FILE", str(file)) in capsys.readouterr().err


def test_printed_options_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *REQUIRED, "--preset", "paper", "--lats.hidden", "8", "--budgets", "30%", "--print-config"]) == 0
    command = parsed(["--config", write(tmp_path / "options.yaml", capsys.readouterr().out)])
    wanted = to_dict(TrainConfig()) | {"budgets": [0.3]}
    wanted["lats"]["hidden"] = 8
    assert to_dict(command.config) == wanted
    assert (command.manifest, command.out) == (Path("m.parquet"), Path("o"))
    assert command.config.given == {"lats.hidden", "budgets"}


def test_options_are_printed_without_what_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert main([*name.split(), "--print-config"]) == 0
    assert "manifest: null" in capsys.readouterr().out


def test_a_flag_and_a_number_in_a_file_arrive_exactly(tmp_path: Path) -> None:
    file = write(tmp_path / "options.json", '{"images": ["a", "b"], "out": "o", "overlay": true, "budget": 0.123456789012}')
    for words in ([], ["--overlay"]):
        command = parse(Route, "route", ["--config", file, *words])
        assert command is not None
        asked = command.routing
        assert (command.images, asked.overlay, asked.tokens, asked.budget) == (("a", "b"), True, False, 0.123456789012)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("Lower `lr`, or extract again.", "Lower --lr, or extract again."),
        ('Use `preset="paper"` with `losses.lesion=0`.', "Use --preset paper with --losses.lesion 0."),
        ("Drop `batch_size` or set `context.turns=False`.", "Drop --batch-size or set --context.turns false."),
        ("Split `manifest` again (`mtb data split`, `select`).", "Split MANIFEST again (`mtb data split`, `select`)."),
    ],
)
def test_messages_spell_settings_as_options_of_the_running_command(message: str, text: str) -> None:
    assert spelled(message, options(Train)) == text
    assert spelled("Set `overlay=True`.", options(Route)) == "Set --overlay."
