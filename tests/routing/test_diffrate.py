"""DiffRate against its formula as a plain loop."""

from __future__ import annotations

import pytest
import torch

from medtokenbudget.errors import RequestError
from medtokenbudget.routing import create_selector
from tests.routing.batches import clustered, cosine, each, mean, ranked

N, K = 20, 7


def test_diffrate_drops_the_least_attended_and_merges_the_next():
    tokens = clustered()
    selection = create_selector("diffrate").select(tokens, K)
    for row, x, attention in each(tokens):
        order = ranked(attention)
        gone = int(0.5 * (N - K))
        kept, merged, dropped = order[:K], order[K : N - gone], order[N - gone :]
        groups = {j: [j] for j in kept}
        for i in merged:
            groups[max(kept, key=lambda j, i=i, x=x: cosine(x[i], x[j]))].append(i)
        for place, j in enumerate(kept):
            torch.testing.assert_close(selection.tokens[row, place], mean([x[i] for i in groups[j]]), atol=1e-5, rtol=1e-5)
        assert sorted((selection.assignment[row] < 0).nonzero().flatten().tolist()) == sorted(dropped)


@pytest.mark.parametrize("dropped", [0.0, 1.0])
def test_diffrate_at_its_ends_only_merges_or_only_drops(dropped):
    tokens = clustered()
    selection = create_selector("diffrate", dropped=dropped).select(tokens, K)
    assert selection.weights.sum(1).tolist() == [N if dropped == 0 else K] * 2
    with pytest.raises(RequestError, match="`dropped` must be at least 0 and at most 1"):
        create_selector("diffrate", dropped=1.5)
