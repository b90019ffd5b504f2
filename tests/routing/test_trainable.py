"""What learned selectors share."""

from __future__ import annotations

import pytest

from medtokenbudget.errors import CountError
from medtokenbudget.routing import create_selector
from tests.routing.batches import tokens_of


def test_a_soft_merger_has_no_more_tokens_than_slots():
    with pytest.raises(CountError, match=r"'query-pool' has 8 slots, so it cannot give 9 tokens"):
        create_selector("query-pool", dim=32, slots=8).select(tokens_of(), 9)
