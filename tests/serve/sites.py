"""One exported site for all tests of the page without a server, and a static server for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from medtokenbudget.errors import WorkError
from medtokenbudget.model import Guarantee, MedTokenBudget
from medtokenbudget.serve.site import find_runtime, write_site
from medtokenbudget.training.familiarity import Familiarity
from tests.machine import absent
from tests.small_model import small_model

MAIN = "lats:lesion-first"
BASELINES = ("random", "center", "darkness", "norm", "attention-entropy", "box-prior", "oracle", "no-pruning", "tome")


def site_model(folder: Path) -> MedTokenBudget:
    model = small_model(folder, BASELINES, main=MAIN)
    model.familiarity = Familiarity(model.dim, rank=4)
    with torch.no_grad():
        for part in (model.familiarity.image, model.familiarity.patch):
            part.basis[:4] = torch.eye(4)
        model.familiarity.limit.fill_(9)
    rule = {"cap": None, "threshold": 0.5, "relative": True, "minimum": 8, "most": 60, "selector": MAIN, "model": model.fingerprint}
    evidence = {"bound": 0.05, "kept": 0.95, "tokens": 30.0, "images": 9, "groups": 9, "dataset": "drawn", "data": ""}
    model.guarantees = (Guarantee(0.95, **rule, **evidence),)
    return model


def built_site(factory: pytest.TempPathFactory) -> Path:
    """The site of the small model, built once for all processes that run the tests."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    try:
        runtime = find_runtime()
    except WorkError as error:
        absent(str(error))
    with FileLock(folder.with_name("site.lock"), timeout=300):
        if not (folder / "service-worker.js").exists():
            write_site(site_model(folder.with_name("site-weights")), folder, runtime)
    return folder


class SiteHandler(SimpleHTTPRequestHandler):
    """What `python -m http.server` sends, without its log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(folder: Path, handler: type[SiteHandler] = SiteHandler) -> Iterator[str]:
    """Serve a folder from a thread of this process and give its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join(10)
