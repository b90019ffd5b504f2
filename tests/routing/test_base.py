"""Selectors by name, from this package, from others and from the text of docs/selectors.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from medtokenbudget.config import BUDGETS
from medtokenbudget.errors import MedTokenBudgetWarning, RequestError, UnknownNameError
from medtokenbudget.routing import Ranker, budget_to_k, create_selector, list_selectors, register_selector, selector_class
from medtokenbudget.routing.base import SELECTORS
from tests.routing.batches import tokens_of


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path that packages can be installed into; what they register is forgotten afterwards."""
    monkeypatch.setattr(SELECTORS, "_classes", dict(SELECTORS._classes))
    monkeypatch.setattr(SELECTORS, "_seen", set(SELECTORS._seen))
    monkeypatch.setattr(SELECTORS, "_scanned", [])
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, package: str, entries: str, source: str) -> None:
    (site / f"{package}.py").write_text(source)
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[medtokenbudget.selectors]\n{entries}\n")


PLUGIN = """
from medtokenbudget.routing import Ranker

class Brightness(Ranker):
    requires = ("luminance",)

    def score(self, tokens, generator=None):
        return tokens.luminance
"""


def test_a_selector_of_an_installed_package_is_found(site):
    install(site, "bright_plugin", "brightness = bright_plugin:Brightness", PLUGIN)
    assert "brightness" in list_selectors()
    selector = create_selector("brightness")
    assert selector.name == "brightness"
    assert selector.select(tokens_of(), 5).k == 5


def test_options_are_checked_by_their_annotations_where_these_can_be_read(site):
    options = "    def __init__(self, width: WIDTH = 1):\n        super().__init__()\n        self.width = width\n"
    unread = "from __future__ import annotations\n" + PLUGIN + "\n" + options.replace("WIDTH", "known_to_type_checkers.Width")
    install(site, "unread_plugin", "unread = unread_plugin:Brightness", unread)
    assert create_selector("unread", width=0).width == 0
    read = "from medtokenbudget.config import Count\n" + PLUGIN + "\n" + options.replace("WIDTH", "Count")
    install(site, "read_plugin", "read = read_plugin:Brightness", read)
    SELECTORS._scanned.clear()
    with pytest.raises(RequestError, match="`width` must be at least 1, got 0"):
        create_selector("read", width=0)


@pytest.mark.parametrize(
    ("entry", "source", "reason"),
    [
        ("broken = broken_plugin:Selector", "import a_package_that_is_not_there", "ModuleNotFoundError"),
        ("broken = broken_plugin:Missing", "", "AttributeError"),
        ("broken = broken_plugin:number", "number = 3", "subclass"),
        ("norm = broken_plugin:Mine", "from medtokenbudget.routing import Ranker\nclass Mine(Ranker): pass", "already registered"),
    ],
)
def test_a_broken_plugin_is_named_in_a_warning_and_left_out(site, monkeypatch, entry, source, reason):
    monkeypatch.delitem(sys.modules, "broken_plugin", raising=False)
    install(site, "broken_plugin", entry, source)
    with pytest.warns(MedTokenBudgetWarning, match=reason) as caught:
        names = list_selectors()
    assert "broken_plugin" in str(caught[0].message)
    assert "broken" not in names
    assert selector_class("norm").__module__ == "medtokenbudget.routing.selectors.simple"
    assert list_selectors() == names


def test_unknown_names_and_options_and_names_that_are_taken_are_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'tome'"):
        create_selector("tomee")
    with pytest.raises(RequestError, match="Selector 'norm' cannot be created"):
        create_selector("norm", colour="red")
    with pytest.raises(RequestError, match="dim"):
        create_selector("lats")
    with pytest.raises(RequestError, match="already registered"):

        @register_selector("norm")
        class Another(Ranker):
            pass

    with pytest.raises(RequestError, match="subclass"):
        register_selector("something")(object)


@pytest.fixture
def blocks(repository, monkeypatch):
    monkeypatch.setattr(SELECTORS, "_classes", dict(SELECTORS._classes))
    text = (repository / "docs" / "selectors.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_example_of_use_runs(blocks):
    tokens = tokens_of(2, (16, 16))
    names = {"tokens": tokens}
    exec(blocks[0], names)
    assert names["selection"].tokens.shape == (2, 77, tokens.dim)


def test_the_new_selector_of_20_lines_is_registered_and_selects(blocks):
    source = blocks[2]
    assert len(source.splitlines()) <= 20
    exec(source, {"__name__": "their_module"})
    assert "outlier" in list_selectors()
    tokens = tokens_of(2, (16, 16))
    selector = create_selector("outlier", minimum=4)
    for budget in BUDGETS:
        assert selector.select_budget(tokens, budget).k == budget_to_k(budget, 256, 4)
    mean = tokens.patches.mean(1, keepdim=True)
    similarity = torch.cosine_similarity(tokens.patches, mean, dim=-1)
    assert torch.equal(selector.order(tokens)[:, 0], similarity.argmin(1))


def test_every_built_in_selector_has_its_row_a_title_of_its_own_and_a_description_of_one_sentence(repository):
    text = (repository / "docs" / "selectors.md").read_text(encoding="utf-8")
    built_in = [cls for cls in SELECTORS._classes.values() if cls.__module__.startswith("medtokenbudget.")]
    first_cells = "".join(re.findall(r"^\|([^|]*)\|", text, flags=re.MULTILINE))
    assert {cls.name for cls in built_in} - set(re.findall(r"`([\w-]+)`", first_cells)) == set()
    assert len({cls.title for cls in built_in} - {""}) == len(built_in)
    for cls in built_in:
        assert cls.description.endswith("."), cls.name
        assert "\n" not in cls.description, cls.name
