"""Rows of a store for training: class balance, order, seeded noise, and that manifest and store fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.training.rows import class_weights, epoch_order, generator, make_parts
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


def test_generators_depend_on_every_argument() -> None:
    draws = {
        tuple(torch.rand(3, generator=generator(*key)).tolist()) for key in [(1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1)]
    }
    assert len(draws) == 4


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
