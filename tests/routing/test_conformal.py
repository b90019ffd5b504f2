"""Conformal risk control: the threshold that a promise needs, checked against plain loops, MAPIE and repeated splits."""

from __future__ import annotations

import doctest
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medtokenbudget.errors import CountError, NonFiniteError, RequestError, ShapeError
from medtokenbudget.routing import conformal
from medtokenbudget.routing.conformal import Promise, groups_needed, kept_counts, lesion_kept, pick_threshold, relative_scores

PATCHES = 12


def images(n: int, seed: int, noise: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Scores [n, 12] that tell lesion patches from others more or less well, and the lesion patches: 1 to 8 of each image."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, n)
    lesion = np.argsort(rng.random((n, PATCHES)), 1) < sizes[:, None]
    return 1 / (1 + np.exp(-(2 * lesion - 1 + rng.normal(0, noise, lesion.shape)))), lesion


def loss_by_loop(
    promise: Promise, scores: np.ndarray, lesion: np.ndarray, groups: list[str], t: float, least: int, most: int
) -> float:
    """The mean loss over groups, image by image, by the rule of the docstrings."""
    losses: dict[str, list[float]] = {}
    for row, inside, group in zip(scores, lesion, groups):
        if not inside.any():
            continue
        best = sorted(range(len(row)), key=lambda i: (-row[i], i))
        k = min(max(least, sum(s >= t for s in row)), most)
        lost = Fraction(int(inside[best[k:]].sum()), int(inside.sum()))
        if promise.coverage is not None:
            lost = Fraction(int(lost > 1 - Fraction(str(promise.retention))))
        losses.setdefault(group, []).append(float(lost))
    return float(np.mean([np.mean(own) for own in losses.values()]))


PROMISES = st.builds(Promise, st.sampled_from([0.5, 0.7, 0.8, 0.9]), st.sampled_from([None, 0.6, 0.8]))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(PROMISES, st.integers(0, 10**6), st.integers(12, 40), st.integers(1, 4), st.sampled_from([None, 9, 12]))
def test_the_threshold_keeps_the_promise_and_no_higher_one_does(
    promise: Promise, seed: int, n: int, least: int, cap: int | None
) -> None:
    scores, lesion = images(n, seed)
    scores = scores.round(1 + seed % 3)  # ties
    groups = [str(i // (1 + seed % 2)) for i in range(n)]
    count, most = len(set(groups)), cap or PATCHES

    def bound(t: float) -> float:
        return (count * loss_by_loop(promise, scores, lesion, groups, t, least, most) + 1) / (count + 1)

    try:
        threshold = pick_threshold(promise, scores, lesion, groups, least, cap)
    except RequestError:
        assert bound(-1.0) > promise.alpha
        return
    assert threshold.bound == pytest.approx(bound(threshold.value))
    assert threshold.bound <= promise.alpha + 1e-9
    higher = np.unique(scores[scores > threshold.value])
    # Above the highest lesion patch only background is left to drop, which costs nothing.
    assert all(bound(t) > promise.alpha or bound(t) == pytest.approx(threshold.bound) for t in higher)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1), st.integers(1, 5), st.integers(5, 12))
def test_a_higher_threshold_never_keeps_more(seed: int, one: float, other: float, least: int, most: int) -> None:
    scores, lesion = images(8, seed)
    low, high = sorted((one, other))
    counts = [kept_counts(scores, t, least, most) for t in (low, high)]
    assert (counts[0] >= counts[1]).all()
    assert (counts[1] >= least).all()
    assert (counts[0] <= most).all()
    assert (lesion_kept(scores, lesion, counts[0]) >= lesion_kept(scores, lesion, counts[1])).all()


@pytest.mark.slow
def test_the_thresholds_are_those_that_mapie_finds() -> None:
    risk_control = pytest.importorskip("mapie.risk_control")
    levels = [0.6, 0.8, 0.9, 0.95]
    scores, lesion = images(60, seed=5)
    # MAPIE tries given thresholds and keeps scores above them: scores lie between the thresholds that it tries.
    step = 1 / 64
    scores = (np.floor(scores / step) + 0.5) * step
    controller = risk_control.MultiLabelClassificationController(
        lambda x: x, risk="recall", method="crc", target_level=levels, predict_params=np.arange(0, 1, step)
    )
    controller.calibrate(scores, lesion.astype(int))
    for level, theirs in zip(levels, controller.best_predict_param):
        ours = pick_threshold(Promise(level), scores, lesion, minimum=0).value
        assert kept_counts(scores, ours, minimum=0).tolist() == (scores > theirs).sum(1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("promise", [Promise(0.9), Promise(0.95), Promise(0.8, coverage=0.9)], ids=str)
def test_new_images_keep_what_was_promised_over_many_splits(promise: Promise) -> None:
    # 40 calibration images: without the correction the mean falls short, so this fails if it is left out.
    scores, lesion = images(800, seed=1)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(150):
        order = rng.permutation(len(scores))
        calibration, new = order[:40], order[40:]
        threshold = pick_threshold(promise, scores[calibration], lesion[calibration]).value
        kept = lesion_kept(scores[new], lesion[new], kept_counts(scores[new], threshold))
        losses.append(np.mean(1 - kept if promise.coverage is None else kept < promise.retention - 1e-9))
    error = 2 * np.std(losses) / np.sqrt(len(losses))
    assert np.mean(losses) <= promise.alpha + error
    assert np.mean(losses) >= promise.alpha - 2 / 41 - error  # and no more is kept than the correction asks for


def test_a_group_counts_once_however_many_images_it_has() -> None:
    scores = np.array([[0.9, 0.8, 0.1]] * 20 + [[0.9, 0.2, 0.1]] * 20)
    lesion = np.array([[1, 1, 0]] * 40, bool)
    each = pick_threshold(Promise(0.7), scores, lesion)
    # The twenty images that would lose a patch are one of 21 groups.
    grouped = pick_threshold(Promise(0.7), scores, lesion, [str(i) for i in range(20)] + ["same"] * 20)
    assert (each.value, each.groups, grouped.value, grouped.groups, grouped.images) == (0.8, 40, 0.8, 21, 40)
    assert (each.risk, grouped.risk) == (pytest.approx(0.25), pytest.approx(0.5 / 21))


def test_what_the_minimum_keeps_cannot_be_lost_and_images_without_a_lesion_patch_do_not_count() -> None:
    scores, lesion = [[0.9, 0.6, 0.2]] * 9, [[1, 1, 0]] * 9
    # The two best patches are the lesion. Free to drop the second, a threshold above 0.6 would lose half of each.
    assert pick_threshold(Promise(0.5), scores, lesion).value == 0.6
    kept = pick_threshold(Promise(0.5), scores, lesion, minimum=2)
    assert (kept.value, kept.risk, kept.bound) == (0.9, 0.0, pytest.approx(1 / 10))
    # A tenth of 9, 10, 19, 20 and 100 patches, rounded down; 1 - 0.9 is less than a tenth in floats.
    assert Promise(0.9, coverage=0.5).allowed_losses([9, 10, 19, 20, 100]).tolist() == [0, 1, 1, 2, 10]
    scores, lesion = images(50, seed=2)
    empty = np.zeros_like(lesion[:30])
    with_empty = pick_threshold(Promise(0.8), np.vstack([scores, scores[:30]]), np.vstack([lesion, empty]))
    assert with_empty == pick_threshold(Promise(0.8), scores, lesion)
    assert np.isnan(lesion_kept(scores[:1], empty[:1], [3])).all()


def test_a_cap_that_does_not_allow_the_promise_is_refused_with_what_it_allows() -> None:
    scores, lesion = images(200, seed=3)
    with pytest.raises(RequestError, match=r"The cap does not allow 95% .* at most (\d+\.?\d*)%") as error:
        pick_threshold(Promise(0.95), scores, lesion, most=3)
    possible = float(str(error.value).rpartition("at most ")[2].partition("%")[0]) / 100
    most = lesion_kept(scores, lesion, np.full(200, 3)).mean()
    assert possible == pytest.approx(1 - (200 * (1 - most) + 1) / 201, abs=1e-3)
    assert pick_threshold(Promise(round(possible - 0.001, 3)), scores, lesion, most=3).bound <= 1 - possible + 0.0011


@pytest.mark.parametrize(
    ("promise", "needed"), [(Promise(0.95), 19), (Promise(0.98), 49), (Promise(0.5, 0.9), 9), (Promise(0.7), 3)]
)
def test_too_few_groups_are_refused_with_the_number_that_is_needed(promise: Promise, needed: int) -> None:
    assert groups_needed(promise) == needed
    scores, lesion = images(needed - 1, seed=4)
    with pytest.raises(RequestError, match=f"{needed - 1} calibration groups cannot promise .* at least {needed} are needed"):
        pick_threshold(promise, scores, lesion)
    scores, lesion = images(needed, seed=4)
    assert (
        lesion_kept(scores, lesion, kept_counts(scores, pick_threshold(promise, scores, lesion).value)).min() >= promise.retention
    )


def test_wrong_input_is_rejected_by_name_and_the_examples_are_right() -> None:
    scores, lesion = images(30, seed=0)
    for wrong in (0.0, 1.0, 1.5, -0.1, float("nan")):
        with pytest.raises(RequestError, match="promised retention must be between 0 and 1"):
            Promise(wrong)
        with pytest.raises(RequestError, match="promised coverage"):
            Promise(0.9, coverage=wrong)
    for error, words, inputs in (
        (ShapeError, "`groups` must name 30 images, got 2", (scores, lesion, ["a", "b"])),
        (ShapeError, r"\[n, N\]", (scores, lesion[:, :5])),
        (NonFiniteError, "NaN", (scores * np.nan, lesion)),
        (RequestError, "No calibration image has a lesion patch", (scores, np.zeros_like(lesion))),
    ):
        with pytest.raises(error, match=words):
            pick_threshold(Promise(0.5), *inputs)
    with pytest.raises(CountError, match="at most 13"):
        kept_counts(scores, 0.5, most=13)
    assert doctest.testmod(conformal).failed == 0


def test_relative_scores_keep_the_order_forget_the_scale_and_end_with_the_share_of_the_last_patch() -> None:
    scores = np.random.default_rng(2).random((5, 40))
    shares = relative_scores(scores)
    assert np.array_equal(np.argsort(-shares, 1), np.argsort(-scores, 1))
    np.testing.assert_allclose(relative_scores(0.01 * scores), shares)
    for row, share in zip(scores, shares):
        assert share.max() == pytest.approx(1)
        for patch in range(40):
            assert share[patch] == pytest.approx((row[row <= row[patch]] ** 2).sum() / (row**2).sum())
    assert np.isfinite(relative_scores(np.zeros((1, 4)))).all()
