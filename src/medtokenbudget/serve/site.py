"""The explorer as a static site: the page of the service, the model as ONNX graphs, the WebAssembly runtime and drawn samples.

Any static server can host the folder. The page then runs the model in the browser of the person who looks at it. The runtime,
onnxruntime-web, is not part of this package: it is found in a folder or in the cache, or fetched once by npm. Its version and its
hashes are pinned here, so that every site has the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medtokenbudget.errors import RequestError, WorkError, first_line
from medtokenbudget.files import atomic_write, sha256_file, sha256_json, write_json, write_text
from medtokenbudget.locks import exclusive
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.model.web_graphs import HEADS_GRAPH, TOKENS_GRAPH, WebGraphs, write_web_graphs
from medtokenbudget.progress import say
from medtokenbudget.serve.samples import image_bytes, mask_bytes, offers
from medtokenbudget.serve.service import STATIC, Limits, Service, index_page

DESCRIPTION = "site.json"
WORKER = "service-worker.js"
INTERPOLATIONS = ("bilinear", "bicubic", "lanczos")
"""Filters that the page has; they equal Pillow's to the last bit."""
PARTS = ("index.html", "static", "model", "runtime", "samples")
"""What a site consists of, beside its description and the service worker."""
LIMITS = Limits(max_bytes=100_000_000, max_pixels=50_000_000)

PACKAGE = "onnxruntime-web"
VERSION = "1.30.0"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
"""SHA-512 of the package archive, in base64, as package managers write it."""
SCRIPT = "ort.wasm.bundle.min.mjs"
BINARY = "ort-wasm-simd-threaded.wasm"
HASHES = {
    SCRIPT: "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    BINARY: "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
"""SHA-256 of the two files of the package that a site needs."""

SERVICE_ENGINE = '<meta name="mtb-engine" content="service">'
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        # WebAssembly needs 'wasm-unsafe-eval'; scripts still come only from the site itself.
        "script-src 'self' 'wasm-unsafe-eval'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "worker-src 'self' blob:",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
PAGE_ENGINE = (
    f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">\n'
    '<meta name="referrer" content="no-referrer">\n'
    '<meta name="mtb-engine" content="page">'
)


def write_site(model: MedTokenBudget, out: Path | str, runtime: WebRuntime, demo: bool = False) -> WebGraphs:
    """Write the site of a model to a folder; files of an earlier site in it are replaced.

    Args:
        model: The model; methods that cannot run in a page are left out.
        out: Folder to write to: empty, new, or with an earlier site.
        runtime: Files of the WebAssembly runtime.
        demo: Whether the page says that the model was trained on synthetic images.

    Returns:
        What the graphs hold, with the methods that were left out.

    Raises:
        RequestError: If the folder has other files, or the model cannot run in a page.
        WorkError: If a graph differs from the model.
    """
    folder = Path(out)
    _check_folder(folder)
    preprocessing = model.backbone.preprocessing.to_dict()
    if preprocessing["interpolation"] not in INTERPOLATIONS:
        known = ", ".join(INTERPOLATIONS)
        raise RequestError(f"The page cannot resize images by '{preprocessing['interpolation']}', only by {known}.")
    with exclusive(folder):
        for name in ("static", "samples", "model"):
            shutil.rmtree(folder / name, ignore_errors=True)
        graphs = write_web_graphs(model, folder / "model")
        _copy(runtime.script, folder / "runtime" / SCRIPT)
        _copy(runtime.binary, folder / "runtime" / BINARY)
        samples = _write_samples(model, folder)
        _write_page(folder)
        values = {
            "model": _describe(model, graphs, demo),
            "preprocessing": preprocessing,
            "graphs": {
                "files": {"tokens": f"model/{TOKENS_GRAPH}"} | ({"heads": f"model/{HEADS_GRAPH}"} if graphs.has_heads else {}),
                "ranked": graphs.ranked,
                "fixed": graphs.fixed,
                "methods": graphs.methods,
                "promises": _promises(model),
            },
            "runtime": {"script": f"runtime/{SCRIPT}", "binary": f"runtime/{BINARY}"},
            "samples": samples,
        }
        _finish(folder, values)
    return graphs


def _check_folder(folder: Path) -> None:
    ours = {*PARTS, DESCRIPTION, WORKER}
    foreign = [path.name for path in folder.iterdir() if path.name not in ours and path.name[0] != "."] if folder.is_dir() else []
    if foreign or folder.is_file():
        what = f"has other files ({', '.join(sorted(foreign)[:3])})" if foreign else "is a file"
        raise RequestError(f"{folder} {what}. Choose an empty folder, or one with an earlier site, for --out.")


def _copy(source: Path, target: Path) -> None:
    with atomic_write(target) as temporary:
        shutil.copyfile(source, temporary)


def _write_samples(model: MedTokenBudget, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for offer in offers(model.classes):
        name = offer.sample.id
        files = {"image": (f"samples/{name}.jpg", image_bytes(name)), "mask": (f"samples/{name}_mask.png", mask_bytes(name))}
        for path, data in files.values():
            with atomic_write(folder / path) as temporary:
                temporary.write_bytes(data)
        row = {"id": name, "title": offer.title, "label": offer.label, "off_center": offer.sample.off_center}
        rows.append(row | {what: path for what, (path, _) in files.items()})
    return rows


def _write_page(folder: Path) -> None:
    for source in sorted(path for path in STATIC.rglob("*") if path.is_file()):
        if source.name not in ("index.html", WORKER):
            _copy(source, folder / "static" / source.relative_to(STATIC))
    page = index_page()
    assert page.count(SERVICE_ENGINE) == 1, "the page names its engine once"
    write_text(folder / "index.html", page.replace(SERVICE_ENGINE, PAGE_ENGINE))


def _describe(model: MedTokenBudget, graphs: WebGraphs, demo: bool) -> dict[str, Any]:
    described = Service(model, LIMITS, demo).describe()
    shown = [row for row in described["selectors"] if row["name"] in graphs.methods]
    for row in shown:
        selector = model.classifier(row["name"]).selector
        row["selector"] = selector.name
        row["keeps_all"] = selector.count(0.5, 10_000) == 10_000
    return {**described, "selectors": shown}


def _promises(model: MedTokenBudget) -> list[dict[str, Any]]:
    """What was calibrated for this model: the threshold on the scores that keeps each promise."""
    names = ("selector", "retention", "coverage", "threshold", "minimum", "most")
    fingerprint = model.fingerprint
    return [{name: getattr(one, name) for name in names} for one in model.guarantees if one.model == fingerprint]


def _finish(folder: Path, values: dict[str, Any]) -> None:
    """Write the description with the hash of every file, then the service worker that keeps them; the version is of them all."""
    found = [path for name in PARTS for path in _files(folder / name)]
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in sorted(found)
    }
    worker = (STATIC / "page" / WORKER).read_text(encoding="utf-8")
    version = sha256_json({"files": files, "values": values, "worker": worker})[:16]
    write_json(folder / DESCRIPTION, {"version": version, "files": files, **values})
    listed = json.dumps({"version": version, "files": [*files, DESCRIPTION]})
    write_text(folder / WORKER, f"const SITE = {listed};\n{worker}")


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file() and entry.name[0] != "."]


@dataclass(frozen=True)
class WebRuntime:
    """Where the two files are."""

    script: Path
    binary: Path


def find_runtime(folder: Path | None = None) -> WebRuntime:
    """Return the runtime in `folder` (the unpacked package or its `dist`), or else from the cache, which npm fills if needed.

    Raises:
        RequestError: If the folder does not have it, or has another version.
        WorkError: If it is not in the cache and npm cannot fetch it.
    """
    if folder is not None:
        return _given(folder)
    cache = cache_folder()
    if not _complete(cache):
        _fetch(cache)
    return WebRuntime(cache / SCRIPT, cache / BINARY)


def cache_folder() -> Path:
    """Folder of the runtime in the cache of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "medtokenbudget" / f"{PACKAGE}-{VERSION}"


def _given(folder: Path) -> WebRuntime:
    for place in (folder, folder / "dist", folder / "package" / "dist", folder / PACKAGE / "dist"):
        if all((place / name).is_file() for name in HASHES):
            if not _complete(place):
                raise RequestError(f"{place} has another version of {PACKAGE} than {VERSION}, or a damaged one. {_advice()}")
            return WebRuntime(place / SCRIPT, place / BINARY)
    raise RequestError(f"--runtime {folder} does not have {SCRIPT} and {BINARY} of {PACKAGE} {VERSION}. {_advice()}")


def _advice() -> str:
    return f"Run `npm pack {PACKAGE}@{VERSION}`, unpack the file and pass its folder `package`."


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() and sha256_file(folder / name) == expected for name, expected in HASHES.items())


def _fetch(cache: Path) -> None:
    npm = shutil.which("npm")
    needs = f"A page without a server needs {PACKAGE} {VERSION}, which is not in {cache}"
    if npm is None:
        raise WorkError(f"{needs}, and npm is not installed to fetch it. Install npm, or pass --runtime DIR. {_advice()}")
    say(f"Fetching {PACKAGE} {VERSION} with npm (33 MB, once) ...")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", folder, "--silent"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise WorkError(f"{needs}, and npm did not fetch it: {first_line(error)} Pass --runtime DIR. {_advice()}") from None
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            why = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no archive"]
            raise WorkError(f"{needs}, and npm did not fetch it: {why[0]}. Connect, or pass --runtime DIR. {_advice()}")
        unpack(archives[0], cache)


def unpack(archive: Path, folder: Path) -> None:
    """Check the package archive and write its two files to `folder`."""
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode("ascii")
    if found != INTEGRITY:
        raise WorkError(f"The archive of {PACKAGE} {VERSION} has SHA-512 {found}, not the pinned one, so it is not used.")
    with tarfile.open(archive) as package:
        for name in HASHES:
            member = package.extractfile(f"package/dist/{name}")
            assert member is not None, "the hash of the archive says that it is there"
            with atomic_write(folder / name) as temporary:
                temporary.write_bytes(member.read())
