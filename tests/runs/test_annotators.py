"""Several annotators of one image: retention against each, and the human line, compared with loops over images and annotators."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageFilter

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.data import Manifest, covered_shares, decode_mask, patch_labels, patch_order
from medtokenbudget.errors import RequestError
from medtokenbudget.metrics import agreement
from tests.drawn import drawn_folder

GRID = (7, 7)


def test_an_annotator_keeps_covered_patches_first_then_the_nearest() -> None:
    # A row of patches: two are covered whole, one is a border that is lesion, one a border that is not.
    covered = np.array([0, 0, 100, 255, 255, 255, 200, 0], np.uint8)
    lesion = covered > 128
    # By coverage: 3, 4 and 5, then 6, then 2. Of the others by the distance from the lesion, which is 3 to 6: 7, then 1, then 0.
    assert patch_order(lesion, covered, (1, 8)).tolist() == [3, 4, 5, 6, 2, 7, 1, 0]
    square = np.zeros((5, 5), bool)
    square[1:4, 1:4] = True
    order = patch_order(square.ravel(), np.where(square, 255, 0).ravel().astype(np.uint8), (5, 5))
    assert order[0] == 12  # the middle
    assert set(order[:9]) == set(np.flatnonzero(square))
    assert set(order[-4:]) == {0, 4, 20, 24}  # the corners are farthest
    assert sorted(patch_order(np.ones(9, bool), np.full(9, 255, np.uint8), (3, 3))) == list(range(9))


def test_agreement_is_the_loop_over_images_and_annotators() -> None:
    draw = np.random.default_rng(0)
    lesions = [draw.random((people, 30)) < 0.3 for people in (2, 3, 4)]
    orders = [np.stack([draw.permutation(30) for _ in lesion]) for lesion in lesions]
    k = [3, 8, 20]
    for between in (False, True):
        retention, share = agreement(orders if between else [order[:1] for order in orders], lesions, k, between)
        for at, count in enumerate(k):
            kept = sizes = best = 0.0
            for order, lesion in zip(orders, lesions):
                pairs = [(i, j) for i in range(len(lesion)) for j in range(len(lesion)) if (i != j if between else i == 0)]
                for i, j in pairs:
                    kept += sum(lesion[j, patch] for patch in order[i, :count]) / len(pairs)
                    sizes += lesion[j].sum() / len(pairs)
                    best += min(count, lesion[j].sum()) / len(pairs)
            assert retention[at] == pytest.approx(kept / sizes)
            assert share[at] == pytest.approx(kept / best)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight images: five by three annotators, one by two, one where the second sees no lesion, one by one annotator."""
    root = tmp_path_factory.mktemp("annotators")
    for number, (_, mask) in enumerate(drawn_folder(root, 8)):
        drawn = Image.open(mask)
        mask.unlink()
        readers = [drawn, drawn.filter(ImageFilter.MinFilter(7)), drawn.filter(ImageFilter.MaxFilter(21))]
        readers = {5: readers[:2], 6: [drawn, Image.new("L", drawn.size)], 7: readers[:1]}.get(number, readers)
        for reader, picture in enumerate(readers):
            path = root / "masks" / f"{mask.stem}_A{reader:02d}_T1_S1.png"
            picture.save(path)
    command = ["data", "folder", str(root / "photos"), "--masks", str(root / "masks"), "--annotators", "each"]
    assert main([*command, "--out", str(root / "m.parquet")]) == 0
    return root


@pytest.mark.slow
def test_an_evaluation_measures_against_each_annotator_and_shows_the_human_line(
    several: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Manifest.read(several / "m.parquet")
    draw = np.random.default_rng(1)
    orders = {name: draw.permutation(49) for name in manifest.ids}
    budgets = {0.2: 9, 0.4: 19}
    rows = [(name, budget, order[:k].tolist(), 49) for budget, k in budgets.items() for name, order in orders.items()]
    table = pa.table(dict(zip(("image_id", "budget", "kept", "n_patches"), map(list, zip(*rows)))))
    pq.write_table(table, several / "mine.parquet")
    run = mtb.evaluate_kept(several / "mine.parquet", several / "m.parquet", several / "run", part="all")
    measured = pd.DataFrame(run.evaluation["annotators"]).set_index(["method", "budget"])
    assert list(dict.fromkeys(measured.index.get_level_values(0)))[:2] == ["One annotator", "mine"]
    assert set(measured["n"]) == {6}  # not the image of one annotator, and not the one where the second sees no lesion
    assert set(measured["view"]) == {"as-is"}
    for budget, k in budgets.items():
        sums = {"mine": np.zeros(3), "One annotator": np.zeros(3)}
        for row, name in enumerate(manifest.ids):
            files = sorted((several / "masks").glob(f"{Path(name).name}_A*.png"))
            masks = [decode_mask(file) for file in files]
            assert manifest.annotator_paths(row) == (files if len(files) > 1 else [])
            masks = [mask for mask in masks if patch_labels(mask, GRID).any()]
            if len(masks) < 2:
                continue
            lesions = [patch_labels(mask, GRID) for mask in masks]
            ranked = [patch_order(lesion, covered_shares(mask, GRID), GRID) for lesion, mask in zip(lesions, masks)]
            for lesion in lesions:
                kept = lesion[orders[name][:k]].sum()
                sums["mine"] += np.array([kept, lesion.sum(), min(k, lesion.sum())]) / len(lesions)
            pairs = [(i, j) for i in range(len(lesions)) for j in range(len(lesions)) if i != j]
            for i, j in pairs:
                kept, size = lesions[j][ranked[i][:k]].sum(), lesions[j].sum()
                sums["One annotator"] += np.array([kept, size, min(k, size)]) / len(pairs)
        for method, (kept, size, best) in sums.items():
            assert measured.loc[(method, budget), "retention"] == pytest.approx(kept / size)
            assert measured.loc[(method, budget), "share"] == pytest.approx(kept / best)
    human = measured.loc["One annotator", "share"]
    assert (human > measured.loc["center", "share"]).all()
    assert (human <= 1).all()
    assert f"the mask of one annotator keeps {human[0.2]:.1%} at budget 0.2, {human[0.4]:.1%} at budget 0.4 (6 images)" in (
        capsys.readouterr().err
    )
    page = run.report(pictures=False).read_text()
    assert 'id="table-annotators"' in page
    shown = pd.read_csv(several / "run" / "tables" / "annotators.csv")
    assert shown["share"].tolist() == pytest.approx(measured["share"].tolist(), abs=1e-6)
    json.loads((several / "run" / "run.json").read_text())


@pytest.mark.slow
def test_a_mask_of_an_annotator_that_is_gone_is_named(several: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(several / "m.parquet")
    rows = manifest.rows.assign(annotator_masks=["masks/p00_A00_T1_S1.png|masks/gone.png", *[None] * 7])
    path = Manifest(rows, manifest.classes, root=manifest.root, name="gone").write(several / "gone.parquet")
    columns = {"image_id": manifest.ids, "kept": [list(range(9))] * 8, "n_patches": [49] * 8}
    pq.write_table(pa.table(columns), tmp_path / "mine.parquet")
    with pytest.raises(RequestError, match=r"gone\.png"):
        mtb.evaluate_kept(tmp_path / "mine.parquet", path, tmp_path / "run", part="all")
