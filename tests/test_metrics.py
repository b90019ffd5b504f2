"""Metrics against plain loops, scikit-learn, values worked by hand and the paper's figures; the examples in their docstrings."""

from __future__ import annotations

import doctest
import importlib
import math
import warnings
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medtokenbudget import metrics
from medtokenbudget.errors import CountError, RequestError, ShapeError
from medtokenbudget.metrics import LesionRetention, Retention, lesion_retention, retention_of_counts
from medtokenbudget.routing import create_selector
from medtokenbudget.runs import paper
from medtokenbudget.tokens import TokenBatch

MEASURED = ("pooled", "mean", "ceiling", "of_ceiling", "precision", "enrichment")
SEEDS = st.integers(0, 2**31)
examples = settings(max_examples=60, deadline=None)
Masks = tuple[np.ndarray, np.ndarray, np.ndarray]


def draw(seed: int, images: int = 0, n: int = 0) -> Masks:
    """Kept patches of different K, lesions of which some are empty, and which images have a mask."""
    rng = np.random.default_rng(seed)
    # Never as many images as patches of 7 or more: such a square is the grid of one image.
    images, n = images or int(rng.integers(1, 9)), n or int(rng.choice([1, 2, 3, 4, 5, 6, *range(9, 30)]))
    kept = rng.random((images, n)) < rng.random((images, 1))
    lesion = rng.random((images, n)) < rng.choice([0.0, 0.2, 0.7], (images, 1))
    return kept, lesion, rng.random(images) < 0.8


def plain_loop(kept: np.ndarray, lesion: np.ndarray, has_mask: np.ndarray) -> dict[str, float]:
    """The definitions, one image and one patch after the other."""
    hits = sizes = best = keeps = patches = empty = 0
    shares = []
    for k, m, known in zip(kept.tolist(), lesion.tolist(), has_mask.tolist()):
        if not known:
            continue
        size = sum(1 for x in m if x)
        if size == 0:
            empty += 1
            continue
        both = sum(1 for x, y in zip(k, m) if x and y)
        hits, sizes, best = hits + both, sizes + size, best + min(sum(k), size)
        keeps, patches = keeps + sum(k), patches + len(k)
        shares.append(both / size)
    over = lambda a, b: a / b if b else math.nan  # noqa: E731
    return {
        "pooled": over(hits, sizes),
        "mean": over(sum(shares), len(shares)),
        "ceiling": over(best, sizes),
        "of_ceiling": over(hits, best),
        "precision": over(hits, keeps),
        "enrichment": over(over(hits, keeps), over(sizes, patches)),
        "n": len(shares),
        "empty": empty,
    }


def same(found: Retention, expected: Retention, tolerance: float = 1e-12) -> None:
    assert asdict(found) == pytest.approx(asdict(expected), rel=tolerance, nan_ok=True)


@examples
@given(SEEDS)
def test_retention_of_masks_equals_a_plain_loop(seed: int) -> None:
    kept, lesion, has_mask = draw(seed)
    assert asdict(lesion_retention(kept, lesion, has_mask)) == pytest.approx(plain_loop(kept, lesion, has_mask), nan_ok=True)


@examples
@given(SEEDS)
def test_torch_numpy_lists_and_integers_give_the_same_retention(seed: int) -> None:
    masks = draw(seed)
    expected = lesion_retention(*masks)
    forms = [
        [torch.from_numpy(mask) for mask in masks],
        [torch.from_numpy(mask).long() for mask in masks],
        [torch.from_numpy(mask).to(torch.uint8) for mask in masks],
        [mask.astype(np.uint16) for mask in masks],
        [np.asfortranarray(mask) for mask in masks],
        [mask.tolist() for mask in masks],
        [masks[0], torch.from_numpy(masks[1]), masks[2].tolist()],
    ]
    for form in forms:
        same(lesion_retention(*form), expected, tolerance=0)


@examples
@given(SEEDS)
def test_masks_and_their_counts_give_the_same_retention_to_the_last_digit(seed: int) -> None:
    kept, lesion, _ = draw(seed)
    counts = (kept & lesion).sum(1), lesion.sum(1), kept.sum(1), kept.shape[1]
    same(retention_of_counts(*counts), lesion_retention(kept, lesion), tolerance=0)


@examples
@given(SEEDS)
def test_no_selection_passes_the_ceiling(seed: int) -> None:
    kept, lesion, has_mask = draw(seed)
    found = lesion_retention(kept, lesion, has_mask)
    if found.n:
        assert 0 <= found.pooled <= found.ceiling <= 1
        assert 0 <= found.mean <= 1
    if not math.isnan(found.of_ceiling):
        assert 0 <= found.of_ceiling <= 1


@examples
@given(SEEDS, st.integers(1, 16))
def test_the_oracle_reaches_the_ceiling(seed: int, k: int) -> None:
    _, lesion, _ = draw(seed, images=6, n=16)
    lesion[0, :3] = True
    tensor = torch.from_numpy(lesion)
    batch = TokenBatch(torch.zeros(6, 16, 4), (4, 4), lesion=tensor, has_mask=torch.ones(6, dtype=torch.bool))
    kept = create_selector("oracle").select(batch, k).kept
    assert kept is not None
    found = lesion_retention(kept, tensor)
    assert found.pooled == found.ceiling
    assert found.of_ceiling == 1.0


def test_keeping_everything_retains_everything_and_enriches_nothing() -> None:
    _, lesion, _ = draw(3, images=5, n=20)
    found = lesion_retention(np.ones_like(lesion), lesion)
    assert (found.pooled, found.mean, found.ceiling, found.of_ceiling) == (1.0, 1.0, 1.0, 1.0)
    assert found.enrichment == pytest.approx(1.0)


def test_retention_of_images_with_different_k_by_hand() -> None:
    # Image 1 keeps 3 of 6 patches, 1 of its 2 lesion patches; image 2 keeps 1, of its 4 lesion patches one.
    kept = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]])
    lesion = np.array([[1, 0, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    found = lesion_retention(kept, lesion)
    assert found.pooled == pytest.approx(2 / 6)
    assert found.mean == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert found.ceiling == pytest.approx((2 + 1) / 6)
    assert found.of_ceiling == pytest.approx(2 / 3)
    assert found.precision == pytest.approx(2 / 4)
    assert found.enrichment == pytest.approx((2 / 4) / (6 / 12))
    assert (found.n, found.empty) == (2, 0)


def test_retention_of_counts_by_hand() -> None:
    # Lesions of 10, 100 and 0 patches, 50 kept of 256; 8, 40 and 0 lesion patches kept. The third is left out and counted.
    found = retention_of_counts([8, 40, 0], [10, 100, 0], 50, 256)
    assert found.pooled == pytest.approx(48 / 110)
    assert found.mean == pytest.approx((0.8 + 0.4) / 2)
    assert found.ceiling == pytest.approx(60 / 110)
    assert found.of_ceiling == pytest.approx(48 / 60)
    assert found.precision == pytest.approx(48 / 100)
    assert found.enrichment == pytest.approx((48 / 100) / (110 / 512))
    assert (found.n, found.empty) == (2, 1)


def test_an_image_without_a_mask_is_neither_measured_nor_empty() -> None:
    lesion = np.array([[1, 0], [0, 0], [0, 0]], bool)
    kept = np.array([[1, 0], [1, 0], [1, 0]], bool)
    found = lesion_retention(kept, lesion, has_mask=[True, True, False])
    assert (found.n, found.empty) == (1, 1)
    found = retention_of_counts([1, 0, math.nan], [1, 0, math.nan], 1, 2)
    assert (found.n, found.empty, found.pooled) == (1, 1, 1.0)


def test_an_image_that_keeps_nothing_counts_as_nothing_kept() -> None:
    found = lesion_retention([[0, 0, 0]], [[1, 1, 0]])
    assert (found.pooled, found.mean, found.ceiling, found.n) == (0.0, 0.0, 0.0, 1)
    assert np.isnan([found.of_ceiling, found.precision, found.enrichment]).all()


def test_without_kept_patches_only_the_ceiling_is_measured() -> None:
    found = retention_of_counts(None, [10, 100], 50, 256)
    assert found.ceiling == pytest.approx(60 / 110)
    assert np.isnan([found.pooled, found.mean, found.of_ceiling, found.precision, found.enrichment]).all()


@pytest.mark.parametrize(
    "found", [retention_of_counts([], [], 50, 256), lesion_retention(np.zeros((2, 4), bool), np.zeros((2, 4), bool))]
)
def test_nothing_measured_is_not_zero(found: Retention) -> None:
    assert np.isnan([getattr(found, name) for name in MEASURED]).all()
    assert found.n == 0
    assert np.isnan(metrics.accuracy([], []))
    assert np.isnan(metrics.macro_f1([], [], 3))
    assert np.isnan(metrics.balanced_accuracy([], [], 3))
    assert np.isnan(metrics.share_of_ceiling(np.zeros((0, 2)), [], [1, 2])).all()


def test_scores_counts_and_soft_masks_are_rejected_with_advice() -> None:
    mask = np.zeros((2, 4), bool)
    with pytest.raises(RequestError, match=r"`kept` must be boolean or 0/1 integers, got float64\. Apply a threshold"):
        lesion_retention(mask.astype(float), mask)
    with pytest.raises(RequestError, match=r"`lesion` must be boolean or 0/1 integers, got torch.float16"):
        lesion_retention(mask, torch.zeros(2, 4).half())
    with pytest.raises(RequestError, match=r"integers other than 0 and 1 \(largest 255\)"):
        lesion_retention(mask, mask.astype(np.uint8) + 255)
    with pytest.raises(RequestError, match=r"`has_mask` must be boolean"):
        lesion_retention(mask, mask, ["yes", "no"])
    with pytest.raises(RequestError, match="mergers such as tome"):
        lesion_retention(None, mask)  # type: ignore[arg-type]


@pytest.mark.parametrize("grid", [(16, 16), (7, 7), (10, 14), (37, 37)])
def test_grids_of_images_are_measured_patch_by_patch_and_one_without_its_batch_is_refused(grid: tuple[int, int]) -> None:
    h, w = grid
    kept, lesion, _ = draw(6, images=2, n=h * w)
    expected = plain_loop(kept, lesion, np.ones(2, bool))
    assert asdict(lesion_retention(kept.reshape(2, h, w), lesion.reshape(2, h, w))) == pytest.approx(expected, nan_ok=True)
    one = plain_loop(kept[:1], lesion[:1], np.ones(1, bool))
    for shape in ((h * w,), (1, h, w)):
        assert asdict(lesion_retention(kept[0].reshape(shape), lesion[0].reshape(shape))) == pytest.approx(one, nan_ok=True)
    if h == w:
        metric = LesionRetention()
        for measure in (lesion_retention, metric.update, metric):
            with pytest.raises(ShapeError, match=r"looks like the grid of one image.*Pass one image as \[N\] or \[1, h, w\]"):
                measure(kept[0].reshape(grid), lesion[0].reshape(grid))


def test_as_many_images_as_patches_of_a_usual_grid_are_a_batch() -> None:
    kept, lesion, has_mask = draw(4, images=49, n=49)
    assert asdict(lesion_retention(kept, lesion, has_mask)) == pytest.approx(plain_loop(kept, lesion, has_mask))


def test_rankings_and_groups_of_a_grid_are_not_read_as_several_images() -> None:
    order, lesion = np.random.default_rng(0).permutation(256).reshape(16, 16), np.zeros((16, 16), bool)
    with pytest.raises(ShapeError, match=r"patches 0 to 15 .*Flatten grids"):
        metrics.kept_lesion_counts(order, lesion, [4])
    for measure in (metrics.group_purity, metrics.lesion_dominated):
        with pytest.raises(ShapeError, match=r"names group 85, but there are only 16 patches.*Flatten grids"):
            measure(torch.from_numpy(order) // 3, torch.from_numpy(lesion))
    with pytest.raises(ShapeError, match=r"`label` must be \[n\] and `probabilities` \[n, C\]"):
        metrics.macro_auroc([0, 1, 1], [0.2, 0.9, 0.8])


def test_wrong_shapes_are_rejected_with_both_shapes() -> None:
    mask = np.zeros((2, 4), bool)
    with pytest.raises(ShapeError, match=r"same shape \[B, N\], got \[2, 4\] and \[2, 3\]"):
        lesion_retention(mask, mask[:, :3])
    with pytest.raises(ShapeError, match=r"Pass one image as \[N\] or \[1, h, w\]"):
        lesion_retention(mask.reshape(2, 2, 2, 1), mask.reshape(2, 2, 2, 1))
    with pytest.raises(ShapeError, match=r"`has_mask` must be \[B\] = \[2\], got \[3\]"):
        lesion_retention(mask, mask, [True, True, True])
    with pytest.raises(ShapeError, match="ragged"):
        lesion_retention([[True], [True, False]], mask)
    with pytest.raises(ShapeError, match=r"must be \[n\]"):
        retention_of_counts([1, 2], [1, 2, 3], 5, 16)
    with pytest.raises(ShapeError, match=r"must be \[n\]"):
        retention_of_counts([1, 2], [1, 2], [5, 5, 5], 16)


def test_counts_that_no_selection_can_have_are_rejected() -> None:
    with pytest.raises(RequestError, match=r"Image 1 kept 6 lesion patches, but at most min\(k, lesion\) = 5"):
        retention_of_counts([1, 6], [3, 9], 5, 16)
    with pytest.raises(RequestError, match="same order"):
        retention_of_counts([4, 1], [3, 9], 5, 16)


@examples
@given(SEEDS, st.integers(1, 4))
def test_accumulating_equals_all_at_once(seed: int, size: int) -> None:
    masks = draw(seed)
    metric = LesionRetention()
    for start in range(0, len(masks[0]), size):
        batch = [mask[start : start + size] for mask in masks]
        same(metric(*batch), lesion_retention(*batch), tolerance=0)
    found, expected = metric.compute(), lesion_retention(*masks)
    same(found, expected)
    for name in ("pooled", "ceiling", "of_ceiling", "precision", "enrichment"):
        np.testing.assert_equal(getattr(found, name), getattr(expected, name))


def test_batches_of_different_grids_accumulate() -> None:
    metric = LesionRetention()
    metric.update([[1, 0, 0]], [[1, 1, 0]])
    metric.update([[1, 1, 0, 0, 0]], [[1, 1, 1, 1, 0]])
    same(metric.compute(), retention_of_counts([1, 2], [2, 4], [1, 2], [3, 5]))


@examples
@given(SEEDS, SEEDS)
def test_merged_states_equal_all_at_once(first: int, second: int) -> None:
    parts = [draw(seed, n=6) for seed in (first, second)]
    one, two = LesionRetention(), LesionRetention()
    one.update(*parts[0])
    two.update(*parts[1])
    by_state = LesionRetention()
    by_state.merge_state(one.metric_state)
    by_state.merge_state(two)
    one.merge_state(two)
    same(one.compute(), lesion_retention(*(np.concatenate(pair) for pair in zip(*parts))))
    same(by_state.compute(), one.compute(), tolerance=0)


def test_merging_something_else_is_rejected() -> None:
    for other in ({"n": 1.0}, 3):
        with pytest.raises(RequestError, match="merge_state"):
            LesionRetention().merge_state(other)  # type: ignore[arg-type]


def test_a_reset_metric_is_as_new_and_a_failed_update_changes_nothing() -> None:
    metric = LesionRetention()
    metric.update([[1, 0]], [[1, 1]])
    state = metric.metric_state
    with pytest.raises(ShapeError):
        metric.update([[1, 0]], [[1, 1, 1]])
    assert metric.metric_state == state
    assert repr(metric) == "LesionRetention(pooled=0.5000, of_ceiling=1.0000, n=1, empty=0)"
    metric.reset()
    assert metric.metric_state == LesionRetention().metric_state
    assert metric.compute().n == 0
    assert math.isnan(metric.compute().pooled)


def test_the_metric_holds_numbers_only_however_much_it_has_seen() -> None:
    metric = LesionRetention()
    for seed in range(50):
        metric.update(*draw(seed))
    assert all(isinstance(value, float) for value in metric.metric_state.values())
    assert vars(metric).keys() == {"_sums"}


def test_precision_and_enrichment_of_the_paper_follow_from_its_retention() -> None:
    # Its mask-free table has all three; 81.1 of 256 patches are lesion on average over the 155 masks.
    lesion = 155 * [paper.PREVALENCE["Mean"][0]]
    for budget, k in ((0.1, 25), (0.3, 76), (0.5, 128)):
        row = dict(zip(paper.MASK_FREE_METRICS, paper.MASK_FREE_CONTROL[budget]))
        kept = np.array(lesion) * row["retention"][0] / 100
        found = retention_of_counts(kept, lesion, k, paper.GRID_PATCHES)
        assert 100 * found.precision == pytest.approx(row["precision"][0], abs=0.3)
        assert found.enrichment == pytest.approx(row["enrichment"][0], abs=0.015)


def test_lesion_sizes_with_the_quantiles_of_the_paper_have_about_its_ceiling() -> None:
    names = ("Minimum", "25th percentile", "Median", "75th percentile", "Maximum")
    lesion = np.interp(np.linspace(0, 1, 155), np.linspace(0, 1, 5), [paper.PREVALENCE[name][0] for name in names]).round()
    for budget, k in ((0.1, 25), (0.2, 51), (0.3, 76), (0.5, 128)):
        assert 100 * retention_of_counts(None, lesion, k, 256).ceiling == pytest.approx(paper.CEILING[budget], abs=4)


@examples
@given(SEEDS)
def test_share_of_ceiling_at_several_budgets_equals_one_budget_at_a_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, k = 24, np.array([1, 5, 12, 24])
    lesion = rng.random((7, n)) < 0.4
    order = np.argsort(rng.random((7, n)), axis=1)
    counts = metrics.kept_lesion_counts(order, lesion, k)
    assert counts.shape == (7, 4)
    shares = metrics.share_of_ceiling(counts, lesion.sum(1), k)
    for column, first in enumerate(k):
        kept = np.zeros_like(lesion)
        np.put_along_axis(kept, order[:, :first], True, axis=1)
        found = lesion_retention(kept, lesion)
        assert shares[column] == found.of_ceiling
        np.testing.assert_array_equal(counts[:, column], (kept & lesion).sum(1))
        assert metrics.share_of_ceiling(counts[:, column], lesion.sum(1), first) == found.of_ceiling


def test_share_of_ceiling_leaves_out_images_without_a_mask() -> None:
    assert metrics.share_of_ceiling([[2.0], [math.nan]], [4, math.nan], [4]).tolist() == [0.5]
    with pytest.raises(ShapeError, match=r"\[n, T\]"):
        metrics.share_of_ceiling([[1], [2]], [1, 2, 3], 4)


def test_counting_along_a_ranking_is_the_same_in_torch_and_rejects_what_it_cannot_count() -> None:
    order, lesion = np.array([[2, 0, 1], [0, 1, 2]]), np.array([[True, False, True], [False, False, True]])
    expected = [[1, 2, 2], [0, 0, 1]]
    assert metrics.kept_lesion_counts(order, lesion, [1, 2, 3]).tolist() == expected
    assert metrics.kept_lesion_counts(torch.from_numpy(order), torch.from_numpy(lesion), [1, 2, 3]).tolist() == expected
    assert metrics.kept_lesion_counts(order.astype(np.int16), lesion, [1, 2, 3]).tolist() == expected
    for k in ([0, 1], [4]):
        with pytest.raises(CountError, match="between 1 and 3"):
            metrics.kept_lesion_counts(order, lesion, k)
    with pytest.raises(ShapeError):
        metrics.kept_lesion_counts(order[:1], lesion, [1])


def test_the_examples_in_the_docstrings_hold() -> None:
    names = ("calibration", "classification", "merging", "ratios", "retention")
    found = [doctest.testmod(importlib.import_module(f"medtokenbudget.metrics.{name}")) for name in names]
    assert sum(module.attempted for module in found) >= 15
    assert sum(module.failed for module in found) == 0


def test_read_only_and_broadcast_arrays_are_measured_without_a_warning() -> None:
    lesion = np.array([[True, False, True]])
    lesion.flags.writeable = False
    kept, order = np.broadcast_to(np.array([True, True, False]), (1, 3)), np.broadcast_to(np.arange(3, dtype=np.int16), (1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lesion_retention(kept, lesion).pooled == 0.5
        assert metrics.kept_lesion_counts(order, lesion, [1, 3]).tolist() == [[1, 2]]
