"""Early routing end to end: extract, train, predict, with a scout and inside the backbone; and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import medtokenbudget as mtb
from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.partial import resize_scores
from medtokenbudget.cli import main
from medtokenbudget.config import BackboneConfig, ExtractConfig
from medtokenbudget.data import Drawings, Manifest, decode_image, synthetic_manifest
from medtokenbudget.errors import BudgetError, RequestError
from medtokenbudget.model import EarlyRouting, MedTokenBudget
from medtokenbudget.model.early import parse_route, untrained_router
from medtokenbudget.model.onnx import export_onnx
from medtokenbudget.serve.service import Question, Service
from tests.drawn import quick
from tests.small_model import small_backbone, small_model

CONFIG = ExtractConfig(views="off-center", threads=1, device="cpu")
SETTINGS = {"scout": {}, "inside": {"block": 2}}


@dataclass(frozen=True)
class World:
    """Drawn images, the backbone of the tests, and a router for each way."""

    folder: Path
    manifest_path: Path
    backbone: BackboneConfig
    routers: dict[str, MedTokenBudget]

    @property
    def manifest(self) -> Manifest:
        return Manifest.read(self.manifest_path)

    def early(self, way: str, budget: float = 0.3) -> EarlyRouting:
        return EarlyRouting(self.routers[way], way, budget, **SETTINGS[way])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("early")
    manifest = synthetic_manifest(folder / "data", Drawings(24, seed=3, size=96))
    small_model(folder / "scout", ("center",), seed=1).save_pretrained(folder / "scout-model")
    config = small_backbone(folder)
    inner = replace(config, layer=1)
    inside = small_model(folder, ("center",), main="lats:lesion-first")
    inside = MedTokenBudget(
        inner, Backbone.load(inner).fingerprint, inside.classes, inside.classifiers, inside.train_config, main=inside.main
    )
    scout = mtb.load(folder / "scout-model", device="cpu")
    return World(folder, manifest, config, {"scout": scout, "inside": inside})


@dataclass(frozen=True)
class Made:
    way: str
    store: FeatureStore
    model: MedTokenBudget
    run: Path


@pytest.fixture(scope="module", params=list(SETTINGS))
def made(request: pytest.FixtureRequest, world: World) -> Made:
    """A store that was routed early and a model that was trained on it, loaded from its folder."""
    way = request.param
    store = extract(world.manifest, world.folder / f"store-{way}", world.backbone, CONFIG, early=world.early(way))
    run = world.folder / f"run-{way}"
    mtb.train(world.manifest_path, store.path, run, quick("lesion-first", "no-pruning", budgets=(0.3,)))
    return Made(way, store, mtb.load(run, device="cpu"), run)


def test_a_model_predicts_from_the_very_tokens_that_its_head_was_trained_on(made: Made, world: World) -> None:
    manifest = world.manifest
    prediction = made.model.predict(manifest.image_path(0))[0]
    stored = made.store.read(made.store.rows([manifest.ids[0]]))
    assert sorted(prediction.kept.tolist()) == sorted(stored.places[0].tolist())
    torch.testing.assert_close(torch.from_numpy(prediction.tokens), stored.patches[0], rtol=5e-3, atol=5e-3)  # stored in fp16
    assert (prediction.budget, prediction.k) == (0.3, 30)
    with pytest.raises(BudgetError, match=r"runs on 30 patches \(budget 0\.3\).*no other budget"):
        made.model.predict(manifest.image_path(0), budget=0.5)
    # The kept lesion is counted on the whole grid.
    results = mtb.Run(made.run).results
    row = results[(results["method"] == made.model.main) & (results["view"] == "as-is")].iloc[0]
    rows = made.store.rows(manifest.part("val").ids)
    lesion, places = made.store.lesion[rows], made.store.read(rows).places
    kept = torch.zeros_like(lesion).scatter(1, places, True)
    assert row["retention"] == pytest.approx(float((kept & lesion).sum() / lesion.sum()))
    assert (row["method"], row["k"]) == ("no-pruning", 30)


def test_a_saved_model_routes_by_command_and_is_rejected_with_another_router(made: Made, world: World, tmp_path: Path) -> None:
    folder = made.model.save_pretrained(tmp_path / "copy")
    assert mtb.load(folder, device="cpu").fingerprint == made.model.fingerprint
    assert main(["route", str(world.manifest_path), "--model", str(folder), "--out", str(tmp_path / "o"), "--table", "csv"]) == 0
    table = pd.read_csv(tmp_path / "o" / "routes.csv")
    assert len(table) == len(world.manifest)
    for answer, kept in zip(made.model.route(world.manifest_path), table["kept"], strict=True):
        assert sorted(answer.kept.tolist()) == sorted(int(patch) for patch in str(kept).split())
    small_model(tmp_path / "other", (), seed=5).save_pretrained(folder / "router")
    with pytest.raises(RequestError, match="not the one that it was trained with"):
        _ = mtb.load(folder, device="cpu").backbone


@pytest.mark.parametrize(("size", "side", "k"), [(320, 20, 120), (224, 14, 58)])
def test_the_scout_sees_a_larger_image_reduced(world: World, size: int, side: int, k: int) -> None:
    config = replace(world.backbone, image_size=size)
    backbone = world.early("scout").wrap(Backbone.load(config))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (size, size, 3), dtype=np.uint8))
    tokens = backbone(backbone.normalize(torch.from_numpy(backbone.prepare(image))[None]))
    assert tokens.grid == (side, side)
    assert tokens.patches.shape[1] == k
    # Scores of a coarse scout lie between the centers of its patches.
    scores = resize_scores(torch.tensor([[0.0, 4.0, 0.0, 4.0]]), (2, 2), (4, 4)).reshape(4, 4)
    torch.testing.assert_close(scores, torch.tensor([0.0, 1.0, 3.0, 4.0]).expand(4, 4))


def test_routers_backbones_and_budgets_that_do_not_fit_are_rejected(world: World) -> None:
    inside, scout = world.early("inside"), world.early("scout")
    deep = EarlyRouting(untrained_router("evit", "inside", world.backbone, 99), "inside", block=99)
    cases: list[tuple[EarlyRouting, dict[str, Any], str]] = [
        (scout, {"image_size": 112}, r"scout looks at images of 160 pixels, but the backbone at images of 112"),
        (world.early("scout", 0.05), {}, r"Budget 0\.05 keeps 5 of 100 patches.*minimum is 8. Use `budget=0\.08`"),
        (replace(inside, block=4), {}, r"block 4 scores the tokens of block 3, but the router was trained on tokens of block 1"),
        (replace(inside, router=world.routers["scout"]), {}, "trained on another backbone"),
        (inside, {"layer": 1}, r"block:2.* does not exist: tokens come from block 1"),
        (deep, {}, r"block:99.* does not exist: tokens come from block 5"),
    ]
    for early, changes, message in cases:
        with pytest.raises(RequestError, match=message):
            early.wrap(Backbone.load(replace(world.backbone, **changes)))
    for route in ("block:x", "zoom", "scout:4"):
        with pytest.raises(RequestError, match="`route` must be scout or block:N"):
            parse_route(route)


def test_a_router_that_never_saw_a_mask_or_does_not_rank_is_rejected(world: World, tmp_path: Path) -> None:
    model = small_model(tmp_path, ("tome", "random", "oracle"))
    backbone = Backbone.load(world.backbone)
    for main_method, reason in (("tome", "merges patches"), ("random", "is random"), ("oracle", "reads lesion")):
        model.main = main_method
        with pytest.raises(RequestError, match=reason):
            EarlyRouting(model, "scout").wrap(backbone)
    model.main = "lats"
    maskless = replace(model.train_config, losses=replace(model.train_config.losses, lesion=0.0))
    for config, info in ((maskless, {}), (model.train_config, {"run": {"masks": 0}})):
        model.train_config, model.info = config, info
        with pytest.raises(RequestError, match="trained without lesion masks"):
            EarlyRouting(model, "scout").wrap(backbone)


@pytest.mark.parametrize("name", ["center", "darkness"])
def test_a_scout_that_reads_no_patch_runs_no_backbone_and_chooses_as_it_does_on_tokens(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = untrained_router(name, "scout", world.backbone)
    pixels = router.backbone.prepare(decode_image(world.manifest.image_path(0)))[None]
    expected = router.classifier().selector.score(router.encode(pixels))
    look = EarlyRouting(router, "scout").image_scores()
    monkeypatch.setattr(Backbone, "tokens", lambda *_: pytest.fail("the backbone ran"))
    found = look(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("name", "signal"), [("evit", "cls_attention"), ("frequency", "received_attention")])
def test_a_selector_that_needs_no_training_chooses_inside_by_the_attention_of_the_block_before(
    name: str, signal: str, world: World
) -> None:
    router = untrained_router(name, "inside", world.backbone, 2)
    backbone = EarlyRouting(router, "inside", block=2).wrap(Backbone.load(world.backbone))
    images = torch.rand(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    before = Backbone.load(replace(world.backbone, layer=1))(images, (signal,))
    best = getattr(before, signal).topk(30, dim=1).indices.sort(1).values
    places = backbone(images).places
    assert torch.equal(places.sort(1).values, best)


def test_other_methods_and_budgets_on_early_routed_tokens_are_rejected(world: World, tmp_path: Path) -> None:
    store = extract(world.manifest, world.folder / "store-scout", world.backbone, CONFIG, early=world.early("scout"))
    with pytest.raises(RequestError, match=r"center chooses among all patches.*Use the method no-pruning"):
        mtb.sweep(world.manifest_path, store, tmp_path / "a", ["center"], config=quick("lesion-first", "center"))
    with pytest.raises(RequestError, match=r"routed at budget 0\.3"):
        mtb.sweep(world.manifest_path, store, tmp_path / "b", budgets=[0.5], config=quick("lesion-first", "no-pruning"))
    with pytest.raises(RequestError, match="chooses among all patches"):
        mtb.create_selector("center").select(store.read([0]), 3)
    run = mtb.sweep(
        world.manifest_path, store, tmp_path / "c", heads=["mlp", "abmil"], config=quick("lesion-first", "no-pruning"), jobs=1
    )
    assert sorted(set(run.results["method"])) == ["no-pruning", "no-pruning+abmil"]
    assert run.model.predict(world.manifest.image_path(0), selector="no-pruning+abmil")[0].k == 30


@pytest.mark.parametrize("route", [("scout", "scout-model"), ("block:2", "evit")], ids=" by ".join)
def test_commands_extract_train_and_predict(
    route: tuple[str, str], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world.folder)
    manifest, store, run, table = str(world.manifest_path), str(tmp_path / "s"), str(tmp_path / "r"), str(tmp_path / "p.csv")
    backbone = ["--backbone", "test_vit", "--weights", str(world.backbone.weights), "--image-size", "160"]
    extracting = ["extract", manifest, *backbone, "--budget", "30%", "--route", route[0]]
    assert main([*extracting, "--store", store, "--router", route[1]]) == 0
    assert "30 of 100 patches)" in capsys.readouterr().out
    assert main(["train", manifest, "--store", store, "--out", run, "--head-epochs", "1", "--device", "cpu"]) == 0
    assert main(["predict", str(world.manifest.image_path(0)), "--model", run, "--out", table, "--overlay"]) == 0
    assert pd.read_csv(table)["k"].tolist() == [30]
    for options, message in (
        ([], "--route and --router must be used together"),
        (["--router", route[1], "--engine", "ray"], "this machine"),
        (["--router", "cropr"], "'cropr' learns, so it cannot choose before it is trained"),
        (["--router", "tome"], "'tome' merges patches, so it cannot choose patches early"),
    ):
        assert main([*extracting, "--store", str(tmp_path / "t"), *options]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


@pytest.mark.slow
def test_the_exported_graph_routes_like_the_model(made: Made, world: World, tmp_path: Path) -> None:
    """From the file of an image to the same class probabilities, with onnxruntime alone after the resize."""
    onnxruntime = pytest.importorskip("onnxruntime")
    image, budget = decode_image(world.manifest.image_path(1)), 0.3
    path = export_onnx(made.model, tmp_path, budget)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = made.model.predict(image, budget)[0]
    pixels = made.model.backbone.prepare(image).transpose(2, 0, 1)[None].astype(np.float32) / 255
    logits, indices = session.run(["logits", "indices"], {"image": pixels})
    probabilities = torch.from_numpy(logits[0]).softmax(0).numpy()
    np.testing.assert_allclose(probabilities, list(expected.probabilities.values()), atol=1e-4)
    assert sorted(indices[0].tolist()) == sorted(expected.kept.tolist())
    with pytest.raises(RequestError, match='Use `graph="whole"`'):
        export_onnx(made.model, tmp_path, budget, "routing")


def test_the_service_answers_like_the_model(made: Made, world: World) -> None:
    path, service = world.manifest.image_path(1), Service(made.model)
    answer, expected = service.answer(Question(path.read_bytes())), made.model.predict(path)[0]
    (row,) = answer["selectors"]
    assert (row["name"], answer["budgets"], answer["n"]) == (made.model.main, [0.3], 100)
    assert row["order"] == expected.kept.tolist()
    np.testing.assert_allclose(row["probabilities"][0], list(expected.probabilities.values()), atol=1e-5)
    described = service.describe()
    assert described["budgets"] == [0.3]
    assert described["route"] == {"way": made.way, "budget": 0.3, "k": 30, **SETTINGS[made.way]}
    with pytest.raises(BudgetError, match="no other budget"):
        service.answer(Question(path.read_bytes(), budgets=(0.5,)))
