"""CLAM against its formulas as plain loops."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.heads.kept import head_of, kept_of
from tests.routing.batches import softmax


@torch.no_grad()
def test_clam_mb_reads_one_attention_for_each_class():
    head, kept = head_of("clam-mb"), kept_of()
    for row in range(3):
        features = [F.relu(head.features(x)) for x in kept.tokens[row]]
        for number in range(3):
            shares = softmax([head.attend(h)[number].item() for h in features])
            pooled = sum(share * h for share, h in zip(shares, features))
            expected = (head.output.weight[number] @ pooled + head.output.bias[number]).item()
            assert head(kept)[row, number].item() == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["clam-sb", "clam-mb"])
def test_the_instance_loss_of_clam_takes_the_most_and_least_attended_tokens(name):
    head, kept, label = head_of(name, instances=4), kept_of(), torch.tensor([0, 2, -1])
    features = F.relu(head.features(kept.tokens))
    attention = head.attend(features)
    total = 0.0
    for number in range(3):
        losses = []
        for row in range(2):  # the third image has no label
            branch = number if name == "clam-mb" else 0
            order = sorted(range(20), key=lambda i, row=row, branch=branch: -attention[row, i, branch].item())
            own = int(label[row]) == number
            examples = [(i, int(own)) for i in order[:4]] + ([(i, 0) for i in order[-4:]] if own else [])
            each = [-head.instance[number](features[row, i]).log_softmax(-1)[target].item() for i, target in examples]
            losses.append(sum(each) / len(each))
        total += sum(losses) / len(losses) / 3
    logits, own_loss = head.training_step(kept, label)
    assert torch.equal(logits, head(kept))
    assert own_loss.item() == pytest.approx(0.3 / 0.7 * total, rel=1e-4)
