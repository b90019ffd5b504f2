"""Distillation: a small backbone (the student) from a large one (the teacher), in steps that can all be resumed.

The tokens of the teacher are stored once (`distill_views`), the student learns them (`distill_student`), and the folder `--out`
becomes a backbone: `config.json`, `weights.safetensors` (fp16) and a model card.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from medtokenbudget import __version__
from medtokenbudget.config import BackboneConfig, DistillConfig, to_dict
from medtokenbudget.data import Manifest
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import MismatchError, WorkError
from medtokenbudget.features import distill_student, zoo
from medtokenbudget.features.backbone import Backbone
from medtokenbudget.features.distill_student import Objective, Student
from medtokenbudget.features.distill_views import TeacherCache, readable
from medtokenbudget.files import (
    append_line,
    read_json,
    read_lines,
    sha256_json,
    write_json,
    write_lines,
    write_safetensors,
    write_text,
)
from medtokenbudget.locks import exclusive
from medtokenbudget.progress import progress, say
from medtokenbudget.tensor_files import load_tensors, save_tensors

_CHECKPOINT = "checkpoint.safetensors"
_STATISTICS_ROWS = 512
_SAMPLE = 320


def distill(
    manifest: Manifest, teacher: BackboneConfig, config: DistillConfig, out: Path, license: str = "as the teacher's and the images'"
) -> Path:
    """Train a student on the training part of a manifest. The same call resumes after an interruption.

    Args:
        manifest: The images; labels and masks are not used.
        teacher: The backbone to imitate.
        config: Settings of the student and its training.
        out: Folder of the new backbone, to be used as the name of a `BackboneConfig`.
        license: License to write on the model card.

    Returns:
        The folder `out`.

    Raises:
        RequestError: The student does not fit the teacher, or no image can be read.
        MismatchError: `out` contains another distillation.
    """
    device = _device(config)
    with exclusive(out):
        return _distill(manifest, teacher, config, out, license, device)


def _distill(
    manifest: Manifest, teacher: BackboneConfig, config: DistillConfig, out: Path, license: str, device: torch.device
) -> Path:
    images = readable(manifest.part("train"), out / "errors.jsonl")
    backbone = Backbone.load(teacher, device)
    plan = distill_student.recipe(config, backbone, license)
    record = _record(images, backbone, config)
    _claim(out / "run.json", record)
    cache = TeacherCache(out / "teacher-cache", images, backbone, config.views, config.seed)
    cache.fill()
    objective = Objective(statistics(cache, device), config)
    sample = {name: value.to(device) for name, value in cache.read(cache.sample(_SAMPLE)).items()}
    # A checkpoint has all weights, so the expensive initialization is skipped.
    start = replace(config, init="random") if (out / _CHECKPOINT).exists() else config
    student = distill_student.create(start, plan, backbone, sample, objective)
    write_text(out / "README.md", _card(record, plan, out))
    _train(student, cache, objective, config, out, lambda: export(student.model, plan, out))
    return out


def _device(config: DistillConfig) -> torch.device:
    if config.threads:
        torch.set_num_threads(config.threads)
    return resolve_device(config.device)


def _record(manifest: Manifest, teacher: Backbone, config: DistillConfig) -> dict[str, Any]:
    return {
        "version": __version__,
        "torch": torch.__version__,
        "images": len(manifest),
        "manifest": manifest.data_hash,
        "source": manifest.source,
        "teacher": teacher.fingerprint,
        "config": {key: value for key, value in to_dict(config).items() if key not in ("device", "threads")},
    }


def _claim(path: Path, record: dict[str, Any]) -> None:
    if path.exists():
        found = read_json(path)
        if sha256_json(found) != sha256_json(record):
            raise MismatchError.between(f"The distillation in {path.parent}", record, found, "Choose another --out.")
    else:
        write_json(path, record)


def statistics(cache: TeacherCache, device: torch.device) -> dict[str, Tensor]:
    """Mean and standard deviation [D] of the patch and class tokens of the teacher, over evenly spaced stored views."""
    rows = torch.linspace(0, cache.rows - 1, min(_STATISTICS_ROWS, cache.rows)).long()
    found = cache.read(rows)
    result = {}
    for name in ("patches", "cls"):
        if name in found:
            values = found[name].float().flatten(0, -2)
            result[f"{name}_mean"] = values.mean(0).to(device)
            result[f"{name}_std"] = values.std(0, correction=0).clamp_min(1e-4).to(device)
    return result


def _train(
    student: Student, cache: TeacherCache, objective: Objective, config: DistillConfig, out: Path, publish: Callable[[], Any]
) -> None:
    """Run the remaining epochs; each ends with a checkpoint and a usable backbone."""
    optimizer = torch.optim.AdamW(_groups(student, config), lr=config.lr)
    steps = -(-len(cache.manifest) // config.batch_size)
    first = _resume(out / _CHECKPOINT, student, optimizer)
    _keep_metrics(out / "metrics.jsonl", first)
    if first:
        # The run may have stopped after the checkpoint and before its weights were published.
        publish()
    with progress(total=config.epochs * steps, initial=first * steps, what="Training the student", unit="step") as bar:
        for epoch in range(first, config.epochs):
            started = time.monotonic()
            rates = [_rate(epoch * steps + step, config.epochs * steps, config) for step in range(steps)]
            losses = _epoch(student, cache, objective, optimizer, epoch, rates, bar)
            speed = len(cache.manifest) / (time.monotonic() - started)
            # In this order: a row without its checkpoint is dropped when the run resumes, a lost row would stay lost.
            append_line(out / "metrics.jsonl", {"epoch": epoch + 1, **losses, "images_per_second": round(speed, 2)})
            _save(out / _CHECKPOINT, student, optimizer, epoch + 1)
            publish()


def _keep_metrics(path: Path, epochs: int) -> None:
    """Drop the rows of epochs that the checkpoint does not have."""
    if path.exists():
        write_lines(path, [row for row in read_lines(path) if row["epoch"] <= epochs])


def _epoch(
    student: Student,
    cache: TeacherCache,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    rates: list[float],
    bar: Any,
) -> dict[str, float]:
    student.train()
    sums: dict[str, float] = {}
    for batch, rate in zip(cache.batches(epoch, objective.config.batch_size), rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        target = {name: value.to(cache.teacher.device) for name, value in batch.items()}
        losses = objective(student(cache.teacher.normalize(target["pixels"])), target)
        if not bool(torch.isfinite(losses["loss"])):
            raise WorkError(f"The loss is not finite in epoch {epoch + 1}. Use a smaller --lr.")
        optimizer.zero_grad(set_to_none=True)
        losses["loss"].backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach()) * len(batch["pixels"])
        bar.update(1)
    return {name: round(value / len(cache.manifest), 6) for name, value in sums.items()}


def _groups(student: Student, config: DistillConfig) -> list[dict[str, Any]]:
    """Parameter groups: weight decay applies to matrices only."""
    named = list(student.named_parameters())
    no_decay = {name for name, value in named if value.ndim < 2 or name.endswith(("pos_embed", "cls_token"))}
    return [
        {"params": [value for name, value in named if name not in no_decay], "weight_decay": config.weight_decay},
        {"params": [value for name, value in named if name in no_decay], "weight_decay": 0.0},
    ]


def _rate(step: int, steps: int, config: DistillConfig) -> float:
    warm = max(1, int(config.warmup * steps))
    if step < warm:
        return config.lr * (step + 1) / warm
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _save(path: Path, student: Student, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Student, adapters and optimizer in one file, so that they are always of the same epoch."""
    tensors = {f"student.{name}": value for name, value in student.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors.update({f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()})
    save_tensors(path, tensors, {"epochs": epochs})


def _resume(path: Path, student: Student, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint if there is one, and return the number of finished epochs."""
    if not path.exists():
        return 0
    tensors, saved = load_tensors(path)
    student.load_state_dict(
        {name.removeprefix("student."): value for name, value in tensors.items() if name.startswith("student.")}
    )
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    epochs = int(saved["epochs"])
    say(f"Resuming after epoch {epochs}.")
    return epochs


def export(model: Any, plan: zoo.Recipe, folder: Path) -> Path:
    """Write the folder of the backbone: recipe and fp16 weights, without the adapters."""
    state = {name: value.detach().cpu().half().contiguous() for name, value in model.state_dict().items()}
    if not all(bool(torch.isfinite(value).all()) for value in state.values()):
        raise WorkError("Some weights are too large for fp16. Train with a smaller --lr.")
    write_safetensors(folder / zoo.WEIGHTS_FILE, save(state, {"format": "pt"}))
    plan.write(folder)
    return folder / zoo.WEIGHTS_FILE


def _card(record: dict[str, Any], plan: zoo.Recipe, out: Path) -> str:
    teacher, config = record["teacher"], record["config"]
    return f"""# A distilled backbone

A plain vision transformer ({config["depth"]} blocks, width {config["width"]}, patches of {config["patch_size"]} pixels) that
reproduces the patch and class tokens of block {teacher["layer"]} of `{teacher["name"]}`.

| | |
|---|---|
| teacher | `{teacher["name"]}`, weights sha256 `{teacher["weights"]}`, block {teacher["layer"]} |
| images | {record["images"]} ({record["source"]}), {config["views"]} views of each |
| training | {config["epochs"]} epochs, batch {config["batch_size"]}, learning rate {config["lr"]}, seed {config["seed"]} |
| initial weights | {config["init"]} |
| license | {plan.license} |

Use it with `--backbone {out}`. The distillation does not measure how well it separates lesions.
Research software, not a medical device.
"""
