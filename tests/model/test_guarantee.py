"""From a saved model to a guarantee and its use: `mtb calibrate`, `mtb predict --retention`, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError
from medtokenbudget.routing.conformal import Promise, group_mean, lesion_kept, pick_threshold
from medtokenbudget.runs.evaluate import patch_scores
from medtokenbudget.serve.service import Question, Service
from tests.bad_input.damage import edit_json
from tests.drawn import Drawn, drawn_store
from tests.small_model import small_model

pytestmark = pytest.mark.slow


def shares(scores: np.ndarray) -> np.ndarray:
    """By hand: how much of the squared scores of its image is in a patch and in those that do not come before it."""
    return np.array([[sum(b**2 for b in row if b <= a) / sum(b**2 for b in row) for a in row] for row in np.asarray(scores, float)])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return drawn_store(tmp_path_factory.mktemp("calibrate"), n=60)


@pytest.fixture
def folder(drawn: Drawn, tmp_path: Path) -> Path:
    """A saved model that was trained on none of the drawings (its scores are arbitrary, which a guarantee does not mind)."""
    model = small_model(drawn.store_path.parent, baselines=("center", "tome", "random"))
    return model.save_pretrained(tmp_path / "model")


@pytest.fixture
def images(drawn: Drawn, tmp_path: Path) -> list[Path]:
    (tmp_path / "images").mkdir()
    return [Path(shutil.copy(drawn.manifest.image_path(i), tmp_path / "images")) for i in range(6)]


def test_a_guarantee_is_saved_with_its_evidence_found_again_and_replaced(drawn: Drawn, folder: Path, tmp_path: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    found = mtb.calibrate(folder, drawn.manifest_path, 0.8, store=drawn.store_path)
    model = mtb.load(folder)
    assert model.guarantees == (found,)
    assert model.guarantee(0.8) == found
    assert (folder / "model.safetensors").read_bytes() == before
    assert (found.data, found.model, found.dataset) == (drawn.manifest.hash, model.fingerprint, drawn.manifest.name)
    # The same from the parts: scores of the stored tokens, groups of the manifest.
    store = drawn.store
    rows = store.rows(drawn.manifest.ids)
    rows = rows[store.has_mask.numpy()[rows]]
    scores, lesion = patch_scores(store, rows, model.classifier().selector), store.lesion.numpy()[rows]
    named = dict(zip(drawn.manifest.ids, drawn.manifest.groups))
    groups = [named[store.ids[row]] for row in rows]
    expected = pick_threshold(Promise(0.8), shares(scores), lesion, groups, minimum=8)
    assert (found.threshold, found.bound, found.groups) == pytest.approx((expected.value, expected.bound, expected.groups))
    assert found.kept == pytest.approx(group_mean(lesion_kept(scores, lesion, found.counts(scores)), groups))
    assert 1 - found.kept <= found.bound <= 0.2 + 1e-9
    # Without a store the tokens are extracted.
    extracted = mtb.calibrate(folder, drawn.manifest_path, "80%", out=tmp_path / "copy")
    assert extracted == found == mtb.load(tmp_path / "copy").guarantee(0.8)
    # Calibrating again replaces the same promise and keeps others.
    for options in ({"cap": 0.9}, {"coverage": 0.6}, {"selector": "center"}):
        mtb.calibrate(folder, drawn.manifest_path, 0.8, store=drawn.store_path, **options)
    known = [(one.selector, one.coverage, one.cap) for one in mtb.load(folder).guarantees]
    assert known == [("center", None, None), ("lats", None, 0.9), ("lats", 0.6, None)]
    # It does not hold for a model that has changed since.
    next(iter(model.classifier().head.parameters())).data += 1
    with pytest.raises(RequestError, match="calibrated for another version of this model"):
        model.guarantee(0.8)


def test_predictions_with_a_guarantee_keep_what_is_above_its_threshold(drawn: Drawn, folder: Path, images: list[Path]) -> None:
    guarantee = mtb.calibrate(folder, drawn.manifest_path, 0.6, store=drawn.store_path)
    model = mtb.load(folder)
    found = model.predict(images, budget=guarantee)
    assert len({one.k for one in found}) > 1
    for one in found:
        k = max(guarantee.minimum, int((shares(one.scores[None]) >= guarantee.threshold - 1e-12).sum()))
        assert one.kept.tolist() == np.argsort(-one.scores, kind="stable")[:k].tolist()
        assert (one.k, one.budget, one.tokens.shape[0], one.guarantee) == (k, k / 100, k, guarantee)
        # The same K as a plain budget gives the same classes.
        (plain,) = model.predict(one.image, budget=k / 100)
        assert plain.probabilities == pytest.approx(one.probabilities, abs=1e-6)
    assert [one.kept.tolist() for one in model.route(images, budget=guarantee)] == [one.kept.tolist() for one in found]
    with pytest.raises(RequestError, match="This guarantee is for 'lats', not for 'center'"):
        model.predict(images, budget=guarantee, selector="center")


def test_the_command_writes_tables_packed_tokens_and_captions(
    drawn: Drawn, folder: Path, images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(folder)
    calibrate = f"calibrate {drawn.manifest_path} --model {where} --store {drawn.store_path} --retention 60%"
    assert main(calibrate.split()) == 0
    assert "lats keeps 60% of the lesion on average, on images like the 60" in capsys.readouterr().err
    predict = f"predict {images[0].parent} --model {where} --retention 0.6 --out {tmp_path}/p.parquet --tokens --overlay"
    assert main(predict.split()) == 0
    frame, packed = pd.read_parquet(tmp_path / "p.parquet"), load_file(tmp_path / "tokens.safetensors")
    assert packed["counts"].tolist() == frame["k"].tolist()
    assert packed["tokens"].shape == (frame["k"].sum(), 64)
    assert packed["indices"].tolist() == [patch for kept in frame["kept"] for patch in kept]
    assert len(list((tmp_path / "overlays").iterdir())) == len(images)


def test_images_that_cannot_be_calibrated_on_are_refused(drawn: Drawn, folder: Path, tmp_path: Path) -> None:
    manifest = drawn.manifest
    bare = manifest.with_columns(mask=[None] * len(manifest))
    other = small_model(tmp_path / "other", baselines=(), seed=1)
    scoreless = "does not rank patches by a score of its own"
    cases: list[tuple[Any, Manifest, dict[str, Any], str]] = [
        (folder, bare, {}, "None of the 60 images has a mask"),
        (folder, manifest, {"retention": 0.99}, r"groups cannot promise 99% .* at least 99 are needed"),
        (folder, manifest, {"retention": 0.9, "cap": 0.1}, "The cap does not allow 90%"),
        (folder, manifest, {"retention": 1.0}, "between 0 and 1"),
        (folder, manifest, {"selector": "tome"}, scoreless),
        (folder, manifest, {"selector": "random"}, scoreless),
        (folder, manifest, {"part": "select"}, "no images in the part 'select'"),
        (other, manifest, {}, r"(?s)The store .* weights"),
    ]
    for model, images, options, message in cases:
        with pytest.raises(RequestError, match=message):
            mtb.calibrate(model, images, **{"retention": 0.8, "store": drawn.store_path, **options})
    assert mtb.load(folder).guarantees == ()


def test_a_guarantee_that_was_damaged_or_changed_is_rejected(drawn: Drawn, folder: Path) -> None:
    mtb.calibrate(folder, drawn.manifest_path, 0.8, store=drawn.store_path)
    path = folder / "config.json"
    text = path.read_text()
    good = json.loads(text)["guarantees"][0]
    for name, value in (("threshold", None), ("retention", 2), ("selector", "evit"), ("most", 10_000), ("coverage", "all")):
        edit_json(path, lambda config: config.update(guarantees=[{**good, name: value}]))  # noqa: B023
        with pytest.raises(RequestError, match=r"config\.json is damaged: .*(guarantees cannot be read|does not fit)"):
            mtb.load(folder)
    for old, new in ((f'"threshold": {good["threshold"]}', '"threshold": 0.2'), ('"most": ', '"most": 1')):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(RequestError, match=r"config.json is damaged or was edited"):
            mtb.load(folder)


def test_the_service_answers_with_what_keeps_each_promise(drawn: Drawn, folder: Path, images: list[Path]) -> None:
    guarantee = mtb.calibrate(folder, drawn.manifest_path, 0.6, store=drawn.store_path)
    model = mtb.load(folder)
    answer = Service(model).answer(Question(images[0].read_bytes()))
    found = {selector["name"]: selector["promises"] for selector in answer["selectors"]}
    (predicted,) = model.predict(images[0], budget=guarantee)
    (promise,) = found["lats"]
    assert (promise["retention"], promise["coverage"], promise["k"]) == (0.6, None, predicted.k)
    assert promise["probabilities"] == pytest.approx(list(predicted.probabilities.values()), abs=1e-5)
    assert found["center"] == []
    mtb.calibrate(folder, drawn.manifest_path, 0.5, store=drawn.store_path)
    service = Service(mtb.load(folder))

    def promised(*retentions: float, selectors: tuple[str, ...] = ()) -> list[float]:
        question = Question(images[0].read_bytes(), selectors=selectors, retentions=retentions)
        return [one["retention"] for one in service.answer(question)["selectors"][0]["promises"]]

    assert (promised(), promised(0.6), promised(0.6, 0.5)) == ([0.5, 0.6], [0.6], [0.5, 0.6])
    with pytest.raises(RequestError, match=r"not calibrated for 95% of the lesion on average. Calibrated: 50% .*; 60% "):
        promised(0.6, 0.95)
    with pytest.raises(RequestError, match="'center' of this model is not calibrated"):
        promised(0.6, selectors=("center",))


@pytest.mark.parametrize("by", ["class", "size"])
def test_a_promise_by_group_holds_for_each_of_them_and_its_table_is_printed_and_on_the_card(
    drawn: Drawn, folder: Path, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"calibrate {drawn.manifest_path} --model {folder} --store {drawn.store_path} --retention 0.7".split()
    assert main([*command, "--by", by]) == 0
    printed, model = capsys.readouterr().out, mtb.load(folder)
    found = model.guarantee(0.7)
    assert str(found) == f"70% of the lesion on average, for each {by}"
    # By hand, without the code of the calibration: who is in which part, and what each keeps at the threshold.
    store, labels = drawn.store, dict(zip(drawn.manifest.ids, drawn.manifest.rows["label"]))
    rows = store.rows(drawn.manifest.ids)
    lesion = store.lesion.numpy()[rows]
    rows, lesion = rows[lesion.any(1)], lesion[lesion.any(1)]
    scores, sizes = patch_scores(store, rows, model.classifier().selector), lesion.sum(1)
    groups = dict(zip(drawn.manifest.ids, drawn.manifest.groups))
    quarters = np.quantile(sizes, (0.25, 0.5, 0.75))
    of = [labels[store.ids[row]] if by == "class" else int((size > quarters).sum()) for row, size in zip(rows, sizes)]
    assert sum(part["images"] for part in found.parts) == len(rows)
    bounds = []
    for value, part in zip(sorted(set(of)), found.parts, strict=True):
        inside = [i for i, one in enumerate(of) if one == value]
        losses: dict[str, list[float]] = {}
        for i in inside:
            order = np.argsort(-scores[i], kind="stable")
            kept = order[: max(8, int((shares(scores[i : i + 1]) >= found.threshold - 1e-12).sum()))]
            losses.setdefault(groups[store.ids[rows[i]]], []).append(1 - lesion[i][kept].sum() / sizes[i])
        mean = np.mean([np.mean(one) for one in losses.values()])
        assert (part["images"], part["groups"]) == (len(inside), len(losses))
        assert part["kept"] == pytest.approx(1 - mean)
        assert part["promised"] == (len(losses) >= 3), "1 / (n + 1) is at most 0.3 from 3 groups on"
        if part["promised"]:
            bounds.append((len(losses) * mean + 1) / (len(losses) + 1))
    assert 0.2 < max(bounds) <= 0.3 + 1e-9, "kept for the worst, and not much lower than it must be"
    assert found.threshold <= mtb.calibrate(mtb.load(folder), drawn.manifest_path, 0.7, store=drawn.store_path).threshold
    lines = printed.splitlines()
    assert lines[0].split() == [by, "groups", "images", "kept", "patches", "promised"]
    assert f"{found.parts[0]['kept']:.1%}" in lines[1]
    card = (folder / "README.md").read_text()
    assert card.count("## Promise of lats: 70% of the lesion") == 1
    assert card.count("\n| ") >= 1 + len(found.parts)
    assert main([*command, "--by", by]) == 0
    assert (folder / "README.md").read_text() == card, "the table is replaced"


def test_a_stratum_that_does_not_exist_or_is_too_small_is_refused(drawn: Drawn, folder: Path) -> None:
    with pytest.raises(RequestError, match=r"Unknown stratum 'clas' to calibrate `by`. Did you mean 'class'\?"):
        mtb.calibrate(folder, drawn.manifest_path, 0.8, store=drawn.store_path, by="clas")
    with pytest.raises(RequestError, match="No class has the 49 groups that 98% of the lesion on average needs"):
        mtb.calibrate(folder, drawn.manifest_path, 0.98, store=drawn.store_path, by="class")
    assert mtb.load(folder).guarantees == ()
