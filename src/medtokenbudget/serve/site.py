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
from pathlib import Path
from typing import Any

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import exclusive, sha256_file, sha256_json, write_bytes, write_json, write_text
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.model.onnx import HEADS_GRAPH, TOKENS_GRAPH, WebGraphs, write_web_graphs
from medtokenbudget.runtime import say
from medtokenbudget.serve.samples import offers, sample_files
from medtokenbudget.serve.service import STATIC, Service, index_page

DESCRIPTION = "site.json"
WORKER = "service-worker.js"
INTERPOLATIONS = ("bilinear", "bicubic", "lanczos")
"""Filters that the page has; they equal Pillow's to the last bit."""
PARTS = ("index.html", "static", "model", "runtime", "samples")
"""What a site consists of, besides its description and the service worker."""
MAX_BYTES = 100_000_000

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
ADVICE = f"Run `npm pack {PACKAGE}@{VERSION}`, unpack the file and pass its folder `package`."

SERVICE_ENGINE = '<meta name="mtb-engine" content="service">'
# WebAssembly needs 'wasm-unsafe-eval'; scripts still come only from the site itself.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "worker-src 'self' blob:; base-uri 'none'; form-action 'none'"
)
PAGE_ENGINE = (
    f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">\n'
    '<meta name="referrer" content="no-referrer">\n'
    '<meta name="mtb-engine" content="page">'
)


def write_site(model: MedTokenBudget, out: Path | str, runtime: Path, demo: bool = False) -> WebGraphs:
    """Write the site of a model to a folder that is empty, new, or has an earlier site, which is replaced.

    `runtime` is the folder from `find_runtime`; with `demo` the page says that the model was trained on synthetic images. The
    result says which methods were left out because they cannot run in a page.
    """
    folder = Path(out)
    ours = {*PARTS, DESCRIPTION, WORKER}
    # Hidden entries such as .git may stay.
    foreign = [path.name for path in folder.iterdir() if path.name not in ours and path.name[0] != "."] if folder.is_dir() else []
    if foreign or folder.is_file():
        what = f"has other files ({', '.join(sorted(foreign)[:3])})" if foreign else "is a file"
        raise RequestError(f"{folder} {what}. Choose an empty folder, or one with an earlier site, as `out`.")
    preprocessing = model.backbone.preprocessing.to_dict()
    if preprocessing["interpolation"] not in INTERPOLATIONS:
        known = ", ".join(INTERPOLATIONS)
        raise RequestError(f"The page cannot resize images by '{preprocessing['interpolation']}', only by {known}.")
    with exclusive(folder):
        for name in ("static", "samples", "model"):
            shutil.rmtree(folder / name, ignore_errors=True)
        graphs = write_web_graphs(model, folder / "model")
        for name in HASHES:
            write_bytes(folder / "runtime" / name, (runtime / name).read_bytes())
        for source in STATIC.rglob("*"):
            if source.is_file() and source.name not in ("index.html", WORKER):
                write_bytes(folder / "static" / source.relative_to(STATIC), source.read_bytes())
        page = index_page()
        assert page.count(SERVICE_ENGINE) == 1, "the page names its engine once"
        write_text(folder / "index.html", page.replace(SERVICE_ENGINE, PAGE_ENGINE))
        service = Service(model, MAX_BYTES, demo=demo)
        described = service.describe()
        described["selectors"] = [row for row in described["selectors"] if row["name"] in graphs.methods]
        for row in described["selectors"]:
            selector = model.classifier(row["name"]).selector
            seer = service.seer(row["name"])
            finer = seer is not None and seer.finer
            row |= {
                "selector": selector.name,
                # NoPruning ignores the budget.
                "keeps_all": selector.count(0.5, 10_000) == 10_000,
                # A finer map than the scores is in the graph for the main method alone.
                "lesion_map": None if seer is None or (finer and row["name"] != model.main) else "lesion" if finer else "scores",
            }
        rule = ("selector", "retention", "coverage", "threshold", "relative", "minimum", "most")
        values = {
            "model": described,
            "preprocessing": preprocessing,
            "graphs": {
                "files": {"tokens": f"model/{TOKENS_GRAPH}"} | ({"heads": f"model/{HEADS_GRAPH}"} if model.has_head else {}),
                "ranked": graphs.ranked,
                "fixed": graphs.fixed,
                "methods": graphs.methods,
                "promises": [{name: getattr(one, name) for name in rule} for one in service.guarantees],
            },
            "runtime": {"script": f"runtime/{SCRIPT}", "binary": f"runtime/{BINARY}"},
            "samples": [_write_sample(folder, offer) for offer in offers(model.classes)],
        }
        write_description(folder, values)
    return graphs


def _write_sample(folder: Path, offer: dict[str, Any]) -> dict[str, Any]:
    name = offer["id"]
    paths = {"image": f"samples/{name}.jpg", "mask": f"samples/{name}_mask.png"}
    for path, data in zip(paths.values(), sample_files(name)):
        write_bytes(folder / path, data)
    return offer | paths


def write_description(folder: Path, values: dict[str, Any]) -> None:
    """Write the description with the hash of every file, then the service worker that caches them; the version covers them all."""
    paths = [path for name in PARTS for path in (folder / name, *(folder / name).rglob("*"))]
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(paths)
        if path.is_file() and path.name[0] != "."
    }
    worker = (STATIC / "page" / WORKER).read_text(encoding="utf-8")
    version = sha256_json({"files": files, "values": values, "worker": worker})[:16]
    write_json(folder / DESCRIPTION, {"version": version, "files": files, **values})
    listed = json.dumps({"version": version, "files": [*files, DESCRIPTION]})
    write_text(folder / WORKER, f"const SITE = {listed};\n{worker}")


def find_runtime(folder: Path | None = None) -> Path:
    """Find the folder of the runtime: in `folder` (the unpacked package or its `dist`), or the cache, which npm fills if needed."""
    if folder is None:
        cache = cache_folder()
        if not _complete(cache):
            _fetch(cache)
        return cache
    for place in (folder, folder / "dist", folder / "package" / "dist", folder / PACKAGE / "dist"):
        if all((place / name).is_file() for name in HASHES):
            if not _complete(place):
                raise RequestError(f"{place} has another version of {PACKAGE} than {VERSION}, or a damaged one. {ADVICE}")
            return place
    raise RequestError(f"The `runtime` folder {folder} does not have {SCRIPT} and {BINARY} of {PACKAGE} {VERSION}. {ADVICE}")


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "medtokenbudget" / f"{PACKAGE}-{VERSION}"


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() and sha256_file(folder / name) == expected for name, expected in HASHES.items())


def _fetch(cache: Path) -> None:
    needs = f"A page without a server needs {PACKAGE} {VERSION}, which is not in {cache}"
    npm = shutil.which("npm")
    if npm is None:
        raise WorkError(f"{needs}, and npm is not installed to fetch it. Install npm, or pass `runtime`. {ADVICE}")
    say(f"Fetching {PACKAGE} {VERSION} with npm (33 MB, once) ...")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", folder, "--silent"]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder, check=True)
            (archive,) = Path(folder).glob("*.tgz")
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            output = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise WorkError(f"{needs}, and npm did not fetch it: {output[-1]}. Connect, or pass `runtime`. {ADVICE}") from None
        unpack(archive, cache)


def unpack(archive: Path, folder: Path) -> None:
    """Check the package archive and write its two files to `folder`."""
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode("ascii")
    if digest != INTEGRITY:
        raise WorkError(f"The archive of {PACKAGE} {VERSION} has SHA-512 {digest}, not the pinned one, so it is not used.")
    with tarfile.open(archive) as package:
        for name in HASHES:
            member = package.extractfile(f"package/dist/{name}")
            assert member is not None, "the hash of the archive says that it is there"
            write_bytes(folder / name, member.read())
