"""Facts that several files state (versions of Python, the version, addresses) agree; setting up shows what it does."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import medtokenbudget
from tests.conftest import REPOSITORY
from tests.machine import absent, script

PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
INSTALL = script(REPOSITORY / ".ci" / "install.py")


def text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def minimum() -> str:
    found = re.fullmatch(r">=(3\.\d+)", PROJECT["project"]["requires-python"])
    return found[1]


def supported() -> list[str]:
    """The versions of Python named in the classifiers."""
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in PROJECT["project"]["classifiers"]]
    return [match[1] for match in found if match]


def test_every_action_of_a_workflow_is_pinned_to_a_commit_with_its_version_beside_it() -> None:
    for path in sorted((REPOSITORY / ".github" / "workflows").glob("*.y*ml")):
        used = re.findall(r"uses:\s*(.+)", path.read_text(encoding="utf-8"))
        assert used, path.name
        for action in used:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)+", action), f"{path.name}: {action}"


def test_packages_are_pinned_once_and_those_that_are_installed_run_on_the_stated_minimum_of_python() -> None:
    pinned = [line.split("==") for line in text("constraints.txt").splitlines() if line.strip()]
    names = [re.sub(r"[-_.]+", "-", name).lower() for name, _ in pinned]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    lowest = Version(f"{minimum()}.0")
    checked, refusing = 0, {}
    for name, version in pinned:
        try:
            package = metadata.metadata(name)
        except metadata.PackageNotFoundError:  # for another platform
            continue
        if package["Version"] == version:
            checked += 1
            needed = package.get("Requires-Python") or ">=3"
            if not SpecifierSet(needed).contains(lowest):
                refusing[name] = needed
    assert checked > len(pinned) // 2, "the environment has other versions than constraints.txt: run make setup"
    assert not refusing, f"requires-python says {minimum()}, but these pinned versions need more: {refusing}"


def test_every_dependency_has_its_reason_next_to_it() -> None:
    project, lines = PROJECT["project"], text("pyproject.toml").splitlines()
    needed = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    reasons = {name: [line for line in lines if f'"{name}"' in line and "# " in line] for name in needed if "[ray," not in name}
    assert [name for name, found in reasons.items() if not found] == []


def test_the_minimum_of_python_is_the_same_everywhere() -> None:
    lowest, versions = minimum(), supported()
    assert versions[0] == lowest
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + lowest.replace(".", "")
    assert PROJECT["tool"]["mypy"]["python_version"] == lowest
    assert tuple(int(part) for part in lowest.split(".")) == INSTALL.MINIMUM
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {lowest} to {versions[-1]}" in text(page), page
    jobs = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == versions


def test_the_version_is_defined_in_one_place_and_cited_as_it_is() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PROJECT["project"]
    assert f'__version__ = "{medtokenbudget.__version__}"' in text(PROJECT["tool"]["hatch"]["version"]["path"])
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["version"] == medtokenbudget.__version__
    assert f"## {medtokenbudget.__version__}" in text("CHANGELOG.md")
    address = PROJECT["project"]["urls"]["Repository"]
    assert not [page for page in ("README.md", "CITATION.cff", "CONTRIBUTING.md") if address in text(page)], "a placeholder"
    assert citation["license"] == PROJECT["project"]["license"]


def test_ci_runs_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", text("Makefile"), flags=re.MULTILINE))
    jobs = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    called = {word for step in steps for word in re.findall(r"make ([a-z]+)", step)}
    assert called == {"lint", "docs", "test"}
    named = set(re.findall(r"`?make ([a-z]+)", text("CONTRIBUTING.md"))) | called
    assert named <= targets, named - targets


def test_the_table_of_folders_has_the_layers_that_import_linter_checks() -> None:
    folders = re.findall(r"^\| `(\w+)/` \|", text("CONTRIBUTING.md"), flags=re.MULTILINE)
    layers = [layer.split(".")[-1] for layer in PROJECT["tool"]["importlinter"]["contracts"][0]["layers"] if "|" not in layer]
    assert folders == [layer for layer in reversed(layers) if (REPOSITORY / "src" / "medtokenbudget" / layer).is_dir()]


def test_the_hooks_before_a_commit_use_only_what_the_environment_has() -> None:
    config = yaml.safe_load(text(".pre-commit-config.yaml"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    for hook in hooks:
        program = Path(hook["entry"].split()[0])
        assert program.parent == Path(".venv/bin")
        assert (Path(sys.prefix) / "bin" / program.name).exists(), program


def fake_pip(lines: list[str], code: int = 0, pause: float = 0.0) -> list[str]:
    body = f"import time; print({chr(10).join(lines)!r}, flush=True); time.sleep({pause}); raise SystemExit({code})"
    return [sys.executable, "-c", body]


def test_setting_up_shows_downloads_and_the_long_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "Collecting torch==2.15.0 (from -c constraints.txt)",
        "  Downloading torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)",
        "  Downloading torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl (900.1 MB)",
        "  Using cached https://files.example/numpy-2.4.6-cp311-cp311-linux_x86_64.whl (16 MB)",
        "Installing collected packages: numpy, torch",
        "Successfully installed numpy torch",
    ]
    assert INSTALL.follow(fake_pip(lines)) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "  downloading torch-2.15.0 (900.1 MB)",
        "  using cached numpy-2.4.6 (16 MB)",
        "  unpacking 2 packages: the longest step, a few minutes ...",
    ]


def test_setting_up_gives_a_sign_of_life_while_pip_is_silent_and_fails_when_pip_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(INSTALL, "QUIET_SECONDS", 0.05)
    assert INSTALL.follow(fake_pip(["Installing collected packages: torch"], pause=1.0)) == 0
    assert "still working" in capsys.readouterr().out
    assert INSTALL.follow(fake_pip(["ERROR: No matching distribution found for torch"], code=3)) == 3
    told = capsys.readouterr()
    assert "No matching distribution" in told.out
    assert "pip failed with exit code 3" in told.err


def test_make_stops_when_setting_up_fails(tmp_path: Path) -> None:
    """`make` itself, in a copy whose installer fails: the target does not run and no stamp says that all is installed."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "install.py").write_text("raise SystemExit(3)")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text(text(name))
    done = subprocess.run(["make", "demo", f"PYTHON={sys.executable}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "mtb demo" not in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_what_a_machine_lacks_skips_its_tests_and_fails_them_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for ci, outcome in (("false", pytest.skip.Exception), ("true", pytest.fail.Exception)):
        monkeypatch.setenv("CI", ci)
        with pytest.raises(outcome, match="needs Chromium"):
            absent("needs Chromium")
