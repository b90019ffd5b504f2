"""The small parts of training: class balance, pooling, purity, the learning rate, early stopping, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.routing import create_selector
from medtokenbudget.tensor_files import load_tensors, save_tensors
from medtokenbudget.training import checkpoints as ck
from medtokenbudget.training.parts import make_parts
from medtokenbudget.training.pooled import PooledHead, class_weights, epoch_order, probabilities
from medtokenbudget.training.pooling import pool_and_judge, pool_to_file
from medtokenbudget.training.schedule import EarlyStopping, cosine_lr, epochs_for
from medtokenbudget.training.seeds import generator
from tests.drawn import Drawn, quick


def test_class_weights_are_inverse_to_frequency_and_average_to_one_over_the_images() -> None:
    label = np.array([0, 0, 0, 1, 3, 3])
    weights = class_weights(label, 4)
    assert weights.tolist() == pytest.approx([6 / (3 * 3), 6 / (3 * 1), 0.0, 6 / (3 * 2)])
    assert weights[torch.from_numpy(label)].mean() == pytest.approx(1.0)


def test_the_sampler_draws_classes_equally_often() -> None:
    label = np.array([0] * 900 + [1] * 100)
    drawn_labels = label[epoch_order(label, quick("paper", class_balance="sampler"), 0, 2).numpy()]
    assert abs((drawn_labels == 1).mean() - 0.5) < 0.05


def test_an_epoch_sees_every_image_once_in_an_order_of_its_own() -> None:
    label = np.zeros(50, dtype=np.int64)
    first, second = (epoch_order(label, quick("paper"), epoch, 1).tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_the_learning_rate_falls_as_a_cosine_to_zero() -> None:
    assert cosine_lr(1e-3, 0, 50) == pytest.approx(1e-3)
    assert cosine_lr(1e-3, 25, 50) == pytest.approx(5e-4)
    assert cosine_lr(1e-3, 50, 50) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("images", "expected"), [(10_000, 8), (640, 40), (64, 40), (10, 40)])
def test_small_data_sets_get_more_epochs_up_to_five_times_as_many(images: int, expected: int) -> None:
    # 640 images are 10 steps of 64: 500 steps would be 50 epochs, five times 8 is 40.
    assert epochs_for(images, 64, 8, 500) == expected
    assert epochs_for(3200, 64, 8, 500) == 10
    assert epochs_for(images, 64, 50, 0) == 50


def test_early_stopping_counts_epochs_and_ignores_small_gains() -> None:
    rule = EarlyStopping(patience=4, min_improvement=0.002)
    assert rule.improved(0.5, 1)
    assert not rule.improved(0.5015, 3)
    assert not rule.stop(3)
    assert rule.stop(5)
    assert rule.improved(0.51, 5)
    assert (rule.best, rule.best_epoch) == (0.51, 5)


def test_generators_depend_on_every_argument() -> None:
    draws = {
        tuple(torch.rand(3, generator=generator(*key)).tolist()) for key in [(1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1)]
    }
    assert len(draws) == 4


@pytest.mark.parametrize("name", ["center", "darkness", "local-contrast", "tome", "no-pruning"])
def test_pooling_once_equals_selecting_at_each_budget(drawn: Drawn, tmp_path: Path, name: str) -> None:
    store, budgets = drawn.store, (0.2, 0.5, 1.0)
    rows = np.arange(10)
    selector = create_selector(name)
    pooled = pool_to_file(tmp_path / "pooled.npy", store, rows, selector, budgets)
    again, evidence = pool_and_judge(store, rows, selector, budgets, seed=0)
    batch = store.read(rows)
    for index, budget in enumerate(budgets):
        selection = selector.select_budget(batch, budget)
        assert np.allclose(pooled[:, index], selection.pooled().numpy(), atol=1e-5)
        assert np.allclose(again[:, index], selection.pooled().numpy(), atol=1e-5)
        assert evidence.k[index] == selection.k
        if selection.kept is not None:
            kept = (selection.kept & batch.lesion).sum(1).numpy()
            assert evidence.kept_lesion[:, index].tolist() == kept.tolist()


def test_a_head_learns_what_the_pooled_tokens_show(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    label = noise.integers(0, 3, 300)
    pooled = (np.eye(3)[label][:, None] * 3 + noise.normal(size=(300, 2, 3)) * 0.3).astype(np.float32)
    head = PooledHead("mlp", 3, 3, quick("paper", head_epochs=15))
    history = head.train_on_file(pooled, label)
    assert history[-1]["classification"] < history[0]["classification"]
    assert (probabilities(head.head, pooled)[:, 1].argmax(-1) == label).mean() > 0.95


def test_a_store_of_other_labels_classes_or_masks_is_refused(drawn: Drawn) -> None:
    manifest, store, config = drawn.manifest, drawn.store, quick("paper")
    make_parts(manifest, store, config)
    make_parts(manifest.take(range(0, len(manifest), 2)), store, config)  # a store may hold more
    with pytest.raises(MismatchError, match=r"classes: expected .*, found"):
        make_parts(replace(manifest, classes=manifest.classes[::-1]), store, config)
    labels = list(manifest.rows["label"])
    labels[0] = next(name for name in manifest.classes if name != labels[0])
    with pytest.raises(MismatchError, match=rf"The labels of 1 images differ .*{manifest.ids[0]}"):
        make_parts(manifest.with_columns(label=labels), store, config)
    with pytest.raises(MismatchError, match=rf"The masks of {len(manifest)} images differ"):
        make_parts(manifest.with_columns(mask=[None] * len(manifest)), store, config)
    with pytest.raises(RequestError, match="has none of the images of this manifest"):
        make_parts(manifest.with_columns(image_id=[f"other-{i}" for i in range(len(manifest))]), store, config)


def test_unlabelled_training_images_are_refused_with_their_number() -> None:
    with pytest.raises(RequestError, match="2 training images have no label"):
        PooledHead("mlp", 3, 3, quick("paper")).train_on_file(np.zeros((4, 1, 3), np.float32), np.array([0, -1, 1, -1]))


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
    ck.restore_optimizer(restored, ck.optimizer_tensors(optimizer))
    step(parameter, optimizer)
    step(other, restored)
    assert torch.equal(parameter, other)
