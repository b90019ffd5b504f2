"""External validation from a saved model to its page: `mtb evaluate`, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.config import CONTROLS
from medtokenbudget.data import Manifest
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.metrics import lesion_retention
from medtokenbudget.reporting.page import build
from medtokenbudget.runs.evaluate import in_classes_of, read_mapping
from tests.drawn import Drawn, drawn_store, quick
from tests.small_model import small_model

BUDGETS = (0.1, 0.3)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return drawn_store(tmp_path_factory.mktemp("evaluate"), n=60)


@pytest.fixture(scope="module")
def trained(drawn: Drawn) -> Path:
    """A run that was trained on the drawings."""
    out = drawn.store_path.parent / "run"
    mtb.train(drawn.manifest_path, drawn.store_path, out, quick("lesion-first", budgets=BUDGETS))
    return out


@pytest.fixture(scope="module")
def external(drawn: Drawn, trained: Path) -> Path:
    """Its evaluation on its validation images, as a run directory with a page."""
    out = trained.parent / "external"
    where = f"evaluate {drawn.manifest_path} --model {trained} --store {drawn.store_path} --out {out} --pictures false"
    command = where.split()
    assert main([*command, "--budgets", "0.1", "30%"]) == 0
    return out


@pytest.mark.slow
def test_an_evaluation_on_its_own_validation_images_repeats_the_numbers_of_the_training(trained: Path, external: Path) -> None:
    before, now = mtb.Run(trained), mtb.Run(external)
    columns = ["view", "method", "budget"]
    both = before.results.merge(now.results, on=columns, suffixes=("", "_now"))
    both = both[both["method"] != "random"]
    assert set(both["method"]) == {before.main, "center", "darkness", "border-contrast"}
    assert set(both["view"]) == {"as-is", "off-center"}
    for metric in ("retention", "retention_of_ceiling", "accuracy", "macro_f1", "ece"):
        np.testing.assert_allclose(both[metric], both[f"{metric}_now"], atol=2e-3)
    assert [row["budget"] for row in now.evaluation["own"]] == list(BUDGETS)
    assert now.evaluation["part"] == "val"


@pytest.mark.slow
def test_the_controls_stand_beside_the_model_on_the_same_images(external: Path) -> None:
    run = mtb.Run(external)
    rows = run.results[(run.results["view"] == "as-is") & (run.results["budget"] == 0.3)].set_index("method")
    assert set(rows.index) == {run.main, *CONTROLS} - {"segmenter"}
    assert rows["n_masked"].nunique() == 1
    assert rows.loc["oracle", "retention_of_ceiling"] == 1
    # No head was trained for the oracle, so nothing is said about its accuracy.
    assert pd.isna(rows.loc["oracle", "accuracy"])
    assert rows.loc[[run.main, "center", "darkness"], "accuracy"].notna().all()


@pytest.mark.slow
def test_an_evaluation_tells_the_share_of_images_that_are_unlike_the_training(
    drawn: Drawn, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = mtb.load(trained)
    validation = drawn.manifest.part("val")
    images = [validation.image_path(row) for row in range(len(validation))]
    distances = sorted(routing.unfamiliarity or 0 for routing in model.route(images))
    half = len(images) // 2
    model.familiarity.limit.mul_((distances[half - 1] + distances[half]) / 2)
    model.save_pretrained(tmp_path / "strict")
    command = f"evaluate {drawn.manifest_path} --model {tmp_path}/strict --store {drawn.store_path} --pictures false".split()
    assert main([*command, "--part", "val", "--budgets", "0.3", "--out", str(tmp_path / "out")]) == 0
    expected = len(images) - half
    share = f"{expected / len(images):.1%} of {len(images)} images are unlike the training images"
    assert share in capsys.readouterr().err
    page = " ".join((tmp_path / "out" / "report.html").read_text(encoding="utf-8").split())
    assert f"{expected} are unlike the training images of the model" in page


@pytest.mark.slow
def test_the_page_says_what_was_lost_and_where(external: Path) -> None:
    page = (external / "report.html").read_text()
    assert "External validation of" in page
    for table in ("own-validation", "attribute-strata", "worst", "size-strata"):
        assert f'id="table-{table}"' in page
    assert "Individual typology angle" in page
    own = pd.read_csv(external / "tables" / "own-validation.csv")
    assert own["lost"].abs().max() < 2e-3  # the same images
    strata = pd.read_csv(external / "tables" / "attribute-strata.csv")
    run = mtb.Run(external)
    attributes = pd.read_parquet(external / "attributes.parquet").set_index("image_id")
    row = strata[(strata["method"] == "center") & (strata["property"] == "dark corners")].iloc[0]
    images = run.predictions.query("method == 'center' and budget == 0.3 and view == 'as-is'").set_index("image_id")
    inside = images[attributes.loc[images.index, "dark corners"] == row["stratum"]]
    reachable = np.minimum(inside["lesion"].astype(int), inside["k"]).sum()
    assert row["value"] == pytest.approx(inside["kept_lesion"].sum() / reachable, abs=1e-5)
    assert row["n"] == len(inside)


@pytest.mark.slow
def test_columns_of_the_manifest_give_strata_in_an_evaluation_and_in_the_report_of_a_training(
    drawn: Drawn, trained: Path, tmp_path: Path
) -> None:
    part = drawn.manifest.part("val")
    half = ["left" if row % 2 else "right" for row in range(len(part))]
    path = replace(part, rows=part.rows.assign(hair=half), name="halves").write(tmp_path / "halves.parquet")
    out = tmp_path / "halves"
    command = f"evaluate {path} --model {trained} --store {drawn.store_path} --out {out} --budgets 0.3 --pictures false".split()
    assert main([*command, "--by", "hiar"]) == 2
    assert not out.exists()
    assert main([*command, "--by", "hair"]) == 0
    strata = pd.read_csv(out / "tables" / "attribute-strata.csv")
    assert {"hair", "hair (column)"} <= set(strata["property"])  # the measured one too
    run = mtb.Run(out)
    images = run.predictions.query("method == 'center' and view == 'as-is'").set_index("image_id")
    for side in ("left", "right"):
        row = strata.query("property == 'hair (column)' and stratum == @side and method == 'center'").iloc[0]
        chosen = images.loc[[name for name, of in zip(part.ids, half) if of == side and name in images.index]]
        chosen = chosen[chosen["lesion"] > 0]
        best = np.minimum(chosen["lesion"].astype(int), chosen["k"]).sum()
        assert row["value"] == pytest.approx(chosen["kept_lesion"].sum() / best, abs=1e-5)
    # A training has no attributes of its own; the manifest it was made from has.
    with pytest.raises(RequestError, match="Unknown column 'hair'"):
        build([trained], tmp_path / "report", by=["hair"])


@pytest.mark.slow
def test_without_masks_or_labels_what_is_left_is_measured(drawn: Drawn, trained: Path, tmp_path: Path) -> None:
    manifest = replace(drawn.manifest.part("val"), name="bare")
    nothing = manifest.with_columns(mask=[None] * len(manifest), label=[None] * len(manifest))
    run = mtb.evaluate(trained, nothing, tmp_path / "neither", store=drawn.store_path, budgets=["30%"])
    assert run.results[["retention", "accuracy"]].isna().all(axis=None)
    assert len(run.predictions[run.predictions["method"] == run.main]) == len(manifest)
    assert "none with a lesion mask" in run.report(pictures=False).read_text()
    masks = mtb.evaluate(
        trained, manifest.with_columns(label=[None] * len(manifest)), tmp_path / "masks", store=drawn.store_path, budgets=[0.3]
    )
    assert masks.results["accuracy"].isna().all()
    assert masks.results["retention"].notna().all()


@pytest.mark.slow
def test_tokens_are_extracted_and_images_that_cannot_be_read_are_counted(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_model(drawn.store_path.parent, baselines=())
    manifest = drawn.manifest.take(range(6))
    images = [str(manifest.image_path(i)) for i in range(6)]
    images[2] = str(tmp_path / "photos" / "broken.jpg")
    (tmp_path / "photos").mkdir()
    Path(images[2]).write_bytes(b"no picture")
    labels = dict.fromkeys(manifest.classes, "MEL")
    broken = manifest.with_columns(image=images, mask=[str(manifest.mask_path(i)) for i in range(6)])
    run = mtb.evaluate(model, broken, tmp_path / "out", budgets=[0.3], classes=labels)
    assert (run.evaluation["images"], run.evaluation["unreadable"]) == (6, 1)
    assert (
        f"1 of 6 images are left out, they or their masks cannot be used. The first: {Path(images[2]).name} is not an image"
        in capsys.readouterr().err
    )
    row = run.results[run.results["method"] == "lats"].iloc[0]
    # The same from predictions of the model itself.
    good = [i for i in range(6) if i != 2]
    found = model.predict([manifest.image_path(i) for i in good], budget=0.3)
    lesion = drawn.store.lesion.numpy()[drawn.store.rows([manifest.ids[i] for i in good])]
    kept = np.stack([one.kept_mask.reshape(-1) for one in found if one.kept_mask is not None])
    assert row["retention"] == pytest.approx(lesion_retention(kept, lesion).pooled, abs=0.02)


@pytest.mark.slow
def test_requests_that_cannot_be_served_are_refused_with_a_reason(
    drawn: Drawn, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, store = str(drawn.manifest_path), str(drawn.store_path)
    command = ["evaluate", manifest, "--model", str(trained), "--out", str(tmp_path / "out"), "--store", store]
    for options, message in (
        (["--part", "all"], "The model was trained on"),
        (["--out", str(trained)], "is the run of a training"),
    ):
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err
    other = small_model(tmp_path / "other", baselines=(), seed=1)
    with pytest.raises(MismatchError, match=r"(?s)The store .*Leave out `store`"):
        mtb.evaluate(other, drawn.manifest.take(range(4)), tmp_path / "out", store=store, classes={"MEL": "MEL"} | named(drawn))


@pytest.mark.slow
def test_training_images_are_recognized_without_the_cache_of_the_store(drawn: Drawn, trained: Path, tmp_path: Path) -> None:
    cache = {path: path.read_bytes() for path in (drawn.store_path / "cache").glob("*.safetensors")}
    for path, data in cache.items():
        path.write_bytes(data[: len(data) // 2])
    try:
        with pytest.raises(RequestError, match="The model was trained on 3 of the 3 images"):
            mtb.evaluate(trained, drawn.manifest.part("train").take(range(3)), tmp_path / "out")
    finally:
        for path, data in cache.items():
            path.write_bytes(data)


def named(drawn: Drawn) -> dict[str, str | None]:
    return dict.fromkeys(drawn.manifest.classes)


def tiny(labels: list[str | None], classes: list[str]) -> Manifest:
    rows = [{"image_id": str(i), "image": f"{i}.jpg", "label": label} for i, label in enumerate(labels)]
    return Manifest.from_records(rows, classes)


def test_classes_are_matched_by_name_or_by_a_mapping(tmp_path: Path) -> None:
    manifest = tiny(["nevus", "MEL", None, "scar"], ["nevus", "MEL", "scar"])
    path = tmp_path / "classes.json"
    path.write_text(json.dumps({"nevus": "NV", "scar": None}))
    found = in_classes_of(manifest, ["MEL", "NV"], read_mapping(path))
    assert (found.rows["label"].tolist(), found.classes) == (["NV", "MEL", None, None], ("MEL", "NV"))
    assert in_classes_of(manifest, []).classes == ()
    with pytest.raises(RequestError, match="a router without classes"):
        in_classes_of(manifest, [], {"nevus": "NV"})
    with pytest.raises(RequestError, match=r'these classes of the data: nevus, scar\. It knows MEL, NV.*"nevus": null'):
        in_classes_of(manifest, ["MEL", "NV"])
    with pytest.raises(RequestError, match="The mapping names wart, but the classes of the data are nevus, MEL, scar"):
        in_classes_of(manifest, ["MEL", "NV"], {"wart": "NV"})
    with pytest.raises(RequestError, match="The mapping leads to BCC, but the classes of the model are MEL, NV"):
        in_classes_of(manifest, ["MEL", "NV"], {"nevus": "BCC", "scar": None})
    path.write_text('["nevus"]')
    with pytest.raises(RequestError, match="must be a JSON object"):
        read_mapping(path)
