"""TC-SSA against its formulas as plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from tests.routing.batches import selector_of, softmax, tokens_of

N, K = 35, 9


@torch.no_grad()
def test_tc_ssa_routes_each_patch_to_its_two_best_slots():
    tokens, selector = tokens_of(), selector_of("tc-ssa")
    selection = selector.select(tokens, K)
    for row in range(len(tokens)):
        gates = [softmax(line[:K].tolist()) for line in selector.gate(tokens.patches[row])]
        received: list[dict[int, float]] = [{} for _ in range(K)]
        for patch, gate in enumerate(gates):
            first, second = sorted(range(K), key=lambda s, g=gate: -g[s])[:2]
            for slot in (first, second):
                received[slot][patch] = gate[slot]
        for slot, shares in enumerate(received):
            if not shares:
                shares = {max(range(N), key=lambda p, s=slot, g=gates: g[p][s]): 1.0}
            expected = sum(w * tokens.patches[row, p] for p, w in shares.items()) / sum(shares.values())
            torch.testing.assert_close(selection.tokens[row, slot], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_tc_ssa_is_trained_to_use_all_slots_evenly():
    tokens, selector = tokens_of(), selector_of("tc-ssa")
    terms = selector.extra_terms(tokens, K)
    logits = [line[:K].tolist() for row in tokens.patches for line in selector.gate(row)]
    gates = [softmax(line) for line in logits]
    mean = [sum(gate[slot] for gate in gates) / len(gates) for slot in range(K)]
    routed = [sum(slot in sorted(range(K), key=lambda s, g=gate: -g[s])[:2] for gate in gates) / len(gates) for slot in range(K)]
    size = sum(math.log(sum(math.exp(value) for value in line)) for line in logits) / len(logits)
    assert float(terms["balance"]) == pytest.approx(0.1 * K * sum(p * f for p, f in zip(mean, routed)), rel=1e-4)
    assert float(terms["entropy"]) == pytest.approx(0.05 * (1 + sum(p * math.log(p) for p in mean) / math.log(K)), abs=1e-6)
    assert float(terms["logits"]) == pytest.approx(1e-5 * size**2, rel=1e-4)
