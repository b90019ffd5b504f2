"""Answers for images in every form: what they hold, that they do not depend on the batch, and what is refused."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medtokenbudget.errors import BudgetError, MissingSignalError, RequestError, UnknownNameError
from medtokenbudget.model import ImageSource, MedTokenBudget, expand
from tests.small_model import CLASSES


def test_a_prediction_holds_kept_patches_their_tokens_and_the_classes_that_the_head_reads_from_them(
    model: MedTokenBudget, images: list[Path]
) -> None:
    (found,) = model.predict(images[0], budget=0.3)
    # Best first, ties by index: numpy's stable sort is an independent implementation of the rule.
    assert found.kept.tolist() == np.argsort(-found.scores, kind="stable")[:30].tolist()
    assert (found.k, found.tokens.shape) == (30, (30, 64))
    np.testing.assert_allclose(found.tokens, model.tokens(images[0]).patches[0][found.kept].numpy(), atol=1e-6)
    with torch.no_grad():
        logits = model.classifier().head(torch.from_numpy(found.tokens).mean(0, keepdim=True))
    assert tuple(found.probabilities) == CLASSES
    np.testing.assert_allclose(list(found.probabilities.values()), logits.softmax(-1)[0].numpy(), atol=1e-6)
    assert found.label == max(found.probabilities, key=found.probabilities.__getitem__)
    assert repr(found) == f"Prediction('{images[0]}', {found.label} {found.probability:.1%}, 30 of 100 patches, lats)"
    assert "30 tokens from 100 patches, tome)" in repr(model.predict(images[0], selector="tome")[0])


def test_paths_pictures_arrays_bytes_folders_and_globs_give_the_same_answers(model: MedTokenBudget, images: list[Path]) -> None:
    pictures = [Image.open(path).convert("RGB") for path in images]
    stack = np.stack([np.asarray(picture) for picture in pictures])
    expected = [prediction.probabilities for prediction in model.predict(images)]
    forms = {
        "folder": images[0].parent,
        "glob": str(images[0].parent / "*.jpg"),
        "strings": [str(path) for path in images],
        "pictures": pictures,
        "arrays": list(stack),
        "stack": stack,
        "tensor": torch.from_numpy(stack),
        "bytes": [path.read_bytes() for path in images],
        "generator": (path for path in images),
    }
    for name, given in forms.items():
        assert [prediction.probabilities for prediction in model.predict(given)] == expected, name
    (one,) = model.predict(torch.from_numpy(stack[0]))
    assert one.probabilities == pytest.approx(expected[0], abs=1e-6)


@pytest.mark.parametrize("name", ["lats", "random", "tome", "center", "no-pruning"])
def test_an_answer_depends_on_neither_the_batch_nor_the_other_budgets(model: MedTokenBudget, images: list[Path], name: str) -> None:
    budgets, tokens = (0.1, 0.3, 0.75, 1.0), model.tokens(images)
    together = model.classify(tokens, budgets, name)
    for place, budget in enumerate(budgets):
        batch = model.predict(images, budget, name, batch_size=5)
        np.testing.assert_allclose(together[:, place], [list(p.probabilities.values()) for p in batch], atol=1e-5)
    with torch.no_grad():
        routed = model.classifier(name).head(model.router(1.0, name)(tokens).pooled()).softmax(-1).numpy()
    np.testing.assert_allclose(routed, together[:, -1], atol=1e-5)
    for path, of_batch in zip(images, batch):
        (alone,) = model.predict(path, budget, name)
        assert alone.assignment.tolist() == of_batch.assignment.tolist()
        assert alone.probabilities == pytest.approx(of_batch.probabilities, abs=1e-5)


def test_the_oracle_needs_a_mask_and_takes_one(model: MedTokenBudget, images: list[Path]) -> None:
    with pytest.raises(MissingSignalError):
        model.predict(images[0], selector="oracle")
    mask = np.zeros((200, 200), dtype=np.uint8)
    mask[:40, :60] = 255
    tokens = model.encode(model.backbone.prepare(Image.open(images[0]))[None], [Image.fromarray(mask)])
    kept = model.router(0.1, "oracle")(tokens).kept
    assert kept is not None
    # 40 x 60 of 200 x 200 pixels are 2 x 3 of the 10 x 10 patches.
    assert set(np.flatnonzero(tokens.lesion[0].numpy())) == {0, 1, 2, 10, 11, 12} <= set(np.flatnonzero(kept[0].numpy()))


def test_an_unreadable_image_is_an_error_or_goes_to_the_callback(model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(images[0].read_bytes()[:2000])
    given = [images[0], *[broken] * 9, images[1]]
    with pytest.raises(RequestError, match=r"broken\.jpg"):
        model.predict(given)
    failures: list[ImageSource] = []
    # With a batch of two, nine failures in a row are more than are collected before a batch is answered.
    predicted = list(model.predict_stream(given, batch_size=2, on_error=failures.append))
    assert [prediction.image for prediction in predicted] == [str(images[0]), str(images[1])]
    assert [(failure.name, "broken.jpg" in failure.reason) for failure in failures] == [(str(broken), True)] * 9


def test_wrong_requests_are_rejected_by_name_before_an_image_is_opened(
    model: MedTokenBudget, images: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(BudgetError):
        model.answers(expand(images), budget=1.2)
    with pytest.raises(UnknownNameError, match=r"Unknown selector 'darknes' in this model\. Did you mean 'darkness'\?"):
        model.answers(expand(images), 0.3, selector="darknes")
    with pytest.raises(RequestError, match="batch_size"):
        model.answers(expand(images), 0.3, batch_size=0)
    # Arrays whose meaning would be a guess.
    for wrong in (np.zeros((20, 20, 3), np.float32), np.zeros((20, 20, 4), np.uint8), np.zeros(5, np.uint8)):
        with pytest.raises(RequestError, match=r"must be uint8 \[H, W\] or \[H, W, 3\]"):
            model.predict([wrong])
    with pytest.raises(RequestError, match="contain no images"):
        model.predict(tmp_path)
    with pytest.raises(RequestError, match="No file matches"):
        model.predict(str(tmp_path / "*.png"))


def test_a_prediction_of_a_file_holds_no_decoded_picture(
    model: MedTokenBudget, images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures: list[weakref.ref[Image.Image]] = []
    prepare = model.backbone.prepare
    monkeypatch.setattr(model.backbone, "prepare", lambda picture: pictures.append(weakref.ref(picture)) or prepare(picture))
    predicted = model.predict(images)
    assert len(predicted) == len(pictures) == 5
    assert [reference() for reference in pictures] == [None] * 5
