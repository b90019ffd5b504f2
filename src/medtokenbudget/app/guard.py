"""Checks on every request (host name, origin, token) and security headers on every response.

It wraps the whole application, so it also covers error responses.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
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


def is_loopback(host: str) -> bool:
    """Return whether a server on `host` can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


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

        rejected = self._rejection(scope["path"], Headers(scope=scope))
        if rejected is None:
            await self.app(scope, receive, send_with_headers)
        else:
            await _reject(send_with_headers, *rejected)

    def _rejection(self, path: str, headers: Headers) -> tuple[int, str, str] | None:
        host = headers.get("host", "")
        if self.loopback and not is_loopback(_name(host)):
            return 421, "wrong_host", f"This server only accepts requests to localhost, not to '{host[:100]}'."
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "cross_origin", "Requests from pages of another origin are not allowed."
        if self.token is not None and path.startswith("/v1/"):
            given = headers.get("authorization", "").removeprefix("Bearer ").encode()
            if not hmac.compare_digest(given, self.token.encode()):
                return 401, "token_required", "This server needs a token. Send the header `Authorization: Bearer TOKEN`."
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
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
