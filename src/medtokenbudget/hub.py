"""One file from the hub or its cache. Common ground because backbones and models are both downloaded from there.

The hub's own client retries an unreachable address five times, half a minute in total, before it looks into its cache. Here the
connection is tested first.
"""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.errors import WorkError, first_line

OFFLINE = "HF_HUB_OFFLINE is set"
_reached: set[str] = set()


def fetch(repo_id: str, name: str, revision: str | None = None) -> Path:
    """Return the path of a repository's file in the cache, downloaded if the hub can be reached.

    A WorkError says that it is in neither; other errors come from the hub's client.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    offline = unreachable() is not None
    try:
        return Path(hf_hub_download(repo_id, name, revision=revision, local_files_only=offline))
    except LocalEntryNotFoundError:
        why = f" ({OFFLINE})" if constants.HF_HUB_OFFLINE else ""
        raise WorkError(f"The hub cannot be reached{why}, and {repo_id}/{name} is not in its cache.") from None


def unreachable(seconds: float = 5.0) -> str | None:
    """Return why the hub does not answer, or None if it does; after the first answer it is not asked again."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return OFFLINE
    if constants.ENDPOINT not in _reached:
        try:
            get_session().head(constants.ENDPOINT, timeout=seconds)
        except Exception as error:  # the errors of the client's transport, which changes with its version
            return first_line(error)
        _reached.add(constants.ENDPOINT)
    return None
