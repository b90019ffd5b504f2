"""The list of deliberate faults fits the package: `make mutants` makes them and runs the tests that must notice."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.machine import script


@pytest.fixture(scope="module")
def mutants(repository: Path) -> ModuleType:
    return script(repository / "tools" / "mutants.py")


def test_every_edit_has_its_text_once_its_tests_and_an_effect(mutants: ModuleType, repository: Path) -> None:
    for edit in mutants.read_list():
        edit.place(mutants.PACKAGE)
        assert edit.old != edit.new, edit.name
        assert all((repository / test).is_file() for test in edit.tests), edit.name


def test_an_edit_is_found_where_its_code_moved_to_and_refused_where_it_is_gone_or_twice(
    mutants: ModuleType, tmp_path: Path
) -> None:
    edit = mutants.Edit("half", "one.py", "x / 2", "x / 3", ())
    (tmp_path / "other").mkdir()
    (tmp_path / "one.py").write_text("y = 1\n")
    with pytest.raises(mutants.EditError, match="in no file"):
        edit.place(tmp_path)
    moved = tmp_path / "other" / "two.py"
    moved.write_text("y = x / 2\n")
    assert edit.place(tmp_path) == moved
    moved.write_text("y = x / 2\nz = x / 2\n")
    with pytest.raises(mutants.EditError, match=r"two\.py \(2\)"):
        edit.place(tmp_path)


def test_words_that_no_edit_has_are_a_wrong_request(mutants: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["no-such-word"]) == 2
    assert "No edit has these words" in capsys.readouterr().err
