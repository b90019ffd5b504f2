"""Checks on every request (host name, origin, token) and security headers on every response.

It wraps the whole application, so it also covers error responses.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


MAX_ADDRESSES = 4096
"""Addresses whose wrong tokens are remembered."""


def is_loopback(host: str) -> bool:
    """Return whether a server on `host` can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guesses:
    """Makes guessing tokens slow: after some wrong ones an address has to wait, each time twice as long.

    Args:
        free: Wrong tokens that cost nothing.
        longest: Longest wait in seconds.
    """

    def __init__(self, free: int = 5, longest: int = 300, clock: Callable[[], float] = time.monotonic) -> None:
        self.free, self.longest, self.clock = free, longest, clock
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def wait(self, client: str) -> int:
        """Seconds that this address has to wait, 0 if none."""
        count, since = self._wrong.get(client, (0, 0.0))
        if count < self.free:
            return 0
        wait = min(self.longest, 2 ** min(count - self.free, 20))
        return max(0, math.ceil(since + wait - self.clock()))

    def failed(self, client: str) -> None:
        """Count a wrong token."""
        self._wrong[client] = (self._wrong.pop(client, (0, 0.0))[0] + 1, self.clock())
        if len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)

    def succeeded(self, client: str) -> None:
        """Forget the wrong tokens of an address."""
        self._wrong.pop(client, None)


class Guard:
    """ASGI middleware that checks requests and adds headers.

    Args:
        app: The application to wrap.
        token: Required as `Authorization: Bearer TOKEN` under /v1; None requires nothing.
        loopback: Reject host names other than localhost. Otherwise a foreign page could reach the server by pointing its own
            host name here (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, token: str | None = None, loopback: bool = True) -> None:
        self.app, self.token, self.loopback = app, token, loopback
        self.guesses = Guesses()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        client = (scope.get("client") or ("unknown",))[0]
        rejected = self._rejection(scope["path"], Headers(scope=scope), client)
        if rejected is None:
            await self.app(scope, receive, send_with_headers)
        else:
            await _reject(send_with_headers, *rejected)

    def _rejection(self, path: str, headers: Headers, client: str) -> tuple[int, str, str] | None:
        host = headers.get("host", "")
        if self.loopback and not is_loopback(_name(host)):
            return 421, "wrong_host", f"This server only accepts requests to localhost, not to '{host[:100]}'."
        origin = headers.get("origin")
        if origin is not None and _origin_host(origin) != host:
            return 403, "cross_origin", "Requests from pages of another origin are not allowed."
        if self.token is not None and path.startswith("/v1/"):
            wait = self.guesses.wait(client)
            if wait:
                return 429, "too_many_guesses", f"Too many wrong tokens from this address. Try again in {wait} s."
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.encode(), self.token.encode())
            if scheme.lower() != "bearer" or not right:
                if given:
                    self.guesses.failed(client)
                return 401, "token_required", "This server needs a token. Send the header `Authorization: Bearer TOKEN`."
            self.guesses.succeeded(client)
        return None


def _origin_host(origin: str) -> str | None:
    """The host and port in an `Origin` header; None if it cannot be parsed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name(host: str) -> str:
    """The host name in a `Host` header, without port and brackets."""
    return urlsplit(f"//{host}").hostname or "" if _splits(host) else ""


def _splits(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname is not None
    except ValueError:
        return False


async def _reject(send: Send, status: int, code: str, message: str) -> None:
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    if status == 429:
        headers.append((b"retry-after", message.rpartition(" in ")[2].removesuffix(" s.").encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
