"""The five terms against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medtokenbudget.config import LossWeights
from medtokenbudget.errors import MissingSignalError, ShapeError
from medtokenbudget.routing.losses import (
    budget_deviation,
    classification_loss,
    distillation_loss,
    diversity_loss,
    lesion_loss,
    lesion_mass_loss,
    scorer_terms,
    total_loss,
)

B, N, C = 3, 6, 4


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return {
        "logits": torch.randn(B, C, generator=generator),
        "scores": torch.rand(B, N, generator=generator) * 0.98 + 0.01,
        "label": torch.tensor([0, 3, 1]),
        "lesion": torch.rand(B, N, generator=generator) > 0.5,
        "has_mask": torch.tensor([True, False, True]),
        "cls_attention": torch.rand(B, N, generator=generator) * 0.01,
    }


def objective(batch, weights: LossWeights | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The paper's objective with K = 2 at budget 0.3, put together as the trainer does."""
    weights = weights or LossWeights()
    known = {name: batch[name] for name in ("lesion", "has_mask", "cls_attention")}
    terms = {"classification": classification_loss(batch["logits"], batch["label"])}
    terms |= scorer_terms(batch["scores"], score_logits=torch.logit(batch["scores"]), k=2, budget=0.3, weights=weights, **known)
    return total_loss(terms, vars(weights)), terms


def lesion_by_hand(batch) -> float:
    terms = []
    for scores, lesion, known in zip(batch["scores"].tolist(), batch["lesion"].tolist(), batch["has_mask"].tolist()):
        if known:
            terms += [-math.log(s) if m else -math.log(1 - s) for s, m in zip(scores, lesion)]
    return sum(terms) / len(terms)


def diversity_by_hand(scores: torch.Tensor) -> float:
    rows, total = scores.tolist(), 0.0
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            if i != j:
                dot = sum(x * y for x, y in zip(a, b))
                total += max(0.0, dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b)))
    return total / (len(rows) * (len(rows) - 1))


def distillation_by_hand(batch) -> float:
    squares = []
    for scores, attention in zip(batch["scores"].tolist(), batch["cls_attention"].tolist()):
        squares += [(s - a / max(attention)) ** 2 for s, a in zip(scores, attention)]
    return sum(squares) / len(squares)


def cross_entropy_by_hand(batch) -> float:
    rows = zip(batch["logits"].tolist(), batch["label"].tolist())
    return sum(math.log(sum(math.exp(x) for x in row)) - row[label] for row, label in rows) / B


def test_each_term_equals_a_plain_loop(batch):
    assert budget_deviation(25, 256, 0.1) == pytest.approx(0.1 - 25 / 256)
    assert budget_deviation(16, 20, 0.1) == pytest.approx(0.7)
    assert classification_loss(batch["logits"], batch["label"]).item() == pytest.approx(cross_entropy_by_hand(batch), abs=1e-5)
    assert diversity_loss(batch["scores"]).item() == pytest.approx(diversity_by_hand(batch["scores"]), abs=1e-5)
    lesion = lesion_loss(torch.logit(batch["scores"]), batch["lesion"], batch["has_mask"]).item()
    assert lesion == pytest.approx(lesion_by_hand(batch), abs=1e-5)
    assert distillation_loss(batch["scores"], batch["cls_attention"]).item() == pytest.approx(distillation_by_hand(batch), abs=1e-6)


def test_the_objective_is_the_papers_weighted_sum_and_reports_each_term(batch):
    loss, terms = objective(batch)
    expected = (
        cross_entropy_by_hand(batch)
        + 0.01 * abs(2 / N - 0.3)
        + 0.05 * diversity_by_hand(batch["scores"])
        + 0.1 * lesion_by_hand(batch)
        + 0.1 * distillation_by_hand(batch)
    )
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert list(terms) == ["classification", "budget", "diversity", "lesion", "distillation"]
    assert terms["lesion"].item() == pytest.approx(lesion_by_hand(batch), abs=1e-5)


def test_a_term_of_weight_zero_is_reported_without_gradient(batch):
    batch["scores"].requires_grad_()
    weights = LossWeights(classification=0, budget=0, diversity=0, lesion=1, distillation=0)
    loss, terms = objective(batch, weights)
    loss.backward()
    assert loss.item() == pytest.approx(lesion_by_hand(batch), abs=1e-5)
    assert terms["distillation"].item() == pytest.approx(distillation_by_hand(batch), abs=1e-6)
    assert [name for name, term in terms.items() if term.requires_grad] == ["lesion"]
    assert batch["scores"].grad[1].abs().sum() == 0
    assert batch["scores"].grad[0].abs().sum() > 0


def test_a_batch_without_masks_has_lesion_loss_zero_that_can_be_differentiated(batch):
    scores = batch["scores"].requires_grad_()
    loss = lesion_loss(scores, batch["lesion"], torch.zeros(B, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert scores.grad.abs().sum() == 0
    assert objective({**batch, "lesion": None, "has_mask": None})[1]["lesion"].item() == 0
    # An empty mask is not a missing one.
    assert lesion_loss(batch["scores"], torch.zeros(B, N, dtype=torch.bool), batch["has_mask"]).item() > 0


def test_opposite_score_vectors_are_as_good_as_unrelated_ones_and_one_image_has_no_diversity_loss():
    # Cosines of the pairs: -1, 0.6 and -0.6; the negative ones count as 0.
    scores = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.6, 0.8]])
    assert diversity_loss(scores).item() == pytest.approx(2 * 0.6 / 6)
    assert diversity_loss(torch.rand(1, N)).item() == 0


@settings(max_examples=10, deadline=None)
@given(batch_size=st.integers(2, 6), seed=st.integers(0, 999))
def test_diversity_does_not_depend_on_the_order_of_images_and_is_one_for_equal_maps(batch_size, seed):
    scores = torch.rand(batch_size, N, generator=torch.Generator().manual_seed(seed)) + 0.01
    torch.testing.assert_close(diversity_loss(scores.flip(0)), diversity_loss(scores))
    torch.testing.assert_close(diversity_loss(scores[:1].expand(batch_size, -1)), torch.tensor(1.0))


def test_the_lesion_loss_of_mixtures_is_the_attention_that_misses_the_lesion():
    attention = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]])
    lesion = torch.tensor([[True, True, False], [False, False, True], [False, False, False]])
    loss = lesion_mass_loss(attention, lesion, torch.tensor([True, True, True])).item()
    assert loss == pytest.approx(-(math.log(0.75) + math.log(0.8)) / 2)
    assert lesion_mass_loss(attention, lesion, torch.tensor([False, False, True])).item() == 0


def test_saturated_scores_keep_the_lesion_loss_and_its_gradient_finite():
    logits = torch.tensor([[60.0, -60.0]], requires_grad=True)
    target, known = torch.tensor([[False, True]]), torch.tensor([True])
    loss = lesion_loss(logits, target, known)
    loss.backward()
    assert loss.item() == pytest.approx(60)
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5]]))


def test_class_weights_and_unlabeled_images_count_as_they_should(batch):
    weights = torch.tensor([1.0, 2.0, 1.0, 5.0])
    each = [classification_loss(batch["logits"][i : i + 1], batch["label"][i : i + 1]).item() for i in range(B)]
    weighted = classification_loss(batch["logits"], batch["label"], weights).item()
    assert weighted == pytest.approx((each[0] + 5 * each[1] + 2 * each[2]) / 8, abs=1e-5)
    partly = classification_loss(batch["logits"], torch.tensor([0, -1, 1])).item()
    assert partly == pytest.approx((each[0] + each[2]) / 2, abs=1e-5)
    assert classification_loss(batch["logits"], torch.full((B,), -1)).item() == 0


def test_what_a_weighted_term_needs_must_be_there(batch):
    without = {**batch, "cls_attention": None}
    with pytest.raises(MissingSignalError, match="attention of a class token"):
        objective(without)
    assert "distillation" not in objective(without, LossWeights(distillation=0))[1]


def test_shapes_that_do_not_agree_are_refused(batch):
    for call in (
        lambda: lesion_loss(batch["scores"], batch["lesion"][:, :3], batch["has_mask"]),
        lambda: distillation_loss(batch["scores"], batch["cls_attention"][:2]),
        lambda: diversity_loss(torch.rand(3)),
        lambda: classification_loss(batch["logits"], batch["label"][:2]),
    ):
        with pytest.raises(ShapeError):
            call()


def test_losses_are_fp32_under_autocast(batch):
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = objective(batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, objective(batch)[0])
