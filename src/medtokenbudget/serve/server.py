"""The server: the JSON API under /v1, the explorer page on /, the limits of both, and how they start.

Needs the extra `serve`, so the rest of the package imports this module only when a server starts.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import threading
import webbrowser
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import uvicorn
from anyio import CapacityLimiter, Lock, fail_after, move_on_after, to_thread
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medtokenbudget import __version__
from medtokenbudget.config import ServeConfig
from medtokenbudget.data import DecodeError
from medtokenbudget.errors import MedTokenBudgetError, RequestError, WorkError
from medtokenbudget.model import load
from medtokenbudget.runtime import say
from medtokenbudget.serve import schemas
from medtokenbudget.serve.samples import SAMPLES, offers, sample_files
from medtokenbudget.serve.service import FILES, NOTICE, STATIC, FieldError, Question, Service, docs_page, index_page, is_demo

TOKEN_VARIABLE = "MTB_TOKEN"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
RETRY_SECONDS = "5"
"""When a client that was refused with 503 should come back."""
IDLE_SECONDS = 10
HEAD_BYTES = 16_384
"""Largest head of a request."""
MAX_FIELDS, MAX_FIELD_BYTES = 300, 10_000
OVERHEAD = 100_000
"""Bytes of multipart boundaries and small fields, in addition to the files."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
# HTTP status of files that cannot be decoded; all other kinds are 422.
_DECODE_STATUS = {"not-an-image": (415, "not_an_image"), "too-large": (413, "too_many_pixels"), "mask-values": (422, "bad_request")}

Answer = TypeVar("Answer")
SampleId = Enum("SampleId", {name: name for name in SAMPLES}, type=str)  # type: ignore[misc]


class ApiError(Exception):
    """An error response: HTTP status, code for programs, message for people."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.response = JSONResponse({"error": {"code": code, "message": message}}, status, headers)


def _busy(code: str, message: str) -> ApiError:
    return ApiError(503, code, f"{message} Try again in {RETRY_SECONDS} s.", {"Retry-After": RETRY_SECONDS})


class Guard:
    """Refuse other origins and add security headers to every response: around the whole application, for errors too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        app = self.app
        if scope["type"] == "http":
            if scope["method"] == "HEAD":  # uvicorn leaves the body out
                scope = {**scope, "method": "GET"}
            headers = Headers(scope=scope)
            origin, host = headers.get("origin"), headers.get("host", "")
            if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
                app = ApiError(403, "cross_origin", "Requests from pages of another origin are not allowed.").response
        await app(scope, receive, send_with_headers)


class Turns:
    """One image at a time in a worker thread, and `waiting` requests that wait for it, each up to `deadline` seconds.

    A request takes its place when its body is complete, so slow clients hold none.
    """

    def __init__(self, waiting: int, deadline: float) -> None:
        self.deadline = deadline
        self._places, self._turn = CapacityLimiter(waiting + 1), Lock()

    def require_place(self) -> None:
        if self._places.available_tokens < 1:
            raise _busy("queue_full", f"The queue is full ({self._places.total_tokens:g} requests).")

    async def run(self, work: Callable[[Question], Answer], question: Question) -> Answer:
        """Run `work` in a thread after all earlier work and return its result, or raise ApiError if it would wait too long."""
        self.require_place()
        async with self._places:
            try:
                with fail_after(self.deadline):
                    await self._turn.acquire()
            except TimeoutError:
                raise _busy("too_late", f"The request waited {self.deadline:g} s for its turn.") from None
            try:
                return await to_thread.run_sync(work, question)
            finally:
                self._turn.release()


def create_app(
    service: Service, waiting: int = 8, deadline: float = 60.0, token: str | None = None, hosts: Sequence[str] = LOOPBACK
) -> ASGIApp:
    """Build the application; see `ServeConfig` for its limits.

    `hosts` are the host names that requests may use. Under any other a foreign page could reach the server by pointing its own
    host name here (DNS rebinding).
    """
    app = FastAPI(
        title="MedTokenBudget",
        version=__version__,
        description=f"Token routing for dermoscopic images: kept patches and class probabilities at any token budget. {NOTICE}",
        # FastAPI's own pages load scripts from elsewhere, which the content policy forbids.
        docs_url=None,
        redoc_url=None,
    )
    turns = Turns(waiting, deadline)
    bearer = HTTPBearer(scheme_name="token", auto_error=False)

    async def check_token(given: HTTPAuthorizationCredentials | None = Depends(bearer)) -> None:  # noqa: B008
        # Takes as long for an almost right token as for any other. As bytes, because it refuses texts that are not ASCII.
        if given is None or not secrets.compare_digest(given.credentials.encode(), str(token).encode()):
            message = "This server needs a token. Send the header `Authorization: Bearer TOKEN`."
            raise ApiError(401, "token_required", message, {"WWW-Authenticate": "Bearer"})

    @app.get("/healthz", response_model=schemas.Health, responses=schemas.errors(), tags=["service"])
    async def healthz() -> dict[str, Any]:
        """Report whether the service is up. Answers even while a forward pass is running."""
        return {"status": "ok", "model": True}

    @app.get("/readyz", response_model=schemas.Health, responses=schemas.errors(503), tags=["service"])
    async def readyz() -> dict[str, Any]:
        """Report whether an image would be answered now: the queue has a free place."""
        turns.require_place()
        return {"status": "ok", "model": True}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(index_page(), headers={"Cache-Control": "no-cache"})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(docs_page(app.openapi()))

    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.include_router(_api(service, turns), dependencies=[] if token is None else [Depends(check_token)])
    _add_error_handlers(app, service.max_pixels)
    # It warns of every malformed body, so that clients could fill the log.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    return Guard(TrustedHostMiddleware(app, hosts, www_redirect=False))


def _api(service: Service, turns: Turns) -> APIRouter:
    api = APIRouter(prefix="/v1")
    described, samples = service.describe(), offers(service.model.classes)

    @api.get("/model", response_model=schemas.ModelInfo, responses=schemas.errors(), tags=["model"])
    async def model() -> dict[str, Any]:
        """Return the classes, methods, budgets, grid, fingerprint and limits of the model."""
        return described

    @api.get("/samples", response_model=schemas.SampleList, responses=schemas.errors(), tags=["samples"])
    async def list_samples() -> dict[str, Any]:
        """List synthetic images to try the service with."""
        return {"samples": samples}

    def file(kind: str) -> dict[str, Any]:
        binary = {"content": {kind: {"schema": {"type": "string", "format": "binary"}}}, "description": "The file."}
        return {"responses": {200: binary, **schemas.errors(404)}, "response_class": Response, "tags": ["samples"]}

    cached = {"Cache-Control": "private, max-age=86400"}

    # Plain functions, so drawing (about a second) runs in a thread and does not block the event loop.
    @api.get("/samples/{sample}/image", **file("image/jpeg"))
    def sample_image(sample: SampleId) -> Response:
        """Return the image."""
        return Response(sample_files(sample.value)[0], media_type="image/jpeg", headers=cached)

    @api.get("/samples/{sample}/mask", **file("image/png"))
    def sample_mask(sample: SampleId) -> Response:
        """Return the lesion mask, white on black."""
        return Response(sample_files(sample.value)[1], media_type="image/png", headers=cached)

    promises = sorted({guarantee.retention for guarantee in service.guarantees})
    routed = schemas.route_description(service.model.selectors, promises)

    @api.post("/route", tags=["model"], response_model=schemas.RouteAnswer, **routed)
    async def route(request: Request) -> Response:
        """Run the backbone once and return the patch order and class probabilities of every method at every budget.

        The upload is not stored.
        """
        try:
            # Before the body is read: a full queue is said at once.
            turns.require_place()
            question = Question.from_form(*await read_form(request, service.max_bytes))
            return JSONResponse(await turns.run(service.answer, question))
        except ApiError:
            await _drain(request, 2 * service.max_bytes)
            raise

    return api


async def read_form(request: Request, max_bytes: int) -> tuple[dict[str, bytes], dict[str, list[str]]]:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(415, "wrong_type", f"Expected multipart/form-data with a file 'image', got {kind or 'no content type'}.")
    large = ApiError(413, "too_many_bytes", f"Image and mask together must not exceed {max_bytes / 1e6:g} MB. Send smaller files.")

    async def limited() -> AsyncGenerator[bytes, None]:
        received = 0
        async for chunk in request.stream():
            received += len(chunk)
            if received > max_bytes + OVERHEAD:
                raise large
            yield chunk

    parser = _InMemory(request.headers, limited(), max_files=len(FILES), max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    try:
        form = await parser.parse()
    except ClientDisconnect:
        raise ApiError(400, "cut_short", "The connection was closed before the request was complete.") from None
    except (MultiPartException, KeyError, UnicodeError) as error:
        why = error.message if isinstance(error, MultiPartException) else type(error).__name__
        raise ApiError(400, "bad_multipart", f"The multipart body cannot be parsed: {why}") from None
    files: dict[str, bytes] = {}
    fields: dict[str, list[str]] = {}
    for name, value in form.multi_items():
        if not isinstance(value, UploadFile):
            fields.setdefault(name, []).append(value)
        elif name in files:
            raise ApiError(422, "repeated_file", f"The file '{name[:60]}' was sent more than once.")
        else:
            files[name] = await value.read()
    # The stream may have `OVERHEAD` bytes more than the files.
    if sum(map(len, files.values())) > max_bytes:
        raise large
    return files, fields


class _InMemory(MultiPartParser):
    """Never spools to disk, as Starlette does above one megabyte: uploads leave no trace."""

    spool_max_size = 1 << 40


async def _drain(request: Request, most: int) -> None:
    """Read and drop the rest of a refused upload, within limits: a client that is still sending would not see the response."""
    # uvicorn does so too, but closes the connection of a client that did not ask to keep it, as many proxies.
    # RuntimeError: the body was already read to its end.
    with move_on_after(5), suppress(ClientDisconnect, RuntimeError):
        async for chunk in request.stream():
            most -= len(chunk)
            if most < 0:
                return


def _add_error_handlers(app: FastAPI, max_pixels: int) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response

    @app.exception_handler(MedTokenBudgetError)
    async def known_error(_: Request, error: MedTokenBudgetError) -> Response:
        status, code, message = 500, "work_failed", str(error)
        if isinstance(error, DecodeError):
            status, code = _DECODE_STATUS.get(error.kind, (422, error.kind.replace("-", "_")))
            message += f" This server accepts up to {max_pixels / 1e6:g} million pixels." if status == 413 else ""
        elif isinstance(error, RequestError):
            status, code = 422, error.code if isinstance(error, FieldError) else "bad_request"
        return ApiError(status, code, message).response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        where = error.errors()[0]["loc"]
        if "sample" in where:
            return ApiError(404, "unknown_sample", f"Unknown sample. Available: {', '.join(SAMPLES)}.").response
        return ApiError(422, "bad_request", f"{'.'.join(map(str, where))}: {error.errors()[0]['msg']}.").response

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "wrong_method"}.get(error.status_code, "error")
        message = f"{request.method} {request.url.path}: {error.detail}. All endpoints are described in /openapi.json."
        return ApiError(error.status_code, code, message, dict(error.headers or {})).response

    @app.exception_handler(Exception)
    async def unknown(_: Request, error: Exception) -> Response:
        # Starlette raises it again after the response, and uvicorn logs it.
        return ApiError(500, "internal", "Internal error. See the terminal of the server for details.").response


def serve(model: str | Path | None, config: ServeConfig, open_browser: bool = False) -> None:
    """Serve a model until Ctrl-C; None means the router that comes with the package."""
    if wrong := [host for host in config.allowed_hosts if "*" in host.removeprefix("*.") or not host or "/" in host or ":" in host]:
        raise RequestError(f"`allowed_hosts` are host names such as router.example.org or *.example.org, got '{wrong[0]}'.")
    token = find_token(config)
    service = find_service(model, config)
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.create_server((config.host, config.port), family=family, backlog=config.connections)
    except OSError as error:
        raise WorkError(f"Cannot listen on {config.host}:{config.port} ({error.strerror}). Choose another `port`.") from None
    name = f"[{config.host}]" if ":" in config.host else config.host
    address = f"http://{name}:{listener.getsockname()[1]}"
    # Whoever listens beyond this machine has a token, which a foreign page does not know.
    hosts = (*LOOPBACK, name, *config.allowed_hosts) if config.allowed_hosts or is_loopback(config.host) else ("*",)
    server = uvicorn.Server(server_config(create_app(service, config.queue, config.deadline, token, hosts), config.connections))
    say(f"Explorer: {address}   API: {address}/openapi.json   Press Ctrl-C to stop.")
    if open_browser:
        # In a thread, because some browsers return only when they are closed; the listener lets them wait until the server runs.
        # Without the token, which other users would see in the list of processes: the page asks for it.
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        say("Server stopped.")


def server_config(app: ASGIApp, connections: int = 100) -> uvicorn.Config:
    """Return the settings of uvicorn, with all limits that it has."""
    return uvicorn.Config(
        app,
        # Only h11 has a limit for the head of a request.
        http="h11",
        ws="none",
        # It refuses the connection that reaches the limit, not the first one beyond it.
        limit_concurrency=connections + 1,
        backlog=connections,
        timeout_keep_alive=IDLE_SECONDS,
        h11_max_incomplete_event_size=HEAD_BYTES,
        # Below errors it logs every malformed request.
        log_level="error",
        access_log=False,
        server_header=False,
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def find_token(config: ServeConfig) -> str | None:
    """Return the token from the file or from the environment; an argument would be visible in the list of processes."""
    token = os.environ.get(TOKEN_VARIABLE) or None
    if config.token_file is not None:
        try:
            token = config.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise RequestError(f"Cannot read the `token_file` {config.token_file}: {reason}.") from None
        if not token:
            raise RequestError(f"{config.token_file} is empty. Write a token to it, such as from `openssl rand -hex 16`.")
    if token is None and not is_loopback(config.host):
        advice = f"Set a token with `token_file` or {TOKEN_VARIABLE}, or leave out `host`."
        raise RequestError(f"Other machines can reach {config.host}. {advice}")
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
        raise RequestError("The token must consist of printable ASCII characters without spaces.")
    return token


def find_service(model: str | Path | None, config: ServeConfig) -> Service:
    if model is None:
        say("No model given. Using the router for dermoscopic images that comes with the package; it predicts no class.")
    name = "dermoscopy" if model is None else str(model)
    loaded = load(name, weights=config.weights, device=config.device)
    size = loaded.backbone.preprocessing.image_size
    # A backbone that is missing or does not fit is an error now, not at the first question.
    loaded.encode(np.zeros((1, size, size, 3), dtype=np.uint8))
    shown = "MODEL" if Path(name).is_dir() else name
    return Service(loaded, config.max_bytes, config.max_pixels, model is not None and is_demo(model), shown)
