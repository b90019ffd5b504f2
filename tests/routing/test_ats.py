"""ATS against evenly spaced samples of the cumulative significance."""

from __future__ import annotations

from dataclasses import replace

import torch

from medtokenbudget.routing import create_selector
from medtokenbudget.routing.selectors.ats import sampled
from tests.routing.batches import clustered, each, ranked

N, K = 20, 7


def test_ats_keeps_the_patches_whose_cumulative_significance_is_nearest_to_evenly_spaced_samples():
    tokens = clustered()
    kept = create_selector("ats").select(tokens, K).kept
    for row, _, attention in each(tokens):
        significance = [a * float(norm) for a, norm in zip(attention, tokens.value_norm[row])]
        total = sum(significance)

        def hits(samples: int, significance=significance, total=total) -> set[int]:
            reached, sums = 0.0, {}
            for i in reversed(ranked(significance)):  # from the least significant patch on
                reached += significance[i]
                sums[i] = reached / total
            points = [(2 * sample + 1) / (2 * samples) for sample in range(samples)]
            return {min(sums, key=lambda i, point=point: abs(sums[i] - point)) for point in points}

        assert any(set(kept[row].nonzero().flatten().tolist()) == hits(samples) for samples in range(K, 200))


def test_ats_samples_are_proportional_to_significance():
    # Sums 0.1, 0.3, 0.6 and 1: of two samples 0.25 is nearest to 0.3 and 0.75 to 0.6; four samples, from 0.125 on, hit all.
    significance = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    assert sampled(significance, 4).tolist() == [[True] * 4]
    assert sampled(significance, 2).tolist() == [[False, True, True, False]]


def test_ats_keeps_exactly_k_where_attention_is_zero_almost_everywhere():
    attention = torch.zeros(2, N)
    attention[:, 3] = 1
    kept = create_selector("ats").select(replace(clustered(), cls_attention=attention), K).kept
    assert kept.sum(1).tolist() == [K, K]
    assert bool(kept[:, 3].all())
