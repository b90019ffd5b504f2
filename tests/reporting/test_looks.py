"""What methods look like, how they are named, and the order they appear in."""

from __future__ import annotations

from medtokenbudget.config import DEFAULT_METHODS
from medtokenbudget.reporting.looks import LOOKS, look, ordered


def test_methods_have_distinct_markers_and_colors() -> None:
    default = [look(method) for method in DEFAULT_METHODS]
    assert len({style.color for style in default}) == len({style.marker for style in default}) == len(default)
    shown = [*LOOKS.values(), look("lats:lesion-first")]
    assert len({(style.color, style.marker) for style in shown}) == len(shown)
    assert len({style.name for style in shown}) == len(shown)


def test_a_method_is_named_by_its_selector_head_and_variant() -> None:
    assert look("lats").name == "LATS (paper)"
    assert look("lats:lesion-first").name == "LATS lesion-first"
    assert look("lats:no-norm").name == "LATS − norm"
    assert look("lats:lesion-first-raster").name == "lesion-first with 1D contrast"
    assert look("center:matched").name == "Center matched"
    assert look("center+linear").name == "Center + linear"
    assert look("lats:raster").name == "lats:raster"
    assert look("somebody-elses") == look("somebody-elses")


def test_learned_methods_come_first_and_controls_last() -> None:
    methods = ["oracle", "new", "center", "lats", "random", "lats:lesion-first"]
    assert ordered(methods, ["lats:lesion-first", "lats"]) == ["lats:lesion-first", "lats", "random", "new", "center", "oracle"]
    assert ordered(methods, ["new"])[0] == "new"
