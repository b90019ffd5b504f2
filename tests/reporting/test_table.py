"""One table in its four formats, and how the best value of a column is found."""

from __future__ import annotations

import numpy as np
import pandas as pd

from medtokenbudget.reporting.table import Table, best, changes, latex_text
from medtokenbudget.reporting.text import page_template


def html(table: Table) -> str:
    """The table as the page shows it."""
    return str(page_template("table.html").module.show_table(table))


def test_latex_commands_in_names_are_harmless() -> None:
    assert latex_text("a_b & 5 % {x} −±—") == r"a\_b \& 5 \% \{x\} $-$$\pm$---"


def test_a_table_says_the_same_in_all_its_forms() -> None:
    table = Table(
        "t", "Title", ["Method", "Acc."], [["a<b", "1.0 [0.5, 1.5]"], ["c", "—"]], pd.DataFrame(), bold=frozenset({(0, 1)})
    )
    assert "| a&lt;b | **1.0 [0.5, 1.5]** |" in table.markdown()
    assert r"a\textless{}b & \textbf{1.0 [0.5, 1.5]} \\" in table.latex()
    assert "<td><b>1.0</b> <small>[0.5, 1.5]</small></td>" in html(table)
    assert '<th scope="row">a&lt;b</th>' in html(table)
    assert "scroll inside this box" not in html(table)
    assert 'Download: <a href="tables/t.csv">CSV</a>' in html(table)


def test_a_table_that_is_cut_by_its_box_says_how_many_rows_it_has() -> None:
    table = Table("t", "Title", ["Method"], [["lats"]] * 40, pd.DataFrame())
    assert "40 rows; scroll inside this box</p></div>" in html(table)


def test_the_best_value_is_marked_unless_it_is_a_reference_or_shared_by_many() -> None:
    methods = ["lats", "center", "random", "oracle"]
    assert best(methods, [[0.5], [0.4], [0.3], [0.9]]) == {(0, 1)}
    assert best(methods, [[0.5001], [0.5], [0.3], [0.9]]) == {(0, 1), (1, 1)}, "equal as printed"
    assert best(methods, [[0.5], [0.5], [0.5], [0.9]]) == frozenset()
    assert best([*methods, "norm"], [[0.5], [0.5], [0.5], [0.9], [0.1]]) == frozenset()
    assert best(methods, [[np.nan, 0.1], [0.4, 0.2], [0.3, 0.3], [0.9, 0.4]], labels=2) == {(1, 2), (2, 3)}


def test_a_rule_is_above_every_row_with_another_key() -> None:
    assert changes(["a", "a", "b", "a"]) == {2, 3}
    assert changes([]) == frozenset()
