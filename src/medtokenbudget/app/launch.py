"""Starts the server: finds the model, listens, opens the browser.

FastAPI and uvicorn belong to the extra `serve` and are imported only when a server starts.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import threading
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medtokenbudget.config import Count, Natural, Port, Positive, Settings
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.progress import say

DEMO_MODEL = Path("runs/demo/model")
TOKEN_VARIABLE = "MTB_TOKEN"


@dataclass(frozen=True)
class ServeConfig(Settings):
    """Settings of the server."""

    host: str = "127.0.0.1"
    """Address to listen on. Addresses that other machines can reach need a token."""
    port: Port = 8765
    """Port to listen on; 0 picks a free one."""
    token_file: Path | None = None
    """File with the token that clients must send as `Authorization: Bearer TOKEN`. Default: the variable MTB_TOKEN."""
    queue: Natural = 8
    """Number of requests that may wait while one is running; further requests get status 503."""
    max_bytes: Count = 25_000_000
    """Largest size of image and mask together, in bytes."""
    max_pixels: Count = 50_000_000
    """Largest number of pixels of an image or a mask."""
    decode_seconds: Positive = 10.0
    """Longest time to decode an image or a mask, in seconds."""
    deadline: Positive = 60.0
    """Seconds within which a request is answered or given up."""
    connections: Count = 100
    """Largest number of open connections; further ones are closed at once."""
    weights: Path | None = None
    """Weights file of the backbone, if it has moved since the model was saved."""
    device: str = "auto"
    """Device to run on: auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""


def require_extra() -> None:
    """Raise RequestError with the install command if a package of the extra `serve` is missing."""
    missing = [name for name in ("fastapi", "uvicorn", "python_multipart") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"The server needs {', '.join(missing)}. Run `pip install 'medtokenbudget[serve]'`.")


def serve(model: str | Path | None, config: ServeConfig, open_browser: bool = False) -> None:
    """Serve a model until Ctrl-C.

    Args:
        model: Folder of a saved model, a run directory, or a hub id. None means the router that comes with the package.
        config: Settings of the server.
        open_browser: Whether to open the page when the server is up.
    """
    require_extra()
    token = find_token(config)
    _check(config, token)
    import uvicorn

    from medtokenbudget.app.connections import BACKLOG, affordable_connections, limit_logs, protocol
    from medtokenbudget.app.guard import is_loopback
    from medtokenbudget.app.routes import create_app, guarded

    service, limits = find_service(model, config)
    listener = _listen(config)
    address = _address(config, listener)
    app = guarded(create_app(service, limits, config.queue, token, config.deadline), token, is_loopback(config.host))
    connections = affordable_connections(config.connections)
    if connections < config.connections:
        say(f"The limit on open files allows {connections} connections. Raise it with `ulimit -n` for more.")
    settings = uvicorn.Config(
        app,
        http=protocol(connections),
        ws="none",
        backlog=BACKLOG,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
    )
    server = uvicorn.Server(settings)
    limit_logs()
    logging.getLogger("medtokenbudget.serve").setLevel(logging.ERROR)
    say(f"Explorer: {address}   API: {address}/openapi.json   Press Ctrl-C to stop.")
    if open_browser:
        # Without the token, which other users would see in the list of processes: the page asks for it.
        threading.Thread(target=_open_when_up, args=(server, address), daemon=True).start()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        say("Server stopped.")


def find_token(config: ServeConfig) -> str | None:
    """The token from the file or from the environment; an argument would be visible in the list of processes."""
    if config.token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = config.token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise RequestError(f"Cannot read --token-file {config.token_file}: {reason}.") from None
    if not token:
        raise RequestError(f"--token-file {config.token_file} is empty. Write a token to it, such as from `openssl rand -hex 16`.")
    return token


def _check(config: ServeConfig, token: str | None) -> None:
    from medtokenbudget.app.guard import is_loopback
    from medtokenbudget.devices import resolve_device

    resolve_device(config.device)
    if not is_loopback(config.host) and not token:
        raise RequestError(
            f"Other machines can reach {config.host}. Set a token with --token-file or {TOKEN_VARIABLE}, or leave out --host."
        )
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
        raise RequestError("The token must consist of printable ASCII characters without spaces.")


def find_service(model: str | Path | None, config: ServeConfig) -> tuple[Any, Any]:
    """Return the service and its limits."""
    from medtokenbudget.app.service import Limits, Service
    from medtokenbudget.model import load

    limits = Limits(config.max_bytes, config.max_pixels, config.decode_seconds)
    if model is None:
        say("No model given. Using the router for dermoscopic images that comes with the package; it predicts no class.")
    loaded = load("dermoscopy" if model is None else model, weights=config.weights, device=config.device)
    return Service(loaded, limits, model is not None and is_demo(model)).warm(), limits


def is_demo(model: str | Path) -> bool:
    """Return whether this is the demo model, or its run."""
    return Path(model).resolve() in (DEMO_MODEL.resolve(), DEMO_MODEL.parent.resolve())


def _listen(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise WorkError(f"Cannot listen on {config.host}:{config.port} ({error.strerror}). Choose another --port.") from None
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
