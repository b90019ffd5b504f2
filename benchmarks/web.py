"""The page without a server against Python: size, time to the first answer, time per image, and agreement of what is kept.

`python -m benchmarks.web [MODEL] [--manifest M] [--n 40]` exports the site of a model (default: the packaged router), opens it in
Chromium with one thread and asks both for the same images (default: drawn ones), in turns. Needs Chromium and npm.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright

import medtokenbudget as mtb
from medtokenbudget.data import Manifest
from medtokenbudget.serve.samples import SAMPLES, sample_files
from medtokenbudget.serve.service import Question, Service
from medtokenbudget.serve.site import find_runtime, write_site

BUDGET = 0.3
LARGEST, FIRST, NEXT, RATIO = 35.0, 3.0, 1.5, 4.0
"""Goals: megabytes of the site, seconds to the first answer after loading, seconds per image, times PyTorch on one thread."""
ROUTE = """async ([image, mask]) => {
    const { engine } = await import(new URL("static/engine.js", document.baseURI).href);
    const file = (data) => data && new Blob([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))]);
    const [first, second] = [file(image), file(mask)];
    const start = performance.now();
    const answer = await engine.route(first, second ?? undefined, []);
    const seconds = (performance.now() - start) / 1000;
    URL.revokeObjectURL(answer.image.preview);
    return { seconds, answer: { ...answer, image: null } };
}"""


@dataclass
class Found:
    """What was measured over all images; `kept` is the share of the patches kept by Python that the page kept too."""

    page: list[float] = field(default_factory=list)
    torch: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    probability: list[float] = field(default_factory=list)
    retention: list[float] = field(default_factory=list)

    def add(self, found: dict[str, Any], expected: dict[str, Any], main: str) -> None:
        """Compare two answers for one image, of the main method at the budget."""
        mine, theirs = (next(row for row in answer["selectors"] if row["name"] == main) for answer in (found, expected))
        place, k = expected["budgets"].index(BUDGET), theirs["k"][expected["budgets"].index(BUDGET)]
        self.kept.append(len({*mine["order"][:k]} & {*theirs["order"][:k]}) / k)
        if theirs["probabilities"] is not None:
            pairs = zip(mine["probabilities"][place], theirs["probabilities"][place])
            self.probability.append(max(abs(a - b) for a, b in pairs))
        if theirs["retention"] is not None:
            self.retention.append(100 * abs(mine["retention"][place] - theirs["retention"][place]))

    def lines(self) -> Iterator[str]:
        yield f"images: {len(self.kept)}"
        same, worst_image = 100 * statistics.mean(self.kept), 100 * min(self.kept)
        yield f"kept patches at {BUDGET:g} that are the same: {same:.2f} % (worst image {worst_image:.1f} %)"
        if self.probability:
            yield f"probabilities: largest difference {max(self.probability):.4f}"
        if self.retention:
            mean, worst = statistics.mean(self.retention), max(self.retention)
            yield f"retention: mean difference {mean:.3f} points, largest {worst:.2f} ({len(self.retention)} images with a lesion)"
        page, alone = statistics.median(self.page), statistics.median(self.torch)
        yield f"page {page:.3f} s an image (goal {NEXT} s)"
        yield f"PyTorch on one thread {alone:.3f} s an image: the page takes {page / alone:.2f} times as long (goal {RATIO:g})"


def images(manifest: Path | None, n: int) -> list[tuple[bytes, bytes | None]]:
    """Image and mask files: n of a manifest, evenly spaced, or the drawn samples."""
    if manifest is None:
        return [sample_files(name) for name in SAMPLES]
    read = Manifest.read(manifest)
    rows = range(0, len(read.rows), max(1, len(read.rows) // n))[:n]
    paths = [(read.image_path(row), read.mask_path(row)) for row in rows]
    return [(image.read_bytes(), None if mask is None else mask.read_bytes()) for image, mask in paths]


@contextmanager
def opened(site: Path) -> Iterator[Page]:
    """The site in Chromium."""
    handler = partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        start = time.perf_counter()
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        page.wait_for_selector("#app:not([hidden])", state="attached", timeout=120_000)
        loaded = time.perf_counter()
        page.wait_for_selector("#app[data-ready]", timeout=120_000)
        print(
            f"loaded after {loaded - start:.2f} s, first answer {time.perf_counter() - loaded:.2f} s later (goal {FIRST} s)",
            flush=True,
        )
        page.wait_for_function("document.querySelectorAll('.sample img[src]').length === 8", timeout=120_000)
        yield page
        browser.close()
        server.shutdown()


def measure(page: Page, service: Service, files: Sequence[tuple[bytes, bytes | None]]) -> Found:
    """Ask the page and Python for every image, in turns."""
    found = Found()
    for image, mask in files:
        start = time.perf_counter()
        expected = service.answer(Question(image, mask))
        found.torch.append(time.perf_counter() - start)
        encoded = [None if data is None else base64.b64encode(data).decode("ascii") for data in (image, mask)]
        answered = page.evaluate(ROUTE, encoded)
        found.page.append(answered["seconds"])
        found.add(answered["answer"], expected, service.model.main)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="dermoscopy")
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--n", type=int, default=40)
    parser.add_argument("--site", type=Path, help="An exported site of the model, instead of a new one.")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = mtb.load(options.model, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        site = options.site or Path(folder) / "site"
        if options.site is None:
            write_site(model, site, find_runtime())
        size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) / 1e6
        print(f"page, model and runtime: {size:.1f} MB (goal {LARGEST:g} MB)", flush=True)
        with opened(site) as page:
            model.tokens(sample_files("mel")[0])  # the first pass loads the backbone and is not timed
            for line in measure(page, Service(model), images(options.manifest, options.n)).lines():
                print(line)


if __name__ == "__main__":
    main()
