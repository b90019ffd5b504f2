"""The HTTP endpoints: the JSON API under /v1 and the explorer page on /.

Needs the extra `serve`, so the rest of the package imports this module only when a server starts.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from medtokenbudget import __version__
from medtokenbudget.app import schemas
from medtokenbudget.app.guard import Guard
from medtokenbudget.app.queue import DeadlineError, Queue, QueueFullError
from medtokenbudget.app.samples import SAMPLES, image_bytes, mask_bytes, offers
from medtokenbudget.app.service import NOTICE, Limits, Service
from medtokenbudget.app.uploads import OVERHEAD, ApiError, NoRoomError, Room, discard, read_question
from medtokenbudget.data import DecodeError
from medtokenbudget.errors import MedTokenBudgetError, RequestError

STATIC = Path(__file__).parent / "static"
NO_MODEL = "No model is loaded. Train the demo model with `make demo` and restart, or run `mtb explore RUN/model`."
_log = logging.getLogger("medtokenbudget.serve")

# HTTP status of files that cannot be decoded; all other kinds are 422.
_DECODE_STATUS = {"not-an-image": (415, "not_an_image"), "too-large": (413, "too_many_pixels"), "mask-values": (422, "bad_request")}

SampleId = Enum("SampleId", {name: name for name in SAMPLES}, type=str)  # type: ignore[misc]


def create_app(
    service: Service | None, limits: Limits | None = None, waiting: int = 8, token: str | None = None, deadline: float = 60.0
) -> FastAPI:
    """Build the application, without its guard.

    Args:
        service: Answers the questions. None serves only the page, which then explains how to train a model.
        limits: The largest request that is accepted; those of the service if there is one.
        waiting: Number of requests that may wait while one is running.
        token: The token that clients must send, mentioned in the OpenAPI description.
        deadline: Seconds within which a request is answered or given up.
    """
    limits = service.limits if service is not None else limits or Limits()
    queue = Queue(waiting, deadline)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        queue.close()
        if service is not None:
            service.close()

    app = FastAPI(
        title="MedTokenBudget",
        version=__version__,
        description=f"Token routing for dermoscopic images: kept patches and class probabilities at any token budget. {NOTICE}",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    _add_error_handlers(app, limits)
    _add_descriptions(app, service, queue)
    _add_samples(app, service)
    _add_route(app, service, queue, limits)
    _add_page(app)
    if token is not None:
        _describe_token(app)
    return app


def guarded(app: FastAPI, token: str | None, loopback: bool) -> Guard:
    """Wrap the application with the checks and headers that every request gets."""
    return Guard(app, token, loopback)


def _add_descriptions(app: FastAPI, service: Service | None, queue: Queue) -> None:
    @app.get("/healthz", response_model=schemas.Health, responses=schemas.errors(), tags=["service"])
    async def healthz() -> dict[str, Any]:
        """Report whether the service is up. Answers even while a forward pass is running."""
        return {"status": "ok", "model": service is not None}

    @app.get("/readyz", response_model=schemas.Health, responses=schemas.errors(503), tags=["service"])
    async def readyz() -> dict[str, Any]:
        """Report whether an image would be answered now: a model is loaded and the queue has a free place."""
        if service is None:
            raise ApiError(503, "no_model", NO_MODEL)
        if queue.full:
            raise _queue_full(queue, queue.retry_after)
        return {"status": "ok", "model": True}

    described = None if service is None else service.describe()

    @app.get("/v1/model", response_model=schemas.ModelInfo, responses=schemas.errors(503), tags=["model"])
    async def model() -> dict[str, Any]:
        """Return the classes, methods, budgets, grid, fingerprint and limits of the model."""
        if described is None:
            raise ApiError(503, "no_model", NO_MODEL)
        return described


def _add_samples(app: FastAPI, service: Service | None) -> None:
    shown = offers(() if service is None else service.model.classes)
    rows = [{"id": o.sample.id, "title": o.title, "label": o.label, "off_center": o.sample.off_center} for o in shown]

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
        return Response(image_bytes(sample.value), media_type="image/jpeg", headers={"Cache-Control": "private, max-age=86400"})

    @app.get("/v1/samples/{sample}/mask", **described("image/png"))
    def sample_mask(sample: SampleId) -> Response:
        """Return the lesion mask, white on black."""
        return Response(mask_bytes(sample.value), media_type="image/png", headers={"Cache-Control": "private, max-age=86400"})


def _add_route(app: FastAPI, service: Service | None, queue: Queue, limits: Limits) -> None:
    statuses = schemas.errors(400, 408, 413, 415, 422, 503)
    statuses[503]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds until the next attempt."}}
    example = {"content": {"application/json": {"example": schemas.ROUTE_EXAMPLE}}}
    # Twice what the queue can hold: requests take a place only when their upload is complete.
    room = Room(2 * queue.places * (limits.max_bytes + OVERHEAD))
    body = schemas.route_body([] if service is None else service.model.selectors)

    @app.post(
        "/v1/route", response_model=schemas.RouteAnswer, responses={200: example, **statuses}, openapi_extra=body, tags=["model"]
    )
    async def route(request: Request) -> Response:
        """Run the backbone once and return the patch order and class probabilities of every method at every budget.

        The upload is not stored.
        """
        try:
            if service is None:
                raise ApiError(503, "no_model", NO_MODEL)
            queue.require_place()
            with room.share() as share:
                question = await read_question(request, limits.max_bytes, share)
                return JSONResponse(await queue.run(lambda: service.answer(question)))
        except DeadlineError as late:
            message = f"The request was not answered within {queue.deadline:g} s. Try again in {late.retry_after} s."
            raise ApiError(503, "too_late", message, {"Retry-After": str(late.retry_after)}) from None
        except QueueFullError as full:
            await discard(request, 2 * limits.max_bytes)
            raise _queue_full(queue, full.retry_after) from None
        except NoRoomError:
            await discard(request, 2 * limits.max_bytes)
            message = "Too many uploads are arriving at the same time. Try again in 5 s."
            raise ApiError(503, "too_many_uploads", message, {"Retry-After": "5", "Connection": "close"}) from None
        except ApiError as error:
            await discard(request, 2 * limits.max_bytes)
            error.headers.setdefault("Connection", "close")
            raise


def _queue_full(queue: Queue, seconds: int) -> ApiError:
    message = f"The queue is full ({queue.places} requests). Try again in {seconds} s."
    return ApiError(503, "queue_full", message, {"Retry-After": str(seconds)})


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

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
            return _error(422, "bad_request", str(error))
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
        _log.error("Request failed.", exc_info=error)
        return _error(500, "internal", "Internal error. See the terminal of the server for details.")


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)
