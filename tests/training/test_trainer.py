"""The trainer: what it learns, what it refuses, and that a killed training resumes to the same bytes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medtokenbudget.config import CurriculumConfig, LossWeights, TrainConfig
from medtokenbudget.errors import BudgetError, MismatchError, RequestError, UnknownNameError, WorkError
from medtokenbudget.files import load_tensors, read_lines, write_lines
from medtokenbudget.training import trainer
from medtokenbudget.training.trainer import (
    batches_of_pooled,
    cosine_lr,
    curriculum_budget,
    epochs_for,
    fit_head,
    new_head,
)
from tests.drawn import Drawn, fit, quick

CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.jsonl"


def train_and_stall(drawn: Drawn, out: Path, config: TrainConfig, stalled: Event) -> None:
    """Train up to a step after the checkpoint of epoch 2, and wait there to be killed."""
    torch.set_num_threads(1)
    step = torch.optim.AdamW.step

    def stall(self: torch.optim.AdamW, closure: None = None) -> None:
        if (out / CHECKPOINT).exists() and load_tensors(out / CHECKPOINT)[1]["epoch"] >= 2:
            stalled.set()
            time.sleep(600)
        step(self, closure)

    torch.optim.AdamW.step = stall
    fit(drawn, config, folder=out)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["paper", "lesion-first"])
def test_a_killed_training_resumes_to_the_same_bytes_as_one_in_memory(drawn: Drawn, tmp_path: Path, preset: str) -> None:
    config = quick(preset, epochs=3, patience=9)
    torch.set_num_threads(1)
    in_memory = fit(drawn, config)
    fit(drawn, config, folder=tmp_path / "whole")
    # Not forked: PyTorch refuses backward passes in the fork of a process that has made one with several threads.
    context = multiprocessing.get_context("spawn")
    stalled, killed = context.Event(), tmp_path / "killed"
    child = context.Process(target=train_and_stall, args=(drawn, killed, config, stalled))
    child.start()
    while child.is_alive() and not stalled.wait(0.05):
        pass
    assert stalled.is_set(), "the child ended before it could be killed"
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert load_tensors(killed / CHECKPOINT)[1]["epoch"] == 2, "killed in the middle of the training"
    resumed = fit(drawn, config, folder=killed)
    assert (killed / CHECKPOINT).read_bytes() == (tmp_path / "whole" / CHECKPOINT).read_bytes()
    for name, value in in_memory.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    logged = [{key: value for key, value in row.items() if key != "seconds"} for row in read_lines(killed / METRICS)]
    assert logged == [{key: value for key, value in row.items() if key != "seconds"} for row in in_memory.history]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_stop_around_a_checkpoint_neither_loses_nor_repeats_a_row_of_metrics(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    config, save = quick("paper", epochs=3, patience=9), trainer.save_tensors

    def stopped(*arguments: Any) -> None:
        if moment == "after":
            save(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "save_tensors", stopped)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fit(drawn, config, folder=tmp_path)
    monkeypatch.undo()
    fit(drawn, config, folder=tmp_path)
    assert [row["epoch"] for row in read_lines(tmp_path / METRICS)] == [0, 1, 2]


def test_a_finished_training_is_read_again_but_no_edited_log_no_other_options_and_no_other_version(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, log = quick("paper", epochs=2, patience=9), tmp_path / METRICS
    fit(drawn, config, folder=tmp_path)
    rows = read_lines(log)
    for change, kept in (({"seconds": 99.0}, 2), ({"loss": 0.1}, 0)):
        write_lines(log, [rows[0] | change, *rows[1:]])
        capsys.readouterr()
        fit(drawn, config, folder=tmp_path)
        assert len(read_lines(log)) == kept
        assert ("metrics.jsonl is missing or damaged; it starts anew" in capsys.readouterr().err) is (kept == 0)
    with pytest.raises(MismatchError, match=r"config\.lr: .*\n.*another `out`"):
        fit(drawn, replace(config, lr=5e-4), folder=tmp_path)
    monkeypatch.setattr(trainer, "TRAINING_VERSION", trainer.TRAINING_VERSION + 1)
    with pytest.raises(MismatchError, match=r"version: expected 2, found 1"):
        fit(drawn, config, folder=tmp_path)


def test_a_row_of_the_history_has_every_term_budget_rate_and_score_spread(drawn: Drawn) -> None:
    row, weights = fit(drawn, quick("paper", epochs=1)).history[0], LossWeights()
    assert {"budget", "lr", "score_mean", "score_std", "selection"} <= set(row)
    named = {"budget": "budget_deviation"}
    terms = {name: row[named.get(name, name)] for name in vars(weights)}
    assert row["loss"] == pytest.approx(sum(getattr(weights, name) * value for name, value in terms.items()), rel=1e-5)


def watch_terms(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` see, and alter, what every step hands to the losses of the scorer."""
    module = sys.modules["medtokenbudget.routing.trainable"]
    real = module.scorer_terms

    def watched(scores: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
        change(options)
        return dict(real(scores, **options))

    monkeypatch.setattr(module, "scorer_terms", watched)


def test_a_step_learns_from_as_many_patches_as_it_is_told(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = set()
    watch_terms(monkeypatch, lambda options: sizes.add(tuple(options["lesion"].shape[1:])))
    for patches in (7, 0):
        fit(drawn, quick("lesion-first", epochs=1, head_epochs=1, patches=patches))
    assert sizes == {(7,), (100,)}
    with pytest.raises(RequestError, match="whole images"):
        fit(drawn, quick("paper", patches=7))


def test_lesion_first_learns_where_the_lesion_is(drawn: Drawn) -> None:
    history = fit(drawn, quick("lesion-first", epochs=8, patience=20)).history
    rows = [row for row in history if row["stage"] == "selector"]
    best = max(row["selection"] for row in rows)
    assert best > 0.7, "share of the ceiling on the selection part; drawing patches at random gives about 0.45"
    assert rows[-1]["lesion"] < rows[0]["lesion"]


def test_without_the_lesion_loss_masks_change_nothing(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    config = quick("paper", epochs=1, losses=LossWeights(lesion=0.0))
    plain = fit(drawn, config).state_dict()
    watch_terms(monkeypatch, lambda options: options.update(lesion=~options["lesion"]))
    inverted = fit(drawn, config).state_dict()
    assert all(torch.equal(plain[name], inverted[name]) for name in plain)


def test_a_loss_that_is_not_finite_stops_with_the_batch_named(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trainer.total_loss
    monkeypatch.setattr(trainer, "total_loss", lambda *arguments: real(*arguments) * float("nan"))
    with pytest.raises(WorkError, match=r"not finite in epoch 0 \(images SYN_.*Lower `lr`"):
        fit(drawn, quick("paper"))


def test_lesion_first_without_masks_says_what_to_do(drawn: Drawn, tmp_path: Path) -> None:
    manifest = drawn.manifest.with_columns(mask=[None] * len(drawn.manifest))
    path = manifest.write(tmp_path / "m.parquet")
    with pytest.raises(RequestError, match=r'no training image has one.*`preset="paper"` with `losses.lesion=0`'):
        fit(Drawn(path, drawn.store_path), quick("lesion-first"))


def test_bf16_autocast_trains_and_differs_from_fp32(drawn: Drawn) -> None:
    plain, half = (fit(drawn, quick("paper", epochs=1, precision=precision)).state_dict() for precision in ("fp32", "bf16"))
    name = "selector.scorer.output.weight"
    assert not torch.equal(plain[name], half[name])
    assert torch.allclose(plain[name], half[name], atol=0.05)


def test_a_head_learns_what_the_pooled_tokens_show() -> None:
    noise, config = np.random.default_rng(0), quick("paper", head_epochs=15)
    label = noise.integers(0, 3, 300)
    pooled = (np.eye(3)[label][:, None] * 3 + noise.normal(size=(300, 2, 3)) * 0.3).astype(np.float32)
    head = new_head("mlp", 3, 3, config)
    history = fit_head(head, batches_of_pooled(pooled, label, config, 3), label, config)
    assert history[-1]["classification"] < history[0]["classification"]
    assert (head(torch.from_numpy(pooled[:, 1])).argmax(-1).numpy() == label).mean() > 0.95
    with pytest.raises(RequestError, match="2 training images have no label"):
        fit_head(head, batches_of_pooled(pooled, label, config, 3), np.array([0, -1, 1, -1]), config)


# Schedules


@pytest.mark.parametrize(("images", "expected"), [(10_000, 8), (3200, 10), (640, 40), (64, 40), (10, 40)])
def test_small_data_sets_get_more_epochs_up_to_five_times_as_many(images: int, expected: int) -> None:
    # 640 images are 10 steps of 64: 500 steps would be 50 epochs, five times 8 is 40.
    assert epochs_for(images, 64, 8, 500) == expected
    assert epochs_for(images, 64, 50, 0) == 50


def test_the_rate_falls_to_zero_and_the_budget_of_the_paper_from_a_half_to_a_quarter_over_20_epochs() -> None:
    assert [cosine_lr(1e-3, epoch, 50) for epoch in (0, 25, 50)] == pytest.approx([1e-3, 5e-4, 0.0], abs=1e-12)
    budgets = [curriculum_budget(CurriculumConfig(), epoch) for epoch in range(50)]
    assert (budgets[0], budgets[5], budgets[10]) == (0.5, pytest.approx(0.25 + 0.125 * (1 + 2**-0.5)), 0.375)
    assert budgets[20:] == [0.25] * 30
    assert all(a > b for a, b in pairwise(budgets[:21]))
    assert [curriculum_budget(CurriculumConfig(start=1.0, end=0.1, epochs=2), epoch) for epoch in range(3)] == [1.0, 0.55, 0.1]
    assert {curriculum_budget(CurriculumConfig(kind="fixed", start=0.3), epoch) for epoch in range(50)} == {0.3}
    for change, error in (({"start": 1.5}, BudgetError), ({"kind": "linear"}, UnknownNameError), ({"epochs": 0}, RequestError)):
        with pytest.raises(error):
            CurriculumConfig(**change)
