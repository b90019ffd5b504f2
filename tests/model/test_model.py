"""The model as an `nn.Module`: devices, modes, parameters, state dicts, gradients, its main method and how it shows itself."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import medtokenbudget as mtb
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.data import decode_image
from medtokenbudget.errors import RequestError
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.routing import Ranker, Selector, TokenBatch, create_selector, register_selector
from medtokenbudget.routing.base import SELECTORS
from medtokenbudget.training import MLPHead, RoutedClassifier
from tests.small_model import CLASSES, small_model

MAIN = "lats:lesion-first"


@pytest.fixture
def model(root: Path) -> MedTokenBudget:
    return small_model(root / "weights", baselines=("random", "center", "tome"), main=MAIN)


def with_selectors(model: MedTokenBudget, main: str, **selectors: Selector) -> MedTokenBudget:
    """The backbone of a model under other selectors, each with a head of its own."""
    made = {name: RoutedClassifier(selector, MLPHead(model.dim, len(CLASSES))) for name, selector in selectors.items()}
    return MedTokenBudget(model.backbone_config, model.backbone_fingerprint, CLASSES, made, model.train_config, main=main)


def test_the_main_method_is_used_when_no_selector_is_named(model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    assert model.selectors == [MAIN, "center", "random", "tome"]
    assert model.classifier() is model.classifier(MAIN)
    by_default, by_name = model.predict(images[0])[0], model.predict(images[0], selector=MAIN)[0]
    assert by_default.selector == MAIN
    assert by_default.probabilities == by_name.probabilities
    # Any method can be the main one.
    again = mtb.load(with_selectors(model, "center", center=create_selector("center")).save_pretrained(tmp_path))
    assert again.main == again.predict(images[0])[0].selector == "center"
    with pytest.raises(RequestError, match=r"main method 'lats' has no classifier\. Methods with a classifier: center"):
        with_selectors(model, "lats", center=create_selector("center"))


def test_method_texts_with_dots_and_signs_are_kept_apart_in_the_state_dict(model: MedTokenBudget, tmp_path: Path) -> None:
    names = ("lats:fixed-0.5", "lats:fixed-0%2E5", "center+linear", "values")
    many = with_selectors(model, names[0], **{name: create_selector("center", minimum=8) for name in names})
    assert list(many.classifiers) == list(names)
    assert len(many.state_dict()) == 4 * len(many.classifier().state_dict())
    again = mtb.load(many.save_pretrained(tmp_path))
    for name in names:
        assert torch.equal(again.classifier(name).head.output.weight, many.classifier(name).head.output.weight)


def test_a_state_dict_carries_the_classifiers_to_another_model(model: MedTokenBudget, root: Path, images: list[Path]) -> None:
    # Of the classifiers, without the frozen backbone.
    expected_size = sum(p.numel() for classifier in model.classifiers.values() for p in classifier.parameters())
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected_size > 0
    assert {key.split(".")[0] for key in model.state_dict()} == {"methods"}
    assert f"methods.method:{MAIN}.head.output.bias" in model.state_dict()
    other = small_model(root / "weights", baselines=("random", "center", "tome"), main=MAIN)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    expected = model.predict(images[0])[0].probabilities
    assert other.predict(images[0])[0].probabilities != expected
    other.load_state_dict(model.state_dict())
    assert other.predict(images[0])[0].probabilities == expected
    assert other.fingerprint == model.fingerprint
    # A copy has parameters of its own, and shares the frozen backbone.
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.classifier().head.output.weight.zero_()
    assert twin.backbone is model.backbone
    assert twin.predict(images[0])[0].probabilities != model.predict(images[0])[0].probabilities == expected


def test_the_backbone_moves_with_the_model_also_if_it_is_loaded_later(
    model: MedTokenBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = mtb.load(model.save_pretrained(tmp_path), device="cpu")
    network = model.backbone.model
    assert model.to("meta") is model
    assert model.device.type == model.backbone.device.type == "meta"
    assert {p.device.type for p in network.parameters()} == {p.device.type for p in model.parameters()} == {"meta"}
    asked: list[str] = []
    load = Backbone.load
    monkeypatch.setattr(Backbone, "load", lambda config, device: asked.append(str(device)) or load(config))
    lazy.to("meta")
    assert asked == []
    assert lazy.backbone.dim == lazy.dim
    assert asked == ["meta"]


def test_training_mode_reaches_the_heads_and_changes_no_answer(model: MedTokenBudget, images: list[Path]) -> None:
    assert not any(part.training for part in model.modules())
    tokens = model.tokens(images)
    predicted, classified = model.predict(images[0])[0].probabilities, model.classify(tokens, (0.3,))
    assert model.train() is model
    assert not model.backbone.model.training
    assert model.predict(images[0])[0].probabilities == predicted
    np.testing.assert_array_equal(model.classify(tokens, (0.3,)), classified)
    assert all(part.training for part in model.modules()), "predicting does not leave training mode"


@pytest.mark.parametrize("selector", [None, "center", "random", "tome"])
def test_forward_gives_the_logits_of_the_predictions_for_images_and_tokens(
    model: MedTokenBudget, images: list[Path], selector: str | None
) -> None:
    expected = [list(p.probabilities.values()) for p in model.predict(images, 0.2, selector)]
    for given in (images, model.tokens(images)):
        np.testing.assert_allclose(model(given, 0.2, selector).softmax(-1).detach().numpy(), expected, atol=1e-5)


def test_a_training_step_through_forward_changes_the_head(model: MedTokenBudget, images: list[Path]) -> None:
    pixels = torch.from_numpy(np.stack([model.backbone.prepare(decode_image(path)) for path in images[:3]]))
    tokens = model.backbone(model.backbone.normalize(pixels))
    assert tokens.patches.is_inference()
    head, labels = model.train().classifier().head, torch.tensor([0, 1, 2])
    for given in (images[:3], tokens):
        before = head.output.bias.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nn.functional.cross_entropy(model(given, 0.3), labels).backward()
        optimizer.step()
        assert not torch.equal(head.output.bias, before)


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
        selector = create_selector("test-linear", dim=model.dim, scale=2.0)
        original = with_selectors(model, "test-linear", **{"test-linear": selector})
        again = mtb.load(original.save_pretrained(tmp_path))
        assert again.classifier().selector.scale == 2.0
        assert again.fingerprint == original.fingerprint
        assert again.predict(images[0])[0].kept.tolist() == original.predict(images[0])[0].kept.tolist()
    finally:
        SELECTORS.unregister("test-linear")


def test_a_selector_that_forgets_an_option_cannot_be_saved_and_says_so(model: MedTokenBudget, tmp_path: Path) -> None:
    class Forgetful(Ranker):
        name = "forgetful"

        def __init__(self, power: float = 1.0) -> None:
            super().__init__()

        def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> torch.Tensor:
            return tokens.patches.norm(dim=-1)

    with pytest.raises(RequestError, match=r"does not store its option\(s\) power.*override options\(\)"):
        with_selectors(model, "forgetful", forgetful=Forgetful()).save_pretrained(tmp_path)


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
    calibrated = repr(mtb.load("dermoscopy")).splitlines()[-2]
    assert calibrated.startswith("  promises: 90% of the lesion on average; 95% of the lesion on average")
