"""Weights, preprocessing and refusals of the backbone, with real small models and real files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.preprocess import Preprocessing, luminance
from medtokenbudget.config import BackboneConfig
from medtokenbudget.errors import GridError, RequestError, ShapeError, WorkError
from tests.hub import serving

NAME = "test_vit"


def small(size: int = 64, classes: int = 0) -> Any:
    torch.manual_seed(3)
    return timm.create_model(NAME, pretrained=False, num_classes=classes, img_size=size).eval()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_file(small().state_dict(), path)
    return path


def config(weights: Path, **changes: Any) -> BackboneConfig:
    return BackboneConfig(**{"name": NAME, "weights": weights, "image_size": 64, **changes})


def test_a_loaded_backbone_gives_what_the_saved_model_gave(weights: Path) -> None:
    backbone = Backbone.load(config(weights))
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        expected = small().forward_features(x)
    assert backbone.grid == (4, 4)
    assert (backbone.dim, backbone.prefix, backbone.has_cls) == (64, 1, True)
    torch.testing.assert_close(backbone(x).patches, expected[:, 1:])
    assert torch.equal(backbone(x).patches, backbone(x).patches)


def test_position_embeddings_are_resampled_to_another_grid(weights: Path) -> None:
    backbone = Backbone.load(config(weights, image_size=96))
    assert backbone.grid == (6, 6)
    table = small().pos_embed[:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(table, (6, 6), mode="bicubic", antialias=True)
    torch.testing.assert_close(backbone.model.pos_embed[:, 1:], expected.permute(0, 2, 3, 1).flatten(1, 2))


@pytest.mark.parametrize(
    ("name", "image_size", "grid"), [("vit_small_patch16_dinov3", 96, (6, 6)), ("vit_tiny_r_s16_p8_224", 128, (4, 4))]
)
def test_other_transformers_load_at_another_size(tmp_path: Path, name: str, image_size: int, grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=3).eval()
    save_file(model.state_dict(), tmp_path / "published.safetensors")
    backbone = Backbone.load(BackboneConfig(name, tmp_path / "published.safetensors", image_size))
    x = torch.randn(1, 3, image_size, image_size)
    tokens = backbone(x)
    assert (backbone.grid, tokens.grid) == (grid, grid)
    other = timm.create_model(name, pretrained=False, num_classes=0, img_size=image_size).eval()
    other.load_state_dict(backbone.model.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(tokens.patches, other.forward_features(x)[:, backbone.prefix :], rtol=1e-4, atol=1e-5)


def test_the_classifier_of_a_published_checkpoint_is_left_out(tmp_path: Path) -> None:
    model = small(classes=10)
    save_file(model.state_dict(), tmp_path / "published.safetensors")
    backbone = Backbone.load(config(tmp_path / "published.safetensors"))
    assert "head.weight" not in backbone.model.state_dict()


def test_the_fingerprint_tells_weights_layer_and_size_apart(weights: Path, tmp_path: Path) -> None:
    other = small()
    other.norm.bias.data.add_(1)
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    variants = [
        config(weights),
        config(weights, layer=0),
        config(weights, image_size=96),
        config(weights, attention="pseudo"),
        config(tmp_path / "other.safetensors"),
    ]
    prints = [str(sorted(Backbone.load(variant).fingerprint.items())) for variant in variants]
    assert len(set(prints)) == len(prints)
    assert Backbone.load(config(weights)).fingerprint == Backbone.load(config(weights, layer=5)).fingerprint


def test_a_wrong_file_is_rejected_with_the_keys_named(weights: Path) -> None:
    with pytest.raises(RequestError, match=r"(?s)missing.*blocks\.6\..*norm.*wrong shape.*cls_token"):
        Backbone.load(BackboneConfig("vit_tiny_patch16_224", weights, 64))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.pth", b"x", "pickle"),
        ("pytorch_model.bin", b"x", "pickle"),
        ("broken.safetensors", b"not a header", "not a valid safetensors"),
        ("absent.safetensors", None, "do not exist"),
    ],
)
def test_files_that_are_not_safetensors_are_rejected(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=message):
        Backbone.load(config(tmp_path / name))


def test_weights_are_fetched_from_the_hub_once(weights: Path, tmp_path: Path, hub_at: Callable[..., None]) -> None:
    served = tmp_path / "served"
    served.mkdir()
    shutil.copy(weights, served / "model.safetensors")
    published = BackboneConfig("test_vit.r160_in1k", image_size=64)
    with serving(served, "timm/test_vit.r160_in1k") as address:
        hub_at(address)
        fetched = Backbone.load(published)
    hub_at("http://127.0.0.1:9", offline=True)
    again = Backbone.load(published)
    assert again.fingerprint == fetched.fingerprint
    assert fetched.fingerprint["weights"] == Backbone.load(config(weights)).fingerprint["weights"]


@pytest.mark.parametrize("hub", ["unreachable", "offline", "without the model"])
def test_weights_out_of_reach_are_an_error_that_says_how_to_get_them(hub: str, tmp_path: Path, hub_at: Callable[..., None]) -> None:
    with serving(tmp_path, "timm/another") as address:
        hub_at(address if hub == "without the model" else "http://127.0.0.1:9", offline=hub == "offline")
        with pytest.raises(WorkError, match=r"(?s)Cannot download the weights.*timm/test_vit.*--weights FILE.*--backbone embedded"):
            Backbone.load(BackboneConfig("test_vit.r160_in1k", image_size=64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "vit_bse_patch14_dinov2"}, "Did you mean 'vit_base_patch14_dinov2"),
        ({"name": "resnet18"}, "vision transformer"),
        ({"name": "swin_tiny_patch4_window7_224", "image_size": 224}, "one fixed grid"),
        ({"name": "samvit_base_patch16_224", "image_size": 224}, "one fixed grid"),
        ({"layer": 6}, "the blocks 0 to 5"),
        ({"image_size": 70}, "--image-size 64 or 80"),
    ],
)
def test_requests_that_cannot_be_served_are_rejected(weights: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Backbone.load(config(weights, **changes))


def test_images_of_another_size_are_rejected(weights: Path) -> None:
    with pytest.raises(ShapeError, match=r"\[B, 3, 64, 64\]"):
        Backbone.load(config(weights))(torch.zeros(1, 3, 32, 32))


def test_the_whole_image_is_resized_and_nothing_is_cropped() -> None:
    picture = np.zeros((40, 80, 3), np.uint8)
    picture[:, :2] = picture[:, -2:] = 255
    prepared = Preprocessing(40, (0.5,) * 3, (0.5,) * 3).prepare(Image.fromarray(picture))  # type: ignore[arg-type]
    assert prepared.shape == (40, 40, 3)
    assert prepared[:, 0].min() > 200
    assert prepared[:, -1].min() > 200
    assert prepared[:, 10:30].max() == 0


def test_normalizing_subtracts_the_mean_and_divides_by_the_deviation() -> None:
    preprocessing = Preprocessing(2, (0.1, 0.2, 0.3), (0.5, 0.25, 0.125))
    pixels = torch.arange(12, dtype=torch.uint8).reshape(1, 2, 2, 3)
    normalized = preprocessing.normalize(pixels)
    assert normalized.shape == (1, 3, 2, 2)
    assert float(normalized[0, 2, 1, 0]) == pytest.approx((8 / 255 - 0.3) / 0.125, abs=1e-5)
    assert Preprocessing.from_dict(preprocessing.to_dict()) == preprocessing


def test_luminance_is_the_mean_grey_value_of_each_patch() -> None:
    pixels = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    pixels[0, :2, 2:] = torch.tensor([255, 0, 0], dtype=torch.uint8)
    pixels[0, 2:, :2] = torch.tensor([10, 20, 30], dtype=torch.uint8)
    pixels[0, 3, 3] = 255
    gray = (0.299 * 10 + 0.587 * 20 + 0.114 * 30) / 255
    torch.testing.assert_close(luminance(pixels, (2, 2)), torch.tensor([[0.0, 0.299, gray, 0.25]]))
    with pytest.raises(GridError, match="cannot be divided"):
        luminance(pixels, (3, 3))


def test_a_real_trained_backbone_equals_timm_on_a_real_image(shared: Path) -> None:
    from safetensors.torch import load_file
    from timm.models.vision_transformer import checkpoint_filter_fn

    path = shared / "weights" / "vit_small_patch14_dinov2_saliency.safetensors"
    name = "vit_small_patch14_dinov2.lvd142m"
    backbone = Backbone.load(BackboneConfig(name, path))
    with Image.open(sorted((shared / "data" / "unlabelled").glob("*.jpg"))[0]) as picture:
        pixels = torch.from_numpy(backbone.prepare(picture.convert("RGB")))[None]
    model = timm.create_model(name, pretrained=False, num_classes=0, img_size=224).eval()
    model.load_state_dict(checkpoint_filter_fn({key: value.float() for key, value in load_file(path).items()}, model))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.inference_mode():
        expected = model.forward_features(((pixels / 255 - mean) / std).permute(0, 3, 1, 2))
    tokens = backbone(backbone.normalize(pixels))
    assert tokens.grid == (16, 16)
    torch.testing.assert_close(tokens.patches, expected[:, 1:], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(tokens.cls, expected[:, 0], rtol=1e-3, atol=1e-3)
