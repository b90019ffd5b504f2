"""The saved model: where it is (folder, run, package, hub), how its folder is written, and every check before it is read.

The folder has `config.json`, `model.safetensors`, `README.md` and, if the model has several methods, `heads.safetensors`. What must
agree is stored twice, in the configuration and in the headers of the tensor files. The configuration carries a checksum of itself
and the hashes of the tensor files. An edited, mixed-up, damaged or foreign file is therefore rejected by name before anything is
built from it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors.torch import save
from torch import Tensor, nn

from medtokenbudget import __version__
from medtokenbudget.backbone.backbone import located
from medtokenbudget.config import NOTICE, BackboneConfig
from medtokenbudget.errors import MismatchError, RequestError, WorkError, first_line
from medtokenbudget.escaping import markdown_text
from medtokenbudget.files import dotted, read_json, sha256_file, sha256_json, unsealed, write_safetensors, write_sealed, write_text
from medtokenbudget.heads import create_head
from medtokenbudget.hub import fetch
from medtokenbudget.locks import exclusive
from medtokenbudget.model.guarantee import Guarantee
from medtokenbudget.routing import create_selector, selector_class
from medtokenbudget.training.classifier import RoutedClassifier
from medtokenbudget.training.familiarity import Familiarity

FORMAT = "medtokenbudget-model"
FORMAT_VERSION = 3
CONFIG, TENSORS, HEADS, CARD = "config.json", "model.safetensors", "heads.safetensors", "README.md"
ROUTER = "router"
"""Folder of the router inside the folder of a model that is routed early."""
SHIPPED = {"dermoscopy": Path(__file__).parent / "dermoscopy"}
"""Models that come with the package. Their names win over a folder of the same name in the working directory (write ./NAME)."""
_FAMILIARITY = "familiarity."
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(name: str | Path, revision: str | None = None) -> Path:
    """Find the folder of a saved model.

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
    return _download(str(name), revision)


def _download(repo_id: str, revision: str | None = None) -> Path:
    """Download a model's files into the hub's cache; a model that is already there needs no network."""
    folder = _fetch(repo_id, CONFIG, revision).parent
    contents = read_config(folder)
    for name in (*contents["files"], CARD):
        _fetch(repo_id, name, revision)
    if "route" in contents["identity"]["backbone"]:  # routed early: the router is a model inside the folder
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


def write_folder(
    folder: Path, identity: dict[str, Any], settings: dict[str, Any], tensors: dict[str, dict[str, Tensor]], card: str
) -> None:
    """Write the folder; `tensors` maps a file name to its tensors, `identity` is what every file must agree on."""
    files = {}
    for name, values in tensors.items():
        whole = {key: value.detach().cpu().contiguous() for key, value in sorted(values.items())}
        # One key only: safetensors writes several in an order that changes from call to call.
        header = {"medtokenbudget": json.dumps(identity, sort_keys=True)}
        write_safetensors(folder / name, save(whole, header))
        files[name] = sha256_file(folder / name)
    if HEADS not in tensors:
        (folder / HEADS).unlink(missing_ok=True)
    write_text(folder / CARD, card or _short_card(identity))
    config = {"format": FORMAT, "format_version": FORMAT_VERSION, "version": __version__, "identity": identity, "files": files}
    # The configuration is written last: a folder left behind by a crash has none and is rejected.
    write_sealed(folder / CONFIG, {**config, **settings})


def _short_card(identity: dict[str, Any]) -> str:
    """Write the card of a model that was not saved from a run and so has no results to show."""
    return (
        f"# MedTokenBudget model\n\n{NOTICE} This model was not evaluated in a run.\n\n"
        f"- backbone: {identity['backbone']['name']}, weights sha256 {identity['backbone']['weights']}\n"
        f"- classes: {', '.join(map(markdown_text, identity['classes'])) or 'none: a router without a head'}\n"
        f"- main method: {identity['main']}\n"
        f"- methods: {', '.join(identity['selectors'])}\n"
    )


def write_guarantees(folder: Path, guarantees: Sequence[Guarantee]) -> None:
    """Write guarantees into the `config.json` of a saved model; the tensors stay as they are."""
    with exclusive(folder):
        write_sealed(folder / CONFIG, {**read_config(folder), "guarantees": [guarantee.to_json() for guarantee in guarantees]})


def describe(classifier: RoutedClassifier) -> dict[str, Any]:
    """Describe the classifier as JSON values: all that is needed to build it again, apart from its tensors."""
    selector, head = classifier.selector, classifier.head
    described = None if head is None else {"name": head.name, "options": head.options()}
    return {"selector": selector.name, "options": selector.options(), "head": described}


def tensors_of(
    classifiers: Mapping[str, RoutedClassifier], main: str, familiarity: Familiarity | None = None
) -> dict[str, dict[str, Tensor]]:
    """Collect the tensors of each file: `selector.*` and `head.*` of the main method, those of others after `<method>/`.

    What tells unfamiliar images is in the main file as `familiarity.*`.
    """
    files: dict[str, dict[str, Tensor]] = {TENSORS: _cpu_state(classifiers[main])}
    if familiarity is not None:
        files[TENSORS] |= {f"{_FAMILIARITY}{name}": value for name, value in _cpu_state(familiarity).items()}
    for method, classifier in classifiers.items():
        # A router without parameters and head, such as the control `center`, has no tensors.
        if method != main and (state := _cpu_state(classifier)):
            files.setdefault(HEADS, {}).update({f"{method}/{name}": value for name, value in state.items()})
    return files


def _cpu_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in module.state_dict().items()}


def fingerprint(identity: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> str:
    """Hash a whole model: what its files agree on, and every number in them."""
    digest = hashlib.sha256(sha256_json(identity).encode())
    for file in sorted(tensors):
        for name, value in sorted(tensors[file].items()):
            digest.update(f"{file}/{name}{list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check the `config.json` of a saved model."""
    path = folder / CONFIG
    if not path.is_file():
        raise RequestError(f"{folder} is not a saved model: it has no {CONFIG}. The model of a run is in RUN/model.")
    config = read_json(path)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise RequestError(f"{path} is not the configuration of a MedTokenBudget model. Copy the model folder again.")
    _check_version(path, config)
    config = unsealed(path, config, "Copy the model folder again, or train the model again.")
    check_config(path, config)
    return config


def _check_version(path: Path, config: dict[str, Any]) -> None:
    version = config.get("format_version")
    if version == FORMAT_VERSION:
        return
    newer = isinstance(version, int) and version > FORMAT_VERSION
    advice = (
        f"Install medtokenbudget {config.get('version')} or newer."
        if newer
        else "Train the model again: `mtb train MANIFEST --store STORE --out NEW_RUN`."
    )
    raise RequestError(f"{path} has model format version {version}, but this program reads version {FORMAT_VERSION}. {advice}")


def read_tensors(folder: Path, name: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of one file; a file that is missing, damaged, or part of another model is rejected by name."""
    path = folder / name
    if not path.is_file():
        raise RequestError(f"{path} is missing. Copy the whole model folder again.")
    try:
        with safetensors.safe_open(str(path), framework="pt") as reader:
            header = reader.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise RequestError(f"{path} is damaged or not a safetensors file ({error}). Copy the model folder again.") from None
    if "medtokenbudget" not in header:
        raise RequestError(f"{path} was not written by medtokenbudget. Replace it with the {name} that belongs to this model.")
    try:
        identity = json.loads(header["medtokenbudget"])
        if not isinstance(identity, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise RequestError(f"{path} is damaged: its header cannot be read. Copy the model folder again.") from None
    check_identity(f"{path} and {CONFIG}", identity, config["identity"])
    if sha256_file(path) != config["files"].get(name):
        raise RequestError(f"{path} is damaged: its hash is not the one in {CONFIG}. Copy the model folder again.")
    return safetensors.torch.load_file(str(path))


def check_identity(what: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise an error that shows the difference if backbone, preprocessing, classes or methods do not agree."""
    if expected == found:
        return
    raise MismatchError.between(
        what,
        dotted(expected),
        dotted(found),
        "Use the files as they were saved. To change classes, methods or backbone, train again.",
    )


def read_card(folder: Path) -> str:
    """Read the text of `README.md`; empty if there is none."""
    path = folder / CARD
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError:
        raise RequestError(f"{path} is damaged: it is not UTF-8 text. Copy the model folder again, or delete this file.") from None


def backbone_config(config: dict[str, Any], source: Path, weights: Path | str | None) -> BackboneConfig:
    """Read the settings of the backbone; without `weights` its file is looked for by name and hash."""
    values = config["backbone"]
    stored = values.get("weights") if weights is None else weights
    try:
        settings = BackboneConfig(**{**values, "weights": None if stored is None else Path(stored)})
    except TypeError as error:
        raise RequestError(f"{source / CONFIG} does not describe a backbone of this version: {error}.") from None
    return settings if weights is not None else located(settings, config["identity"]["backbone"]["weights"], source)


def take_familiarity(identity: dict[str, Any], files: dict[str, dict[str, Tensor]], source: Path) -> Familiarity | None:
    """Build what tells unfamiliar images and remove its tensors from `files`; None if the model was saved without it."""
    tensors = {name: files[TENSORS].pop(name) for name in list(files[TENSORS]) if name.startswith(_FAMILIARITY)}
    if not tensors:
        return None
    basis = tensors.get(f"{_FAMILIARITY}image.basis")
    rank = basis.shape[1] if basis is not None and basis.ndim == 2 else 1
    built = Familiarity(identity["backbone"]["dim"], rank)
    _fill(built, {name.removeprefix(_FAMILIARITY): value for name, value in tensors.items()}, source / TENSORS, _FAMILIARITY[:-1])
    return built


def build(identity: dict[str, Any], files: dict[str, dict[str, Tensor]], source: Path) -> dict[str, RoutedClassifier]:
    """Build the classifiers that `identity` describes from the tensors in `files`; every tensor must fit and be used."""
    dim, classes = identity["backbone"]["dim"], len(identity["classes"])
    built: dict[str, RoutedClassifier] = {}
    unused = {(file, name) for file, values in files.items() for name in values}
    for method, described in identity["selectors"].items():
        file, prefix = (TENSORS, "") if method == identity["main"] else (HEADS, f"{method}/")
        classifier = _empty(described, dim, classes, source)
        tensors = {name[len(prefix) :]: value for name, value in files.get(file, {}).items() if name.startswith(prefix)}
        unused -= {(file, prefix + name) for name in tensors}
        _fill(classifier, tensors, source / file, method)
        built[method] = classifier
    if unused:
        names = ", ".join(sorted(name for _, name in unused)[:6])
        raise RequestError(f"{source} contains tensors that no method uses: {names}. Copy the whole model folder again.")
    return built


def _empty(described: dict[str, Any], dim: int, classes: int, source: Path) -> RoutedClassifier:
    """Build a classifier with the described architecture and untrained parameters."""
    try:
        name, options, head = described["selector"], described["options"], described["head"]
        learned = {"dim": dim} if selector_class(name).learns else {}
        selector = create_selector(name, **learned, **options)
        return RoutedClassifier(selector, None if head is None else create_head(head["name"], dim, classes, **head["options"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"{source / CONFIG} does not describe its methods correctly: {error}. Save the model again.") from None


def _fill(module: nn.Module, tensors: dict[str, Tensor], path: Path, method: str) -> None:
    expected = module.state_dict()
    faults = [f"{name} is missing" for name in expected if name not in tensors]
    faults += [f"{name} is not part of this model" for name in tensors if name not in expected]
    faults += [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(value.shape)}"
        for name, value in expected.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    faults += [f"{name} has numbers of type {value.dtype}" for name, value in tensors.items() if not value.is_floating_point()]
    faults += [
        f"{name} contains NaN or infinite values" for name, value in tensors.items() if not bool(torch.isfinite(value).all())
    ]
    if faults:
        raise RequestError(f"{path} does not fit '{method}': {'; '.join(faults[:6])}.")
    module.load_state_dict(tensors, strict=True)


# The configuration may come from anywhere, so every value is checked before a model is built from it.
Check = tuple[Callable[[Any], bool], str]
"""Whether a value is valid, and what it must be, for the message."""


def _is(*kinds: type) -> Callable[[Any], bool]:
    # In Python True is an int, in JSON it is no number.
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is(int)(value) and 0 < value <= 1_000_000


def _is_finite(value: Any) -> bool:
    return _is(int, float)(value) and math.isfinite(value)


def _is_share(value: Any) -> bool:
    return _is_finite(value) and 0 < value < 1


def _are_names(value: Any) -> bool:
    return _is(list)(value) and all(isinstance(name, str) and name for name in value)


def _is_grid(value: Any) -> bool:
    return _is(list)(value) and len(value) == 2 and all(map(_is_count, value))


def _are_files(value: Any) -> bool:
    return _is(dict)(value) and TENSORS in value and all(n in (TENSORS, HEADS) and _is(str)(h) for n, h in value.items())


OBJECT: Check = (_is(dict), "an object")
NAME: Check = (_is(str), "a name")
HASH: Check = (_is(str), "a hash")
METHOD: Check = (_is(str), "a method")
COUNT: Check = (_is_count, "a positive number")
FINITE: Check = (_is_finite, "a finite number")
_CONFIG: dict[str, Check] = {
    **dict.fromkeys(("identity", "backbone", "train", "info"), OBJECT),
    "files": (_are_files, "the hashes of model.safetensors and, if there are other methods, heads.safetensors"),
}
_IDENTITY: dict[str, Check] = {
    "backbone": OBJECT,
    "classes": (_are_names, "a list of names"),
    "main": METHOD,
    "selectors": (lambda value: _is(dict)(value) and bool(value), "an object with at least one method"),
}
_FINGERPRINT: dict[str, Check] = {
    **{"name": NAME, "weights": HASH, "dim": COUNT, "image_size": COUNT},
    "grid": (_is_grid, "two positive numbers"),
}
_BACKBONE: dict[str, Check] = {"name": NAME, "weights": (_is(str, type(None)), "a path or null"), "image_size": COUNT}
_METHOD: dict[str, Check] = {
    **{"selector": NAME, "options": OBJECT},
    "head": (_is(dict, type(None)), "an object, or null for a router without a head"),
}
_HEAD: dict[str, Check] = {"name": NAME, "options": OBJECT}
_GUARANTEE: dict[str, Check] = {
    "retention": (_is_share, "a number between 0 and 1"),
    "coverage": (lambda value: value is None or _is_share(value), "a number between 0 and 1, or null"),
    "cap": (lambda value: value is None or value == 1 or _is_share(value), "a number in (0, 1], or null"),
    **dict.fromkeys(("threshold", "bound", "kept", "tokens"), FINITE),
    **dict.fromkeys(("minimum", "most", "images", "groups"), COUNT),
    **{"selector": METHOD, "dataset": NAME, "data": HASH, "model": HASH},
}


def check_config(path: Path, config: dict[str, Any]) -> None:
    """Check the types of everything that a model is built from.

    Raises:
        RequestError: A value is missing or of the wrong type; the message names the file and the value.
    """
    _check(path, config, _CONFIG)
    identity = config["identity"]
    _check(path, identity, _IDENTITY, "identity.")
    _check(path, identity["backbone"], _FINGERPRINT, "identity.backbone.")
    _check(path, config["backbone"], _BACKBONE, "backbone.")
    for method, described in identity["selectors"].items():
        where = f"identity.selectors.{method}"
        if not isinstance(described, dict):
            raise _wrong(path, where, "an object")
        _check(path, described, _METHOD, f"{where}.")
        if described["head"] is not None:
            _check(path, described["head"], _HEAD, f"{where}.head.")
        if (described["head"] is None) is bool(identity["classes"]):
            raise _wrong(path, f"{where}.head", "null exactly if identity.classes is empty")
    _check_guarantees(path, config.get("guarantees", []), identity)
    if len(set(identity["classes"])) < len(identity["classes"]):
        repeated = sorted({name for name in identity["classes"] if identity["classes"].count(name) > 1})
        raise RequestError(f"{path} names classes more than once: {', '.join(repeated)}. Train the model again with unique names.")
    if identity["main"] not in identity["selectors"]:
        raise RequestError(f"{path} is damaged: the main method '{identity['main']}' is not one of its methods. Save it again.")


def _check_guarantees(path: Path, values: Any, identity: dict[str, Any]) -> None:
    """Models that were never calibrated have no guarantees."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise _wrong(path, "guarantees", "a list of objects")
    h, w = identity["backbone"]["grid"]
    for number, value in enumerate(values):
        where = f"guarantees.{number}."
        _check(path, value, _GUARANTEE, where)
        if value["selector"] not in identity["selectors"]:
            raise _wrong(path, f"{where}selector", "one of the model's methods")
        if not value["minimum"] <= value["most"] <= h * w:
            raise _wrong(path, f"{where}most", f"between {value['minimum']} and {h * w} patches")


def _check(path: Path, values: dict[str, Any], checks: dict[str, Check], prefix: str = "") -> None:
    missing = [f"{prefix}{name}" for name in checks if name not in values]
    if missing:
        raise RequestError(f"{path} is damaged: it has no {', '.join(missing)}. Save the model again.")
    for name, (valid, expected) in checks.items():
        if not valid(values[name]):
            raise _wrong(path, f"{prefix}{name}", expected)


def _wrong(path: Path, name: str, expected: str) -> RequestError:
    return RequestError(f"{path} is damaged: {name} must be {expected}. Save the model again.")
