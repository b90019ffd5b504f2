"""Answers for images in every form: what they hold, that they do not depend on the batch, and what is refused."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.functional import normalize, to_tensor

import medtokenbudget as mtb
from medtokenbudget.data import decode_image
from medtokenbudget.errors import BudgetError, MissingSignalError, RequestError, UnknownNameError
from medtokenbudget.model import ImageSource, MedTokenBudget, Prediction, expand
from medtokenbudget.model.inference import as_pixels
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


def test_every_form_of_the_same_images_gives_the_same_answers(model: MedTokenBudget, images: list[Path]) -> None:
    pictures = [Image.open(path).convert("RGB") for path in images]
    stack = np.stack([np.asarray(picture) for picture in pictures])
    floats = torch.stack([to_tensor(picture) for picture in pictures])
    labels = torch.arange(5)
    expected = [prediction.probabilities for prediction in model.predict(images)]
    forms = {
        "folder": images[0].parent,
        "glob": str(images[0].parent / "*.jpg"),
        "strings": [str(path) for path in images],
        "pictures": pictures,
        "arrays": list(stack),
        "stack": stack,
        "tensor": torch.from_numpy(stack),
        "channels first": stack.transpose(0, 3, 1, 2),
        "flipped twice in memory": stack[:, ::-1, :, ::-1][:, ::-1, :, ::-1],
        "bytes": [path.read_bytes() for path in images],
        "open files": [path.open("rb") for path in images],
        "generator": (path for path in images),
        "floats": floats,
        "floats with a gradient": floats.clone().requires_grad_(),
        "floats, channels last": floats.permute(0, 2, 3, 1).double().numpy(),
        "single floats": list(floats),
        "loader": DataLoader(floats, batch_size=2),
        "loader of pairs": DataLoader(TensorDataset(floats, labels), batch_size=2),
        "loader of single pairs": DataLoader(TensorDataset(floats, labels), batch_size=None),
        "data set of pictures": list(zip(pictures, labels)),
    }
    for name, given in forms.items():
        assert [prediction.probabilities for prediction in model.predict(given)] == expected, name
    for one in (torch.from_numpy(stack[0]), floats[0], stack[0].transpose(2, 0, 1), images[0].open("rb")):
        (found,) = model.predict(one)
        assert found.probabilities == pytest.approx(expected[0], abs=1e-6)


def test_normalized_tensors_give_the_answers_of_their_files(model: MedTokenBudget, images: list[Path]) -> None:
    floats = torch.stack([to_tensor(Image.open(path)) for path in images])
    own = model.backbone.preprocessing
    expected = [routing.kept.tolist() for routing in model.route(images)]
    for statistics in ((own.mean, own.std), ((0.7, 0.5, 0.4), (0.1, 0.2, 0.3))):
        given = normalize(floats, *statistics)
        for said in (statistics, True)[: 1 + (statistics == (own.mean, own.std))]:
            assert [routing.kept.tolist() for routing in model.route(given, normalized=said)] == expected
            selection = model.router(normalized=said)(given)
            assert selection.indices.tolist() == expected
        with pytest.raises(RequestError, match=r"images 0 to 4: floats must be from 0 to 1, got -.* Pass `normalized=True`"):
            model.route(given)
    with pytest.raises(RequestError, match=r"undone\. Check its mean"):
        model.route(floats, normalized=((0.5,) * 3, (2.0,) * 3))


MODES = ("RGB", "L", "1", "P", "LA", "RGBA", "CMYK", "YCbCr", "I;16")


@pytest.mark.parametrize("mode", MODES)
def test_a_picture_of_any_mode_gives_the_answer_of_its_file(
    model: MedTokenBudget, images: list[Path], tmp_path: Path, mode: str
) -> None:
    gray = Image.fromarray(np.asarray(Image.open(images[0]).convert("L")).astype(np.uint16) * 257)
    picture = gray if mode == "I;16" else Image.open(images[0]).convert(mode)
    path = tmp_path / ("picture.jpg" if mode == "YCbCr" else "picture.tif" if mode in ("CMYK", "LA") else "picture.png")
    picture.save(path, **({"quality": 95} if mode == "YCbCr" else {}))
    opened, (expected,) = Image.open(path), model.route(path)
    for form in (opened, path.read_bytes(), path.open("rb"), *([] if mode == "YCbCr" else [picture])):
        np.testing.assert_array_equal(model.route(form)[0].scores, expected.scores)


def test_a_picture_is_turned_by_its_exif_orientation_once(model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    upright, path, exif = Image.open(images[1]), tmp_path / "turned.png", Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    expected = model.route(upright)[0].scores
    for form in (path, Image.open(path), decode_image(path), Image.open(path).convert("RGB")):
        np.testing.assert_array_equal(model.route(form)[0].scores, expected)


def test_a_router_gives_one_selection_for_a_batch_of_images(model: MedTokenBudget, images: list[Path]) -> None:
    floats = torch.stack([to_tensor(Image.open(path)) for path in images]).requires_grad_()
    each = model.route(images, "30%")
    for given in (floats, images, model.tokens(images), DataLoader(floats.detach(), batch_size=2)):
        selection = model.router("30%")(given)
        assert selection.kept.sum(1).tolist() == [30] * 5
        np.testing.assert_array_equal(selection.indices.numpy(), [routing.kept for routing in each])
        np.testing.assert_allclose(selection.scores.numpy(), [routing.scores for routing in each], atol=1e-6)
        np.testing.assert_allclose(selection.tokens.numpy(), [routing.tokens for routing in each], atol=1e-5)
        assert not any(values.requires_grad for values in (selection.tokens, selection.scores))
        torch.nn.Linear(64, 2)(selection.tokens).sum().backward()  # the tokens may be what another model learns from
    # Of the size of the model, nothing is resized.
    small = torch.rand(2, 3, 160, 160)
    found, files = model.router()(small), small.mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    assert found.indices.tolist() == [routing.kept.tolist() for routing in model.route(list(files))]
    assert model.router(selector="tome")(small).scores is None


def test_shares_are_numbers_percentages_or_promises(model: MedTokenBudget, images: list[Path]) -> None:
    assert {model.predict(images[0], share)[0].k for share in (0.3, "0.3", "30%", np.float64(0.3), None)} == {30}
    assert mtb.predict(images[0], model, "10%")[0].budget == 0.1
    assert mtb.route(images[0], "33.3%")[0].k == 85  # of 256
    assert mtb.route(images[0], retention="95%")[0].guarantee == mtb.load().guarantee(0.95)
    with pytest.raises(RequestError, match="`budget` and `retention` exclude each other"):
        mtb.route(images[0], 0.3, retention=0.95)
    with pytest.raises(RequestError, match="is not calibrated for"):
        model.predict(images[0], retention=0.95)
    with pytest.raises(RequestError, match="keeps another number of patches of each image"):
        mtb.load().router(mtb.load().guarantee(0.95))


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
    predicted = list(model.stream(given, batch_size=2, on_error=failures.append, kind=Prediction))
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


def test_white_that_rounding_left_above_1_stays_white() -> None:
    assert as_pixels(torch.full((1, 3, 2, 2), 1 + 0.5 / 255)).unique().tolist() == [255]
