"""Answers for images in every form: what they hold, that they do not depend on the batch, and what is refused."""

from __future__ import annotations

import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medtokenbudget.errors import BudgetError, MissingSignalError, RequestError, UnknownNameError
from medtokenbudget.model import ImageSource, MedTokenBudget
from tests.small_model import CLASSES, draw_images, small_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(root: Path) -> MedTokenBudget:
    return small_model(root / "weights")


@pytest.fixture(scope="module")
def images(root: Path) -> list[Path]:
    return draw_images(root / "images", 5)


def test_a_prediction_holds_probabilities_class_scores_kept_patches_and_their_tokens(
    model: MedTokenBudget, images: list[Path]
) -> None:
    (found,) = model.predict(images[0], budget=0.3)
    assert tuple(found.probabilities) == CLASSES
    assert sum(found.probabilities.values()) == pytest.approx(1, abs=1e-6)
    assert found.label == max(found.probabilities, key=found.probabilities.__getitem__)
    assert found.k == 30
    assert found.tokens.shape == (30, 64)
    tokens = model.tokens(images[0])
    np.testing.assert_allclose(found.tokens, tokens.patches[0][found.kept].numpy(), atol=1e-6)
    # Best first, ties by index: numpy's stable sort is an independent implementation of the rule.
    assert found.kept.tolist() == np.argsort(-found.scores, kind="stable")[:30].tolist()


def test_the_probabilities_are_those_of_the_head_on_the_mean_of_the_kept_tokens(model: MedTokenBudget, images: list[Path]) -> None:
    (found,) = model.predict(images[1], budget=0.2)
    with torch.no_grad():
        logits = model.classifier().head(torch.from_numpy(found.tokens).mean(0, keepdim=True))
    np.testing.assert_allclose(list(found.probabilities.values()), logits.softmax(-1)[0].numpy(), atol=1e-6)


def test_paths_pictures_arrays_bytes_folders_and_globs_give_the_same_answers(model: MedTokenBudget, images: list[Path]) -> None:
    pictures = [Image.open(path).convert("RGB") for path in images]
    wanted = [found.probabilities for found in model.predict(images)]
    ways = {
        "folder": images[0].parent,
        "glob": str(images[0].parent / "*.jpg"),
        "strings": [str(path) for path in images],
        "pictures": pictures,
        "arrays": [np.asarray(picture) for picture in pictures],
        "stack": np.stack([np.asarray(picture) for picture in pictures]),
        "bytes": [path.read_bytes() for path in images],
        "generator": (path for path in images),
    }
    for name, given in ways.items():
        assert [found.probabilities for found in model.predict(given)] == wanted, name


def test_an_answer_does_not_depend_on_the_batch_it_was_in(model: MedTokenBudget, images: list[Path]) -> None:
    for selector in ("lats", "random", "tome"):
        together = model.predict(images, selector=selector, batch_size=5)
        alone = [model.predict(path, selector=selector)[0] for path in images]
        for one, other in zip(together, alone):
            assert one.assignment.tolist() == other.assignment.tolist()
            np.testing.assert_allclose(list(one.probabilities.values()), list(other.probabilities.values()), atol=1e-5)


def test_each_selector_answers_with_its_own_head(model: MedTokenBudget, images: list[Path]) -> None:
    tokens = model.tokens(images)
    for name in model.selectors:
        if name == "oracle":
            continue
        selection = model.router(0.3, name)(tokens)
        with torch.no_grad():
            wanted = model.classifiers[name].head(selection.pooled()).softmax(-1).numpy()
        found = [list(p.probabilities.values()) for p in model.predict(images, selector=name)]
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_all_budgets_at_once_equal_one_at_a_time(model: MedTokenBudget, images: list[Path]) -> None:
    budgets = (0.1, 0.3, 0.75, 1.0)
    tokens = model.tokens(images)
    for name in ("lats", "random", "tome", "no-pruning"):
        together = model.classify(tokens, budgets, name)
        assert together.shape == (5, 4, 3)
        for place, budget in enumerate(budgets):
            alone = [list(p.probabilities.values()) for p in model.predict(images, budget, name)]
            np.testing.assert_allclose(together[:, place], alone, atol=1e-5)


def test_the_oracle_needs_a_mask_and_takes_one(model: MedTokenBudget, images: list[Path]) -> None:
    with pytest.raises(MissingSignalError):
        model.predict(images[0], selector="oracle")
    mask = np.zeros((200, 200), dtype=np.uint8)
    mask[:40, :60] = 255
    pixels = model.backbone.prepare(Image.open(images[0]))[None]
    tokens = model.encode(pixels, [Image.fromarray(mask)])
    kept = model.router(0.1, "oracle")(tokens).kept
    assert kept is not None
    # 40 x 60 of 200 x 200 pixels are 2 x 3 of the 10 x 10 patches.
    assert set(np.flatnonzero(tokens.lesion[0].numpy())) == {0, 1, 2, 10, 11, 12} <= set(np.flatnonzero(kept[0].numpy()))


def test_an_unreadable_image_is_an_error_or_goes_to_the_callback(model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(images[0].read_bytes()[:2000])
    given = [images[0], broken, images[1]]
    with pytest.raises(RequestError, match=r"broken\.jpg"):
        model.predict(given)
    failures: list[ImageSource] = []
    found = list(model.predict_stream(given, on_error=failures.append))
    assert [p.image for p in found] == [str(images[0]), str(images[1])]
    assert [(failure.name, "broken.jpg" in failure.reason) for failure in failures] == [(str(broken), True)]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((20, 20, 3), np.float32), "uint8"),
        (np.zeros((20, 20, 4), np.uint8), r"\[H, W, 3\]"),
        (np.zeros(5, np.uint8), "uint8"),
    ],
)
def test_an_array_whose_meaning_would_be_a_guess_is_rejected(model: MedTokenBudget, array: np.ndarray, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        model.predict([array])


def test_wrong_requests_are_rejected_by_name(model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    with pytest.raises(BudgetError):
        model.predict(images[0], budget=1.2)
    with pytest.raises(UnknownNameError, match=r"Unknown selector 'darknes' in this model\. Did you mean 'darkness'\?"):
        model.predict(images[0], selector="darknes")
    with pytest.raises(RequestError, match="contain no images"):
        model.predict(tmp_path)
    with pytest.raises(RequestError, match="No file matches"):
        model.predict(str(tmp_path / "*.png"))


def test_the_text_of_a_prediction_is_one_line_without_scores(model: MedTokenBudget, images: list[Path]) -> None:
    (found,) = model.predict(images[0], budget=0.3)
    share = re.escape(f"{found.probability:.1%}")
    assert re.fullmatch(rf"Prediction\('{images[0]}', {found.label} {share}, 30 of 100 patches, lats\)", repr(found))


def test_the_text_of_a_merger_counts_tokens(model: MedTokenBudget, images: list[Path]) -> None:
    assert "30 tokens from 100 patches, tome)" in repr(model.predict(images[0], selector="tome")[0])


def test_a_prediction_of_a_file_holds_no_decoded_picture(
    model: MedTokenBudget, images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Image.Image]] = []
    prepare = model.backbone.prepare
    monkeypatch.setattr(model.backbone, "prepare", lambda picture: seen.append(weakref.ref(picture)) or prepare(picture))
    found = model.predict(images)
    assert len(found) == len(seen) == 5
    assert [reference() for reference in seen] == [None] * 5
