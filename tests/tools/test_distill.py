"""The script that made the embedded backbone, with a tiny teacher and drawn images."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Drawings, Manifest, synthetic_manifest
from tests.conftest import REPOSITORY


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("distill", REPOSITORY / "tools" / "distill.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_writes_a_backbone_that_loads_and_resumes_from_the_teachers_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = synthetic_manifest(tmp_path / "set.parquet", Drawings(n=12, seed=2, size=64))
    Manifest.read(manifest).with_columns(split=["train"] * 12).write(manifest)
    torch.manual_seed(0)
    teacher = timm.create_model("test_vit", pretrained=False, num_classes=0, img_size=64)
    for name, parameter in teacher.named_parameters():
        if name.endswith("gamma"):
            parameter.data.fill_(0.5)
    save_file(teacher.state_dict(), tmp_path / "teacher.safetensors")
    main, out = script().main, tmp_path / "small"
    words = [manifest, "--teacher", "test_vit", "--weights", tmp_path / "teacher.safetensors", "--image-size", 64]
    words += ["--depth", 2, "--batch-size", 6, "--epochs", 2, "--out", out]
    arguments = [str(word) for word in words]

    # A head of the teacher has 32 dimensions; the slow teacher must not run before the refusal.
    assert main([*arguments, "--width", "48", "--heads", "1"]) == 2
    assert "Change --width or --heads" in capsys.readouterr().err
    assert not out.exists()

    assert main([*arguments, "--width", "32", "--heads", "1"]) == 0
    backbone = Backbone.load(BackboneConfig(str(out), image_size=64))
    assert (backbone.grid, backbone.dim, backbone.has_cls, backbone.depth) == ((4, 4), 32, True, 2)
    assert backbone(torch.randn(2, 3, 64, 64)).cls_attention is not None
    state = load_file(out / "weights.safetensors")
    assert all(value.dtype == torch.float16 for value in state.values())
    assert not any("adapter" in name for name in state)

    written = (out / "weights.safetensors").read_bytes()
    tokens = out / "teacher-cache" / "views-00000.safetensors"
    made = tokens.stat().st_mtime_ns
    assert main([*arguments, "--width", "32", "--heads", "1"]) == 0
    assert (out / "weights.safetensors").read_bytes() == written
    assert tokens.stat().st_mtime_ns == made
