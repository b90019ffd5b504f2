"""Metrics against plain loops, scikit-learn, values worked by hand and the paper's figures; the examples in their docstrings."""

from __future__ import annotations

import copy
import doctest
import math
import pickle
import subprocess
import sys
import warnings
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn
from torchmetrics import MetricCollection

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
    # Fewer than 7 images: with 7 to 48 patches each, more could be the grid of one image.
    images, n = images or int(rng.integers(1, 7)), n or int(rng.choice([1, 2, 3, 4, 5, 6, *range(9, 30)]))
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
    found = lesion_retention(kept, tensor)
    assert found.pooled == found.ceiling
    assert found.of_ceiling == 1.0


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


def test_an_image_without_a_mask_is_neither_measured_nor_empty() -> None:
    lesion = np.array([[1, 0], [0, 0], [0, 0]], bool)
    kept = np.array([[1, 0], [1, 0], [1, 0]], bool)
    found = lesion_retention(kept, lesion, has_mask=[True, True, False])
    assert (found.n, found.empty) == (1, 1)
    found = retention_of_counts([1, 0, math.nan], [1, 0, math.nan], 1, 2)
    assert (found.n, found.empty, found.pooled) == (1, 1, 1.0)


def test_what_cannot_be_measured_is_not_zero() -> None:
    nothing_kept = lesion_retention([[0, 0, 0]], [[1, 1, 0]])
    assert (nothing_kept.pooled, nothing_kept.mean, nothing_kept.ceiling, nothing_kept.n) == (0.0, 0.0, 0.0, 1)
    assert np.isnan([nothing_kept.of_ceiling, nothing_kept.precision, nothing_kept.enrichment]).all()
    merged = retention_of_counts(None, [10, 100], 50, 256)
    assert merged.ceiling == pytest.approx(60 / 110)
    assert np.isnan([getattr(merged, name) for name in MEASURED if name != "ceiling"]).all()
    empty = np.zeros((2, 4), bool)
    for nothing in (retention_of_counts([], [], 50, 256), lesion_retention(empty, empty)):
        assert np.isnan([getattr(nothing, name) for name in MEASURED]).all()
        assert nothing.n == 0
    assert np.isnan([metrics.accuracy([], []), metrics.macro_f1([], [], 3), metrics.balanced_accuracy([], [], 3)]).all()
    assert np.isnan(metrics.share_of_ceiling(np.zeros((0, 2)), [], [1, 2])).all()


MASK = np.zeros((2, 4), bool)
REJECTED = {
    "scores": (lambda: lesion_retention(MASK.astype(float), MASK), r"`kept` must be boolean .*, got float64\. Apply a threshold"),
    "half precision": (lambda: lesion_retention(MASK, torch.zeros(2, 4).half()), "`lesion` must be boolean .* torch.float16"),
    "gray values": (lambda: lesion_retention(MASK, MASK.astype(np.uint8) + 255), r"other than 0 and 1 \(largest 255\)"),
    "words": (lambda: lesion_retention(MASK, MASK, ["yes", "no"]), "`has_mask` must be boolean"),
    "a merger": (lambda: lesion_retention(None, MASK), "mergers such as tome"),
    "two shapes": (lambda: lesion_retention(MASK, MASK[:, :3]), r"same shape .*, got \[2, 4\] and \[2, 3\]"),
    "four axes": (
        lambda: lesion_retention(MASK.reshape(2, 2, 2, 1), MASK.reshape(2, 2, 2, 1)),
        r"\[N\], \[B, N\], \[h, w\] or \[B, h, w\], got \[2, 2, 2, 1\]",
    ),
    "too many images": (lambda: lesion_retention(MASK, MASK, [True] * 3), r"`has_mask` must be \[B\] = \[2\], got \[3\]"),
    "ragged": (lambda: lesion_retention([[True], [True, False]], MASK), "ragged"),
    "counts of two lengths": (lambda: retention_of_counts([1, 2], [1, 2, 3], 5, 16), r"must be \[n\]"),
    "k of another length": (lambda: retention_of_counts([1, 2], [1, 2], [5, 5, 5], 16), r"must be \[n\]"),
    "more than k": (lambda: retention_of_counts([1, 6], [3, 9], 5, 16), r"Image 1 kept 6 .* min\(k, lesion\) = 5"),
    "more than the lesion": (lambda: retention_of_counts([4, 1], [3, 9], 5, 16), "same order"),
    "shares of other images": (lambda: metrics.share_of_ceiling([[1], [2]], [1, 2, 3], 4), r"\[n, T\]"),
    "labels of another length": (lambda: metrics.accuracy([0, 1], [0, 1, 1]), r"got \[2\] and \[3\]"),
    "no probabilities": (lambda: metrics.macro_auroc([0, 1, 1], [0.2, 0.9, 0.8]), r"`probabilities` \[n, C\]"),
    "groups of other images": (lambda: metrics.group_purity(torch.zeros(1, 4).long(), torch.ones(1, 3)), "must be"),
    "attention of tokens": (lambda: metrics.lesion_mass(torch.ones(1, 4), torch.zeros(1, 4)), "must be"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_what_cannot_be_a_mask_or_its_counts_is_rejected_with_advice(case: str) -> None:
    measure, message = REJECTED[case]
    with pytest.raises(RequestError, match=message):
        measure()


@pytest.mark.parametrize("grid", [(16, 16), (7, 7), (10, 14), (37, 37), (64, 64)])
def test_every_shape_of_the_same_patches_gives_the_same_retention_and_one_that_has_two_meanings_is_refused(
    grid: tuple[int, int],
) -> None:
    h, w = grid
    kept, lesion, _ = draw(6, images=2, n=h * w)
    batch, one = plain_loop(kept, lesion, np.ones(2, bool)), plain_loop(kept[:1], lesion[:1], np.ones(1, bool))
    for expected, images, shapes in (
        (batch, slice(None), [(2, h * w), (2, h, w)]),
        (one, 0, [(h * w,), (h, w), (1, h * w), (1, h, w)]),
    ):
        for shape in shapes:
            masks = kept[images].reshape(shape), lesion[images].reshape(shape)
            assert asdict(lesion_retention(*masks, grid=grid)) == pytest.approx(expected, nan_ok=True)
            if shape != grid:
                assert asdict(lesion_retention(*masks)) == pytest.approx(expected, nan_ok=True)
                continue
            with pytest.raises(ShapeError, match=rf"could be the grid \[h, w\] .*`grid=\({h}, {w}\)`"):
                lesion_retention(*masks)
    with pytest.raises(ShapeError, match=r"`kept` must be \[N\], .* of the `grid` \[3, 5\]"):
        lesion_retention(kept, lesion, grid=(3, 5))


def test_no_images_have_no_retention() -> None:
    none = np.zeros((0, 16), bool)
    for kept, lesion in ((none, none), (none.reshape(0, 4, 4), none.reshape(0, 4, 4))):
        found = lesion_retention(kept, lesion)
        assert (found.n, found.empty) == (0, 0)
        assert np.isnan(found.pooled)


def test_as_many_images_as_patches_are_a_batch_if_the_grid_says_so() -> None:
    kept, lesion, has_mask = draw(4, images=49, n=49)
    expected = plain_loop(kept, lesion, has_mask)
    assert asdict(lesion_retention(kept, lesion, has_mask, grid=(7, 7))) == pytest.approx(expected)
    kept, lesion, has_mask = draw(4, images=256, n=256)  # no usual grid
    assert asdict(lesion_retention(kept, lesion, has_mask)) == pytest.approx(plain_loop(kept, lesion, has_mask))


def test_rankings_and_groups_of_a_grid_are_not_read_as_several_images() -> None:
    order, lesion = np.random.default_rng(0).permutation(256).reshape(16, 16), np.zeros((16, 16), bool)
    with pytest.raises(ShapeError, match=r"patches 0 to 15 .*Flatten grids"):
        metrics.kept_lesion_counts(order, lesion, [4])
    for measure in (metrics.group_purity, metrics.lesion_dominated):
        with pytest.raises(ShapeError, match=r"names group 85, but there are only 16 patches.*Flatten grids"):
            measure(torch.from_numpy(order) // 3, torch.from_numpy(lesion))


def as_numbers(found: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in found.items()}


@examples
@given(SEEDS, st.integers(1, 4))
def test_the_torchmetrics_class_accumulates_what_the_function_measures_at_once(seed: int, size: int) -> None:
    masks = draw(seed)
    expected = asdict(lesion_retention(*masks))
    parts = [[mask[start : start + size] for mask in masks] for start in range(0, len(masks[0]), size)]
    metric, others = LesionRetention(), [LesionRetention() for _ in parts]
    for part, other in zip(parts, others):
        assert as_numbers(metric(*part)) == pytest.approx(asdict(lesion_retention(*part)), rel=1e-6, nan_ok=True)
        other.update(*part)
    assert as_numbers(metric.compute()) == pytest.approx(expected, rel=1e-6, nan_ok=True)
    joined = LesionRetention()
    for other in others:  # as its sums are joined over processes
        joined.merge_state(other)
    assert as_numbers(joined.compute()) == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_a_metric_is_reset_copied_pickled_and_collected_and_a_failed_update_changes_nothing() -> None:
    metric = LesionRetention(grid=(1, 3))
    metric.update([[1, 0, 0]], [[1, 1, 0]])
    with pytest.raises(ShapeError):
        metric.update([[1, 0]], [[1, 0]])
    metric.update([1, 1, 0], [1, 1, 1])
    expected = pytest.approx(asdict(retention_of_counts([1, 2], [2, 3], [1, 2], 3)), rel=1e-6)
    for same_metric in (metric, copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert as_numbers(same_metric.compute()) == expected
        assert type(same_metric) is metrics.LesionRetention
    collected = MetricCollection([LesionRetention()])([[1, 0]], [[1, 1]])
    assert collected["pooled"].item() == 0.5
    metric.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics warns that nothing was added
        assert metric.compute()["n"] == 0
        assert math.isnan(metric.compute()["pooled"])


def test_torchmetrics_is_loaded_when_its_class_is_asked_for_and_asked_for_where_it_is_missing() -> None:
    code = """
import sys
import medtokenbudget.metrics as metrics
print("torchmetrics" in sys.modules)
sys.modules["torchmetrics"] = None
try:
    metrics.LesionRetention
except metrics.RequestError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "False"
    assert "Run `pip install torchmetrics`, or use `lesion_retention`" in done.stdout


def test_precision_enrichment_and_ceiling_of_the_paper_follow_from_its_retention_and_lesion_sizes() -> None:
    # Its mask-free table has all three; 81.1 of 256 patches are lesion on average over the 155 masks.
    sizes = paper.prevalence_table().set_index("statistic")["patches"]
    numbers = paper.table("mask-free").pivot_table("paper", "budget", "metric")
    lesion = np.full(155, sizes["Mean"])
    for budget, k in ((0.1, 25), (0.3, 76), (0.5, 128)):
        row = numbers.loc[budget]
        measured = retention_of_counts(lesion * row["retention"] / 100, lesion, k, 256)
        assert 100 * measured.precision == pytest.approx(row["precision"], abs=0.3)
        assert measured.enrichment == pytest.approx(row["enrichment"], abs=0.015)
    names = ["Minimum", "25th percentile", "Median", "75th percentile", "Maximum"]
    drawn = np.interp(np.linspace(0, 1, 155), np.linspace(0, 1, 5), sizes[names]).round()
    for k, ceiling in ((25, 29.3), (51, 52.3), (76, 69.0), (128, 87.1)):  # measured on the masks
        assert 100 * retention_of_counts(None, drawn, k, 256).ceiling == pytest.approx(ceiling, abs=4)


@examples
@given(SEEDS)
def test_share_of_ceiling_at_several_budgets_equals_one_budget_at_a_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, k = 24, np.array([1, 5, 12, 24])
    lesion = rng.random((6, n)) < 0.4
    order = np.argsort(rng.random((6, n)), axis=1)
    counts = metrics.kept_lesion_counts(order, lesion, k)
    assert counts.shape == (6, 4)
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
    results = doctest.testmod(metrics)
    assert results.attempted >= 12
    assert results.failed == 0


def test_read_only_and_broadcast_arrays_are_measured_without_a_warning() -> None:
    lesion = np.array([[True, False, True]])
    lesion.flags.writeable = False
    kept, order = np.broadcast_to(np.array([True, True, False]), (1, 3)), np.broadcast_to(np.arange(3, dtype=np.int16), (1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lesion_retention(kept, lesion).pooled == 0.5
        assert metrics.kept_lesion_counts(order, lesion, [1, 3]).tolist() == [[1, 2]]


@examples
@given(SEEDS)
def test_group_purity_equals_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assignment, lesion = rng.integers(-1, 5, (4, 12)), rng.random((4, 12)) < 0.5
    expected = []
    for groups, mask in zip(assignment, lesion):
        right = sum(max(mask[groups == g].sum(), (~mask[groups == g]).sum()) for g in range(5))
        expected.append(right / (groups >= 0).sum() if (groups >= 0).any() else math.nan)
    found = metrics.group_purity(torch.from_numpy(assignment), torch.from_numpy(lesion))
    assert found.tolist() == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("seed", range(4))
def test_lesion_dominated_equals_a_plain_loop_and_is_the_retention_of_kept_patches(seed: int) -> None:
    draw = np.random.default_rng(seed)
    assignment, lesion = draw.integers(-1, 5, (3, 24)), draw.random((3, 24)) > 0.5
    found = metrics.lesion_dominated(torch.from_numpy(assignment), torch.from_numpy(lesion))
    for row in range(3):
        safe = 0
        for group in range(5):
            inside = assignment[row] == group
            if 2 * lesion[row, inside].sum() > inside.sum():
                safe += int(lesion[row, inside].sum())
        assert found[row].item() == pytest.approx(safe / lesion[row].sum())
    kept = draw.random((3, 24)) > 0.4
    alone = np.where(kept, kept.cumsum(1) - 1, -1)
    retained = metrics.lesion_dominated(torch.from_numpy(alone), torch.from_numpy(lesion)).numpy()
    np.testing.assert_allclose(retained, (kept & lesion).sum(1) / lesion.sum(1), rtol=1e-6)


def test_lesion_mass_is_the_mean_attention_on_the_lesion_and_the_precision_of_kept_patches() -> None:
    draw = torch.Generator().manual_seed(0)
    attention = torch.rand(2, 3, 8, generator=draw).softmax(-1)
    lesion = torch.rand(2, 8, generator=draw) > 0.5
    found = metrics.lesion_mass(attention, lesion)
    for row in range(2):
        total = sum(float(attention[row, k, n]) for k in range(3) for n in range(8) if lesion[row, n])
        assert found[row].item() == pytest.approx(total / 3)
    one_hot = torch.eye(8)[:4].unsqueeze(0)
    assert metrics.lesion_mass(one_hot, lesion[:1]).item() == pytest.approx(lesion[0, :4].float().mean().item())


def test_what_mergers_lose_is_not_measured_without_a_lesion_or_a_token() -> None:
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    assert math.isnan(metrics.lesion_dominated(torch.zeros(1, 4).long(), nothing).item())
    assert math.isnan(metrics.lesion_mass(torch.full((1, 2, 4), 0.25), nothing).item())
    assert math.isnan(metrics.group_purity(torch.full((1, 4), -1), ~nothing).item())


@examples
@given(st.integers(0, 2**31), st.integers(1, 80), st.integers(2, 8))
def test_classification_metrics_equal_those_of_scikit_learn(seed: int, n: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    label, predicted = rng.integers(0, classes, n), rng.integers(0, classes, n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert metrics.accuracy(label, predicted) == pytest.approx(sklearn.accuracy_score(label, predicted))
        assert metrics.macro_f1(label, predicted, classes) == pytest.approx(sklearn.f1_score(label, predicted, average="macro"))
        expected = sklearn.balanced_accuracy_score(label, predicted)
        assert metrics.balanced_accuracy(label, predicted, classes) == pytest.approx(expected)


def test_macro_auroc_equals_scikit_learn_one_against_rest_with_ties() -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 4, 200)
    probabilities = rng.integers(1, 5, (200, 4)).astype(float)
    probabilities /= probabilities.sum(1, keepdims=True)
    expected = sklearn.roc_auc_score(label, probabilities, multi_class="ovr", average="macro")
    assert metrics.macro_auroc(label, probabilities) == pytest.approx(expected)


def test_macro_auroc_leaves_out_classes_that_do_not_occur() -> None:
    label = np.array([0, 0, 1, 1])
    probabilities = np.array([[0.8, 0.1, 0.1], [0.3, 0.4, 0.3], [0.2, 0.7, 0.1], [0.4, 0.5, 0.1]])
    expected = np.mean([sklearn.roc_auc_score(label == c, probabilities[:, c]) for c in (0, 1)])
    assert metrics.macro_auroc(label, probabilities) == pytest.approx(expected)
    assert np.isnan(metrics.macro_auroc(np.zeros(4, int), probabilities[:, :1]))


def test_a_confidence_on_the_border_of_two_bins_is_in_the_lower_one() -> None:
    # Four bins: (0, 0.25], (0.25, 0.5], (0.5, 0.75], (0.75, 1].
    probabilities = np.array([[0.5, 0.5], [0.25, 0.75], [0.2, 0.8], [1.0, 0.0]])
    confidence, index = metrics.confidence_bins(probabilities, bins=4)
    assert confidence.tolist() == [0.5, 0.75, 0.8, 1.0]
    assert index.tolist() == [1, 2, 3, 3]


@examples
@given(SEEDS, st.integers(1, 40), st.integers(2, 6))
def test_recall_equals_scikit_learn_and_is_not_measured_for_absent_classes(seed: int, n: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    label, predicted = rng.integers(0, classes, n), rng.integers(0, classes, n)
    expected = sklearn.recall_score(label, predicted, labels=range(classes), average=None, zero_division=np.nan)
    np.testing.assert_allclose(metrics.recall(label, predicted, classes), expected)


def test_reliability_curve_and_calibration_error_by_hand() -> None:
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
    label, predicted = [0, 1, 1], [0, 0, 1]
    confidence, accuracy, counts = metrics.reliability(label, predicted, probabilities)
    used = counts > 0
    assert confidence[used].tolist() == pytest.approx([0.6, 0.9])
    assert accuracy[used].tolist() == pytest.approx([1.0, 0.5])
    assert np.isnan(confidence[~used]).all()
    # Confidences 0.9 (right), 0.9 (wrong), 0.6 (right): bins hold {0.9, 0.9} and {0.6}.
    error = metrics.expected_calibration_error(label, predicted, probabilities)
    assert error == pytest.approx(2 / 3 * abs(0.5 - 0.9) + 1 / 3 * abs(1 - 0.6))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), min_size=1, max_size=30), st.integers(1, 40))
def test_the_smallest_quarter_and_the_images_below_90_percent_equal_plain_loops(images: list[tuple[int, float]], k: int) -> None:
    lesion = [size for size, _ in images]
    kept = [round(share * min(size, k)) for size, share in images]
    sizes = sorted(size for size in lesion if size)
    low = [i for i, size in enumerate(lesion) if size and size <= statistics_quartile(sizes)]
    expected = sum(kept[i] for i in low) / sum(min(lesion[i], k) for i in low) if low else np.nan
    np.testing.assert_allclose(metrics.smallest_quarter(kept, lesion, k), expected)
    below = [Fraction(kept[i], min(size, k)) < Fraction(9, 10) for i, size in enumerate(lesion) if size]
    np.testing.assert_allclose(metrics.share_below(kept, lesion, k), np.mean(below) if below else np.nan)


def statistics_quartile(sizes: list[int]) -> float:
    """The lower quartile by linear interpolation, by hand."""
    if not sizes:
        return 0.0
    place = (len(sizes) - 1) / 4
    below = int(place)
    return sizes[below] + (place - below) * (sizes[min(below + 1, len(sizes) - 1)] - sizes[below])


def test_mergers_and_images_without_a_mask_have_neither() -> None:
    assert np.isnan(metrics.smallest_quarter([np.nan], [5], 3))
    assert np.isnan(metrics.share_below([np.nan], [5], 3))
    assert metrics.share_below([2, np.nan], [2, np.nan], 3) == 0
