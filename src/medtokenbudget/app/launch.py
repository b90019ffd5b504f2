"""From a command to a running server: which model, which address, when to open the browser.

FastAPI and uvicorn are an extra and are imported here only when a server starts.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import threading
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.progress import say

DEMO_MODEL = Path("runs/demo/model")


@dataclass(frozen=True)
class ServeConfig:
    """The server."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but this machine's own needs a token."""
    port: int = 8765
    """Port to listen on; 0 takes a free one."""
    token: str | None = None
    """What clients must send as `Authorization: Bearer TOKEN`."""
    queue: int = 8
    """Requests that may wait for the one that is running; further ones get 503."""
    max_bytes: int = 25_000_000
    """Most bytes of image and mask together."""
    max_pixels: int = 50_000_000
    """Most pixels of an image or a mask."""
    weights: Path | None = None
    """Where the backbone's weights lie on this machine, if not where they lay when the model was saved."""
    device: str = "auto"
    """'auto' takes a GPU when there is one; else 'cpu', 'cuda', ..."""


def require_extra() -> None:
    """FastAPI, uvicorn and the multipart parser, or a message that says how to get them."""
    missing = [name for name in ("fastapi", "uvicorn", "python_multipart") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"serving needs {', '.join(missing)}: pip install 'medtokenbudget[serve]'.")


def serve(model: str | Path | None, config: ServeConfig, open_browser: bool = False) -> None:
    """Serve a model until Ctrl-C. Without one: the demo's, or a page that says how to make it."""
    require_extra()
    _check(config)
    import uvicorn

    from medtokenbudget.app.guard import is_loopback
    from medtokenbudget.app.routes import create_app, guarded

    service, limits = find_service(model, config)
    listener = _listen(config)
    address = _address(config, listener)
    app = guarded(create_app(service, limits, config.queue, config.token), config.token, is_loopback(config.host))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="on"))
    logging.getLogger("medtokenbudget.serve").setLevel(logging.ERROR)
    say(f"explorer: {address}   API: {address}/openapi.json   (Ctrl-C stops)")
    if open_browser:
        # The token travels behind the #, which browsers do not send to anyone.
        page = f"{address}/#token={config.token}" if config.token else address
        threading.Thread(target=_open_when_up, args=(server, page), daemon=True).start()
    server.run(sockets=[listener])


def _check(config: ServeConfig) -> None:
    from medtokenbudget.app.guard import is_loopback

    if not is_loopback(config.host) and not config.token:
        raise RequestError(f"others can reach {config.host}: give a token that clients must send (--token), or leave --host out.")
    if config.token is not None and (not config.token.isascii() or not config.token.isprintable() or " " in config.token):
        raise RequestError("a token consists of printable ASCII characters without spaces.")
    if config.queue < 0 or config.max_bytes < 1 or config.max_pixels < 1 or not 0 <= config.port < 65536:
        raise RequestError("--queue must be at least 0, --max_bytes and --max_pixels at least 1, --port within 0..65535.")


def find_service(model: str | Path | None, config: ServeConfig) -> tuple[Any, Any]:
    """The service (None without a model) and its limits."""
    from medtokenbudget.app.service import Limits, Service
    from medtokenbudget.model import load

    limits = Limits(config.max_bytes, config.max_pixels)
    if model is None:
        if not (DEMO_MODEL / "config.json").is_file():
            say("no model given and no demo model here: the page says how to make one (`make demo`).")
            return None, limits
        say(f"no model given: serving the demo model in {DEMO_MODEL}.")
    demo = model is None or Path(model).resolve() in (DEMO_MODEL.resolve(), DEMO_MODEL.parent.resolve())
    loaded = load(DEMO_MODEL if model is None else model, weights=config.weights, device=config.device)
    return Service(loaded, limits, demo).warm(), limits


def _listen(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise WorkError(f"cannot listen on {config.host}:{config.port} ({error.strerror}). Choose another --port.") from None
    return listener


def _address(config: ServeConfig, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _open_when_up(server: Any, page: str) -> None:
    for _ in range(200):
        if server.started:
            webbrowser.open(page)
            return
        time.sleep(0.05)
