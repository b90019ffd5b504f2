"""One file from the hub or its cache. Common ground because backbones and models are both downloaded from there."""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.errors import WorkError

_reached: set[str] = set()


def fetch(repo_id: str, name: str, revision: str | None = None) -> Path:
    """Return the path of a repository's file in the cache, downloaded if the hub can be reached.

    A WorkError says that it is in neither; other errors come from the hub's client.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, name, revision=revision, local_files_only=not _answers()))
    except LocalEntryNotFoundError:
        why = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise WorkError(f"The hub cannot be reached{why}, and {repo_id}/{name} is not in its cache.") from None


def _answers() -> bool:
    """Whether the hub answers. Its own client tries five times, for half a minute, before it looks into its cache."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.ENDPOINT not in _reached and not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=5.0)
        except Exception:  # the errors of the client's transport, which changes with its version
            return False
        _reached.add(constants.ENDPOINT)
    return not constants.HF_HUB_OFFLINE
