"""Where a model is: a folder, a run, the package itself, or the hub, which is the only part of a model that uses the network."""

from __future__ import annotations

import re
from pathlib import Path

from medtokenbudget.errors import RequestError, WorkError, first_line
from medtokenbudget.hub import fetch
from medtokenbudget.model.folder import CARD, CONFIG, ROUTER, read_config

SHIPPED = {"dermoscopy": Path(__file__).parent / "dermoscopy"}
"""Models that come with the package. Their names win over a folder of the same name in the working directory (write ./NAME)."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a saved model.

    Args:
        name: A model folder, a run directory, a hub id `owner/name` (downloaded into its cache), or the name of a shipped model.
        revision: Branch, tag or commit on the hub.
    """
    if isinstance(name, str) and name in SHIPPED:
        return SHIPPED[name]
    folder = Path(name).expanduser()
    if folder.is_dir():
        inside = folder / "model"
        if (folder / CONFIG).exists():
            return folder
        if not (inside / CONFIG).exists() and (folder / "run.json").exists():
            raise RequestError(
                f"The run {name} has no saved model, because it is unfinished or has no learned method. "
                "Run its command again, or train a model with `mtb train`."
            )
        return inside if (inside / CONFIG).exists() else folder
    if folder.exists():
        raise RequestError(f"{name} is a file. Pass the folder of a saved model (with {CONFIG}, model.safetensors, README.md).")
    looks_local = str(name).startswith(".") or (folder.parent != Path() and folder.parent.is_dir())
    if not _HUB_ID.fullmatch(str(name)) or looks_local:
        raise RequestError(
            f"There is no model folder {name}, and it is neither a hub id such as owner/name nor "
            f"a model of the package ({', '.join(SHIPPED)})."
        )
    return download(str(name), revision)


def download(repo_id: str, revision: str | None = None) -> Path:
    """Download a model's files into the hub's cache; a model that is already there needs no network."""
    config = _fetch(repo_id, CONFIG, revision)
    folder = config.parent
    found = read_config(folder)
    for name in (*found["files"], CARD):
        _fetch(repo_id, name, revision)
    if "route" in found["identity"]["backbone"]:  # routed early: the router is a model inside the folder
        router = _fetch(repo_id, f"{ROUTER}/{CONFIG}", revision).parent
        for name in (*read_config(router)["files"], CARD):
            _fetch(repo_id, f"{ROUTER}/{name}", revision)
    return folder


def _fetch(repo_id: str, name: str, revision: str | None) -> Path:
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return fetch(repo_id, name, revision)
    except WorkError as error:
        raise WorkError(f"{error} Check the network, or copy the model folder to this machine and pass its path.") from None
    except EntryNotFoundError:
        raise RequestError(f"{repo_id} on the hub has no {name}, so it is not a MedTokenBudget model.") from None
    except RevisionNotFoundError:
        raise RequestError(f"{repo_id} on the hub has no revision '{revision}'.") from None
    except RepositoryNotFoundError:
        raise RequestError(f"There is no folder {repo_id}, and no model {repo_id} on the hub that you can access.") from None
    except Exception as error:  # the hub library lets its transport's errors through
        raise WorkError(f"Downloading {name} of {repo_id} failed: {first_line(error)}. Run the same command again.") from error


def upload(folder: Path, repo_id: str, private: bool = True, message: str = "Upload model") -> str:
    """Create the repository if needed and upload the folder; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
    except (LocalTokenNotFoundError, HfHubHTTPError, OSError) as error:
        raise WorkError(f"Uploading to {repo_id} failed: {first_line(error)}. Log in with `hf auth login`, then retry.") from error
    return str(address)
