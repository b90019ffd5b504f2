"""One file from the hub or from its cache. Common ground because backbones and models are both fetched from there.

The hub's own client asks an address that cannot be reached five more times, half a minute in all, before it looks at its cache.
"""

from __future__ import annotations

from pathlib import Path

from medtokenbudget.errors import WorkError

_SECONDS = 5.0
_reached: set[str] = set()


def fetch(repo_id: str, name: str, revision: str | None = None) -> Path:
    """The path of a file of a repository; without a network, of the file in the cache, or an error at once.

    Other errors are those of the hub's client.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    away = not _reachable(constants.ENDPOINT)
    try:
        return Path(hf_hub_download(repo_id, name, revision=revision, local_files_only=away))
    except LocalEntryNotFoundError:
        why = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise WorkError(f"the hub cannot be reached{why} and {repo_id}/{name} is not in its cache.") from None


def _reachable(address: str) -> bool:
    """Whether anything answers there; once it did, it is not asked again."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    if address not in _reached:
        try:
            get_session().head(address, timeout=_SECONDS)
        except Exception:  # the errors of the client's transport, which changes with its version
            return False
        _reached.add(address)
    return True
