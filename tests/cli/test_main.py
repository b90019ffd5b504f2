"""The command `mtb` itself: quick to answer, exact about what was wrong, with help that a newcomer can read."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from medtokenbudget import __version__
from medtokenbudget.cli import COMMANDS, command, main
from medtokenbudget.cli.learn import training_config
from medtokenbudget.cli.options import CommandParser, Kind, budget, command_parser, parser_of
from medtokenbudget.cli.show import all_parsers, script
from medtokenbudget.config import TrainConfig, preset, to_dict
from medtokenbudget.errors import RequestError
from tests.conftest import REPOSITORY

PARSERS = dict(all_parsers())
NOISE = re.compile(r"<class|Optional|Literal|Path\(|Posix|\bNone\b|\bnull\b|\[\]|['\"]\]|NoneType|typing|tuple|Annotated|Traceback")


def needed(parser: CommandParser) -> list[str]:
    """Words that satisfy everything a command requires."""
    words: list[str] = []
    for action in parser.options().values():
        if action.option_strings and action.required:
            words += [
                action.option_strings[0],
                "0.5" if isinstance(action.type, Kind) and "share" in action.type.allowed else "some.parquet",
            ]
        elif not action.option_strings and action.nargs in (None, "+"):
            words.append(action.type.choices[0] if isinstance(action.type, Kind) and action.type.choices else "some.parquet")
    return words


def test_help_and_import_load_nothing_heavy() -> None:
    code = (
        "import sys, medtokenbudget, medtokenbudget.cli as c; c.main(['--help']);"
        "heavy = {'torch', 'numpy', 'pandas', 'timm', 'matplotlib', 'yaml'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_the_help_of_every_command_loads_nothing_heavy() -> None:
    """One process for all of them: `all_parsers` imports every command and builds its options."""
    code = (
        "import sys; from medtokenbudget.cli.show import all_parsers\n"
        "for _, parser in all_parsers(): parser.format_help()\n"
        "print({'torch', 'numpy', 'pandas', 'timm', 'matplotlib'} & set(sys.modules) or 'light')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "light", done.stdout + done.stderr


@pytest.mark.parametrize("name", PARSERS)
def test_the_help_of_a_command_starts_with_usage_and_example_and_has_no_types_of_the_language(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"Usage: mtb {name} ")
    assert "\nExample:\n  " in told
    assert f"mtb {name} " in told.split("Example:\n")[1].splitlines()[0]
    assert NOISE.search(told) is None, NOISE.search(told)
    assert not re.search(r"--[\w.]*_", told), "options are shown with hyphens"
    assert told.rstrip().endswith("Show this help and exit.")
    assert told.endswith("\n")
    assert not [line for line in told.splitlines() if len(line) > 130]


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_has_a_help_text_that_is_a_sentence(name: str) -> None:
    options = PARSERS[name].options()
    assert options
    for dest, action in options.items():
        assert action.help, f"mtb {name}: {dest} has no help"
        assert len(action.help.split()) > 1, f"{dest}: {action.help}"
        assert action.help.rstrip(")").endswith("."), f"{dest}: {action.help}"


def test_the_help_shows_the_options_that_people_need_first_and_then_groups() -> None:
    told = PARSERS["train"].format_help()
    headings = re.findall(r"^(\S.*):$", told, flags=re.MULTILINE)
    assert headings == [
        "Example",
        "Arguments",
        "Options",
        "Training",
        "Context scorer",
        "LATS scorer",
        "Router",
        "Budget curriculum of the joint recipe",
        "Losses",
        "General",
    ]
    first = told.split("\nOptions:\n")[1].split("\n\n")[0]
    assert re.findall(r"^  (--\S+)", first, flags=re.MULTILINE) == [
        "--store",
        "--out",
        "--head",
        "--selector",
        "--preset",
        "--epochs",
        "--seed",
        "--device",
        "--budgets",
    ]


@pytest.mark.parametrize("name", PARSERS)
def test_the_help_shows_required_options_before_all_others(name: str) -> None:
    required = [
        action.option_strings[0] for action in PARSERS[name].options().values() if action.option_strings and action.required
    ]
    shown = re.findall(r"^  (--\S+)", PARSERS[name].format_help(), flags=re.MULTILINE)
    assert shown[: len(required)] == required


def test_the_help_shows_lists_without_brackets_and_the_defaults_of_the_preset() -> None:
    plain = " ".join(PARSERS["train"].format_help().split())
    assert "(default: 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1)" in plain
    assert "(default: attention norm contrast)" in plain
    assert "together with the joint recipe. (default: 8)" in plain
    paper = " ".join(parser_of(command("train"), ["--preset", "paper"]).format_help().split())
    assert "together with the joint recipe. (default: 50)" in paper


@pytest.mark.parametrize("name", PARSERS)
def test_a_value_that_does_not_parse_is_named_with_its_option_and_what_is_allowed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = 0
    for action in PARSERS[name].options().values():
        kind, label = action.type, action.option_strings[0] if action.option_strings else str(action.metavar)
        if action.nargs == 0:
            words, message = [f"{label}=maybe"], f"Option {label} takes no value."
        else:
            assert isinstance(kind, Kind)
            if kind.allowed == "text" or (kind.allowed == "a path" and not action.option_strings):
                continue
            wrong = "" if kind.allowed == "a path" else "no-such-value"
            words = [label, wrong] if action.option_strings else [wrong]
            message = f"{label} cannot be '{wrong}'. Use {kind.allowed}."
        required = needed(PARSERS[name]) if action.option_strings else []
        assert main([*name.split(), *required, *words]) == 2, label
        told = capsys.readouterr().err
        assert message in told
        assert f"Run `mtb {name} --help`" in told
        assert NOISE.search(told) is None, told
        tried += 1
    assert tried


@pytest.mark.parametrize(
    ("text", "value"), [("30%", 0.3), ("0.3", 0.3), ("1", 1.0), ("100%", 1.0), ("12.5%", 0.125), (".5", 0.5), ("1e-1", 0.1)]
)
def test_a_budget_is_a_share_or_a_percentage(text: str, value: float) -> None:
    assert budget(text) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("text", ["0", "0%", "101%", "-0.3", "30 %%", "nan", "inf", "a third", "", "1000"])
def test_a_budget_outside_0_to_1_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"Use a share of the patches above 0 and at most 1, such as 0\.3 or 30%\.$"):
        budget(text)


def test_a_budget_of_30_is_taken_for_a_forgotten_percent_sign() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 30%\?"):
        budget("30")


def test_every_option_called_budget_takes_a_percentage() -> None:
    found = {
        f"{name} {dest}": action.type
        for name, parser in PARSERS.items()
        for dest, action in parser.options().items()
        if dest.rsplit(".")[-1].rsplit("_")[-1] in ("budget", "budgets") and not dest.startswith("losses.")
    }
    assert {"predict budget", "export budget", "extract budget", "sweep budgets", "train selection_budget"} <= set(found)
    assert all(kind is budget for kind in found.values()), found


def test_options_are_accepted_with_hyphens_and_with_underscores() -> None:
    parser = parser_of(command("extract"))
    for spelled in ("--image-size", "--image_size"):
        assert parser.parse_args(["m.parquet", "--store", "s", spelled, "112"]).image_size == 112
        assert parser.parse_args(["m.parquet", "--store", "s", f"{spelled}=112"]).image_size == 112


def test_an_unknown_option_is_answered_with_the_closest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "model", "photos", "--out", "p.csv", "--bugdet", "0.3"]) == 2
    assert "Unknown option --bugdet. Did you mean --budget?" in capsys.readouterr().err
    assert main(["train", "--lats.hiden", "3"]) == 2
    assert "Did you mean --lats.hidden?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "m.parquet"], "Missing: --store, --out."),
        (["train", "m.parquet", "--store"], "Option --store needs a value."),
        (["sweep", "m.parquet", "--seeds", "--store", "s"], "Option --seeds needs a value."),
        (["predict", "model", "a.jpg", "--out", "p.csv", "b.jpg"], "Unexpected argument 'b.jpg'."),
        (["train", "m.parquet", "--store", "s", "--out", ""], "Option --out cannot be ''. Use a path."),
        (
            ["extract", "m", "--store", "s", "--engine", "rey"],
            "--engine cannot be 'rey'. Use local or ray. Did you mean 'ray'?",
        ),
        (["demo", "--n", "1.5"], "Option --n cannot be '1.5'. Use a whole number that is at least 1."),
        (
            ["train", "m", "--store", "s", "--out", "o", "--lr", "fast"],
            "Option --lr cannot be 'fast'. Use a number that is above 0.",
        ),
        (["data", "isik"], "Did you mean 'isic'?"),
    ],
)
def test_a_wrong_request_says_what_to_change(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_command_is_answered_with_the_closest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_a_wrong_request_is_exit_code_2_without_a_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", f"{tmp_path}/none.parquet", "--store", "s", "--out", f"{tmp_path}/r"]) == 2
    error = capsys.readouterr().err
    assert "none.parquet" in error
    assert "Traceback" not in error


def test_the_version_tells_devices_and_every_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"mtb {__version__}"
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name in extras.keys() - {"dev", "docs"}:
        line = next(line for line in rest if line.split()[:2] == ["extra", name])
        assert all(re.split(r"[>\[]", package)[0] in line for package in extras[name])
    assert any("CPU cores" in line for line in rest)


def parsed(arguments: list[str]) -> argparse.Namespace:
    """What `mtb train ARGUMENTS` is asked to do."""
    return parser_of(command("train"), arguments).parse_args(arguments)


REQUIRED = ["m.parquet", "--store", "s", "--out", "o"]


def test_the_options_of_a_training_run_are_its_configuration() -> None:
    assert training_config(parsed(REQUIRED)) == preset("lesion-first")
    assert training_config(parsed([*REQUIRED, "--preset", "paper"])) == TrainConfig()
    changed = training_config(parsed([*REQUIRED, "--budgets", "10%", "0.5", "--lats.signals", "norm", "--losses.lesion", "0"]))
    assert (changed.budgets, changed.lats.signals, changed.losses.lesion) == ((0.1, 0.5), ("norm",), 0.0)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_options_come_from_a_file_and_the_command_line_overrides_them(tmp_path: Path) -> None:
    text = "preset: paper\nstore: s\nout: o\nbatch-size: 32\nlr: 1e-4\nlats: {hidden: 8}\nbudgets: [30%, 0.5]\n"
    file = write(tmp_path / "options.yaml", text)
    options = parsed(["m.parquet", "--config", file, "--batch-size", "16"])
    config = training_config(options)
    assert (options.store, options.manifest) == (Path("s"), Path("m.parquet"))
    assert (config.recipe, config.batch_size, config.lr, config.lats.hidden) == ("joint", 16, 1e-4, 8)
    assert config.budgets == (0.3, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "Did you mean 'epochs'?"),
        ("epochs: many", "epochs cannot be 'many'. Use a whole number that is at least 1."),
        ("epochs: null", "epochs has no value. Give it one, or leave it out."),
        ("router: {minimum: 0}", "router.minimum cannot be '0'. Use a whole number that is at least 1."),
        ("budgets: [2000]", "budgets cannot be '2000'. Use a share"),
        ("[1, 2]", "has no options"),
        ("a: [", "neither YAML nor JSON"),
    ],
)
def test_a_wrong_option_in_a_file_is_named_with_the_file(text: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "options.yaml", text)
    with pytest.raises(RequestError, match=re.escape(message)) as raised:
        parsed([*REQUIRED, "--config", file])
    assert file in str(raised.value)


def test_a_file_of_options_that_does_not_exist_is_named() -> None:
    with pytest.raises(RequestError, match=r"Cannot read the configuration file none\.yaml: No such file"):
        parsed([*REQUIRED, "--config", "none.yaml"])


def test_printed_options_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *REQUIRED, "--preset", "paper", "--lats.hidden", "8", "--budgets", "30%", "--print-config"])
    assert ended.value.code == 0
    file = write(tmp_path / "options.yaml", capsys.readouterr().out)
    options = parsed(["--config", file])
    wanted = to_dict(TrainConfig()) | {"budgets": [0.3]}
    wanted["lats"]["hidden"] = 8
    assert to_dict(training_config(options)) == wanted
    assert (options.manifest, options.out) == (Path("m.parquet"), Path("o"))


def test_a_type_that_options_cannot_have_is_a_mistake_of_the_programmer() -> None:
    with pytest.raises(TypeError, match="options cannot have the type"):
        command_parser("x", "X.", "mtb x").add_argument("--x", type=dict[str, Any])


def test_the_package_is_a_program_and_the_reader_of_its_help_may_be_gone() -> None:
    command = [sys.executable, "-m", "medtokenbudget", "--help"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("Usage: mtb COMMAND ...")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        (["mtb", "tr"], ["train"]),
        (["mtb", "data", "is"], ["isic"]),
        (["mtb", "data", "isic", "--mask-"], ["--mask-sources"]),
        (["mtb", "store", "i"], ["info"]),
        (["mtb", "store", "info", "--j"], ["--json"]),
        (["mtb", "train", "m.parquet", "--preset", "pa"], ["paper"]),
        (["mtb", "extract", "m.parquet", "--image-"], ["--image-size"]),
        (["mtb", "train", "m.parquet", "--out", "ru"], []),
    ],
)
def test_bash_completes_commands_options_and_choices(typed: list[str], wanted: list[str]) -> None:
    words = " ".join(f"'{word}'" for word in typed)
    program = f"{script('bash')}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _mtb; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == wanted


def test_zsh_gets_the_same_script_through_its_bash_layer() -> None:
    assert script("zsh").splitlines()[1:] == ["autoload -U +X bashcompinit && bashcompinit", *script("bash").splitlines()[1:]]
