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
import torch
from safetensors.torch import load_file, save
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
            raise RequestError(
                f"The run {name} has no saved model, because it is unfinished or has no learned method. "
                "Run its command again, or train a model with `mtb train`."
            )
        return inside if (inside / CONFIG).exists() else folder
    if folder.exists():
        raise RequestError(f"{name} is a file. Pass the folder of a saved model (with {CONFIG}, model.safetensors, README.md).")
    looks_local = str(name).startswith(".") or (folder.parent != Path() and folder.parent.is_dir())
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or looks_local:
        raise RequestError(
            f"There is no model folder {name}, and it is neither a hub id such as owner/name nor "
            f"a model of the package ({', '.join(SHIPPED)})."
        )
    return _download(str(name), revision)


def _download(repo_id: str, revision: str | None) -> Path:
    """Download a model's files into the hub's cache; a model that is already there needs no network."""
    folder = _fetch(repo_id, CONFIG, revision).parent
    config = read_config(folder)
    names = [*config["files"], CARD]
    if "route" in config["identity"]["backbone"]:  # routed early: the router is a model inside the folder
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
    files = {}
    for name, values in tensors.items():
        # One key only: safetensors writes several in an order that changes from call to call.
        header = {"medtokenbudget": json.dumps(identity, sort_keys=True)}
        write_safetensors(folder / name, save({key: values[key].contiguous() for key in sorted(values)}, header))
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
    """Write guarantees into the `config.json` of a saved model; its tensors are not touched."""
    with exclusive(folder):
        write_sealed(folder / CONFIG, {**read_config(folder), "guarantees": [guarantee.to_json() for guarantee in guarantees]})


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
    files: dict[str, dict[str, Tensor]] = {TENSORS: {}}
    for file, prefix, module in parts:
        for name, value in module.state_dict().items():
            # Only now, because controls such as `center` have no tensors, and a file without any is not written.
            files.setdefault(file, {})[f"{prefix}{name}"] = value.detach().cpu()
    return files


def fingerprint(identity: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> str:
    """Hash a whole model: what its files agree on, and every number in them."""
    digest = hashlib.sha256(sha256_json(identity).encode())
    for file in sorted(tensors):
        for name, value in sorted(tensors[file].items()):
            digest.update(f"{file}/{name}{list(value.shape)}".encode())
            digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check the `config.json` of a saved model."""
    path = folder / CONFIG
    if not path.is_file():
        raise RequestError(f"{folder} is not a saved model: it has no {CONFIG}. The model of a run is in RUN/model.")
    config = read_json(path)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise RequestError(f"{path} is not the configuration of a MedTokenBudget model. {_COPY_AGAIN}")
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        advice = f"Install medtokenbudget {config.get('version')} or newer." if newer else "Train the model again with `mtb train`."
        raise RequestError(f"{path} has model format version {version}, but this program reads version {FORMAT_VERSION}. {advice}")
    config = unsealed(path, config, "Copy the model folder again, or train the model again.")
    _check_config(path, config)
    return config


def read_parts(source: Path, config: dict[str, Any]) -> tuple[dict[str, RoutedClassifier], Familiarity | None]:
    """Build what `config` describes from the tensor files of the folder; every tensor must fit and be used."""
    identity, files = config["identity"], {name: _read_tensors(source / name, config) for name in config["files"]}
    dim, classes = identity["backbone"]["dim"], len(identity["classes"])

    def taken(file: str, prefix: str) -> dict[str, Tensor]:
        names = [name for name in files.get(file, {}) if name.startswith(prefix)]
        return {name.removeprefix(prefix): files[file].pop(name) for name in names}

    familiarity = None
    if tensors := taken(TENSORS, "familiarity."):
        basis = tensors.get("image.basis")
        familiarity = Familiarity(dim, rank=basis.shape[1] if basis is not None and basis.ndim == 2 else 1)
        _fill(familiarity, tensors, source / TENSORS, "familiarity")
    classifiers = {}
    for method, described in identity["selectors"].items():
        classifiers[method] = _untrained(described, dim, classes, source)
        file, prefix = (TENSORS, "") if method == identity["main"] else (HEADS, f"{method}/")
        _fill(classifiers[method], taken(file, prefix), source / file, method)
    if unused := sorted(name for values in files.values() for name in values):
        raise RequestError(f"{source} contains tensors that no method uses: {', '.join(unused[:6])}. {_COPY_AGAIN}")
    return classifiers, familiarity


def _read_tensors(path: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of one file; a file that is missing, damaged, or part of another model is rejected by name."""
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
    if identity != config["identity"]:
        advice = "Use the files of one saved model. To change classes, methods or backbone, train again."
        raise MismatchError.between(f"{path} and {CONFIG}", dotted(identity), dotted(config["identity"]), advice)
    if sha256_file(path) != config["files"][path.name]:
        raise RequestError(f"{path} is damaged: its hash is not the one in {CONFIG}. {_COPY_AGAIN}")
    return load_file(str(path))


def _untrained(described: dict[str, Any], dim: int, classes: int, source: Path) -> RoutedClassifier:
    """Build a classifier with the described architecture and untrained parameters."""
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


def read_card(folder: Path) -> str:
    """Read the text of `README.md`; empty if there is none."""
    path = folder / CARD
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError:
        raise RequestError(f"{path} is damaged: it is not UTF-8 text. Copy the model folder again, or delete this file.") from None


def backbone_config(config: dict[str, Any], source: Path, weights: Path | str | None) -> BackboneConfig:
    """Read the settings of the backbone; without `weights` its file is looked for by name and hash."""
    stored = config["backbone"]["weights"] if weights is None else weights
    try:
        settings = BackboneConfig(**{**config["backbone"], "weights": None if stored is None else Path(stored)})
    except TypeError as error:
        raise RequestError(f"{source / CONFIG} does not describe a backbone of this version: {error}.") from None
    return settings if weights is not None else located(settings, config["identity"]["backbone"]["weights"], source)


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


def _are_files(value: Any) -> bool:
    return _is(dict)(value) and TENSORS in value and all(n in (TENSORS, HEADS) and _is(str)(h) for n, h in value.items())


_OBJECT: Check = (_is(dict), "an object")
_NAME: Check = (_is(str), "a name")
_HASH: Check = (_is(str), "a hash")
_COUNT: Check = (_is_count, "a positive number")
_CONFIG: dict[str, Any] = {
    "identity": {
        "backbone": {
            **{"name": _NAME, "weights": _HASH, "dim": _COUNT, "image_size": _COUNT},
            "grid": (lambda value: _is(list)(value) and len(value) == 2 and all(map(_is_count, value)), "two positive numbers"),
        },
        "classes": (lambda value: _is(list)(value) and all(isinstance(n, str) and n for n in value), "a list of names"),
        "main": (_is(str), "a method"),
        "selectors": (lambda value: _is(dict)(value) and bool(value), "an object with at least one method"),
    },
    "backbone": {"name": _NAME, "weights": (_is(str, type(None)), "a path or null"), "image_size": _COUNT},
    "train": _OBJECT,
    "info": _OBJECT,
    "files": (_are_files, "the hashes of model.safetensors and, if there are other methods, heads.safetensors"),
}
_METHOD: dict[str, Any] = {
    **{"selector": _NAME, "options": _OBJECT},
    "head": (_is(dict, type(None)), "an object, or null for a router without a head"),
}
_GUARANTEE: dict[str, Any] = {
    "retention": (_is_share, "a number between 0 and 1"),
    "coverage": (lambda value: value is None or _is_share(value), "a number between 0 and 1, or null"),
    "cap": (lambda value: value is None or value == 1 or _is_share(value), "a number in (0, 1], or null"),
    **dict.fromkeys(("threshold", "bound", "kept", "tokens"), (_is_finite, "a finite number")),
    **dict.fromkeys(("minimum", "most", "images", "groups"), _COUNT),
    **{"selector": (_is(str), "a method"), "dataset": _NAME, "data": _HASH, "model": _HASH},
}


def _check_config(path: Path, config: dict[str, Any]) -> None:
    """Raise a RequestError that names the file and the value if something that a model is built from is missing or wrong."""
    _check(path, config, _CONFIG)
    identity, guarantees = config["identity"], config.get("guarantees", [])
    classes, methods, (h, w) = identity["classes"], identity["selectors"], identity["backbone"]["grid"]
    for method, described in methods.items():
        where = f"identity.selectors.{method}"
        _check(path, described, _METHOD, where)
        if described["head"] is not None:
            _check(path, described["head"], {"name": _NAME, "options": _OBJECT}, f"{where}.head")
        if (described["head"] is None) is bool(classes):
            raise _wrong(path, f"{where}.head", "null exactly if identity.classes is empty")
    if not isinstance(guarantees, list):
        raise _wrong(path, "guarantees", "a list of objects")
    for number, value in enumerate(guarantees):
        where = f"guarantees.{number}"
        _check(path, value, _GUARANTEE, where)
        if value["selector"] not in methods:
            raise _wrong(path, f"{where}.selector", "one of the model's methods")
        if not value["minimum"] <= value["most"] <= h * w:
            raise _wrong(path, f"{where}.most", f"between {value['minimum']} and {h * w} patches")
    if repeated := sorted({name for name in classes if classes.count(name) > 1}):
        raise RequestError(f"{path} names classes more than once: {', '.join(repeated)}. Train the model again with unique names.")
    if identity["main"] not in methods:
        raise RequestError(f"{path} is damaged: the main method '{identity['main']}' is not one of its methods. Save it again.")


def _check(path: Path, value: Any, expected: Any, where: str = "") -> None:
    if not isinstance(expected, dict):
        valid, text = expected
        if not valid(value):
            raise _wrong(path, where, text)
        return
    if not isinstance(value, dict):
        raise _wrong(path, where, "an object")
    places = {name: f"{where}.{name}".lstrip(".") for name in expected}
    if missing := [places[name] for name in expected if name not in value]:
        raise RequestError(f"{path} is damaged: it has no {', '.join(missing)}. Save the model again.")
    for name, inner in expected.items():
        _check(path, value[name], inner, places[name])


def _wrong(path: Path, name: str, expected: str) -> RequestError:
    return RequestError(f"{path} is damaged: {name} must be {expected}. Save the model again.")
