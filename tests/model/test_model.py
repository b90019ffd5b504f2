"""The model as an `nn.Module`: devices, modes, parameters, state dicts, gradients, its main method and how it shows itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import medtokenbudget as mtb
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.errors import RequestError
from medtokenbudget.model import MedTokenBudget, load
from medtokenbudget.routing import Ranker, TokenBatch, create_selector, register_selector
from medtokenbudget.routing.base import SELECTORS
from medtokenbudget.training import MLPHead, RoutedClassifier
from tests.bad_input.damage import edit_json
from tests.small_model import CLASSES, draw_images, small_model

MAIN = "lats:lesion-first"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("module")


@pytest.fixture
def model(root: Path) -> MedTokenBudget:
    return small_model(root / "weights", baselines=("random", "center", "tome"), main=MAIN)


@pytest.fixture(scope="module")
def images(root: Path) -> list[Path]:
    return draw_images(root / "images", 3)


def test_the_main_method_is_what_is_used_when_no_selector_is_named(model: MedTokenBudget, images: list[Path]) -> None:
    assert model.main == MAIN
    assert model.selectors == [MAIN, "center", "random", "tome"]
    assert model.classifier() is model.classifier(MAIN)
    for found, wanted in zip(model.predict(images), model.predict(images, selector=MAIN)):
        assert found.selector == MAIN
        assert found.probabilities == wanted.probabilities


def test_a_main_method_without_a_classifier_is_rejected(model: MedTokenBudget) -> None:
    arguments = (model.backbone_config, model.backbone_fingerprint, CLASSES, model.classifiers, model.train_config)
    with pytest.raises(RequestError, match=r"main method 'lats' has no classifier\. Methods with a classifier: lats:lesion-first"):
        MedTokenBudget(*arguments, main="lats")


def test_a_model_without_lats_can_have_any_main_method(model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    only = {"center": model.classifiers["center"]}
    small = MedTokenBudget(model.backbone_config, model.backbone_fingerprint, CLASSES, only, model.train_config, main="center")
    again = mtb.load(small.save_pretrained(tmp_path))
    assert again.main == "center"
    assert again.predict(images[0])[0].selector == "center"


def test_the_saved_folder_records_the_main_method_in_format_3(model: MedTokenBudget, tmp_path: Path) -> None:
    folder = model.save_pretrained(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["format_version"] == 3
    assert config["identity"]["main"] == MAIN
    assert mtb.load(folder).main == MAIN


@pytest.mark.parametrize(("version", "advice"), [(1, "Train the model again with `mtb train`"), (4, "Install medtokenbudget")])
def test_a_folder_of_another_format_is_rejected_with_its_version_and_what_to_do(
    model: MedTokenBudget, tmp_path: Path, version: int, advice: str
) -> None:
    path = model.save_pretrained(tmp_path) / "config.json"
    edit_json(path, lambda config: config.update(format_version=version))
    with pytest.raises(RequestError, match=f"has model format version {version}, but this program reads version 3. .*{advice}"):
        mtb.load(tmp_path)


def test_classifiers_are_submodules_and_the_frozen_backbone_is_not(model: MedTokenBudget) -> None:
    assert isinstance(model, nn.Module)
    wanted = sum(p.numel() for classifier in model.classifiers.values() for p in classifier.parameters())
    assert sum(p.numel() for p in model.parameters()) == wanted > 0
    assert all(p.requires_grad for p in model.parameters())
    assert {key.split(".")[0] for key in model.state_dict()} == {"methods"}
    assert f"methods.method:{MAIN}.head.output.bias" in model.state_dict()


def test_method_texts_with_dots_and_signs_are_kept_apart_in_the_state_dict(model: MedTokenBudget, tmp_path: Path) -> None:
    names = ("lats:fixed-0.5", "lats:fixed-0%2E5", "center+linear", "values")
    made = {name: RoutedClassifier(create_selector("center", minimum=8), MLPHead(model.dim, 3)) for name in names}
    many = MedTokenBudget(model.backbone_config, model.backbone_fingerprint, CLASSES, made, model.train_config, main=names[0])
    assert list(many.classifiers) == list(names)
    assert all(many.classifiers[name] is made[name] for name in names)
    assert len(many.state_dict()) == 4 * len(made[names[0]].state_dict())
    again = mtb.load(many.save_pretrained(tmp_path))
    for name in names:
        assert torch.equal(again.classifiers[name].head.output.weight, made[name].head.output.weight)


def test_a_state_dict_carries_the_answers_to_another_model(model: MedTokenBudget, root: Path, images: list[Path]) -> None:
    other = small_model(root / "weights", baselines=("random", "center", "tome"), main=MAIN)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    wanted = model.predict(images)
    assert other.predict(images)[0].probabilities != wanted[0].probabilities
    other.load_state_dict(model.state_dict())
    assert [p.probabilities for p in other.predict(images)] == [p.probabilities for p in wanted]
    assert other.fingerprint == model.fingerprint


def test_the_backbone_moves_with_the_model(model: MedTokenBudget) -> None:
    network = model.backbone.model
    moved = model.to("meta")
    assert moved is model
    assert model.device.type == model.backbone.device.type == "meta"
    assert {p.device.type for p in network.parameters()} == {p.device.type for p in model.parameters()} == {"meta"}


def test_a_backbone_loaded_after_a_move_is_on_the_device_of_the_model(
    model: MedTokenBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = mtb.load(model.save_pretrained(tmp_path), device="cpu")
    asked: list[str] = []
    real = Backbone.load
    monkeypatch.setattr(Backbone, "load", lambda config, device: asked.append(str(device)) or real(config))
    lazy.to("meta")
    assert asked == []
    assert lazy.backbone.dim == lazy.dim
    assert asked == ["meta"]


def test_it_starts_in_evaluation_mode_and_training_mode_reaches_the_heads_but_not_the_backbone(model: MedTokenBudget) -> None:
    assert not any(part.training for part in model.modules())
    assert model.train() is model
    assert all(classifier.head.training for classifier in model.classifiers.values())
    assert not model.backbone.model.training


def test_predictions_are_the_same_in_training_mode_which_stays_on(model: MedTokenBudget, images: list[Path]) -> None:
    wanted, tokens = model.predict(images), model.tokens(images)
    probabilities = model.classify(tokens, (0.3,))
    model.train()
    assert [p.probabilities for p in model.predict(images)] == [p.probabilities for p in wanted]
    np.testing.assert_array_equal(model.classify(tokens, (0.3,)), probabilities)
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize("selector", [None, "center", "random", "tome"])
def test_forward_gives_the_logits_of_the_predictions_for_images_and_tokens(
    model: MedTokenBudget, images: list[Path], selector: str | None
) -> None:
    wanted = [list(p.probabilities.values()) for p in model.predict(images, 0.2, selector)]
    for given in (images, model.tokens(images)):
        logits = model(given, 0.2, selector)
        assert logits.shape == (3, 3)
        np.testing.assert_allclose(logits.softmax(-1).detach().numpy(), wanted, atol=1e-5)


def test_a_training_step_through_forward_changes_the_head(model: MedTokenBudget, images: list[Path]) -> None:
    model.train()
    head = model.classifier().head
    before = head.output.bias.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(images, 0.3), torch.tensor([0, 1, 2])).backward()
    optimizer.step()
    assert not torch.equal(head.output.bias, before)


def test_forward_takes_tokens_that_a_backbone_made_for_inference(model: MedTokenBudget, images: list[Path]) -> None:
    pixels = torch.from_numpy(np.stack([model.backbone.prepare(mtb_open(path)) for path in images]))
    tokens = model.backbone(model.backbone.normalize(pixels))
    assert tokens.patches.is_inference()
    nn.functional.cross_entropy(model(tokens), torch.tensor([0, 1, 2])).backward()
    assert model.classifier().head.output.bias.grad is not None


def mtb_open(path: Path) -> object:
    from medtokenbudget.data import decode_image

    return decode_image(path)


def test_a_copy_has_parameters_of_its_own_and_shares_the_frozen_backbone(model: MedTokenBudget, images: list[Path]) -> None:
    wanted = model.predict(images[0])[0].probabilities
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.classifier().head.output.bias.add_(1.0)
        other.classifier().head.output.weight.zero_()
    assert model.predict(images[0])[0].probabilities == wanted
    assert other.backbone is model.backbone
    assert other.predict(images[0])[0].probabilities != wanted


def test_a_tensor_of_one_picture_is_one_picture(model: MedTokenBudget, images: list[Path]) -> None:
    pixels = torch.from_numpy(np.array(mtb_open(images[0])))
    assert pixels.ndim == 3
    (found,) = model.predict(pixels)
    assert found.probabilities == model.predict(images[0])[0].probabilities


def test_a_learned_selector_of_another_package_is_saved_and_loaded_like_lats(
    model: MedTokenBudget, images: list[Path], tmp_path: Path
) -> None:
    class Linear(Ranker, nn.Module):
        learns = True

        def __init__(self, dim: int, scale: float = 1.0, minimum: int = 16) -> None:
            nn.Module.__init__(self)
            Ranker.__init__(self, minimum)
            # The name of the classifier's own part: the tensors must not be mixed up.
            self.head = nn.Linear(dim, 1)
            self.scale = scale

        def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> torch.Tensor:
            return self.scale * self.head(tokens.patches.float()).squeeze(-1)

    register_selector("test-linear")(Linear)
    try:
        made = {"test-linear": RoutedClassifier(create_selector("test-linear", dim=model.dim, scale=2.0), MLPHead(model.dim, 3))}
        own = MedTokenBudget(
            model.backbone_config, model.backbone_fingerprint, CLASSES, made, model.train_config, main="test-linear"
        )
        again = mtb.load(own.save_pretrained(tmp_path))
        assert again.classifier().selector.scale == 2.0
        for one, other in zip(own.predict(images), again.predict(images)):
            assert one.kept.tolist() == other.kept.tolist()
            assert one.probabilities == other.probabilities
    finally:
        SELECTORS.unregister("test-linear")


def test_a_selector_that_forgets_an_option_cannot_be_saved_and_says_so(model: MedTokenBudget, tmp_path: Path) -> None:
    class Forgetful(Ranker):
        name = "forgetful"

        def __init__(self, power: float = 1.0) -> None:
            super().__init__()

        def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> torch.Tensor:
            return tokens.patches.norm(dim=-1)

    made = {"forgetful": RoutedClassifier(Forgetful(), MLPHead(model.dim, 3))}
    own = MedTokenBudget(model.backbone_config, model.backbone_fingerprint, CLASSES, made, model.train_config, main="forgetful")
    with pytest.raises(RequestError, match=r"does not store its option\(s\) power.*override options\(\)"):
        own.save_pretrained(tmp_path)


def test_the_text_of_a_model_is_a_readable_block(model: MedTokenBudget) -> None:
    assert repr(model).splitlines() == [
        "MedTokenBudget(",
        "  backbone: test_vit, 160 pixels",
        "  grid:     10 x 10 patches of 64 numbers",
        "  classes:  3 (MEL, NV, BCC)",
        "  main:     lats:lesion-first",
        "  others:   center, random, tome",
        "  device:   cpu",
        ")",
    ]


def test_the_text_of_a_calibrated_model_says_what_it_promises() -> None:
    last = repr(load("dermoscopy")).splitlines()[-2]
    assert last.startswith("  promises: 90% of the lesion on average; 95% of the lesion on average")
