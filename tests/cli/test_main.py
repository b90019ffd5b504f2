"""The command `mtb` itself: quick to answer, exact about what was wrong, with help that a newcomer can read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from medtokenbudget import __version__
from medtokenbudget.cli import COMMANDS, GROUPS, command, main
from medtokenbudget.cli.options import REQUIRED, options
from medtokenbudget.routing import create_selector, list_selectors
from tests.conftest import REPOSITORY

NOISE = re.compile(r"<class|Optional|Literal|Path\(|Posix|\bNone\b|\bnull\b|\[\]|['\"]\]|NoneType|typing|tuple|Annotated|Traceback")


def needed(name: str) -> list[str]:
    """Words that satisfy everything a command requires."""
    required = [option for option in options(command(name)).values() if option.default is REQUIRED]
    value = {float: "0.5"}
    words = [[option.spelling] * (not option.positional) + [value.get(option.kind.type, "some.parquet")] for option in required]
    return [word for pair in words for word in pair]


def test_no_help_loads_anything_heavy() -> None:
    code = (
        "import sys, medtokenbudget, medtokenbudget.cli as c\n"
        "c.main(['--help'])\n"
        "for name in c.COMMANDS: c.main([*name.split(), '--help-all'])\n"
        "print({'torch', 'numpy', 'pandas', 'PIL', 'timm', 'matplotlib', 'yaml', 'typeguard'} & set(sys.modules) or 'light')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("light\n"), done.stdout[-200:] + done.stderr
    assert all(f"• {name.split()[0]} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example_every_option_and_no_terms_of_the_language(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*name.split(), "--help-all"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: mtb {name} ")
    assert f"\nExample:\n  mtb {name} " in text
    assert NOISE.search(text) is None, NOISE.search(text)
    assert not re.search(r"--[\w.]*_", text), "options are shown with hyphens"
    for option in options(command(name)).values():
        assert re.search(rf"{re.escape(option.spelling)}\b", text), option.spelling
        assert option.help.rstrip(")").endswith("."), f"{option.name}: {option.help}"
        assert len(option.help.split()) > 1, f"{option.name}: {option.help}"
    listed = re.findall(r"^\W*(--[a-z][\w.-]*)", text, flags=re.MULTILINE)
    known = options(command(name)).values()
    required = {option.spelling for option in known if option.default is REQUIRED and not option.positional}
    assert set(listed[: len(required)]) == required, "required options come first"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_at_most_ten_options_with_every_required_one_and_names_the_command_that_shows_all(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    known = {option.name: option for option in options(command(name)).values() if option.name not in ("config", "print_config")}
    shown = [one for one in known.values() if re.search(rf"^\W*{re.escape(one.spelling)}\b", text, flags=re.MULTILINE)]
    assert len(shown) <= 10
    assert {one.name for one in known.values() if one.default is REQUIRED} <= {one.name for one in shown}
    assert (f"mtb {name} --help-all" in text) == (len(shown) < len(known))


def test_the_help_of_training_has_sections_ranges_and_the_defaults_of_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help-all"])
    text = capsys.readouterr().out
    sections = re.findall(r"^\W*([a-z]+) options\W*$", text, flags=re.MULTILINE)
    assert sections == ["train", "lats", "context", "scout", "router", "curriculum", "losses", "general"]
    plain = " ".join(text.split())
    assert "(above 0 and at most 1; default: 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1)" in plain
    assert "together with the joint recipe. (default: 8)" in plain
    main(["train", "--preset", "paper", "--help-all"])
    assert "together with the joint recipe. (default: 50)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_value_that_does_not_parse_is_named_with_its_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = [option for option in options(command(name)).values() if option.name != "config" and not option.positional]
    one_of_each_kind = {option.kind.type: option for option in known if not option.flag and option.kind.type is not str}
    for option in one_of_each_kind.values():
        wrong = "" if option.kind.type is Path else "no-such-value"
        assert main([*name.split(), *needed(name), f"{option.spelling}={wrong}"]) == 2, option
        message = " ".join(capsys.readouterr().err.split())
        assert option.spelling in message
        assert f"mtb {name} --help" in message
        assert NOISE.search(message) is None, message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "m.parquet"], "--out PATH Run directory to write. (required)"),
        (["train", "m.parquet", "--store"], "Missing value for argument '--store'"),
        (["sweep", "m", "--seeds", "--store", "s", "--out", "o"], "--seeds needs a value."),
        (["route", "--out", "o"], "IMAGES needs a value."),
        (["predict", "a.jpg", "--model", "m", "--out", "p.csv", "b.jpg"], "Unrecognized options: b.jpg"),
        (["predict", "photos", "--model", "m", "--out", "p.csv", "--bugdet", "1"], "Perhaps you meant: --budget X"),
        (["train", "m", "--store", "s", "--out", "o", "--lats.hiden", "3"], "Perhaps you meant: --lats.hidden N"),
        (["extract", "m", "--store", "s", "--engine", "rey"], "invalid choice 'rey' for argument '--engine'. Expected one of"),
        (["demo", "--n", "1.5"], "Error parsing --n: '1.5' is not a whole number."),
        (["demo", "--n", "0"], "mtb: --n must be at least 1, got 0."),
        (["train", "m", "--store", "s", "--out", "o", "--lr", "fast"], "Error parsing --lr: 'fast' is not a number."),
        (["route", "a", "--out", "o", "--budget", "30"], "--budget must be above 0 and at most 1, got 30.0. Did you mean 0.3?"),
        (["report", "a", "--pictures", "perhaps"], "'perhaps' is not true or false."),
        (["trian"], "Did you mean 'train'?"),
        (["data", "isik"], "Unknown command of mtb data 'isik'. Did you mean 'isic'?"),
        (["train", "none.parquet", "--store", "s", "--out", "r"], "none.parquet"),
    ],
)
def test_a_wrong_request_is_exit_code_2_and_says_what_to_change(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
@pytest.mark.parametrize("group", GROUPS)
def test_a_group_lists_its_commands(group: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group, *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: mtb {group} [-h]")
    assert all(f"• {name.split()[1]} " in text for name in COMMANDS if name.startswith(f"{group} "))


def test_the_help_begins_with_what_people_need_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"• {name} ") for name in ("route", "train", "evaluate", "reproduce", "extract")]
    assert places == sorted(places)
    assert "mtb --version" in text


def test_every_selector_is_listed_with_what_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selectors", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list_selectors()
    tome = create_selector("tome")
    assert rows["tome"] == {
        "name": "tome",
        "kind": "merger",
        "title": tome.title,
        "description": tome.description,
        "learns": False,
        "requires": [],
    }
    assert rows["evit"]["requires"] == ["cls_attention"]
    assert main(["selectors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list_selectors()
    assert "ranker, learns" in next(line for line in lines if line.startswith("lats "))
    assert "Reads lesion, has_mask." in next(line for line in lines if line.startswith("oracle "))


def test_the_version_tells_devices_and_every_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"mtb {__version__}"
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name in extras.keys() - {"dev", "docs"}:
        line = next(line for line in rest if line.split()[:2] == ["extra", name])
        assert all(re.split(r"[>\[]", package)[0] in line for package in extras[name])
    assert any("CPU cores" in line for line in rest)


def test_the_package_is_a_program_and_the_reader_of_its_help_may_be_gone() -> None:
    command = [sys.executable, "-m", "medtokenbudget", "--help"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("usage: mtb [-h]")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""


def test_the_shell_completes_commands_options_and_choices(tmp_path: Path) -> None:
    script = tmp_path / "mtb.sh"
    assert main(["--tyro-write-completion", "bash", str(script)]) == 0
    cases = {
        "mtb tr": {"train"},
        "mtb data is": {"isic"},
        "mtb data isic --mask-": {"--mask-sources"},
        "mtb store i": {"info"},
        "mtb train m.parquet --preset pa": {"paper"},
        "mtb extract m.parquet --image-": {"--image-size"},
    }
    program = f"source {script}\n" + "\n".join(
        f'COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _tyro_mtb; echo "${{COMPREPLY[@]}}"' for words in cases
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert [set(line.split()) for line in done.stdout.splitlines()] == list(cases.values())
