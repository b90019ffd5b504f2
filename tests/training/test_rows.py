"""Rows of a store for training: which images are for what, class balance, order, seeded noise, and that manifest and store fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from medtokenbudget.backbone import extract
from medtokenbudget.config import ExtractConfig
from medtokenbudget.data import Drawings, Manifest, synthetic_manifest
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.training.rows import TrainingRows, class_weights, draw_views, epoch_order, generator, held_out
from tests.drawn import Drawn, quick
from tests.small_model import small_backbone


def rows_of(drawn: Drawn, *words: str, **changes: object) -> TrainingRows:
    return TrainingRows.of(drawn.manifest, drawn.store, quick(*words, **changes))


def test_the_strict_protocol_selects_on_images_that_are_neither_trained_nor_reported_on(drawn: Drawn) -> None:
    rows = rows_of(drawn, "lesion-first")
    ids = np.array(drawn.store.ids)
    trained, selected, reported = (
        set(ids[part]) for part in (np.concatenate([rows.train, rows.views]), rows.select, rows.validation)
    )
    assert trained
    assert selected
    assert reported
    assert not trained & selected
    assert not (trained | selected) & reported


def test_every_class_gives_its_share_in_whole_groups_whatever_the_order_of_the_rows() -> None:
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    assert np.bincount(labels[held_out(labels, [str(row) for row in range(160)], 0.2, seed=3)]).tolist() == [20, 10, 2]
    rng = np.random.default_rng(0)
    labels, groups = rng.integers(0, 3, 200), np.array([f"g{g}" for g in rng.integers(0, 80, 200)])
    order = rng.permutation(200)
    chosen = held_out(labels, list(groups), 0.3, seed=4)
    assert not {*groups[chosen]} & {*groups[~chosen]}
    np.testing.assert_array_equal(chosen[order], held_out(labels[order], list(groups[order]), 0.3, seed=4))


@pytest.mark.parametrize("preset", ["paper", "lesion-first"])
@pytest.mark.parametrize("protocol", ["paper", "strict"])
def test_no_head_ever_learns_from_a_validation_image(drawn: Drawn, preset: str, protocol: str) -> None:
    rows = rows_of(drawn, preset, protocol=protocol, selection_metric="accuracy")
    assert set(np.array(drawn.store.ids)[rows.head]) == set(drawn.manifest.part("train").ids)


def test_the_paper_protocol_selects_on_validation_and_trains_on_all_of_training(drawn: Drawn) -> None:
    rows = rows_of(drawn, "paper", protocol="paper")
    assert rows.select.tolist() == rows.validation.tolist()
    assert len(rows.train) == len(drawn.manifest.part("train"))
    with pytest.raises(RequestError, match="evaluation only"):
        rows_of(drawn, "paper", protocol="paper", selection_metric="retention")


def test_views_of_validation_images_are_never_trained_on(drawn: Drawn) -> None:
    trained = set(np.array(drawn.store.ids)[rows_of(drawn, "lesion-first").views])
    assert trained
    assert trained <= set(drawn.manifest.part("train").ids)
    assert len(rows_of(drawn, "paper").views) == 0


def test_only_lesion_first_leaves_out_images_without_a_mask(drawn: Drawn) -> None:
    masks = drawn.manifest.rows["mask"].where(np.arange(len(drawn.manifest)) % 2 == 0, None)
    manifest = drawn.manifest.with_columns(mask=list(masks))
    store = drawn.store.annotated(manifest)
    for preset, everything in (("paper", True), ("lesion-first", False)):
        rows = TrainingRows.of(manifest, store, quick(preset))
        assert store.has_mask.numpy()[rows.train].all() is np.bool_(not everything)
        assert not store.has_mask.numpy()[rows.head].all(), "heads learn from every image"


def test_an_epoch_draws_one_view_of_each_image_that_has_any() -> None:
    names = np.array(["a", "b", "b", "a", "b"])
    drawn = [draw_views(names, generator(0, "views", epoch)) for epoch in range(40)]
    assert {int(place) for place, _ in drawn} == {0, 3}
    assert {int(place) for _, place in drawn} == {1, 2, 4}
    assert len(draw_views(names[:0], generator(0, "views", 0))) == 0


def test_views_may_be_one_crop_and_retention_is_picked_on_views_too(tmp_path: Path) -> None:
    manifest = Manifest.read(synthetic_manifest(tmp_path / "data", Drawings(24, seed=3, size=96)))
    options = ExtractConfig(views="off-center", crops=3, threads=1)
    store = extract(manifest, tmp_path / "tokens", small_backbone(tmp_path), options)
    every = {"off-center", "off-center-2", "off-center-3"}
    for views, trained in (("none", set()), ("off-center", {"off-center"}), ("all", every)):
        rows = TrainingRows.of(manifest, store, quick("lesion-first", views=views))
        kinds = [set(np.array(store.views)[part]) for part in (rows.views, rows.select, rows.off_center)]
        assert kinds == [trained, {"identity", *trained}, {"off-center"}]
    by_accuracy = TrainingRows.of(manifest, store, quick("lesion-first", selection_metric="accuracy"))
    assert set(np.array(store.views)[by_accuracy.select]) == {"identity"}


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
    keys = [(1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1)]
    assert len({tuple(torch.rand(3, generator=generator(*key)).tolist()) for key in keys}) == 4


def test_a_store_of_other_labels_classes_or_masks_is_refused(drawn: Drawn) -> None:
    manifest, store, config = drawn.manifest, drawn.store, quick("paper")
    TrainingRows.of(manifest.take(range(0, len(manifest), 2)), store, config)  # a store may hold more
    labels = list(manifest.rows["label"])
    labels[0] = next(name for name in manifest.classes if name != labels[0])
    for other, message in (
        (replace(manifest, classes=manifest.classes[::-1]), r"classes: expected .*, found"),
        (manifest.with_columns(label=labels), rf"The labels of 1 images differ .*{manifest.ids[0]}"),
        (manifest.with_columns(mask=[None] * len(manifest)), rf"The masks of {len(manifest)} images differ"),
        (manifest.with_columns(image_id=[f"other-{i}" for i in range(len(manifest))]), "has none of the images of this manifest"),
    ):
        with pytest.raises((MismatchError, RequestError), match=message):
            TrainingRows.of(other, store, config)
