"""What methods look like and how they are named."""

from __future__ import annotations

import pytest

from medtokenbudget.config import DEFAULT_METHODS
from medtokenbudget.model.looks import is_reference, look
from medtokenbudget.routing import Ranker, default_methods, register_selector
from medtokenbudget.routing.base import SELECTORS

OURS = [name for name, kind in SELECTORS._classes.items() if kind.__module__.startswith("medtokenbudget.")]


def test_methods_have_distinct_titles_markers_and_colors() -> None:
    default = [look(method) for method in DEFAULT_METHODS]
    assert len({style.color for style in default}) == len({style.marker for style in default}) == len(default)
    every = [look(name) for name in (*OURS, "lats:lesion-first")]
    assert len({(style.color, style.marker) for style in every}) == len({style.title for style in every}) == len(every)
    assert all(style.description.endswith(".") for style in every)
    assert [name for name in OURS if is_reference(name)] == ["no-pruning", "oracle", "box-prior"]


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("lats", "LATS (paper)"),
        ("lats:lesion-first", "LATS lesion-first"),
        ("lats:no-norm", "LATS − norm"),
        ("lats:lesion-first-raster", "lesion-first with 1D contrast"),
        ("center:matched", "Center matched"),
        ("center+linear", "Center + linear"),
        ("lats:raster", "lats:raster"),
        ("elsewhere", "elsewhere"),
    ],
)
def test_a_method_is_named_by_its_selector_head_and_variant(method: str, title: str) -> None:
    assert look(method).title == title
    assert look(method) == look(method)


def test_a_registered_selector_is_shown_as_it_describes_itself_and_swept_if_it_asks() -> None:
    class Scout(Ranker):
        title, description = "Scout", "Keeps what it likes."
        color, marker = "#123456", "X"
        in_default_sweep = True

    register_selector("lookout")(Scout)
    try:
        style = look("lookout:mask-free")
        assert (style.title, style.color, style.marker) == ("Scout mask-free", "#123456", "X")
        assert style.description == "Scout, trained without lesion masks."
        assert default_methods() == (*DEFAULT_METHODS, "lookout")
    finally:
        SELECTORS.unregister("lookout")
    assert "not installed here" in look("lookout").description
