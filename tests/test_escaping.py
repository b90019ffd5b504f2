"""Names that spreadsheets and pages would run as code are only names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from medtokenbudget.escaping import csv_cell, from_csv_cell
from medtokenbudget.reporting.table import Table
from medtokenbudget.runs.run import RESULT_COLUMNS, read_results, write_results


def test_names_that_spreadsheets_and_pages_would_run_are_only_names(tmp_path: Path) -> None:
    evil = ("=HYPERLINK(1)", "+1", "-1+1", "@SUM(A1)", "\t=1")
    assert [from_csv_cell(csv_cell(name)) for name in (*evil, "NV", "'x")] == [*evil, "NV", "'x"]
    row: dict[str, Any] = dict.fromkeys(RESULT_COLUMNS, -0.5)
    frame = pd.DataFrame([{**row, "study": "s", "dataset": name, "view": "as-is", "method": "center"} for name in evil])
    write_results(tmp_path / "results.csv", frame)
    text = (tmp_path / "results.csv").read_text()
    assert ",'=HYPERLINK" in text
    assert ",-0.5" in text, "numbers stay numbers"
    assert read_results(tmp_path / "results.csv")["dataset"].tolist() == list(evil)
    name = "<script>alert(1)</script>[x](javascript:y)|z"
    Table("t", name, ["=class", "n"], [[name, "1"]], pd.DataFrame({"=class": [evil[0]], "n": [np.float64(-1)]})).write(tmp_path)
    assert "<script" not in (tmp_path / "t.md").read_text()
    assert "](javascript" not in (tmp_path / "t.md").read_text()
    assert (tmp_path / "t.csv").read_text() == "'=class,n\n'=HYPERLINK(1),-1\n"
