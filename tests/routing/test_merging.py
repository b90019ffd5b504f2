"""What the mergers share: they compare patches or keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from medtokenbudget.errors import MissingSignalError, UnknownNameError
from medtokenbudget.routing import create_selector
from tests.routing.batches import clustered

N, K = 20, 7


@pytest.mark.parametrize("name", ["tome", "pitome", "atc"])
def test_mergers_compare_keys_where_they_are_asked_to(name):
    tokens = clustered()
    by_keys = create_selector(name, compare="keys").select(tokens, K)
    # Merging depends on the keys alone: with the keys as patches, the patches fall into the same groups.
    alike = create_selector(name).select(replace(tokens, patches=tokens.mean_key, cls=None), K)
    assert torch.equal(by_keys.assignment, alike.assignment)
    for row in range(2):
        for group in range(K):
            members = tokens.patches[row][by_keys.assignment[row] == group]
            torch.testing.assert_close(by_keys.tokens[row, group], members.mean(0))
    with pytest.raises(MissingSignalError, match="`signals` mean_key"):
        create_selector(name, compare="keys").select(replace(tokens, mean_key=None), K)
    with pytest.raises(UnknownNameError, match="compare"):
        create_selector(name, compare="values")
