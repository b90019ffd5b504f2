"""A server on this machine that answers like the hub's download addresses, for everything that is fetched from the hub."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(folder: Path, repo: str) -> Iterator[str]:
    """The address under which the files of `folder` are those of the repository `repo`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            found = re.fullmatch(rf"/{re.escape(repo)}/resolve/main/([\w./]+)", self.path)
            path = folder / found.group(1) if found else folder / "absent"
            known = found and path.is_file()
            content = path.read_bytes() if known else b""
            self.send_response(200 if known else 404)
            if known:
                self.send_header("ETag", f'"{path.parent.name}-{path.name}-1"')
                self.send_header("X-Repo-Commit", "a" * 40)
            else:
                self.send_header("X-Error-Code", "EntryNotFound" if found else "RepoNotFound")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
