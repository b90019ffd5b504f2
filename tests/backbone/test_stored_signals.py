"""Signals against loops over timm's own attention, and stores that gain them without touching their tokens."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.preprocess import Preprocessing
from medtokenbudget.backbone.shards import signal_path, write_signal
from medtokenbudget.backbone.stored_signals import DEFAULT, REGISTRY
from medtokenbudget.cli import main
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest
from medtokenbudget.errors import MissingSignalError, RequestError, UnknownNameError, WorkError
from medtokenbudget.tokens import SIGNALS, TokenBatch
from tests.backbone.test_attention import images, make, timm_attention
from tests.backbone.tiny import CONFIG, contents, tiny_backbone, tiny_manifest

EXTRA = ("received_attention", "value_norm", "mean_key", "rollout")
ALL = replace(CONFIG, signals=EXTRA, views="off-center")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> BackboneConfig:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return tiny_manifest(tmp_path_factory.mktemp("images"), 10)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, backbone: BackboneConfig, manifest: Manifest) -> Path:
    path = tmp_path_factory.mktemp("plain") / "store"
    extract(manifest, path, backbone, replace(ALL, signals=()))
    return path


@pytest.fixture
def store(tmp_path: Path, plain: Path) -> Path:
    shutil.copytree(plain, tmp_path / "store")
    return tmp_path / "store"


def qkv(model: Any, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, T, d] of a plain block, from its own projection."""
    seen = []
    attention = model.blocks[layer].attn
    handle = attention.qkv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.inference_mode():
        model.forward_features(x)
    handle.remove()
    b, t, width = seen[0].shape
    _, key, value = seen[0].reshape(b, t, 3, attention.num_heads, width // 3 // attention.num_heads).permute(2, 0, 3, 1, 4)
    return key, value


def test_every_signal_is_a_field_of_a_batch_and_in_the_registry() -> None:
    assert tuple(REGISTRY) == SIGNALS
    assert set(SIGNALS) <= set(TokenBatch.__dataclass_fields__)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "reg4"])
def test_signals_are_what_the_blocks_compute(kind: str, layer: int) -> None:
    model = make(kind)
    x, prefix = images(model, 2), model.num_prefix_tokens
    weights = [timm_attention(model, x, block).mean(1) for block in range(layer + 1)]
    key, value = qkv(model, x, layer)
    tokens = Backbone.from_model(model, kind, layer=layer)(x, EXTRA)
    t = weights[0].shape[-1]
    for row in range(2):
        received = [np.mean([float(weights[layer][row, i, j]) for i in range(prefix, t)]) for j in range(prefix, t)]
        norms = [sum(float(v) ** 2 for v in value[row, :, j].flatten()) ** 0.5 for j in range(prefix, t)]
        product = torch.eye(t)
        for block in weights:
            product = (0.5 * block[row] + 0.5 * torch.eye(t)) @ product
        torch.testing.assert_close(tokens.received_attention[row], torch.tensor(received, dtype=torch.float32))
        torch.testing.assert_close(tokens.value_norm[row], torch.tensor(norms), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tokens.mean_key[row], key[row].mean(0)[prefix:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tokens.rollout[row], product[0, prefix:], rtol=1e-3, atol=1e-6)
    assert tokens.attention_entropy is None
    assert tokens.cls_attention is None


def test_a_pass_without_rollout_does_not_look_at_the_earlier_blocks() -> None:
    backbone = Backbone.from_model(make("plain"), "plain")
    x = images(backbone.model, 1)
    with_it = backbone(x, ("rollout",)).rollout
    assert backbone(x).rollout is None
    assert torch.equal(backbone(x, ("rollout",)).rollout, with_it)
    assert backbone._rollout.product() is None


def test_signals_that_a_backbone_cannot_give_are_rejected_by_name() -> None:
    without_class_token = Backbone.from_model(make("siglip"), "siglip")
    with pytest.raises(RequestError, match="cls_attention, rollout needs a class token"):
        without_class_token(images(without_class_token.model), ("value_norm", "cls_attention", "rollout"))
    pseudo = Backbone.from_model(make("plain"), "plain", attention="pseudo")
    with pytest.raises(RequestError, match="value_norm needs the attention of the backbone itself"):
        pseudo(images(pseudo.model), ("value_norm",))
    assert pseudo(images(pseudo.model), ("received_attention",)).received_attention.sum(1).tolist() == pytest.approx([1, 1, 1])
    with pytest.raises(UnknownNameError, match="Did you mean 'rollout'"):
        pseudo.check_signals(("rolout",))


def test_signals_added_later_are_those_of_the_first_pass_and_leave_every_other_file(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, store: Path
) -> None:
    before = contents(store)
    at_once = extract(manifest, tmp_path / "at-once", backbone, replace(ALL, signals=(*DEFAULT, *EXTRA)))
    later = extract(manifest, store, backbone, ALL)
    after = contents(store)
    assert {name: after[name] for name in before} == before
    assert later.signals == at_once.signals == SIGNALS
    assert later.identity == at_once.identity
    rows = range(len(later))
    one, two = (found.read(rows, signals=EXTRA) for found in (later, at_once))
    for name in EXTRA:
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert after == contents(tmp_path / "at-once")
    later.verify(manifest)


def test_only_what_is_asked_for_is_computed_and_read(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> None:
    store = extract(manifest, tmp_path / "store", backbone, replace(CONFIG, signals=("value_norm",)))
    assert store.signals == ("value_norm",)
    assert store.read([0]).value_norm is None
    assert store.read([0], signals=("value_norm", "lesion")).value_norm.shape == (1, 16)
    assert store.read([0]).attention_entropy is None
    with pytest.raises(MissingSignalError, match=r"no rollout for 10 of 10 rows.*--signals rollout"):
        next(iter(store.batches([0], 1, signals=("rollout", "value_norm"))))
    grown = extract(manifest, tmp_path / "store", backbone, replace(CONFIG, signals=("attention_entropy",)))
    assert grown.signals == ("attention_entropy", "value_norm")
    assert grown.read([0]).attention_entropy is not None
    assert grown.attention_entropy.shape == (10, 16)


def test_new_images_get_the_signals_that_the_store_has(tmp_path: Path, backbone: BackboneConfig) -> None:
    few, more = (tiny_manifest(tmp_path / "images", n) for n in (5, 9))
    extract(few, tmp_path / "store", backbone, replace(CONFIG, signals=("value_norm", "attention_entropy")))
    store = extract(more, tmp_path / "store", backbone, CONFIG)
    assert store.signals == ("attention_entropy", "value_norm")
    assert len(store) == 9


def test_an_interrupted_addition_goes_on(
    monkeypatch: pytest.MonkeyPatch, backbone: BackboneConfig, manifest: Manifest, store: Path
) -> None:
    made: list[str] = []

    def stop(*args: Any, **named: Any) -> None:
        made.append(args[2])
        if len(made) == 3:
            raise KeyboardInterrupt
        write_signal(*args, **named)

    extraction = sys.modules[extract.__module__]
    monkeypatch.setattr(extraction, "write_signal", stop)
    with pytest.raises(KeyboardInterrupt):
        extract(manifest, store, backbone, ALL)
    assert not FeatureStore.open(store, manifest).has("rollout")
    done = {path: path.stat().st_mtime_ns for path in store.glob("signal-*")}
    assert len(done) == 2
    monkeypatch.undo()
    assert extract(manifest, store, backbone, ALL).signals == SIGNALS
    assert {path: path.stat().st_mtime_ns for path in done} == done


def test_images_of_another_manifest_can_be_added_later(backbone: BackboneConfig, manifest: Manifest, store: Path) -> None:
    half = manifest.take(range(5))
    config = replace(ALL, signals=("rollout",))
    assert extract(half, store, backbone, config).has("rollout")
    whole = FeatureStore.open(store, manifest)
    with pytest.raises(MissingSignalError, match=r"rollout for \d+ of"):
        whole.require_signals(("rollout",))
    first = FeatureStore.open(store, half).read([0], signals=("rollout",)).rollout
    whole = extract(manifest, store, backbone, config)
    assert whole.has("rollout")
    assert torch.equal(FeatureStore.open(store, half).read([0], signals=("rollout",)).rollout, first)


def test_a_damaged_signal_is_noticed_and_made_again(backbone: BackboneConfig, manifest: Manifest, store: Path) -> None:
    extract(manifest, store, backbone, ALL)
    path = signal_path(store, 0, "value_norm")
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 255, whole[-1]]))
    found = FeatureStore.open(store, manifest)
    with pytest.raises(WorkError, match=r"signal-00000-value_norm\.safetensors is damaged"):
        found.read(range(len(found)), signals=("value_norm",))
    with pytest.raises(WorkError, match="signal-00000-value_norm"):
        found.verify()
    path.write_bytes(b"no header")
    with pytest.raises(MissingSignalError, match="value_norm"):
        FeatureStore.open(store, manifest).require_signals(("value_norm",))
    extract(manifest, store, backbone, ALL)
    assert path.read_bytes() == whole


def test_tokens_of_another_origin_gain_no_signals(
    monkeypatch: pytest.MonkeyPatch, backbone: BackboneConfig, manifest: Manifest, store: Path
) -> None:
    monkeypatch.setattr(Preprocessing, "prepare", lambda self, image: np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(WorkError, match="are not those that the backbone gives now"):
        extract(manifest, store, backbone, ALL)


def test_the_command_adds_signals_and_says_which_a_store_has(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest.write(tmp_path / "m.parquet")
    call = ["extract", str(tmp_path / "m.parquet"), "--store", str(tmp_path / "s"), "--backbone", backbone.name]
    call += ["--image-size", "32", "--device", "cpu", "--threads", "1"]
    assert main(call) == 0
    assert main([*call, "--signals", "rollout", "value_norm"]) == 0
    assert main(["store", "info", str(tmp_path / "s")]) == 0
    assert "signals    attention_entropy, cls_attention, value_norm, rollout" in capsys.readouterr().out
    assert main([*call, "--signals", "valuenorm"]) == 2
    assert "Did you mean 'value_norm'?" in capsys.readouterr().err
