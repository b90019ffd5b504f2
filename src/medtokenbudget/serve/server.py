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

import uvicorn
from anyio import CapacityLimiter, Lock, WouldBlock, fail_after, move_on_after, to_thread
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
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
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import MedTokenBudgetError, RequestError, WorkError
from medtokenbudget.model import load
from medtokenbudget.progress import say
from medtokenbudget.serve import schemas
from medtokenbudget.serve.samples import SAMPLES, image_bytes, mask_bytes, offers
from medtokenbudget.serve.service import FILES, NOTICE, STATIC, FieldError, Limits, Question, Service, index_page, is_demo

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
        self.status, self.code, self.message, self.headers = status, code, message, headers


class Guard:
    """ASGI middleware that refuses other origins and missing tokens, and adds security headers to every response.

    It wraps the whole application, so that error responses have the headers too.

    Args:
        app: The application to wrap.
        token: Required as `Authorization: Bearer TOKEN` under /v1; None requires nothing.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token

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

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _refusal(self, path: str, headers: Headers) -> Response | None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return _error(403, "cross_origin", "Requests from pages of another origin are not allowed.")
        if self.token is not None and path.startswith("/v1/"):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(given.encode(), self.token.encode()):
                message = "This server needs a token. Send the header `Authorization: Bearer TOKEN`."
                return _error(401, "token_required", message, {"WWW-Authenticate": "Bearer"})
        return None


class Turns:
    """One image at a time in a worker thread, and a bounded number of requests that wait for it.

    A request takes its place when its body is complete, so slow clients hold none.

    Args:
        waiting: Number of places besides that of the running request.
        deadline: Seconds that a request may wait.
    """

    def __init__(self, waiting: int, deadline: float) -> None:
        self.deadline = deadline
        self._places, self._turn = CapacityLimiter(waiting + 1), Lock()

    def require_place(self) -> None:
        """Raise ApiError if all places are taken."""
        if self._places.available_tokens < 1:
            raise self._full()

    async def run(self, work: Callable[[Question], Answer], question: Question) -> Answer:
        """Run `work` in a thread after all earlier work and return its result.

        Raises:
            ApiError: If all places are taken, or the turn does not come in time.
        """
        try:
            self._places.acquire_nowait()
        except WouldBlock:
            raise self._full() from None
        try:
            await self._wait()
            try:
                return await to_thread.run_sync(work, question)
            finally:
                self._turn.release()
        finally:
            self._places.release()

    async def _wait(self) -> None:
        try:
            with fail_after(self.deadline):
                await self._turn.acquire()
        except TimeoutError:
            message = f"The request waited {self.deadline:g} s for its turn. Try again in {RETRY_SECONDS} s."
            raise ApiError(503, "too_late", message, {"Retry-After": RETRY_SECONDS}) from None

    def _full(self) -> ApiError:
        message = f"The queue is full ({self._places.total_tokens:g} requests). Try again in {RETRY_SECONDS} s."
        return ApiError(503, "queue_full", message, {"Retry-After": RETRY_SECONDS})


def create_app(
    service: Service, waiting: int = 8, deadline: float = 60.0, token: str | None = None, hosts: Sequence[str] = LOOPBACK
) -> ASGIApp:
    """Build the application.

    Args:
        service: Answers the questions.
        waiting: Number of requests that may wait while one is running.
        deadline: Seconds that a request may wait for its turn.
        token: The token that clients must send.
        hosts: Host names that requests may use. Under any other a foreign page could reach the server by pointing its own host
            name here (DNS rebinding).
    """
    app = FastAPI(
        title="MedTokenBudget",
        version=__version__,
        description=f"Token routing for dermoscopic images: kept patches and class probabilities at any token budget. {NOTICE}",
        docs_url=None,
        redoc_url=None,
    )
    turns = Turns(waiting, deadline)
    _add_error_handlers(app, service.limits)
    _add_descriptions(app, service, turns)
    _add_samples(app, service)
    _add_route(app, service, turns)
    _add_page(app)
    if token is not None:
        _describe_token(app)
    # It warns of every malformed body, so that clients could fill the log.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    return Guard(TrustedHostMiddleware(app, hosts, www_redirect=False), token)


def _add_descriptions(app: FastAPI, service: Service, turns: Turns) -> None:
    described = service.describe()

    @app.get("/healthz", response_model=schemas.Health, responses=schemas.errors(), tags=["service"])
    async def healthz() -> dict[str, Any]:
        """Report whether the service is up. Answers even while a forward pass is running."""
        return {"status": "ok", "model": True}

    @app.get("/readyz", response_model=schemas.Health, responses=schemas.errors(503), tags=["service"])
    async def readyz() -> dict[str, Any]:
        """Report whether an image would be answered now: the queue has a free place."""
        turns.require_place()
        return {"status": "ok", "model": True}

    @app.get("/v1/model", response_model=schemas.ModelInfo, responses=schemas.errors(), tags=["model"])
    async def model() -> dict[str, Any]:
        """Return the classes, methods, budgets, grid, fingerprint and limits of the model."""
        return described


def _add_samples(app: FastAPI, service: Service) -> None:
    shown = offers(service.model.classes)
    rows = [{"id": o.sample.id, "title": o.title, "label": o.label, "off_center": o.sample.off_center} for o in shown]
    cached = {"Cache-Control": "private, max-age=86400"}

    @app.get("/v1/samples", response_model=schemas.SampleList, responses=schemas.errors(), tags=["samples"])
    async def samples() -> dict[str, Any]:
        """List synthetic images to try the service with."""
        return {"samples": rows}

    def described(kind: str) -> dict[str, Any]:
        binary = {"content": {kind: {"schema": {"type": "string", "format": "binary"}}}, "description": "The file."}
        return {"responses": {200: binary, **schemas.errors(404)}, "response_class": Response, "tags": ["samples"]}

    # Plain functions, so drawing (about a second) runs in a thread and does not block the event loop.
    @app.get("/v1/samples/{sample}/image", **described("image/jpeg"))
    def sample_image(sample: SampleId) -> Response:
        """Return the image."""
        return Response(image_bytes(sample.value), media_type="image/jpeg", headers=cached)

    @app.get("/v1/samples/{sample}/mask", **described("image/png"))
    def sample_mask(sample: SampleId) -> Response:
        """Return the lesion mask, white on black."""
        return Response(mask_bytes(sample.value), media_type="image/png", headers=cached)


def _add_route(app: FastAPI, service: Service, turns: Turns) -> None:
    most = service.limits.max_bytes
    statuses = schemas.errors(413, 415, 422, 503)
    statuses[503]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds until the next attempt."}}
    example = {"content": {"application/json": {"example": schemas.ROUTE_EXAMPLE}}}
    body = schemas.route_body(service.model.selectors)

    @app.post(
        "/v1/route", response_model=schemas.RouteAnswer, responses={200: example, **statuses}, openapi_extra=body, tags=["model"]
    )
    async def route(request: Request) -> Response:
        """Run the backbone once and return the patch order and class probabilities of every method at every budget.

        The upload is not stored.
        """
        try:
            turns.require_place()
            question = Question.from_form(*await read_form(request, most))
            return JSONResponse(await turns.run(service.answer, question))
        except ApiError:
            await _drain(request, 2 * most)
            raise


async def read_form(request: Request, max_bytes: int) -> tuple[dict[str, bytes], dict[str, list[str]]]:
    """Read the files and the fields of a multipart body.

    Args:
        request: The request; its body is read here.
        max_bytes: Largest size of all files together.

    Raises:
        ApiError: If the body is too large or malformed, or has unknown files.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(415, "wrong_type", f"Expected multipart/form-data with a file 'image', got {kind or 'no content type'}.")
    large = ApiError(413, "too_many_bytes", f"Image and mask together must not exceed {max_bytes / 1e6:g} MB. Send smaller files.")

    async def limited() -> AsyncGenerator[bytes, None]:
        seen = 0
        async for chunk in request.stream():
            seen += len(chunk)
            if seen > max_bytes + OVERHEAD:
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


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(index_page(), headers={"Cache-Control": "no-cache"})

    app.mount("/static", StaticFiles(directory=STATIC), name="static")


def _describe_token(app: FastAPI) -> None:
    made = app.openapi

    def openapi() -> dict[str, Any]:
        described = made()
        described.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"token": []}]
        return described

    app.openapi = openapi  # type: ignore[method-assign]


def _add_error_handlers(app: FastAPI, limits: Limits) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return _error(error.status, error.code, error.message, error.headers)

    @app.exception_handler(MedTokenBudgetError)
    async def known_error(_: Request, error: MedTokenBudgetError) -> Response:
        if isinstance(error, DecodeError):
            status, code = _DECODE_STATUS.get(error.kind, (422, error.kind.replace("-", "_")))
            limit = f" This server accepts up to {limits.max_pixels / 1e6:g} million pixels." if status == 413 else ""
            return _error(status, code, str(error) + limit)
        if isinstance(error, RequestError):
            return _error(422, error.code if isinstance(error, FieldError) else "bad_request", str(error))
        return _error(500, "work_failed", str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        where = error.errors()[0]["loc"]
        if "sample" in where:
            return _error(404, "unknown_sample", f"Unknown sample. Available: {', '.join(SAMPLES)}.")
        return _error(422, "bad_request", f"{'.'.join(map(str, where))}: {error.errors()[0]['msg']}.")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        codes = {404: "not_found", 405: "wrong_method"}
        message = f"{request.method} {request.url.path}: {error.detail}. All endpoints are described in /openapi.json."
        return _error(error.status_code, codes.get(error.status_code, "error"), message, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unknown(_: Request, error: Exception) -> Response:
        # Starlette raises it again after the response, and uvicorn logs it.
        return _error(500, "internal", "Internal error. See the terminal of the server for details.")


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)


def serve(model: str | Path | None, config: ServeConfig, open_browser: bool = False) -> None:
    """Serve a model until Ctrl-C.

    Args:
        model: Folder of a saved model, a run directory, or a hub id. None means the router that comes with the package.
        config: Settings of the server.
        open_browser: Whether to open the page when the server is up.
    """
    token = find_token(config)
    _check(config, token)
    service = find_service(model, config)
    listener = _listen(config)
    name = f"[{config.host}]" if ":" in config.host else config.host
    address = f"http://{name}:{listener.getsockname()[1]}"
    hosts = (*LOOPBACK, name) if is_loopback(config.host) else ("*",)
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
    """Return whether a server on `host` can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def find_token(config: ServeConfig) -> str | None:
    """Return the token from the file or from the environment; an argument would be visible in the list of processes."""
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
    resolve_device(config.device)
    if not is_loopback(config.host) and not token:
        raise RequestError(
            f"Other machines can reach {config.host}. Set a token with --token-file or {TOKEN_VARIABLE}, or leave out --host."
        )
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
        raise RequestError("The token must consist of printable ASCII characters without spaces.")


def find_service(model: str | Path | None, config: ServeConfig) -> Service:
    """Load a model, or the router of the package, and run it once."""
    if model is None:
        say("No model given. Using the router for dermoscopic images that comes with the package; it predicts no class.")
    loaded = load("dermoscopy" if model is None else model, weights=config.weights, device=config.device)
    return Service(loaded, Limits(config.max_bytes, config.max_pixels), model is not None and is_demo(model)).warm()


def _listen(config: ServeConfig) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(config.connections)
    except OSError as error:
        listener.close()
        raise WorkError(f"Cannot listen on {config.host}:{config.port} ({error.strerror}). Choose another --port.") from None
    return listener
