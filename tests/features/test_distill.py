"""Distillation through the command, with a tiny teacher and drawn images: learning, resuming, refusing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from medtokenbudget.cli import main
from medtokenbudget.config import BackboneConfig, DistillConfig
from medtokenbudget.data import Drawings, Manifest, synthetic_manifest
from medtokenbudget.features import distill, distill_start, distill_student
from medtokenbudget.features.backbone import Backbone
from medtokenbudget.features.distill_views import draw_view
from medtokenbudget.files import read_lines
from tests import processes

TEACHER = "test_vit"
STUDENT = ["--image_size", "64", "--patch_size", "16", "--width", "32", "--heads", "1", "--depth", "2", "--batch_size", "6"]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = synthetic_manifest(tmp_path_factory.mktemp("drawn") / "set.parquet", Drawings(n=16, seed=2, size=64))
    return Manifest.read(path).with_columns(split=["train"] * 16).write(path)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = timm.create_model(TEACHER, pretrained=False, num_classes=0, img_size=64)
    for name, parameter in model.named_parameters():
        if name.endswith("gamma"):
            parameter.data.fill_(0.5)
    path = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    save_file(model.state_dict(), path)
    return path


def run(manifest: Path, weights: Path, out: Path, *more: str) -> int:
    arguments = ["distill", str(manifest), "--teacher", TEACHER, "--weights", str(weights), "--out", str(out), "--views", "2"]
    return main([*arguments, *STUDENT, "--epochs", "2", *more])


@pytest.fixture(scope="module")
def undisturbed(manifest: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("student") / "small"
    assert run(manifest, weights, out) == 0
    return out


def test_the_command_leaves_a_backbone_that_loads_like_any_other(undisturbed: Path, tmp_path: Path) -> None:
    backbone = Backbone.load(BackboneConfig(str(undisturbed), image_size=64))
    assert (backbone.grid, backbone.dim, backbone.has_cls, backbone.depth) == ((4, 4), 32, True, 2)
    tokens = backbone(torch.randn(2, 3, 64, 64))
    assert tokens.attention_entropy is not None
    assert tokens.cls_attention is not None
    assert all(value.dtype == torch.float16 for value in load_file(undisturbed / "weights.safetensors").values())
    assert "adapter" not in "".join(load_file(undisturbed / "weights.safetensors"))
    assert "test_vit" in (undisturbed / "README.md").read_text()


def test_metrics_have_a_row_for_each_epoch_and_the_record_names_the_teacher(undisturbed: Path) -> None:
    rows = read_lines(undisturbed / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[1]["patches"] < rows[0]["patches"]
    record = json.loads((undisturbed / "run.json").read_text())
    assert record["images"] == 16
    assert record["teacher"]["name"] == TEACHER


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(
    manifest: Path, weights: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "small"
    epoch = distill._epoch

    def stop_in_the_second(*arguments: Any) -> dict[str, float]:
        if arguments[4] == 1:
            raise KeyboardInterrupt
        return epoch(*arguments)

    monkeypatch.setattr(distill, "_epoch", stop_in_the_second)
    assert run(manifest, weights, out) == 130
    (out / "teacher-cache" / "views-00000.safetensors").unlink()
    monkeypatch.undo()
    assert run(manifest, weights, out) == 0
    assert (out / "weights.safetensors").read_bytes() == (undisturbed / "weights.safetensors").read_bytes()
    assert [row["epoch"] for row in read_lines(out / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_killed_between_checkpoint_and_weights_publishes_them_when_it_resumes(
    manifest: Path, weights: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    out, save = tmp_path / "small", distill._save

    def stop_after(*arguments: Any) -> None:
        save(*arguments)
        if arguments[3] == epochs:
            raise KeyboardInterrupt

    monkeypatch.setattr(distill, "_save", stop_after)
    assert run(manifest, weights, out) == 130
    monkeypatch.undo()
    assert run(manifest, weights, out) == 0
    for name in ("weights.safetensors", "config.json"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes()
    assert [row["epoch"] for row in read_lines(out / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "teacher-cache/views-00000.safetensors"])
def test_a_flipped_bit_in_what_a_run_resumes_from_is_named(
    manifest: Path, weights: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / "small"
    shutil.copytree(undisturbed, out)
    data = bytearray((out / name).read_bytes())
    data[-3] ^= 1
    (out / name).write_bytes(data)
    assert run(manifest, weights, out) == 2
    assert f"{name} is damaged" in capsys.readouterr().err
    (out / name).unlink()
    assert run(manifest, weights, out) == 0
    assert (out / "weights.safetensors").read_bytes() == (undisturbed / "weights.safetensors").read_bytes()


@pytest.mark.slow
def test_a_full_disk_is_a_message_and_the_run_resumes(manifest: Path, weights: Path, undisturbed: Path, tmp_path: Path) -> None:
    arguments = ["distill", manifest, "--teacher", TEACHER, "--weights", weights, "--out", tmp_path / "small", "--views", "2"]
    ended = processes.run([*arguments, *STUDENT, "--epochs", "2"], tmp_path / "log", processes.Limits(file_bytes=2000))
    assert ended.code == 1
    assert "No space left while writing" in ended.said
    assert "Traceback" not in ended.said
    assert run(manifest, weights, tmp_path / "small") == 0
    assert (tmp_path / "small" / "weights.safetensors").read_bytes() == (undisturbed / "weights.safetensors").read_bytes()


def test_a_run_with_other_settings_is_not_mixed_into_an_old_folder(
    manifest: Path, weights: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(manifest, weights, undisturbed, "--lr", "0.01") == 2
    message = capsys.readouterr().err
    assert "Choose another --out" in message
    assert "0.01" in message


def test_an_unreadable_image_is_named_and_left_out(manifest: Path, weights: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    whole = Manifest.read(manifest)
    records = [{"image_id": whole.ids[i], "image": str(whole.image_path(i))} for i in range(7)]
    records.append({"image_id": "broken", "image": str(tmp_path / "broken.jpg")})
    Manifest.from_records(records, (), source="mixed").write(tmp_path / "mixed.parquet")
    assert run(tmp_path / "mixed.parquet", weights, tmp_path / "small", "--init", "random") == 0
    assert [row["image_id"] for row in read_lines(tmp_path / "small" / "errors.jsonl")] == ["broken"]
    assert json.loads((tmp_path / "small" / "run.json").read_text())["images"] == 7


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--patch_size", "8"], "Use --patch-size 16"),
        (["--heads", "3"], "must be a multiple"),
        (["--heads", "2"], "--init random"),
        (["--width", "96", "--heads", "3"], "--init random"),
        (["--views", "0"], "at least 1"),
        (["--layer", "9"], "the blocks 0 to 5"),
    ],
)
def test_students_that_cannot_be_made_are_rejected(
    manifest: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert run(manifest, weights, tmp_path / "small", *more) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("views-*")), "the slow teacher ran before the refusal"


def test_the_stored_tokens_are_the_teachers_for_the_stored_pixels(undisturbed: Path, weights: Path) -> None:
    teacher = Backbone.load(BackboneConfig(TEACHER, weights, 64))
    with safe_open(undisturbed / "teacher-cache" / "views-00000.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert stored["pixels"].shape == (32, 64, 64, 3)
    tokens = teacher(teacher.normalize(stored["pixels"]))
    for name in ("patches", "cls", "cls_attention"):
        torch.testing.assert_close(stored[name].float(), getattr(tokens, name), rtol=2e-3, atol=2e-3)


def test_views_depend_on_the_image_name_and_the_seed_alone() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8))
    assert draw_view(picture, "a", 0, 1) is picture
    first = np.asarray(draw_view(picture, "a", 1, 1))
    assert np.array_equal(first, np.asarray(draw_view(picture, "a", 1, 1)))
    others = [draw_view(picture, *key) for key in (("b", 1, 1), ("a", 2, 1), ("a", 1, 2))]
    assert all(other.size != (first.shape[1], first.shape[0]) or not np.array_equal(first, np.asarray(other)) for other in others)


def test_a_student_as_wide_and_deep_as_its_teacher_starts_as_its_equal(weights: Path) -> None:
    teacher = Backbone.load(BackboneConfig(TEACHER, weights, 64))
    config = DistillConfig(width=64, depth=6, heads=2, patch_size=16)
    plan = distill_student.recipe(replace(config, init="random"), teacher, "none")
    plan.arguments["mlp_ratio"] = 3
    model = distill_student.build(plan.architecture, 64, plan)
    images = torch.randn(8, 3, 64, 64)
    distill_start.start_from_teacher(model, teacher, images)
    with torch.inference_mode():
        student, expected = model.eval().forward_features(images), teacher.model.forward_features(images)
    solution = torch.linalg.lstsq(student.flatten(0, 1), expected.flatten(0, 1)).solution
    error = (student.flatten(0, 1) @ solution - expected.flatten(0, 1)).pow(2).mean() / expected.var()
    assert float(error) < 0.02


def test_losses_are_zero_at_the_target_and_follow_their_formulas() -> None:
    target = torch.randn(2, 5, 8)
    assert float(distill_student.token_loss(target, target)) == pytest.approx(0, abs=1e-6)
    # Doubling keeps the direction; smooth L1 of a difference d is d^2 / 2 up to 1 and |d| - 1 / 2 beyond.
    value = torch.tensor([[0.5, 2.0]])
    assert float(distill_student.token_loss(2 * value, value)) == pytest.approx((0.125 + 1.5) / 2, abs=1e-6)
    p, q = torch.tensor([[0.1, 0.3]]), torch.tensor([[0.2, 0.2]])
    by_hand = 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.5)
    assert float(distill_student.attention_loss(q, p)) == pytest.approx(by_hand, abs=1e-6)
