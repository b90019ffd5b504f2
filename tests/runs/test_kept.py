"""A method that was made without this package: its table of kept patches is judged like a model, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import medtokenbudget as mtb
from medtokenbudget.backbone.views import ViewError, geometry_of, image_seed
from medtokenbudget.cli import main
from medtokenbudget.config import CONTROLS
from medtokenbudget.data import Manifest, decode_mask, patch_labels
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.metrics import lesion_retention
from medtokenbudget.runs.evaluate import read_kept
from tests.drawn import Drawn, drawn_folder

IDS = ["NV/a", "NV/b", "NV/c"]


def images() -> Manifest:
    return Manifest.from_records([{"image_id": name, "image": f"{name}.png", "label": "NV"} for name in IDS], ["MEL", "NV"])


def write(path: Path, metadata: dict[str, str] | None = None, **columns: Any) -> Path:
    """A table of three images that keep patches 0 and 5 of 16, unless `columns` say otherwise."""
    values = {"image_id": IDS, "kept": [[0, 5]] * 3, "n_patches": [16] * 3, **columns}
    table = pa.table({name: value for name, value in values.items() if value is not None})
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def test_a_table_says_what_was_kept_whatever_its_order(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.parquet",
        image_id=["NV/c", "NV/x", "NV/a", "NV/b"],
        kept=[[3, 1], [0, 1], [2, 0], [5, 15]],
        n_patches=[16] * 4,
    )
    table = read_kept(path, images())
    assert (table.method, table.grid, table.names) == ("mine", (4, 4), IDS)
    assert {budget: kept.tolist() for budget, kept in table.kept.items()} == {0.125: [[2, 0], [5, 15], [3, 1]]}


@pytest.mark.parametrize(
    ("columns", "metadata", "grid"),
    [
        ({"n_patches": None}, {"grid": "[2, 8]"}, (2, 8)),
        ({"n_patches": None, "scores": [[0.5] * 49] * 3}, None, (7, 7)),
        ({}, None, (4, 4)),
    ],
)
def test_the_grid_is_stated_or_follows_from_the_number_of_patches(tmp_path: Path, columns: Any, metadata: Any, grid: Any) -> None:
    assert read_kept(write(tmp_path / "m.parquet", metadata, **columns), images()).grid == grid


def test_several_budgets_and_probabilities_are_read(tmp_path: Path) -> None:
    rows = {
        "image_id": IDS * 2,
        "budget": [0.1] * 3 + [0.25] * 3,
        "kept": [[0]] * 3 + [[0, 1, 2, 3]] * 3,
        "n_patches": [16] * 6,
        "p_NV": [0.25] * 6,
        "p_MEL": [0.75] * 6,
    }
    table = read_kept(write(tmp_path / "m.parquet", **rows), images())
    assert list(table.kept) == [0.1, 0.25]
    assert table.probabilities[0.1].tolist() == [[0.75, 0.25]] * 3  # in the order of the manifest's classes


def test_a_budget_that_does_not_give_the_number_of_patches_becomes_the_share_that_was_kept(tmp_path: Path) -> None:
    table = read_kept(write(tmp_path / "m.parquet", budget=[0.9] * 3, kept=[[0, 1, 2]] * 3, n_patches=[49] * 3), images())
    assert list(table.kept) == [pytest.approx(3 / 49, abs=1e-6)]
    assert int(next(iter(table.kept)) * 49) == 3  # the controls keep as many


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no kept patches": ({"kept": None}, "needs the columns image_id and kept"),
    "a merger": ({"kept": [None, [1], [2]]}, "merge patches keep none"),
    "no grid": ({"n_patches": None}, "does not say its grid. Add a column n_patches"),
    "a number that is no square": ({"n_patches": [15] * 3}, "does not say its grid"),
    "a missing image": ({"image_id": ["NV/a", "NV/b", "NV/x"]}, "has no row for 1 of 3 images of the manifest: NV/c"),
    "other images": ({"image_id": ["x", "y", "z"]}, "has no image of the manifest: it has x, y, z"),
    "an image twice": ({"image_id": ["NV/a", "NV/a", "NV/b"]}, "more than one row for NV/a at one budget"),
    "different K": ({"kept": [[0], [0, 1], [2]], "budget": [0.1] * 3}, "keeps 1, 2 patches at one budget"),
    "nothing": ({"kept": pa.array([[], [], []], pa.list_(pa.int32()))}, "keeps 0 patches"),
    "a patch outside": ({"kept": [[0, 5], [0, 16], [1, 2]]}, "different patches from 0 to 15 of a grid of 4 x 4"),
    "a negative patch": ({"kept": [[0, 5], [0, -1], [1, 2]]}, "different patches from 0 to 15"),
    "a patch twice": ({"kept": [[0, 5], [3, 3], [1, 2]]}, "different patches from 0 to 15"),
    "numbers that are not whole": ({"kept": [[0.0, 5.5]] * 3}, "different patches from 0 to 15"),
    "only crops": ({"view": ["off-center"] * 3}, "has no rows of the view as-is"),
    "an unknown view": ({"view": ["as-is", "as-is", "left"]}, "has the view left"),
    "other classes": ({"p_NV": [1.0] * 3}, "has p_NV, but the classes of the manifest are MEL, NV"),
    "no probabilities": ({"p_NV": [1.0] * 3, "p_MEL": [0.5] * 3}, "do not sum to 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    columns, message = REFUSED[case]
    with pytest.raises(RequestError, match=message):
        read_kept(write(tmp_path / "mine.parquet", **columns), images())


def test_a_table_named_like_a_control_or_that_is_no_parquet_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"Rename the file"):
        read_kept(write(tmp_path / "center.parquet"), images())
    (tmp_path / "text.parquet").write_text("image_id,kept\n")
    with pytest.raises(RequestError, match="is not a readable Parquet file"):
        read_kept(tmp_path / "text.parquet", images())


def test_off_center_views_are_judged_on_the_crops_that_the_protocol_defines(drawn: Drawn, tmp_path: Path) -> None:
    manifest, rows, grid = drawn.manifest.part("val"), [], drawn.store.grid
    for row, name in enumerate(manifest.ids):
        mask = decode_mask(manifest.mask_path(row))
        for view in ("as-is", "off-center"):
            try:
                shown = mask if view == "as-is" else geometry_of(view, mask, image_seed(0, name)).of(mask)
            except ViewError:
                continue
            lesion = np.asarray(patch_labels(shown, grid)).ravel()
            order = np.argsort(~lesion, kind="stable").tolist()
            rows += [{"image_id": name, "view": view, "budget": b, "kept": order[:k]} for b, k in ((0.1, 4), (0.5, 18))]
    table = pd.DataFrame(rows).assign(n_patches=grid[0] * grid[1])
    table.to_parquet(tmp_path / "by-mask.parquet")
    run = mtb.evaluate_kept(tmp_path / "by-mask.parquet", drawn.manifest_path, tmp_path / "run", drawn.store_path)
    results = run.results.set_index(["method", "view"])
    off = table[table["view"] == "off-center"]
    assert 0 < off["image_id"].nunique() == results.loc[("by-mask", "off-center"), "n_masked"].iloc[0]
    for view in ("as-is", "off-center"):
        assert results.loc[("by-mask", view), "retention_of_ceiling"].tolist() == [1, 1]
    assert (results.loc[("center", "off-center"), "retention_of_ceiling"] < 1).all()
    off.iloc[1:].pipe(lambda few: pd.concat([table[table["view"] == "as-is"], few])).to_parquet(tmp_path / "by-mask.parquet")
    with pytest.raises(RequestError, match="has no row for 1 of"):
        mtb.evaluate_kept(tmp_path / "by-mask.parquet", drawn.manifest_path, tmp_path / "few", drawn.store_path)


def test_a_model_and_a_table_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "m.parquet", "--model", "model", "--kept", "k.parquet", "--out", "o"]) == 2
    assert "--kept replaces the model and its options. Leave out --model." in capsys.readouterr().err
    assert main(["evaluate", "m.parquet", "--kept", "k.parquet", "--budgets", "0.3", "--out", "o"]) == 2
    assert "Leave out --budgets." in capsys.readouterr().err


@pytest.mark.slow
def test_what_route_writes_is_judged_as_the_model_itself(tmp_path: Path) -> None:
    drawn_folder(tmp_path, 14)
    manifest = tmp_path / "m.parquet"
    assert main(["data", "folder", str(tmp_path / "photos"), "--masks", str(tmp_path / "masks"), "--out", str(manifest)]) == 0
    for budget in ("0.1", "0.3"):
        assert main(["route", str(manifest), "--budget", budget, "--out", str(tmp_path / budget)]) == 0
    tables = [pq.read_table(tmp_path / budget / "routes.parquet") for budget in ("0.1", "0.3")]
    both = tmp_path / "mine.parquet"
    pq.write_table(pa.concat_tables([table.replace_schema_metadata(tables[0].schema.metadata) for table in tables]), both)
    evaluate = f"evaluate {manifest} --kept {both} --part all --out {tmp_path}/table --pictures false"
    assert main(evaluate.split()) == 0
    judged = mtb.Run(tmp_path / "table")
    rows = judged.results[judged.results["method"] == "mine"].set_index("budget")
    assert set(judged.results["method"]) == {"mine", *CONTROLS} - {"segmenter"}
    for budget in (0.1, 0.3):
        said = json.loads((tmp_path / str(budget) / "summary.json").read_text())["retention"]["router"]
        assert rows.loc[budget, "retention"] == pytest.approx(said["pooled"], abs=1e-9)
        assert rows.loc[budget, "retention_of_ceiling"] == pytest.approx(said["of_ceiling"], abs=1e-9)
    model = mtb.evaluate("dermoscopy", manifest, tmp_path / "model", budgets=[0.1, 0.3], part="all")
    theirs = model.results[model.results["view"] == "as-is"].replace({"method": {model.main: "mine"}})
    both = judged.results.merge(theirs, on=["method", "budget"]).query("method in ('mine', 'center', 'oracle')")
    assert len(both) == 2 * 3
    for name in ("retention", "retention_mean", "precision", "n_masked"):
        np.testing.assert_allclose(both[f"{name}_x"], both[f"{name}_y"], rtol=1e-6)
    # An independent count: patches of the table against masks that are read again.
    opened = Manifest.read(manifest)
    lesions = [patch_labels(decode_mask(opened.mask_path(row)), (16, 16)) for row in range(len(opened))]
    kept = np.zeros((len(opened), 256), bool)
    by_id = pd.read_parquet(tmp_path / "0.3" / "routes.parquet").set_index("image")["kept"]
    for row, name in enumerate(opened.ids):
        kept[row, by_id[name]] = True
    assert rows.loc[0.3, "retention"] == pytest.approx(
        lesion_retention(kept, np.stack([np.asarray(one).ravel() for one in lesions])).pooled
    )
    assert "mine" in (tmp_path / "table" / "report.html").read_text()
    small = write(tmp_path / "small.parquet", image_id=opened.ids[:3])
    with pytest.raises(MismatchError, match="grid"):
        mtb.evaluate_kept(small, opened.take([0, 1, 2]), tmp_path / "x", tmp_path / "table" / "tokens")
