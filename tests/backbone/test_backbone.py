"""The backbone: what timm computes, from the weights that were asked for; and the one in the package."""

from __future__ import annotations

import argparse
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from medtokenbudget.api import extract
from medtokenbudget.backbone.backbone import PACKAGED, WEIGHTS_FILE, Backbone, Preprocessing, build, find_recipe, luminance
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import decode_image
from medtokenbudget.errors import GridError, RequestError, ShapeError, WorkError
from medtokenbudget.model.saved import located
from tests.backbone.tiny import tiny_manifest
from tests.hub import serving

NAME = "test_vit"


def small() -> Any:
    torch.manual_seed(3)
    return timm.create_model(NAME, pretrained=False, num_classes=0, img_size=64).eval()


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
    with pytest.raises(ShapeError, match=r"\[B, 3, 64, 64\]"):
        backbone(torch.zeros(1, 3, 32, 32))


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
    assert backbone.model.num_classes == 0, "the classifier of a published checkpoint is left out"
    assert (backbone.grid, tokens.grid) == (grid, grid)
    other = timm.create_model(name, pretrained=False, num_classes=0, img_size=image_size).eval()
    other.load_state_dict(backbone.model.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(tokens.patches, other.forward_features(x)[:, backbone.prefix :], rtol=1e-4, atol=1e-5)


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
        ("model.pth", b"x", "damaged, or contains more than tensors"),
        ("pytorch_model.bin", pickle.dumps({"model": Path}), "damaged, or contains more than tensors"),
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
        with pytest.raises(WorkError, match=r"(?s)Cannot download the weights.*timm/test_vit.*as `weights`.*`backbone=.embedded.`"):
            Backbone.load(BackboneConfig("test_vit.r160_in1k", image_size=64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "vit_bse_patch14_dinov2"}, "Did you mean 'vit_base_patch14_dinov2"),
        ({"name": "eva02_tiny_patch14_244"}, "Did you mean 'eva02_tiny_patch14_224"),
        ({"name": "resnet18"}, "vision transformer"),
        ({"name": "convnext_tiny"}, "one fixed grid"),
        ({"name": "swin_tiny_patch4_window7_224", "image_size": 224}, "one fixed grid"),
        ({"name": "samvit_base_patch16_224", "image_size": 224}, "one fixed grid"),
        ({"layer": 6}, "the blocks 0 to 5"),
        ({"image_size": 70}, "`image_size=64` or `image_size=80`"),
    ],
)
def test_requests_that_cannot_be_served_are_rejected(weights: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Backbone.load(config(weights, **changes))


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


WEIGHTS_SHA256 = "46e4859e07d64f4e7833e20ef9cdb2a1202f0eb0bc70bb0126bd7d49a3846ae9"


def test_the_embedded_backbone_loads_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    backbone = Backbone.load(BackboneConfig("embedded"))
    assert (backbone.grid, backbone.dim, backbone.prefix, backbone.has_cls) == ((16, 16), 192, 1, True)
    assert backbone.fingerprint["weights"] == WEIGHTS_SHA256, "not the measured ones"
    assert (PACKAGED["embedded"] / WEIGHTS_FILE).stat().st_size < 6_000_000


def test_the_same_image_gives_the_same_bytes_in_every_load_and_batch_position() -> None:
    images = torch.randn(3, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    first, second = (Backbone.load(BackboneConfig("embedded"))(images) for _ in range(2))
    for name in ("patches", "cls", "attention_entropy", "cls_attention"):
        assert torch.equal(getattr(first, name), getattr(second, name))
        assert bool(torch.isfinite(getattr(first, name)).all())
    alone = Backbone.load(BackboneConfig("embedded"))(images[2:])
    torch.testing.assert_close(alone.patches, first.patches[2:], rtol=1e-4, atol=1e-4)


def test_panderm_loads_from_a_checkpoint_in_the_layout_of_its_authors(tmp_path: Path) -> None:
    """As pretraining saves it: the encoder next to its teacher and decoder, optimizer and settings."""
    torch.manual_seed(0)
    model = build("panderm-base", 224, find_recipe("panderm-base"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    state = {f"encoder.{key}": value for key, value in model.state_dict().items()}
    state |= {"encoder.mask_token": torch.zeros(1), "teacher.norm.weight": torch.zeros(1), "decoder.x": torch.zeros(1)}
    state["encoder.blocks.0.attn.relative_position_index"] = torch.zeros(197, 197)
    path = tmp_path / "panderm_bb.pth"
    torch.save({"model": state, "optimizer": {"state": {}}, "epoch": 499, "args": argparse.Namespace(lr=1e-3)}, path)
    backbone = Backbone.load(BackboneConfig("panderm-base", path))
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = model.eval().forward_features(images)
    tokens = backbone(images)
    torch.testing.assert_close(tokens.patches, expected[:, 1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tokens.cls, expected[:, 0], rtol=1e-4, atol=1e-4)
    assert (backbone.grid, backbone.preprocessing.mean) == ((14, 14), (0.485, 0.456, 0.406))
    with pytest.raises(RequestError, match="comes as a checkpoint of its authors"):
        Backbone.load(BackboneConfig("panderm-base"))


@pytest.mark.parametrize("kind", ["ViT", "Dinov2WithRegisters", "DINOv3ViT"])
def test_a_folder_of_transformers_gives_its_tokens_and_attention(kind: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "patch_size": 8}
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(image_size=32, **shape)).eval()
    model.save_pretrained(tmp_path / "net")
    with pytest.raises(RequestError, match="does not say which mean and standard deviation"):
        Backbone.load(BackboneConfig(f"hf:{tmp_path / 'net'}", image_size=32))
    transformers.ViTImageProcessor(image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6], resample=2).save_pretrained(
        tmp_path / "net"
    )
    backbone = Backbone.load(BackboneConfig(f"hf:{tmp_path / 'net'}", image_size=32))
    images = torch.randn(2, 3, 32, 32)
    tokens = backbone(images, ("cls_attention", "received_attention"))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(images, output_attentions=True)
    torch.testing.assert_close(tokens.patches, expected.last_hidden_state[:, backbone.prefix :], rtol=1e-4, atol=1e-5)
    weights = expected.attentions[-1].mean(1)
    torch.testing.assert_close(tokens.cls_attention, weights[:, 0, backbone.prefix :], rtol=1e-4, atol=1e-5)
    assert (backbone.fingerprint["name"], backbone.preprocessing.interpolation) == ("hf:net", "bilinear")
    assert backbone.preprocessing.mean == (0.1, 0.2, 0.3)
    # A saved model finds the folder again by the hash of the weights.
    again = located(BackboneConfig("hf:net", image_size=32), backbone.fingerprint["weights"])
    assert Backbone.load(again).fingerprint == backbone.fingerprint
    with pytest.raises(WorkError, match="transformers cannot load"):
        Backbone.load(BackboneConfig(f"hf:{tmp_path / 'absent'}", image_size=32))


def test_a_model_in_memory_fills_a_store_that_names_its_weights_by_hash(tmp_path: Path) -> None:
    manifest, model = tiny_manifest(tmp_path / "images", 3), small()
    store = extract(manifest, tmp_path / "store", model, views="none", device="cpu", threads=1, dtype="fp32")
    backbone = Backbone.from_model(model, type(model).__name__)
    assert store.config["backbone"] == backbone.fingerprint
    pictures = torch.from_numpy(np.stack([backbone.prepare(decode_image(manifest.image_path(row))) for row in range(3)]))
    expected = backbone(backbone.normalize(pictures)).patches
    torch.testing.assert_close(store.read(store.rows(manifest.ids)).patches, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RequestError, match="A backbone in memory is not sent to other processes"):
        extract(manifest, tmp_path / "other", model, views="none", device="cpu", jobs=2)


def test_the_whole_image_is_resized_and_nothing_is_cropped() -> None:
    picture = np.zeros((40, 80, 3), np.uint8)
    picture[:, :2] = picture[:, -2:] = 255
    prepared = Preprocessing(40, (0.5,) * 3, (0.5,) * 3).prepare(Image.fromarray(picture))
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
    assert preprocessing.to_dict()["std"] == [0.5, 0.25, 0.125]


def test_luminance_is_the_mean_grey_value_of_each_patch() -> None:
    pixels = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    pixels[0, :2, 2:] = torch.tensor([255, 0, 0], dtype=torch.uint8)
    pixels[0, 2:, :2] = torch.tensor([10, 20, 30], dtype=torch.uint8)
    pixels[0, 3, 3] = 255
    gray = (0.299 * 10 + 0.587 * 20 + 0.114 * 30) / 255
    torch.testing.assert_close(luminance(pixels, (2, 2)), torch.tensor([[0.0, 0.299, gray, 0.25]]))
    with pytest.raises(GridError, match="cannot be divided"):
        luminance(pixels, (3, 3))
