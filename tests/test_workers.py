"""Worker processes: one that dies is a message."""

from __future__ import annotations

import os

import pytest

from medtokenbudget.errors import WorkError
from medtokenbudget.workers import process_pool


def test_a_worker_that_dies_is_a_message_that_says_what_to_do() -> None:
    with (
        pytest.raises(WorkError, match=r"A worker process died.*`if __name__ == \"__main__\":`.*use fewer"),
        process_pool(1) as pool,
    ):
        pool.submit(os._exit, 1).result()
