"""The attentive probe against its formula as a plain loop."""

from __future__ import annotations

import math

import torch

from tests.heads.kept import head_of, kept_of
from tests.routing.batches import softmax


@torch.no_grad()
def test_attentive_probe_is_attention_of_one_query():
    head, kept = head_of("attentive-probe"), kept_of()
    for row in range(3):
        x = head.norm(kept.tokens[row])
        keys, values = head.key(x).view(20, 4, 32), head.value(x).view(20, 4, 32)
        parts = []
        for part in range(4):
            shares = softmax([(keys[i, part] @ head.query[part]).item() / math.sqrt(32) for i in range(20)])
            parts.append(sum(share * values[i, part] for i, share in enumerate(shares)))
        torch.testing.assert_close(head(kept)[row], head.output(torch.cat(parts)), atol=1e-5, rtol=1e-4)
