"""`mtb doctor` reports what is available and what to do about what is missing."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from medtokenbudget.app import doctor
from medtokenbudget.cli import main
from tests.conftest import REPOSITORY
from tests.hub import serving


def test_every_check_has_a_state_and_advice_unless_it_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--timeout", "0.2"])
    report = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in report["checks"]]
    assert {"python", "torch", "timm", "gpu", "embedded backbone", "hub weights", "extra serve", "disk"} <= set(names)
    assert report["healthy"] == (code == 0)
    for check in report["checks"]:
        assert check["state"] in ("ok", "note", "missing")
        assert check["state"] == "ok" or check["advice"], check


def test_the_text_output_names_the_same_checks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--timeout", "0.2"])
    text = capsys.readouterr().out
    for word in ("python", "torch", "embedded backbone", "disk"):
        assert word in text


def test_a_missing_extra_is_a_note_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.EXTRAS, "serve", ("fastapi", "a-package-that-nobody-has"))
    check = doctor._extra("serve")
    assert check.state == "note"
    assert "a-package-that-nobody-has" in check.found
    assert check.advice == "pip install 'medtokenbudget[serve]'"


def test_every_extra_for_users_is_checked_with_all_its_packages() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = {name: {re.split(r"[>\[]", text)[0] for text in extras[name]} for name in extras.keys() - {"dev", "docs"}}
    assert {name: set(packages) for name, packages in doctor.EXTRAS.items()} == wanted


def test_a_missing_required_package_makes_the_check_fail() -> None:
    check = doctor._package("a-package-that-nobody-has")
    assert check.state == "missing"
    assert not doctor.healthy([check])


def test_an_unreachable_hub_is_a_note(hub_at: Callable[..., None], tmp_path: Path) -> None:
    hub_at("http://127.0.0.1:9")
    check = doctor._hub(timeout=0.2)
    assert (check.state, check.found.split(" (")[0]) == ("note", "http://127.0.0.1:9 cannot be reached")
    assert "--backbone embedded" in check.advice
    hub_at("http://127.0.0.1:9", offline=True)
    assert doctor._hub(timeout=0.2).found == "HF_HUB_OFFLINE is set"
    with serving(tmp_path, "someone/router") as address:
        hub_at(address)
        assert doctor._hub(timeout=5).state == "ok"
