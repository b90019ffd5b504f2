"""Routers without a head: trained from masks alone, saved, loaded, routed, exported and served; classes are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.errors import NoHeadError, RequestError
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.serve.service import Question, Service
from medtokenbudget.training import MLPHead, RoutedClassifier
from tests.bad_input.damage import edit_json
from tests.drawn import Drawn, quick
from tests.small_model import draw_images, small_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headless")


@pytest.fixture(scope="module")
def model(root: Path) -> MedTokenBudget:
    return small_model(root / "weights", ("center", "random", "tome"), head=False)


@pytest.fixture(scope="module")
def images(root: Path) -> list[Path]:
    return draw_images(root / "images", 3)


SETTINGS = quick("lesion-first", labels=False, budgets=(0.1, 0.3))


@pytest.fixture(scope="module")
def trained(drawn: Drawn, root: Path) -> mtb.Run:
    return mtb.train(drawn.manifest_path, drawn.store_path, root / "run", SETTINGS, head="none")


def test_a_router_routes_as_the_same_router_with_a_head_does(root: Path, model: MedTokenBudget, images: list[Path]) -> None:
    with_head = small_model(root / "weights", ("center",))
    with_head.classifier().selector.load_state_dict(model.classifier().selector.state_dict())
    for alone, both in zip(model.route(images, 0.3), with_head.predict(images, 0.3)):
        assert alone.kept.tolist() == both.kept.tolist()
        np.testing.assert_array_equal(alone.scores, both.scores)
        np.testing.assert_array_equal(alone.tokens, both.tokens)
    assert "MEL" not in repr(model.route(images[0])[0])
    assert not isinstance(with_head.route(images[0])[0], mtb.model.Prediction), "a routing has no classes, whatever the model"


def test_a_saved_router_comes_back_the_same_and_refuses_classes_by_naming_route(
    model: MedTokenBudget, images: list[Path], tmp_path: Path
) -> None:
    saved = model.save_pretrained(tmp_path / "saved")
    assert json.loads((saved / "config.json").read_text())["identity"]["selectors"]["lats"]["head"] is None
    assert not (saved / "heads.safetensors").exists(), "the controls have no tensors"
    assert "none: a router without a head" in (saved / "README.md").read_text()
    again = mtb.load(saved, device="cpu").use_backbone(model.backbone)
    assert again.fingerprint == model.fingerprint
    assert again.route(images[0])[0].kept.tolist() == model.route(images[0])[0].kept.tolist()
    assert "none: a router without a head" in repr(again)
    assert (again.classes, again.has_head) == ((), False)
    for ask in (again.predict, again.classify, again.forward):
        with pytest.raises(NoHeadError, match=r"no head.*mtb route"):
            ask(images[0], *([(0.3,)] if ask == again.classify else []))


def test_classes_and_heads_come_together_or_not_at_all(root: Path, model: MedTokenBudget, tmp_path: Path) -> None:
    mixed = {"lats": model.classifier(), "center": RoutedClassifier(model.classifier("center").selector, MLPHead(model.dim, 2))}
    with pytest.raises(RequestError, match="'center' has a head, but the model has no classes"):
        MedTokenBudget(model.backbone_config, model.backbone_fingerprint, (), mixed, model.train_config, main="lats")
    with pytest.raises(RequestError, match="'lats' has no head, but the model has classes"):
        MedTokenBudget(model.backbone_config, model.backbone_fingerprint, ("A",), mixed, model.train_config, main="lats")
    saved = model.save_pretrained(tmp_path / "saved")
    edit_json(saved / "config.json", lambda config: config["identity"].update(classes=["MEL"]))
    with pytest.raises(RequestError, match=r"does not match:\n  classes: expected \[\], found \['MEL'\]"):
        mtb.load(saved)


def test_the_service_answers_without_probabilities(model: MedTokenBudget, images: list[Path]) -> None:
    answer = Service(model).answer(Question(images[0].read_bytes()))
    assert answer["classes"] == []
    assert {selector["name"] for selector in answer["selectors"]} == {"lats", "center", "random", "tome"}
    assert all(selector["probabilities"] is None for selector in answer["selectors"])
    kept = model.route(images[0], 0.3)[0].kept.tolist()
    assert answer["selectors"][0]["order"][:30] == kept


def test_training_from_masks_alone_measures_retention_and_no_accuracy(trained: mtb.Run, drawn: Drawn) -> None:
    assert set(trained.results["method"]) == {"lats:lesion-first", "center", "darkness", "border-contrast", "random"}
    assert trained.results["retention"].notna().all()
    assert trained.results[["accuracy", "macro_f1", "balanced_accuracy", "macro_auroc", "ece"]].isna().all(axis=None)
    assert (trained.results["n"] == 0).all()
    assert ",," in (trained.path / "results.csv").read_text(), "what was not measured is an empty cell"
    assert (trained.predictions["predicted"] == -1).all()
    assert not trained.model.has_head
    assert trained.model.classifier("center").head is None
    assert [row["stage"] for row in map(json.loads, (trained.path / "metrics.jsonl").read_text().splitlines())] == ["selector"] * 2
    assert trained.model.route(drawn.manifest.image_path(0))[0].k == 30


def test_a_manifest_without_labels_gives_the_router_of_one_whose_labels_are_left_out(
    trained: mtb.Run, drawn: Drawn, tmp_path: Path
) -> None:
    again = mtb.train(drawn.manifest.without_labels(), drawn.store_path, tmp_path / "run", SETTINGS)
    assert not again.model.has_head
    assert again.model.fingerprint == trained.model.fingerprint
    assert again.results.equals(trained.results)


@pytest.mark.slow
def test_the_card_and_the_report_of_a_router_speak_of_retention_alone(trained: mtb.Run) -> None:
    card = trained.model.card
    assert 'model.route("image.jpg"' in card
    assert "accuracy" not in card
    assert "share of ceiling" in card
    page = trained.report(pictures=False).read_text()
    assert "compared on 23 validation images" in page
    assert "the routers of this run have no head" in page
    assert "<code>mtb route</code>" in page


def test_settings_recipes_and_selectors_that_need_labels_are_refused(drawn: Drawn, tmp_path: Path) -> None:
    for config, selector, words in (
        (quick("lesion-first", labels=False, selection_metric="accuracy"), "lats", "uses selection_metric = 'accuracy'"),
        (quick("lesion-first", labels=False, class_balance="loss"), "lats", "uses class_balance = 'loss'"),
        (quick("lesion-first", labels=False, head_epochs=3), "lats", "uses head_epochs = 3"),
        (quick("lesion-first", labels=False, class_balance="sampler"), "lats", "no classes to balance"),
        (quick("paper"), "lats", "lats needs class labels"),
        (quick("lesion-first"), "cropr", "cropr:lesion-first needs class labels"),
    ):
        with pytest.raises(RequestError, match=words):
            mtb.train(drawn.manifest_path, drawn.store_path, tmp_path / "run", config, selector, head="none")
    with pytest.raises(RequestError, match="'auto' or 'none'"):
        mtb.train(drawn.manifest_path, drawn.store_path, tmp_path / "run", SETTINGS, head="mlp")


def test_images_with_neither_labels_nor_masks_are_refused_and_route_is_named(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = drawn.manifest.without_labels()
    bare = replace(bare, rows=bare.rows.assign(mask=None))
    path = bare.write(tmp_path / "bare.parquet")
    assert main(["train", str(path), "--store", str(drawn.store_path), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "neither class labels nor lesion masks" in said
    assert "mtb route" in said


def test_the_command_trains_from_masks_alone_and_says_what_is_next(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--epochs", "1", "--batch-size", "16", "--lats.hidden", "16", "--lats.layers", "1", "--budgets", "0.3"]
    command = ["train", str(drawn.manifest_path), "--store", str(drawn.store_path), "--out", str(tmp_path / "run"), *small]
    assert main([*command, "--head", "none"]) == 0
    said = capsys.readouterr().err
    assert "accuracy" not in said
    assert "of the lesion that fits the budget kept (n = 23)" in said
    assert f"mtb route IMAGES --model {tmp_path / 'run' / 'model'}" in said
    assert main(f"predict {drawn.manifest.image_path(0)} --model {tmp_path}/run --out {tmp_path}/p.csv".split()) == 2
    assert "mtb route" in capsys.readouterr().err
    assert not (tmp_path / "p.csv").exists()
