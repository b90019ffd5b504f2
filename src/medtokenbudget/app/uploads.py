"""Reads untrusted multipart requests in memory, within limits. Nothing is written to disk or kept after the answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from medtokenbudget.app.service import Question

# The parser warns of each malformed body, which is answered with its reason anyway: clients could fill the log.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
FILES, FIELDS = ("image", "mask"), ("selectors", "budgets", "retention", "preview")
MAX_FIELDS = 300
MAX_FIELD_BYTES = 10_000
# Space for multipart boundaries and small fields.
OVERHEAD = 100_000
READ_SECONDS = 60.0
GRACE_SECONDS, BYTES_PER_SECOND = 5.0, 2_000
"""A body may take the grace time, plus a second for this many bytes that have arrived."""


class ApiError(Exception):
    """An error response: HTTP status, code for programs, message for people."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}


@dataclass(frozen=True)
class _Body:
    files: dict[str, bytes]
    fields: dict[str, list[str]]


class _InMemory(MultiPartParser):
    """Never spools to disk: Starlette does so above this size, and the limit on the whole body is far below it."""

    spool_max_size = 1 << 40


class NoRoomError(Exception):
    """The uploads that are arriving already fill the memory that is set aside for them."""


@dataclass
class Room:
    """Memory for the uploads of all requests, counted as they arrive: a body that trickles in takes only what has arrived."""

    limit: int
    used: int = 0

    @contextmanager
    def share(self) -> Iterator[Room]:
        """The part of one request; it is given back when the block ends."""
        part = _Share(self)
        try:
            yield part
        finally:
            self.used -= part.used

    def take(self, size: int) -> None:
        if self.used + size > self.limit:
            raise NoRoomError
        self.used += size


class _Share(Room):
    def __init__(self, whole: Room) -> None:
        super().__init__(whole.limit)
        self.whole = whole

    def take(self, size: int) -> None:
        self.whole.take(size)
        self.used += size


async def read_question(request: Request, max_bytes: int, room: Room | None = None) -> Question:
    """Read the question from a multipart body.

    Args:
        request: The request; its body is read here.
        max_bytes: Largest size of all files together.
        room: Where the bytes that have arrived are counted.

    Raises:
        ApiError: If the body is too large, too slow, malformed or has unknown fields.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(415, "wrong_type", f"Expected multipart/form-data with a file 'image', got {kind or 'no content type'}.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes + OVERHEAD:
        raise _too_large(max_bytes)
    try:
        body = await asyncio.wait_for(_parse(request, max_bytes, room), READ_SECONDS)
    except TimeoutError:
        raise ApiError(408, "too_slow", "The request arrived too slowly. Try again with a faster connection.") from None
    except ClientDisconnect:
        raise ApiError(400, "cut_short", "The connection was closed before the request was complete.") from None
    except MultiPartException as error:
        raise ApiError(400, "bad_multipart", f"The multipart body cannot be parsed: {error.message}") from None
    return _question(body, max_bytes)


async def discard(request: Request, limit: int, seconds: float = 5.0) -> None:
    """Read and drop the rest of a rejected request, within limits: a client that is still sending would not see the response."""

    async def read() -> None:
        seen = 0
        async for chunk in request.stream():
            seen += len(chunk)
            if seen > limit:
                return

    try:
        await asyncio.wait_for(read(), seconds)
    # RuntimeError: the stream was already partly read and cannot be continued.
    except (TimeoutError, ClientDisconnect, RuntimeError):
        return


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "too_many_bytes", f"Image and mask together must not exceed {max_bytes / 1e6:g} MB. Send smaller files.")


async def _parse(request: Request, max_bytes: int, room: Room | None) -> _Body:
    async def limited() -> AsyncGenerator[bytes, None]:
        seen, stream, started = 0, aiter(request.stream()), time.monotonic()
        while True:
            left = started + GRACE_SECONDS + seen / BYTES_PER_SECOND - time.monotonic()
            try:
                chunk = await asyncio.wait_for(anext(stream), max(0.0, left))
            except StopAsyncIteration:
                return
            seen += len(chunk)
            if room is not None:
                room.take(len(chunk))
            if seen > max_bytes + OVERHEAD:
                raise _too_large(max_bytes)
            yield chunk

    parser = _InMemory(request.headers, limited(), max_files=len(FILES), max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    try:
        form = await parser.parse()
    except (KeyError, UnicodeError) as error:
        raise ApiError(400, "bad_multipart", f"The multipart body cannot be parsed ({type(error).__name__}).") from None
    files: dict[str, bytes] = {}
    fields: dict[str, list[str]] = {}
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name not in FILES:
                    raise ApiError(422, "unknown_field", f"Unknown file field '{name[:60]}'. Available: {', '.join(FILES)}.")
                if name in files:
                    raise ApiError(422, "repeated_file", f"The file '{name}' was sent more than once.")
                files[name] = await value.read()
            else:
                fields.setdefault(name, []).append(value)
    finally:
        await form.close()
    return _Body(files, fields)


def _question(body: _Body, max_bytes: int) -> Question:
    as_text = [name for name in FILES if name in body.fields]
    if as_text:
        raise ApiError(422, "not_a_file", f"'{as_text[0]}' was sent as text. Send it as a file, with a file name.")
    if "image" not in body.files:
        raise ApiError(422, "no_image", "The file field 'image' is missing.")
    if sum(map(len, body.files.values())) > max_bytes:
        raise _too_large(max_bytes)
    unknown = [name for name in body.fields if name not in FIELDS]
    if unknown:
        raise ApiError(422, "unknown_field", f"Unknown field '{unknown[0][:60]}'. Available: {', '.join(FIELDS)}.")
    return Question(
        image=body.files["image"],
        mask=body.files.get("mask"),
        selectors=tuple(_items(body, "selectors")),
        budgets=tuple(_number(text, "bad_budget", "A token budget") for text in _items(body, "budgets")),
        retentions=tuple(_number(text, "bad_retention", "A promised retention") for text in _items(body, "retention")),
        preview=_flag(body.fields.get("preview", ["false"])),
    )


def _items(body: _Body, name: str) -> list[str]:
    """The values of a field that may be repeated or separated by commas."""
    return [item.strip() for value in body.fields.get(name, []) for item in value.split(",")]


def _number(text: str, code: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ApiError(422, code, f"{what} must be a number in (0, 1], got '{text[:60]}'.") from None


def _flag(values: list[str]) -> bool:
    if len(values) != 1 or values[0] not in ("true", "false"):
        raise ApiError(422, "bad_preview", "'preview' must be 'true' or 'false'.")
    return values[0] == "true"
