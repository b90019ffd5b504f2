"""Cropr against its formula as a plain loop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from medtokenbudget.config import TrainConfig
from medtokenbudget.runs.method import Method
from tests.routing.batches import seeded, selector_of, softmax, tokens_of

N, K = 35, 9


def test_cropr_ranks_by_its_query_and_learns_from_its_auxiliary_head_alone():
    tokens, selector = replace(tokens_of(), label=torch.tensor([0, 1, 1])), selector_of("cropr")
    scores, losses = selector.score(tokens), []
    for row in range(len(tokens)):
        logits = [float(selector.query[0] @ patch) for patch in tokens.patches[row]]
        assert scores[row].tolist() == pytest.approx(logits, abs=1e-5)
        shares = softmax([logit / math.sqrt(32) for logit in logits])
        gathered = sum(share * patch for share, patch in zip(shares, tokens.patches[row]))
        predicted = selector.auxiliary(gathered + selector.mlp(gathered))
        losses.append(-predicted.log_softmax(-1)[tokens.label[row]].item())
    step = selector.training_pass(tokens, 0.5, TrainConfig(), seeded())
    assert step.terms["auxiliary"].requires_grad
    assert step.terms["auxiliary"].item() == pytest.approx(sum(losses) / 3, abs=1e-5)
    assert step.weights["auxiliary"] == 1.0
    lesion_first = Method("cropr", variant="lesion-first").config(TrainConfig())
    assert "auxiliary" not in selector.training_pass(tokens, 0.5, lesion_first, seeded(), route=False).terms
