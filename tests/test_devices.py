"""Device names: what this machine has is accepted, and every command says the same about what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medtokenbudget.cli import main
from medtokenbudget.devices import available_devices, resolve_device, worker_devices
from medtokenbudget.errors import RequestError
from tests.drawn import Drawn
from tests.small_model import draw_images, small_backbone, small_model


def test_names_become_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device(torch.device("cpu")) == torch.device("cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert available_devices()[:3] == ["cpu", "cuda:0", "cuda:1"]
    for name in ("cuda", "cuda:0", "cuda:1"):
        assert resolve_device(name) == torch.device(name)
    with pytest.raises(RequestError, match=r"Device 'cuda:2' is not available on this machine. Available: cpu, cuda:0, cuda:1"):
        resolve_device("cuda:2")
    assert worker_devices("cuda") == ["cuda:0", "cuda:1"]
    assert worker_devices("auto", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert worker_devices("cuda:1", 2) == ["cuda:1", "cuda:1"]
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert worker_devices("cpu") == ["cpu"] * 4


def test_a_name_of_no_device_or_of_one_that_this_machine_lacks_is_rejected_with_the_available_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    for name in ("gpu", "", "cuda:first", "cpu:-1"):
        with pytest.raises(RequestError, match=f"'{name}' is not a device name. Available: cpu"):
            resolve_device(name)
    for name in ("cuda", "mps", "meta", "cpu:5"):
        with pytest.raises(RequestError, match=f"Device '{name}' is not available on this machine. Available: cpu"):
            resolve_device(name)


@pytest.mark.parametrize("command", ["extract", "train", "predict", "serve"])
def test_a_missing_gpu_is_a_message_and_exit_code_2_in_every_command(
    command: str, drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    backbone = small_backbone(drawn.store_path.parent)
    model = tmp_path / "model"
    if command in ("predict", "serve"):
        small_model(tmp_path / "weights").save_pretrained(model)
    vit = ["--weights", str(backbone.weights), "--image-size", str(backbone.image_size)]
    manifest, out = str(drawn.manifest_path), str(tmp_path / "out")
    arguments = {
        "extract": [manifest, "--store", out, "--backbone", backbone.name, *vit],
        "train": [manifest, "--store", str(drawn.store_path), "--out", out],
        "predict": [str(model), str(draw_images(tmp_path / "images", 1)[0]), "--out", f"{out}.csv"],
        "serve": [str(model), "--port", "0"],
    }
    assert main([command, *arguments[command], "--device", "cuda"]) == 2
    assert "Device 'cuda' is not available on this machine. Available: cpu" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*")), "nothing was begun"
