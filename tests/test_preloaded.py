"""The modules that the fork server of the tests imports once."""

from __future__ import annotations

import pytest

from tests import preloaded


def test_every_module_that_is_preloaded_exists_and_a_wrong_name_is_an_error_that_the_fork_server_does_not_ignore() -> None:
    preloaded.preload()
    with pytest.raises(RuntimeError, match=r"cannot import medtokenbudget\.api\.nothing: No module named") as caught:
        preloaded.preload(["data", "api.nothing"])
    assert not isinstance(caught.value, ImportError)
