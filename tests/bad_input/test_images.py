"""Bad images and masks: each is named with its fault."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from medtokenbudget.data import decode_image
from medtokenbudget.data.masks import mask_of
from medtokenbudget.errors import MedTokenBudgetError, RequestError
from medtokenbudget.model import MedTokenBudget, load
from medtokenbudget.routing import create_selector
from tests.bad_input.damage import CLEAR, PLAIN
from tests.small_model import small_model


def test_a_mask_of_another_shape_and_places_without_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    Image.new("L", (50, 10)).save(path)
    for action, says in (
        (lambda: mask_of(PLAIN.size, path), "mask.png has 50 x 10 pixels"),
        (lambda: decode_image(tmp_path), "is a folder"),
        (lambda: decode_image(tmp_path / "nothing"), "does not exist"),
        (lambda: decode_image("a\0b"), "cannot be opened"),
        (lambda: decode_image(tmp_path / ("x" * 300)), "cannot be opened"),
    ):
        with pytest.raises(MedTokenBudgetError, match=says):
            action()


RGB = torch.rand(2, 3, 40, 40)
TENSORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "0 to 255": (RGB * 255, {}, "floats must be from 0 to 1, got .* seem to be from 0 to 255. Divide them"),
    "normalized": (RGB * 4 - 2, {}, "floats must be from 0 to 1, got -.* seem to be normalized. Pass `normalized=True`"),
    "normalized with other numbers": (RGB * 4 - 2, {"normalized": ((0.5,) * 3, (0.5,) * 3)}, "`normalized` undone. Check its mean"),
    "not normalized uint8": ((RGB * 255).byte(), {"normalized": True}, "`normalized` belongs to floats, got uint8"),
    "not normalized picture": (PLAIN, {"normalized": True}, "`normalized` belongs to tensors and arrays of floats, got Image"),
    "mean without std": (RGB, {"normalized": (0.5, 0.5, 0.5)}, "`normalized` must be True, False, or .mean, std."),
    "std of 0": (RGB, {"normalized": ((0.5,) * 3, (0.0,) * 3)}, "`normalized` must be True, False, or .mean, std."),
    "NaN": (RGB.masked_fill(RGB > 0.9, torch.nan), {}, "contain NaN or infinite values"),
    "infinite": (RGB / 0, {}, "contain NaN or infinite values"),
    "int64": ((RGB * 255).long(), {}, "must be uint8 from 0 to 255 or floats from 0 to 1, got int64"),
    "16 bits": (np.zeros((40, 40, 3), np.uint16), {}, "must be uint8 from 0 to 255 or floats .* got uint16"),
    "booleans": (RGB > 0.5, {}, "got bool"),
    "names in an array": (np.array(["a.jpg", "b.jpg"]), {}, "must be uint8"),
    "no images": (RGB[:0], {}, "there are no pixels"),
    "no rows": (RGB[:, :, :0], {}, "there are no pixels"),
    "two channels": (RGB[:, :2], {}, "pixels must be .* got float32 .2, 2, 40, 40.[.]$"),
    "four channels": (torch.rand(4, 40, 40), {}, "Leave out the fourth channel, alpha"),
    "four channels last": (np.zeros((40, 40, 4), np.uint8), {}, "Leave out the fourth channel, alpha"),
    "channels first or last": (torch.rand(3, 40, 3), {}, "pixels must be"),
    "one axis": (torch.rand(40), {}, "pixels must be"),
    "five axes": (RGB[None], {}, "pixels must be"),
    "batches in a list, one bad": ([RGB, RGB * 255], {}, "images 2 to 3: floats"),
    "labels first": (DataLoader(list(zip([1, 2], RGB))), {}, "got int64"),
    "dictionaries": ([{"image": RGB}], {}, "an iterable gave dict"),
    "a dictionary": ({"image": RGB}, {}, "`images` must be .* got dict"),
    "a list of lists of paths": ([["a.jpg", "b.jpg"]], {}, "an iterable gave list"),
    "a number": (3, {}, "`images` must be .* got int"),
    "nothing": (None, {}, "`images` must be .* got NoneType"),
    "an empty file": (io.BytesIO(), {}, "image 0 is empty"),
    "a file of text": (io.StringIO("x"), {}, "opened as text. Open it with mode 'rb'"),
    "a transparent picture": (CLEAR, {}, "image 0 has transparent pixels"),
    "a float picture": (Image.new("F", (9, 9)), {}, "image 0 has the pixel format 'F'"),
    "budget 0": (RGB, {"budget": 0}, "`budget` must be above 0 and at most 1, got 0"),
    "budget 2": (RGB, {"budget": 2}, "`budget` must be above 0 and at most 1, got 2. Did you mean 0.02"),
    "budget x": (RGB, {"budget": "x"}, "`budget` must be a number, got 'x'"),
    "budget of 300 %": (RGB, {"budget": "300%"}, "`budget` must be above 0 and at most 1, got 3.0"),
    "a retention of 2": (RGB, {"retention": 2}, "`retention` must be above 0"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> MedTokenBudget:
    return small_model(tmp_path_factory.mktemp("small"), baselines=())


@pytest.mark.parametrize("case", TENSORS)
def test_what_is_no_image_or_no_budget_is_refused_by_name(small: MedTokenBudget, case: str) -> None:
    images, options, says = TENSORS[case]
    with pytest.raises(RequestError, match=says):
        small.route(images, **options)
    if "retention" not in options and not isinstance(images, io.IOBase):
        with pytest.raises(RequestError, match=says):
            small.router(**options)(images)


def test_images_of_several_sizes_are_resized_and_no_images_are_no_batch(small: MedTokenBudget) -> None:
    sizes = [torch.rand(3, 40, 60), torch.rand(3, 160, 160), torch.rand(3, 7, 300)]
    assert small.router(0.3)(sizes).kept.sum(1).tolist() == [30] * 3
    assert small.route([]) == []
    with pytest.raises(RequestError, match="`images` contains no image"):
        small.router(0.3)([])


def test_a_router_that_reads_pixels_has_no_mean_and_std_to_undo() -> None:
    floats = torch.rand(1, 3, 64, 64)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    normalized = (floats - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    router = load("dermoscopy", device="cpu")
    with pytest.raises(RequestError, match=r"reads pixels in \[0, 1\] and has no mean and std. Pass yours: `normalized=\(mean"):
        router.route(normalized, normalized=True)
    assert router.router(0.3, normalized=(mean, std))(normalized).kept.equal(router.router(0.3)(floats).kept)


PLAIN_TOKENS = torch.rand(2, 36, 8)
TOKENS: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "two axes": ("norm", PLAIN_TOKENS[0], {}, "`tokens` must be a tensor of floats .B, N, D., got torch.float32 .36, 8."),
    "integers": ("norm", PLAIN_TOKENS.long(), {}, "`tokens` must be a tensor of floats .* got torch.int64"),
    "an array": ("norm", PLAIN_TOKENS.numpy(), {}, "`tokens` must be a tensor of floats .* got ndarray"),
    "no images": ("norm", PLAIN_TOKENS[:0], {}, "`tokens` must be a tensor of floats"),
    "NaN": ("norm", PLAIN_TOKENS / 0, {}, "patches of row 0 contain NaN"),
    "no square": ("center", PLAIN_TOKENS[:, :35], {}, "35 patches are no square. Pass their `grid=.h, w.`"),
    "a class token that was not named": ("center", torch.rand(2, 37, 8), {}, "37 patches are no square.*`prefix`: 1 for a class"),
    "another grid": ("center", PLAIN_TOKENS, {"grid": (5, 7)}, "A grid of 5 x 7 does not have 36 patches"),
    "only a prefix": ("norm", PLAIN_TOKENS, {"prefix": 36}, "`prefix` must be the number of tokens in front"),
    "budget and k": ("norm", PLAIN_TOKENS, {"budget": 0.3, "k": 9}, "`budget` and `k` exclude each other"),
    "budget 0": ("norm", PLAIN_TOKENS, {"budget": 0}, "`budget` must be above 0"),
    "budget x": ("norm", PLAIN_TOKENS, {"budget": "x"}, "`budget` must be a number, got 'x'"),
    "k of 37": ("norm", PLAIN_TOKENS, {"k": 37}, "Cannot keep 37 of 36 patches"),
    "a missing signal": ("evit", PLAIN_TOKENS, {}, "'evit' reads cls_attention.* pass it as `cls_attention` with plain tensors"),
    "a signal of another shape": ("evit", PLAIN_TOKENS, {"cls_attention": torch.rand(2, 37)}, "`cls_attention` must be .2, 36."),
    "an unknown signal": ("evit", PLAIN_TOKENS, {"cls_atention": PLAIN_TOKENS}, "Did you mean 'cls_attention'"),
    "a promise": ("norm", PLAIN_TOKENS, {"retention": 0.95}, "`retention` needs a calibrated model"),
}


@pytest.mark.parametrize("case", TOKENS)
def test_plain_tokens_that_cannot_be_selected_from_are_refused_by_name(case: str) -> None:
    name, tokens, options, says = TOKENS[case]
    with pytest.raises(RequestError, match=says):
        create_selector(name)(tokens, **options)
