"""The addresses of the service: the JSON API for other systems and, on /, the explorer for people.

Needs the extra `serve`; nothing else in the package imports this file at its top.
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
from medtokenbudget.app.queue import Queue, QueueFullError
from medtokenbudget.app.samples import SAMPLES, image_bytes, mask_bytes
from medtokenbudget.app.service import NOTICE, Limits, Service
from medtokenbudget.app.uploads import ApiError, discard, read_question
from medtokenbudget.data import DecodeError
from medtokenbudget.errors import MedTokenBudgetError, RequestError

STATIC = Path(__file__).parent / "static"
NO_MODEL = "no model is loaded. Make one with `make demo`, then start again, or give a model: mtb explore RUN/model."
_log = logging.getLogger("medtokenbudget.serve")

# What a file that does not become pixels means in HTTP; all other kinds are 422.
_DECODE_STATUS = {"not-an-image": (415, "not_an_image"), "too-large": (413, "too_many_pixels")}

SampleId = Enum("SampleId", {name: name for name in SAMPLES}, type=str)  # type: ignore[misc]


def create_app(service: Service | None, limits: Limits | None = None, waiting: int = 8, token: str | None = None) -> FastAPI:
    """The application without its guard; `service` None serves the page, which then says how to make a model."""
    limits = service.limits if service is not None else limits or Limits()
    queue = Queue(waiting)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        queue.close()

    app = FastAPI(
        title="MedTokenBudget",
        version=__version__,
        description=f"Token routing for dermoscopic images: which patches stay at a budget, and what the head then says. {NOTICE}",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    _add_error_answers(app, limits)
    _add_descriptions(app, service)
    _add_samples(app)
    _add_route(app, service, queue, limits)
    _add_page(app)
    if token is not None:
        _describe_token(app)
    return app


def guarded(app: FastAPI, token: str | None, loopback: bool) -> Guard:
    """The application as it is served."""
    return Guard(app, token, loopback)


def _add_descriptions(app: FastAPI, service: Service | None) -> None:
    @app.get("/healthz", response_model=schemas.Health, responses=schemas.faults(), tags=["service"])
    async def healthz() -> dict[str, Any]:
        """Whether the service is up; answers while a pass is running."""
        return {"status": "ok", "model": service is not None}

    described = None if service is None else service.describe()

    @app.get("/v1/model", response_model=schemas.ModelInfo, responses=schemas.faults(503), tags=["model"])
    async def model() -> dict[str, Any]:
        """Classes, selectors, budgets, grid, fingerprint and limits."""
        if described is None:
            raise ApiError(503, "no_model", NO_MODEL)
        return described


def _add_samples(app: FastAPI) -> None:
    @app.get("/v1/samples", response_model=schemas.SampleList, responses=schemas.faults(), tags=["samples"])
    async def samples() -> dict[str, Any]:
        """Drawn pictures to try the service with."""
        rows = [{"id": s.id, "title": s.title, "label": s.label, "off_center": s.off_center} for s in SAMPLES.values()]
        return {"samples": rows}

    def described(kind: str) -> dict[str, Any]:
        binary = {"content": {kind: {"schema": {"type": "string", "format": "binary"}}}, "description": "The file."}
        return {"responses": {200: binary, **schemas.faults(404)}, "response_class": Response, "tags": ["samples"]}

    # Plain functions: drawing takes a second and runs in a thread of its own.
    @app.get("/v1/samples/{sample}/image", **described("image/jpeg"))
    def sample_image(sample: SampleId) -> Response:
        """The picture."""
        return Response(image_bytes(sample.value), media_type="image/jpeg", headers={"Cache-Control": "private, max-age=86400"})

    @app.get("/v1/samples/{sample}/mask", **described("image/png"))
    def sample_mask(sample: SampleId) -> Response:
        """Its lesion, white on black."""
        return Response(mask_bytes(sample.value), media_type="image/png", headers={"Cache-Control": "private, max-age=86400"})


def _add_route(app: FastAPI, service: Service | None, queue: Queue, limits: Limits) -> None:
    statuses = schemas.faults(400, 408, 413, 415, 422, 503)
    statuses[503]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds until a place is free."}}
    example = {"content": {"application/json": {"example": schemas.ROUTE_EXAMPLE}}}
    body = schemas.route_body([] if service is None else service.model.selectors)

    @app.post(
        "/v1/route", response_model=schemas.RouteAnswer, responses={200: example, **statuses}, openapi_extra=body, tags=["model"]
    )
    async def route(request: Request) -> Response:
        """One pass of the backbone over an image; for every selector the order of the patches and the classes at every budget.

        Nothing of the upload is kept after the answer.
        """
        try:
            if service is None:
                raise ApiError(503, "no_model", NO_MODEL)
            with queue.place():
                question = await read_question(request, limits.max_bytes)
                return JSONResponse(await queue.run(lambda: service.answer(question)))
        except QueueFullError as full:
            await discard(request, 2 * limits.max_bytes)
            message = f"{queue.places} requests are waiting already. Try again in {full.retry_after} s."
            raise ApiError(503, "queue_full", message, {"Retry-After": str(full.retry_after)}) from None
        except ApiError as error:
            await discard(request, 2 * limits.max_bytes)
            error.headers.setdefault("Connection", "close")
            raise


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


def _add_error_answers(app: FastAPI, limits: Limits) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return _fault(error.status, error.code, error.message, error.headers)

    @app.exception_handler(MedTokenBudgetError)
    async def known_error(_: Request, error: MedTokenBudgetError) -> Response:
        if isinstance(error, DecodeError):
            status, code = _DECODE_STATUS.get(error.kind, (422, error.kind.replace("-", "_")))
            limit = f" This server takes {limits.max_pixels / 1e6:g} million pixels." if status == 413 else ""
            return _fault(status, code, str(error) + limit)
        if isinstance(error, RequestError):
            return _fault(422, "bad_request", str(error))
        return _fault(500, "work_failed", str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        where = error.errors()[0]["loc"]
        if "sample" in where:
            return _fault(404, "unknown_sample", f"there is no such sample; the samples are {', '.join(SAMPLES)}.")
        return _fault(422, "bad_request", f"{'.'.join(map(str, where))}: {error.errors()[0]['msg']}.")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        codes = {404: "not_found", 405: "wrong_method"}
        message = f"{request.method} {request.url.path}: {error.detail}. The addresses are described in /openapi.json."
        return _fault(error.status_code, codes.get(error.status_code, "error"), message, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unknown(_: Request, error: Exception) -> Response:
        _log.error("a request failed", exc_info=error)
        return _fault(500, "internal", "the server failed on this request; its terminal shows why.")


def _fault(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)
