"""The saved model: where it is (folder, run, package, hub), how its folder is written, and every check before it is read.

What must agree is stored twice, in the configuration and in the headers of the tensor files. The configuration carries a checksum
of itself and the hashes of the tensor files, so an edited, mixed-up, damaged or foreign file is rejected by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from medtokenbudget import __version__, files
from medtokenbudget.backbone.backbone import HUB, find_recipe
from medtokenbudget.config import NOTICE, BackboneConfig
from medtokenbudget.errors import MismatchError, RequestError, UnknownNameError, WorkError, first_line
from medtokenbudget.escaping import markdown_text
from medtokenbudget.files import exclusive, fetch, remembered
from medtokenbudget.heads import create_head
from medtokenbudget.heads.head import RoutedClassifier
from medtokenbudget.routing import create_selector, selector_class
from medtokenbudget.routing.conformal import Guarantee
from medtokenbudget.training.familiarity import Familiarity

FORMAT = "medtokenbudget-model"
FORMAT_VERSION = 3
CONFIG, TENSORS, HEADS, CARD = "config.json", "model.safetensors", "heads.safetensors", "README.md"
ROUTER = "router"
"""Folder of the router inside the folder of a model that is routed early."""
SHIPPED = {"dermoscopy": Path(__file__).parent / "dermoscopy"}
"""Models that come with the package. Their names win over a folder of the same name in the working directory (write ./NAME)."""
_COPY_AGAIN = "Copy the model folder again."


def resolve(name: str | Path, revision: str | None = None) -> Path:
    """Find the folder of a saved model: a folder, a run, a hub id `owner/name` (downloaded into its cache), or a shipped model."""
    if isinstance(name, str) and name in SHIPPED:
        return SHIPPED[name]
    folder = Path(name).expanduser()
    if folder.is_dir():
        inside = folder / "model"
        if (folder / CONFIG).exists():
            return folder
        if not (inside / CONFIG).exists() and (folder / "run.json").exists():
            advice = "Run its command again, or train a model with `mtb train`."
            raise RequestError(f"The run {name} has no saved model, because it is unfinished or has no learned method. {advice}")
        return inside if (inside / CONFIG).exists() else folder
    if folder.exists():
        raise RequestError(f"{name} is a file. Pass the folder of a saved model (with {CONFIG}, model.safetensors, README.md).")
    # A mistyped path below a folder of this machine has the form of a hub id too.
    looks_local = str(name).startswith(".") or (folder.parent != Path() and folder.parent.is_dir())
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or looks_local:
        raise UnknownNameError.of("model", str(name), SHIPPED, "(no folder of a model or run, and no hub id such as owner/name)")
    return _download(str(name), revision)


def _download(repo_id: str, revision: str | None) -> Path:
    """Download a model's files into the hub's cache; a model that is already there needs no network."""
    folder = _fetch(repo_id, CONFIG, revision).parent
    config = read_config(folder)
    names = [*config["files"], CARD]
    if "route" in config["identity"].get("backbone", ()):  # routed early: the router is a model inside the folder
        router = _fetch(repo_id, f"{ROUTER}/{CONFIG}", revision).parent
        names += [f"{ROUTER}/{name}" for name in (*read_config(router)["files"], CARD)]
    for name in names:
        _fetch(repo_id, name, revision)
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


def write_folder(
    folder: Path, identity: dict[str, Any], settings: dict[str, Any], tensors: dict[str, dict[str, Tensor]], card: str
) -> None:
    """Write the folder; `tensors` maps a file name to its tensors, `identity` is what every file must agree on."""
    hashes = {}
    for name, values in tensors.items():
        # One key only: safetensors writes several in an order that changes from call to call.
        header = {"medtokenbudget": json.dumps(identity, sort_keys=True)}
        files.write_bytes(folder / name, save({key: _smallest(values[key]) for key in sorted(values)}, header))
        hashes[name] = files.sha256_file(folder / name)
    # Left by a model with more methods that was saved here before.
    if HEADS not in tensors:
        (folder / HEADS).unlink(missing_ok=True)
    files.write_text(folder / CARD, card or _short_card(identity))
    config = {"format": FORMAT, "format_version": FORMAT_VERSION, "version": __version__, "identity": identity, "files": hashes}
    # The configuration is written last: a folder left behind by a crash has none and is rejected.
    files.write_sealed(folder / CONFIG, {**config, **settings})


def _smallest(values: Tensor) -> Tensor:
    """Return fp16 where it loses nothing."""
    half = values.half()
    return (half if torch.equal(half.to(values.dtype), values) else values).contiguous()


def _short_card(identity: dict[str, Any]) -> str:
    """Write the card of a model that was not saved from a run and so has no results to show."""
    return (
        f"# MedTokenBudget model\n\n{NOTICE} This model was not evaluated in a run.\n\n"
        f"- backbone: {identity['backbone']['name']}, weights sha256 {identity['backbone']['weights']}\n"
        f"- classes: {', '.join(map(markdown_text, identity['classes'])) or 'none: a router without a head'}\n"
        f"- main method: {identity['main']}\n"
        f"- methods: {', '.join(identity['selectors'])}\n"
    )


def write_guarantees(folder: Path, guarantees: Sequence[Guarantee], card: str) -> None:
    """Write guarantees into the `config.json` of a saved model, and its card; its tensors are not touched."""
    with exclusive(folder):
        if card != read_card(folder):
            files.write_text(folder / CARD, card)
        files.write_sealed(folder / CONFIG, {**read_config(folder), "guarantees": [one.to_json() for one in guarantees]})


def describe(classifier: RoutedClassifier) -> dict[str, Any]:
    """Describe the classifier as JSON values: all that is needed to build it again, apart from its tensors."""
    selector, head = classifier.selector, classifier.head
    described = None if head is None else {"name": head.name, "options": head.options()}
    return {"selector": selector.name, "options": selector.options(), "head": described}


def tensors_of(
    classifiers: Mapping[str, RoutedClassifier], main: str, familiarity: Familiarity | None
) -> dict[str, dict[str, Tensor]]:
    """Collect the tensors of each file: `selector.*`, `head.*` of the main method and `familiarity.*`; others after `<method>/`."""
    parts: list[tuple[str, str, nn.Module]] = [(TENSORS, "", classifiers[main])]
    parts += [] if familiarity is None else [(TENSORS, "familiarity.", familiarity)]
    parts += [(HEADS, f"{method}/", classifier) for method, classifier in classifiers.items() if method != main]
    tensors: dict[str, dict[str, Tensor]] = {TENSORS: {}}
    for file, prefix, module in parts:
        for name, value in module.state_dict().items():
            # Only now, because controls such as `center` have no tensors, and a file without any is not written.
            tensors.setdefault(file, {})[f"{prefix}{name}"] = value.detach().cpu()
    return tensors


def fingerprint(identity: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> str:
    """Hash a whole model: what its files agree on, and every number in them."""
    digest = hashlib.sha256(files.sha256_json(identity).encode())
    for file in sorted(tensors):
        for name, value in sorted(tensors[file].items()):
            # With name and shape: without them other tensors of the same bytes would have the same hash.
            digest.update(f"{file}/{name}{list(value.shape)}".encode())
            digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a saved model: its format, its version, its checksum and its parts."""
    path = folder / CONFIG
    if not path.is_file():
        raise RequestError(f"{folder} is not a saved model: it has no {CONFIG}. The model of a run is in RUN/model.")
    config = files.read_json(path)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise RequestError(f"{path} is not the configuration of a MedTokenBudget model. {_COPY_AGAIN}")
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        advice = f"Install medtokenbudget {config.get('version')} or newer." if newer else "Train the model again with `mtb train`."
        raise RequestError(f"{path} has model format version {version}, but this program reads version {FORMAT_VERSION}. {advice}")
    config = files.unsealed(path, config, "Copy the model folder again, or train the model again.")
    if wrong := [name for name in ("identity", "backbone", "train", "info", "files") if not isinstance(config.get(name), dict)]:
        raise RequestError(f"{path} is damaged: {wrong[0]} must be an object. {_COPY_AGAIN}")
    # Names from the file become paths: one such as ../../secret must not be opened.
    if not {TENSORS} <= set(config["files"]) <= {TENSORS, HEADS}:
        raise RequestError(f"{path} is damaged: its files must be {TENSORS} and, for other methods, {HEADS}. {_COPY_AGAIN}")
    return config


def read_parts(source: Path, config: dict[str, Any]) -> tuple[dict[str, RoutedClassifier], Familiarity | None]:
    """Build what `config` describes from the tensor files of the folder; every tensor must fit and be used."""
    # Reading compares the identity with the headers, so whatever was edited in only one of them is named here.
    identity, unused = config["identity"], {name: _read_tensors(source / name, config) for name in config["files"]}
    dim, classes = identity["backbone"]["dim"], len(identity["classes"])

    def taken(file: str, prefix: str) -> dict[str, Tensor]:
        names = [name for name in unused.get(file, {}) if name.startswith(prefix)]
        return {name.removeprefix(prefix): unused[file].pop(name) for name in names}

    familiarity = None
    if tensors := taken(TENSORS, "familiarity."):
        basis = tensors.get("image.basis")
        familiarity = Familiarity(*(basis.shape if basis is not None and basis.ndim == 2 else (dim, 1)))
        _fill(familiarity, tensors, source / TENSORS, "familiarity")
    classifiers = {}
    for method, described in identity["selectors"].items():
        classifiers[method] = _untrained(described, dim, classes, source)
        file, prefix = (TENSORS, "") if method == identity["main"] else (HEADS, f"{method}/")
        _fill(classifiers[method], taken(file, prefix), source / file, method)
    if names := sorted(name for values in unused.values() for name in values):
        raise RequestError(f"{source} contains tensors that no method uses: {', '.join(names[:6])}. {_COPY_AGAIN}")
    return classifiers, familiarity


def _read_tensors(path: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    if not path.is_file():
        raise RequestError(f"{path} is missing. {_COPY_AGAIN}")
    try:
        with safetensors.safe_open(str(path), framework="pt") as reader:
            header = reader.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise RequestError(f"{path} is damaged or not a safetensors file ({error}). {_COPY_AGAIN}") from None
    if "medtokenbudget" not in header:
        raise RequestError(f"{path} was not written by medtokenbudget. Replace it with the {path.name} that belongs to this model.")
    try:
        identity = dict(json.loads(header["medtokenbudget"]))
    except (ValueError, TypeError, RecursionError):
        raise RequestError(f"{path} is damaged: its header cannot be read. {_COPY_AGAIN}") from None
    # Before the hash: files of two models that were mixed up are named as such, not as damaged.
    if identity != config["identity"]:
        advice = "Use the files of one saved model. To change classes, methods or backbone, train again."
        raise MismatchError.between(f"{path} and {CONFIG}", files.dotted(identity), files.dotted(config["identity"]), advice)
    if files.sha256_file(path) != config["files"][path.name]:
        raise RequestError(f"{path} is damaged: its hash is not the one in {CONFIG}. {_COPY_AGAIN}")
    return load_file(str(path))


def _untrained(described: dict[str, Any], dim: int, classes: int, source: Path) -> RoutedClassifier:
    name, head = described["selector"], described["head"]
    try:
        learned = {"dim": dim} if selector_class(name).learns else {}
        selector = create_selector(name, **learned, **described["options"])
        return RoutedClassifier(selector, None if head is None else create_head(head["name"], dim, classes, **head["options"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"{source / CONFIG} does not describe its methods correctly: {error}. Save the model again.") from None


def _fill(module: nn.Module, tensors: dict[str, Tensor], path: Path, what: str) -> None:
    expected = module.state_dict()
    faults = [f"{name} is missing" for name in expected if name not in tensors]
    for name, value in tensors.items():
        if name not in expected:
            faults.append(f"{name} is not part of this model")
        elif value.shape != expected[name].shape:
            faults.append(f"{name} has shape {list(value.shape)}, expected {list(expected[name].shape)}")
        elif not value.is_floating_point():
            faults.append(f"{name} has numbers of type {value.dtype}")
        elif not bool(torch.isfinite(value).all()):
            faults.append(f"{name} contains NaN or infinite values")
    if faults:
        raise RequestError(f"{path} does not fit '{what}': {'; '.join(faults[:6])}.")
    module.load_state_dict(tensors, strict=True)


def read_guarantees(source: Path, config: dict[str, Any]) -> list[Guarantee]:
    """Read what a model was calibrated for; each must fit its methods and its grid."""
    (h, w), methods = config["identity"]["backbone"]["grid"], config["identity"]["selectors"]
    try:
        guarantees = [Guarantee.from_json(values) for values in config.get("guarantees", [])]
    except (KeyError, TypeError, RequestError) as error:
        raise RequestError(f"{source / CONFIG} is damaged: its guarantees cannot be read ({error}). {_COPY_AGAIN}") from None
    for guarantee in guarantees:
        if guarantee.selector not in methods or guarantee.most > h * w:
            raise RequestError(f"{source / CONFIG} is damaged: '{guarantee}' does not fit its methods and its grid. {_COPY_AGAIN}")
    return guarantees


def read_card(folder: Path) -> str:
    path = folder / CARD
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError:
        raise RequestError(f"{path} is damaged: it is not UTF-8 text. Copy the model folder again, or delete this file.") from None


def backbone_config(config: dict[str, Any], source: Path, weights: Path | str | None, name: str = "backbone") -> BackboneConfig:
    """Read the settings of the backbone `name`; without `weights` its file is looked for by name and hash."""
    stored = config[name]["weights"] if weights is None else weights
    try:
        settings = BackboneConfig(**{**config[name], "weights": None if stored is None else Path(stored)})
    except (TypeError, RequestError) as error:
        raise RequestError(f"{source / CONFIG} does not describe a backbone of this version: {error}.") from None
    return settings if weights is not None else located(settings, config["identity"][name]["weights"], source)


def located(config: BackboneConfig, sha256: str, beside: Path | None = None) -> BackboneConfig:
    """Point a configuration that was read from a file to the weights with this hash on this machine, or in the folder `beside`.

    Stores and models are shared, so they name weights by file name and hash. Where the file is, only this user's machine knows.
    """
    known = remembered(sha256)
    if config.weights is not None:
        places = [config.weights] if config.weights.is_absolute() else []
        places += [beside / config.weights.name] if beside is not None else []
        return replace(config, weights=next((place for place in [*places, *known] if place.is_file()), config.weights))
    if config.name.startswith(HUB):
        homes = (f"{HUB}{path.parent}" for path in known if path.parent.name == config.name.removeprefix(HUB))
        return replace(config, name=next(homes, config.name))
    folders = (str(path.parent) for path in known if path.parent.name == Path(config.name).name)
    return replace(config, name=next((folder for folder in folders if find_recipe(folder) is not None), config.name))
