"""A scout as a model: it reads pixels, and its tokens are of another backbone, computed when they are first read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

import medtokenbudget as mtb
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.cli import main
from medtokenbudget.config import BackboneConfig
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.serve.service import Question, Service
from medtokenbudget.training.familiarity import Familiarity, moments_of
from tests.bad_input.damage import edit_json
from tests.small_model import scout_model


@pytest.fixture
def model() -> MedTokenBudget:
    return scout_model()


@pytest.fixture(scope="module")
def embedded() -> Backbone:
    return Backbone.load(BackboneConfig(name="embedded"))


def tokens_of(embedded: Backbone, image: Path) -> np.ndarray:
    """The tokens [256, 192] of the embedded backbone itself."""
    pixels = torch.from_numpy(embedded.prepare(Image.open(image)))[None]
    return embedded(embedded.normalize(pixels)).patches[0].numpy()


def test_kept_tokens_are_of_the_embedded_backbone_and_computed_when_first_read(
    model: MedTokenBudget, embedded: Backbone, images: list[Path]
) -> None:
    first, second = model.route(images[:2], budget=0.3)
    assert model._token_backbone is None, "routing alone does not load it"
    assert first.tokens.shape == (76, 192)
    np.testing.assert_allclose(first.tokens, tokens_of(embedded, images[0])[first.kept], atol=1e-5)
    assert first.tokens is first.tokens, "computed once"
    assert "tokens" not in vars(second)
    assert "pixels, 64 pixels; tokens from embedded, 224 pixels" in repr(model)


def test_a_saved_scout_gives_the_same_tokens_and_the_command_writes_them(
    model: MedTokenBudget, embedded: Backbone, images: list[Path], tmp_path: Path
) -> None:
    folder = model.save_pretrained(tmp_path / "model")
    again = mtb.load(folder, device="cpu")
    assert again.fingerprint == model.fingerprint
    assert (
        again.fingerprint
        != MedTokenBudget(
            model.backbone_config, model.backbone_fingerprint, (), model.classifiers, model.train_config, main="scout", device="cpu"
        ).fingerprint
    )
    assert np.array_equal(again.route(images[0])[0].tokens, model.route(images[0])[0].tokens)
    command = ["route", *map(str, images), "--model", str(folder), "--tokens", "--tokens-dtype", "fp32", "--device", "cpu"]
    assert main([*command, "--out", str(tmp_path / "routed")]) == 0
    written = load_file(tmp_path / "routed" / "tokens.safetensors")
    for image, tokens, kept in zip(images, written["tokens"], written["indices"], strict=True):
        np.testing.assert_allclose(tokens, tokens_of(embedded, image)[kept], atol=1e-5)
    edit_json(folder / "config.json", lambda config: config["identity"]["tokens"].update(layer=3))
    with pytest.raises(MismatchError, match=r"tokens\.layer"):
        mtb.load(folder)


def test_a_router_function_takes_images_or_their_tokens_and_refuses_tokens_without_pixels(
    model: MedTokenBudget, embedded: Backbone, images: list[Path]
) -> None:
    wanted = model.route(images, budget=0.3)
    tokens = model.tokens(images)
    assert (tokens.patches.shape, tokens.pixels.shape) == ((5, 256, 192), (5, 256, 48))
    selection = model.router(0.3)(tokens)
    for row, routing in enumerate(wanted):
        assert selection.indices[row].tolist() == routing.kept.tolist()
        np.testing.assert_allclose(selection.tokens[row].numpy(), routing.tokens, atol=1e-5)
    pixels = torch.from_numpy(np.stack([embedded.prepare(Image.open(image)) for image in images]))
    with pytest.raises(RequestError, match=r"The router reads pixels.*Pass `model\.tokens\(images\)`"):
        model.router(0.3)(embedded(embedded.normalize(pixels)))


def test_another_backbone_or_grid_is_refused(model: MedTokenBudget, images: list[Path]) -> None:
    config, fingerprint = model.tokens_from
    parts = (model.backbone_config, model.backbone_fingerprint, (), model.classifiers, model.train_config)
    with pytest.raises(RequestError, match="The grid of the backbone in `tokens_from`"):
        MedTokenBudget(*parts, main="scout", tokens_from=(config, {**fingerprint, "grid": [8, 8]}))
    other = MedTokenBudget(*parts, main="scout", tokens_from=(config, {**fingerprint, "weights": "0" * 64}), device="cpu")
    with pytest.raises(MismatchError, match="weights"):
        _ = other.route(images[0])[0].tokens


def test_the_service_answers_as_the_model_does(model: MedTokenBudget, images: list[Path]) -> None:
    answer = Service(model).answer(Question(images[0].read_bytes()))
    assert [row["name"] for row in answer["selectors"]] == ["scout", "center"]
    assert answer["selectors"][0]["order"][:76] == model.route(images[0], 0.3)[0].kept.tolist()


def test_unfamiliar_images_are_told_by_what_the_scout_sees_in_the_same_pass(
    model: MedTokenBudget, images: list[Path], tmp_path: Path
) -> None:
    selector = model.classifier().selector
    seen = selector.see(model.tokens(images)).features
    assert seen.patches.shape == (5, 1, 2 * (24 + 32)), "mean and deviation of the two coarsest levels"
    model.familiarity = Familiarity(seen.dim, rank=2)
    model.familiarity.image.fit(moments_of(seen.patches[:, 0]))
    model.familiarity.patch.fit(moments_of(seen.patches[:, 0]))
    again, calls = mtb.load(model.save_pretrained(tmp_path / "model"), device="cpu"), []
    again.classifier().selector.network.stem.register_forward_pre_hook(lambda *_: calls.append(None))
    routed = again.route(images, batch_size=5)
    assert len(calls) == 1
    # One vector per image, so its strangest part is the image itself.
    distance = model.familiarity.image(seen.patches[:, 0]).detach()
    np.testing.assert_allclose([one.unfamiliarity for one in routed], distance.numpy(), rtol=1e-3)
    np.testing.assert_allclose([one.unfamiliarity for one in again.route(images, selector="center")], distance.numpy(), rtol=1e-3)
    answer = Service(again).answer(Question(images[0].read_bytes()))
    assert answer["unfamiliarity"] == pytest.approx(routed[0].unfamiliarity, rel=1e-3)


@pytest.mark.slow
def test_graphs_of_a_scout_keep_what_it_keeps(model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from medtokenbudget.model.onnx import export_onnx, write_web_graphs

    features = model.classifier().selector.see(model.tokens(images)).features
    model.familiarity = Familiarity(features.dim, rank=2)
    (found,) = model.route(images[0], 0.3)
    pixels = model.backbone.prepare(Image.open(images[0]))
    whole = onnxruntime.InferenceSession(str(export_onnx(model, tmp_path, 0.3)))
    scores, kept = whole.run(None, {"image": pixels.transpose(2, 0, 1)[None].astype(np.float32) / 255})
    np.testing.assert_allclose(scores[0], found.scores, atol=1e-5)
    assert set(kept[0]) == set(found.kept)
    assert write_web_graphs(model, tmp_path / "web").ranked == ("scout", "center")
    web = onnxruntime.InferenceSession(str(tmp_path / "web" / "tokens.onnx"))
    scores, unfamiliarity = web.run(["scores", "unfamiliarity"], {"pixels": pixels[None]})
    np.testing.assert_allclose(scores[0], found.scores, atol=1e-4)
    assert unfamiliarity[0] == pytest.approx(found.unfamiliarity, rel=1e-3)
    assert json.loads(whole.get_modelmeta().custom_metadata_map["grid"]) == [16, 16]
