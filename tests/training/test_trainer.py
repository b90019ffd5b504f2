"""The trainer: what it learns, what it refuses, and that a killed run goes on to the same bytes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medtokenbudget.backbone import extract
from medtokenbudget.config import ExtractConfig, LossWeights, TrainConfig
from medtokenbudget.data import Drawings, Manifest, synthetic_manifest
from medtokenbudget.errors import MismatchError, RequestError, WorkError
from medtokenbudget.files import read_lines, write_lines
from medtokenbudget.tensor_files import load_tensors, save_tensors
from medtokenbudget.training import trainer
from medtokenbudget.training.rows import ViewDraw, generator, make_parts
from medtokenbudget.training.trainer import optimizer_tensors, restore_optimizer, train_selector
from tests.drawn import Drawn, quick
from tests.small_model import small_backbone


def _train_and_stall(drawn: Drawn, out: Path, config: TrainConfig, stalled: Event) -> None:
    """Train up to a step after the checkpoint of epoch 2, and wait there to be killed."""
    torch.set_num_threads(1)
    step = torch.optim.AdamW.step

    def stall(self: torch.optim.AdamW, closure: None = None) -> None:
        checkpoint = out / "checkpoint.safetensors"
        if checkpoint.exists() and load_tensors(checkpoint)[1]["epoch"] >= 2:
            stalled.set()
            time.sleep(600)
        step(self, closure)

    torch.optim.AdamW.step = stall  # type: ignore[assignment,method-assign]
    train_selector(drawn.manifest, drawn.store, out, config)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["paper", "lesion-first"])
def test_a_killed_training_goes_on_to_the_same_bytes(drawn: Drawn, tmp_path: Path, preset: str) -> None:
    config = quick(preset, epochs=4, patience=9)
    torch.set_num_threads(1)
    whole = train_selector(drawn.manifest, drawn.store, tmp_path / "whole", config)
    # Not forked: PyTorch refuses backward passes in the fork of a process that has made one with several threads.
    context = multiprocessing.get_context("spawn")
    stalled = context.Event()
    child = context.Process(target=_train_and_stall, args=(drawn, tmp_path / "killed", config, stalled))
    child.start()
    while child.is_alive() and not stalled.wait(0.05):
        pass
    assert stalled.is_set(), "the child ended before it could be killed"
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    checkpoint = tmp_path / "killed" / "checkpoint.safetensors"
    assert load_tensors(checkpoint)[1]["epoch"] == 2, "killed in the middle of the training"
    resumed = train_selector(drawn.manifest, drawn.store, tmp_path / "killed", config)
    assert checkpoint.read_bytes() == (tmp_path / "whole" / "checkpoint.safetensors").read_bytes()
    for name, value in whole.head.state_dict().items():
        assert torch.equal(value, resumed.head.state_dict()[name]), name
    epochs = [row["epoch"] for row in read_lines(tmp_path / "killed" / "metrics.jsonl") if row["stage"] == "selector"]
    assert epochs == [0, 1, 2, 3]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_stop_around_a_checkpoint_neither_loses_nor_repeats_a_row_of_metrics(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    config = quick("paper", epochs=3, patience=9)
    save = trainer._Trainer._save

    def stopped(self: trainer._Trainer) -> None:
        if moment == "after":
            save(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer._Trainer, "_save", stopped)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train_selector(drawn.manifest, drawn.store, tmp_path, config)
    monkeypatch.undo()
    train_selector(drawn.manifest, drawn.store, tmp_path, config)
    assert [row["epoch"] for row in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_a_log_with_another_number_is_not_believed_when_a_training_resumes(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, log = quick("paper", epochs=2, patience=9), tmp_path / "metrics.jsonl"
    train_selector(drawn.manifest, drawn.store, tmp_path, config)
    rows = read_lines(log)
    for change, kept in (({"seconds": 99.0}, 2), ({"loss": 0.1}, 0)):
        write_lines(log, [rows[0] | change, *rows[1:]])
        capsys.readouterr()
        train_selector(drawn.manifest, drawn.store, tmp_path, config)
        assert len(read_lines(log)) == kept
        assert ("metrics.jsonl is missing or damaged; it starts anew" in capsys.readouterr().err) is (kept == 0)


def test_the_metrics_file_has_every_term_budget_rate_and_score_spread(drawn: Drawn, tmp_path: Path) -> None:
    train_selector(drawn.manifest, drawn.store, tmp_path, quick("paper"))
    rows = read_lines(tmp_path / "metrics.jsonl")
    terms = {"loss", "classification", "budget_deviation", "diversity", "lesion", "distillation"}
    assert terms | {"budget", "lr", "score_mean", "score_std", "selection"} <= set(rows[0])
    weights = LossWeights()
    expected = (
        rows[0]["classification"]
        + weights.budget * rows[0]["budget_deviation"]
        + weights.diversity * rows[0]["diversity"]
        + weights.lesion * rows[0]["lesion"]
        + weights.distillation * rows[0]["distillation"]
    )
    assert rows[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_strict_protocol_selects_on_images_that_are_neither_trained_nor_reported_on(drawn: Drawn) -> None:
    parts = make_parts(drawn.manifest, drawn.store, quick("lesion-first"))
    trained = np.concatenate([parts.train, parts.train_views])
    sets = [set(np.array(drawn.store.ids)[rows]) for rows in (trained, parts.select, parts.validation)]
    assert all(sets)
    assert not sets[0] & sets[1]
    assert not sets[0] & sets[2]
    assert not sets[1] & sets[2]


@pytest.mark.parametrize("preset", ["paper", "lesion-first"])
@pytest.mark.parametrize("protocol", ["paper", "strict"])
def test_no_head_ever_learns_from_a_validation_image(drawn: Drawn, preset: str, protocol: str) -> None:
    config = quick(preset, protocol=protocol, selection_metric="accuracy")
    learned = set(np.array(drawn.store.ids)[make_parts(drawn.manifest, drawn.store, config).head])
    assert learned == set(drawn.manifest.part("train").ids)


def test_the_paper_protocol_selects_on_validation_and_trains_on_all_of_training(drawn: Drawn) -> None:
    parts = make_parts(drawn.manifest, drawn.store, quick("paper", protocol="paper"))
    assert parts.select.tolist() == parts.validation.tolist()
    assert len(parts.train) == len(drawn.manifest.part("train"))


def test_validation_masks_never_pick_an_epoch(drawn: Drawn, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="evaluation only"):
        train_selector(drawn.manifest, drawn.store, tmp_path, quick("paper", protocol="paper", selection_metric="retention"))


def test_views_of_validation_images_are_never_trained_on(drawn: Drawn) -> None:
    parts = make_parts(drawn.manifest, drawn.store, quick("lesion-first"))
    trained = set(np.array(drawn.store.ids)[parts.train_views])
    assert trained
    assert trained <= set(drawn.manifest.part("train").ids)
    assert len(make_parts(drawn.manifest, drawn.store, quick("paper")).train_views) == 0


def test_an_epoch_draws_one_view_of_each_image_that_has_any() -> None:
    class Store:
        ids = ("b", "a", "b", "c", "b", "a")

    rows = np.array([5, 4, 2, 1, 0])
    draw = ViewDraw(Store(), rows)  # type: ignore[arg-type]
    assert (len(draw), draw.rows) == (2, 5)
    seen = [draw.draw(generator(0, "views", epoch)) for epoch in range(40)]
    assert {int(row) for row, _ in seen} == {1, 5}
    assert {int(row) for _, row in seen} == {0, 2, 4}
    assert len(ViewDraw(Store(), rows[:0]).draw(generator(0, "views", 0))) == 0  # type: ignore[arg-type]


def test_views_may_be_one_crop_and_retention_is_picked_on_views_too(tmp_path: Path) -> None:
    folder = tmp_path / "crops"
    manifest = synthetic_manifest(folder / "data", Drawings(24, seed=3, size=96))
    options = ExtractConfig(views="off-center", crops=3, threads=1)
    store = extract(Manifest.read(manifest), folder / "tokens", small_backbone(folder), options)
    seen = {}
    for views in ("none", "off-center", "all"):
        parts = make_parts(Manifest.read(manifest), store, quick("lesion-first", views=views))
        seen[views] = [set(np.array(store.views)[rows]) for rows in (parts.train_views, parts.select, parts.off_center)]
    every = {"off-center", "off-center-2", "off-center-3"}
    assert seen["none"] == [set(), {"identity"}, {"off-center"}]
    assert seen["off-center"] == [{"off-center"}, {"identity", "off-center"}, {"off-center"}]
    assert seen["all"] == [every, {"identity", *every}, {"off-center"}]
    by_accuracy = make_parts(Manifest.read(manifest), store, quick("lesion-first", selection_metric="accuracy"))
    assert set(np.array(store.views)[by_accuracy.select]) == {"identity"}


def _watch_terms(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` see, and alter, what every step hands to the losses of the scorer."""
    module = sys.modules["medtokenbudget.routing.trainable"]
    real = module.scorer_terms

    def watched(scores: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
        change(options)
        return dict(real(scores, **options))

    monkeypatch.setattr(module, "scorer_terms", watched)


def test_a_step_learns_from_as_many_patches_as_it_is_told(drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = set()
    _watch_terms(monkeypatch, lambda options: sizes.add(tuple(options["lesion"].shape[1:])))
    for patches in (7, 0):
        train_selector(drawn.manifest, drawn.store, tmp_path / str(patches), quick("lesion-first", epochs=1, patches=patches))
    assert sizes == {(7,), (100,)}
    with pytest.raises(RequestError, match="whole images"):
        train_selector(drawn.manifest, drawn.store, tmp_path / "joint", quick("paper", patches=7))


def test_lesion_first_learns_where_the_lesion_is(drawn: Drawn, tmp_path: Path) -> None:
    trained = train_selector(drawn.manifest, drawn.store, tmp_path, quick("lesion-first", epochs=8, patience=20))
    first, last = read_lines(tmp_path / "metrics.jsonl")[0], trained.best_value
    assert last > 0.7, "share of the ceiling on the selection part; drawing patches at random gives about 0.45"
    assert [row["lesion"] for row in read_lines(tmp_path / "metrics.jsonl") if row["stage"] == "selector"][-1] < first["lesion"]


@pytest.mark.parametrize("difference", ["joint recipe", "unfinished", "learning rate"])
def test_a_sibling_that_trained_another_selector_is_left_alone(drawn: Drawn, tmp_path: Path, difference: str) -> None:
    config = quick("paper" if difference == "joint recipe" else "lesion-first", epochs=1)
    there = replace(config, lr=5e-4) if difference == "learning rate" else config
    train_selector(drawn.manifest, drawn.store, tmp_path / "a", there)
    if difference == "unfinished":
        tensors, state = load_tensors(tmp_path / "a" / "checkpoint.safetensors")
        save_tensors(tmp_path / "a" / "checkpoint.safetensors", tensors, {**state, "finished": False})
    before = (tmp_path / "a" / "checkpoint.safetensors").read_bytes()
    stages: list[str] = []
    train_selector(
        *(drawn.manifest, drawn.store, tmp_path / "b", config),
        head="linear",
        on_epoch=lambda stage, *_: stages.append(stage),
        sibling=tmp_path / "a",
    )
    assert "selector" in stages, "the selector is trained, not taken over"
    train_selector(drawn.manifest, drawn.store, tmp_path / "c", config, head="linear")
    assert (tmp_path / "b" / "checkpoint.safetensors").read_bytes() == (tmp_path / "c" / "checkpoint.safetensors").read_bytes()
    assert (tmp_path / "a" / "checkpoint.safetensors").read_bytes() == before


def test_without_the_lesion_loss_masks_change_nothing(drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = quick("paper", losses=LossWeights(lesion=0.0))
    free = train_selector(drawn.manifest, drawn.store, tmp_path / "a", config).selector.scorer.state_dict()
    _watch_terms(monkeypatch, lambda options: options.update(lesion=~options["lesion"]))
    inverted = train_selector(drawn.manifest, drawn.store, tmp_path / "b", config).selector.scorer.state_dict()
    assert all(torch.equal(free[name], inverted[name]) for name in free)


def test_a_loss_that_is_not_finite_stops_with_the_batch_named(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainer.total_loss

    monkeypatch.setattr(trainer, "total_loss", lambda *arguments: real(*arguments) * float("nan"))
    with pytest.raises(WorkError, match=r"not finite in epoch 0 \(images SYN_"):
        train_selector(drawn.manifest, drawn.store, tmp_path, quick("paper"))


def test_lesion_first_without_masks_says_what_to_do(drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = drawn.store
    monkeypatch.setattr(store, "has_mask", torch.zeros(len(store), dtype=torch.bool), raising=False)
    without = drawn.manifest.with_columns(mask=[None] * len(drawn.manifest))
    with pytest.raises(RequestError, match="no training image has one"):
        train_selector(without, store, tmp_path, quick("lesion-first"))


def test_going_on_with_other_options_is_refused_with_the_difference(drawn: Drawn, tmp_path: Path) -> None:
    config = quick("paper")
    train_selector(drawn.manifest, drawn.store, tmp_path, config)
    with pytest.raises(MismatchError, match=r"config\.lr"):
        train_selector(drawn.manifest, drawn.store, tmp_path, replace(config, lr=5e-4))


def test_bf16_autocast_trains_and_differs_from_fp32(drawn: Drawn, tmp_path: Path) -> None:
    plain = train_selector(drawn.manifest, drawn.store, tmp_path / "a", quick("paper", epochs=1))
    half = train_selector(drawn.manifest, drawn.store, tmp_path / "b", quick("paper", epochs=1, precision="bf16"))
    a, b = plain.selector.scorer.output.weight, half.selector.scorer.output.weight
    assert not torch.equal(a, b)
    assert torch.allclose(a, b, atol=0.05)


def test_a_checkpoint_comes_back_whole_and_a_damaged_one_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_tensors(path, {"b": torch.arange(3), "a": torch.ones(2)}, {"epoch": 3})
    first = path.read_bytes()
    save_tensors(path, {"a": torch.ones(2), "b": torch.arange(3)}, {"epoch": 3})
    assert path.read_bytes() == first
    tensors, state = load_tensors(path)
    assert state == {"epoch": 3}
    assert torch.equal(tensors["b"], torch.arange(3))
    path.write_bytes(first[:-5])
    with pytest.raises(RequestError, match=r"c\.safetensors is damaged or incomplete"):
        load_tensors(path)


def test_an_optimizer_comes_back_from_its_tensors() -> None:
    def made() -> tuple[torch.nn.Parameter, torch.optim.AdamW]:
        parameter = torch.nn.Parameter(torch.ones(3))
        return parameter, torch.optim.AdamW([parameter], lr=0.1)

    def step(parameter: torch.nn.Parameter, optimizer: torch.optim.AdamW) -> None:
        (parameter**2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    parameter, optimizer = made()
    step(parameter, optimizer)
    other, restored = made()
    other.data.copy_(parameter.data)
    restore_optimizer(restored, optimizer_tensors(optimizer))
    step(parameter, optimizer)
    step(other, restored)
    assert torch.equal(parameter, other)
