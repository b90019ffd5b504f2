"""The command `mtb` itself: quick to answer, exact about what was wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from medtokenbudget.cli import COMMANDS, main


def test_help_and_import_do_not_load_torch() -> None:
    code = (
        "import sys, medtokenbudget, medtokenbudget.cli as c; c.main(['--help']);"
        "heavy = {'torch', 'numpy', 'pandas', 'timm', 'matplotlib'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself_with_an_example_and_without_torch(name: str) -> None:
    code = f"import sys; from medtokenbudget.cli import main; main(['{name}', '--help'])"
    script = f"import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"mtb {name}" in done.stdout
    assert done.stdout.strip().endswith("False"), "the help of a command must not wait for torch"


@pytest.mark.parametrize("command", [["extract"], ["train"], ["data", "isic"]])
def test_help_tells_defaults_and_no_types_of_the_language(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    told = capsys.readouterr().out
    assert f"\n\nExample: mtb {' '.join(command)} " in told
    for noise in ("<class", "null", "Literal", "type: str", "type: int", "default: False"):
        assert noise not in told, noise
    assert "(required)" in told
    assert {"extract": "(default: 224)", "train": "tuple[str, ...]", "data": "(default: grouped)"}[command[0]] in told


def test_an_unknown_command_is_refused_with_the_closest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_a_wrong_request_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    assert main(["train", f"{tmp_path}/none.parquet", "--store", "s", "--out", f"{tmp_path}/r"]) == 2
    error = capsys.readouterr().err
    assert "none.parquet" in error
    assert "Traceback" not in error


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mtb 0.")
