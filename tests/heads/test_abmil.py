"""ABMIL, and the bag of CLAM, against gated attention as a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.heads.kept import head_of, kept_of
from tests.routing.batches import softmax


@torch.no_grad()
@pytest.mark.parametrize("name", ["abmil", "clam-sb"])
def test_abmil_and_the_bag_of_clam_are_gated_attention_pooling(name):
    head, kept = head_of(name), kept_of()
    for row in range(3):
        features = [F.relu(head.features(x)) for x in kept.tokens[row]]
        attend = head.attend
        scores = [attend.output(torch.tanh(attend.value(h)) * torch.sigmoid(attend.gate(h))).item() for h in features]
        pooled = sum(share * h for share, h in zip(softmax(scores), features))
        torch.testing.assert_close(head(kept)[row], head.output(pooled), atol=1e-5, rtol=1e-4)
