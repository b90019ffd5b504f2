"""Limits below HTTP: how many connections are open, how long the head of a request may take, and how much is logged.

Its own file because it extends uvicorn, which the rest of the service does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""Time for the head of a request, from the connection or from the end of the previous answer."""
CONNECTIONS = 100
"""Open connections; further ones are closed at once."""
BACKLOG = 16
"""Connections that are accepted in one turn of the event loop, before any of them can be closed again."""
_SPARE_HANDLES = 16


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with a limit on open connections and on the time that a request head may take."""

    limit = CONNECTIONS
    header_seconds = HEADER_SECONDS
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            transport.abort()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Let the clock run while no request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watch()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(self.header_seconds, self._too_late)

    def _stop_watch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.close()


def protocol(connections: int = CONNECTIONS, header_seconds: float = HEADER_SECONDS) -> type[BoundedProtocol]:
    """The protocol class with these limits, for uvicorn, which makes one object of it per connection."""
    limits = {"limit": connections, "header_seconds": header_seconds}
    return type("LimitedProtocol", (BoundedProtocol,), limits)


def affordable_connections(wanted: int) -> int:
    """The number of connections that the process has file handles for, at most `wanted`; the soft limit is raised if possible."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - _open_handles() - BACKLOG - _SPARE_HANDLES))


def _open_handles() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 64


class LogLimit(logging.Filter):
    """Lets through a number of records per minute and counts the rest.

    Args:
        most: Records per minute.
    """

    def __init__(self, most: int = 20) -> None:
        super().__init__()
        self.most, self.started, self.count = most, -60.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self.started >= 60:
            if self.count > self.most:
                record.msg = f"({self.count - self.most} messages were left out.) {record.msg}"
            self.started, self.count = now, 0
        self.count += 1
        return self.count <= self.most


def limit_logs(most: int = 20) -> None:
    """Limit what clients can make the server write."""
    for name in ("asyncio", "uvicorn.error", "medtokenbudget.serve"):
        logger: Any = logging.getLogger(name)
        logger.filters = [one for one in logger.filters if not isinstance(one, LogLimit)]
        logger.addFilter(LogLimit(most))
