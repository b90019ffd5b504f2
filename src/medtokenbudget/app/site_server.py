"""A static server for looking at an exported site on this machine. For others, any web server does the same."""

from __future__ import annotations

import webbrowser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from medtokenbudget.errors import WorkError
from medtokenbudget.progress import say


class SiteHandler(SimpleHTTPRequestHandler):
    """Files of one folder, as most web servers send them."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
        ".onnx": "application/octet-stream",
    }

    def end_headers(self) -> None:
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: who looks at the page is nobody's business."""


def site_server(folder: Path, port: int = 0, handler: type[SiteHandler] = SiteHandler) -> ThreadingHTTPServer:
    """A server for the site in `folder` that only this machine can reach; it is not running yet."""
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(handler, directory=str(folder)))
    except OSError as error:
        raise WorkError(f"Cannot listen on 127.0.0.1:{port} ({error.strerror}). Choose another --port.") from None


def serve_site(folder: Path, port: int) -> None:
    """Serve the site in `folder` and open it in the browser, until Ctrl-C."""
    with site_server(folder, port) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        say(f"Site: {address}   Press Ctrl-C to stop.")
        webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("Server stopped.")
