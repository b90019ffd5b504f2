"""A multipart request to a question, read in memory under a limit: nothing is written to disk, nothing outlives the answer.

Its own file because reading what strangers send is the part that must be right.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from medtokenbudget.app.service import Question

FILES, FIELDS = ("image", "mask"), ("selectors", "budgets", "preview")
MAX_FIELDS = 300
MAX_FIELD_BYTES = 10_000
# Room for the boundaries and the small fields beside the files.
OVERHEAD = 100_000
READ_SECONDS = 60.0


class ApiError(Exception):
    """An answer other than the one asked for: HTTP status, code for programs, message for people."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}


@dataclass(frozen=True)
class _Body:
    files: dict[str, bytes]
    fields: dict[str, list[str]]


class _InMemory(MultiPartParser):
    """Starlette's parser moves files above this size to disk; the limit on the whole body is far below it."""

    spool_max_size = 1 << 40


async def read_question(request: Request, max_bytes: int) -> Question:
    """The question in a multipart body whose files together have at most `max_bytes`."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(415, "wrong_type", f"send multipart/form-data with a file called 'image', not '{kind or 'no type'}'.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes + OVERHEAD:
        raise _too_large(max_bytes)
    try:
        body = await asyncio.wait_for(_parse(request, max_bytes), READ_SECONDS)
    except TimeoutError:
        raise ApiError(408, "too_slow", f"the request was not complete after {READ_SECONDS:.0f} s. Try again.") from None
    except ClientDisconnect:
        raise ApiError(400, "cut_short", "the connection ended before the request was complete.") from None
    except MultiPartException as error:
        raise ApiError(400, "bad_multipart", f"the multipart body cannot be read: {error.message}") from None
    return _question(body, max_bytes)


async def discard(request: Request, limit: int, seconds: float = 5.0) -> None:
    """Read on without keeping, within limits: a client that is still sending would otherwise not see its refusal."""

    async def read() -> None:
        seen = 0
        async for chunk in request.stream():
            seen += len(chunk)
            if seen > limit:
                return

    try:
        await asyncio.wait_for(read(), seconds)
    # A stream that was begun and left cannot be read again; then there is nothing to be polite about.
    except (TimeoutError, ClientDisconnect, RuntimeError):
        return


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "too_many_bytes", f"image and mask may have {max_bytes / 1e6:g} MB together. Reduce them first.")


async def _parse(request: Request, max_bytes: int) -> _Body:
    async def limited() -> AsyncGenerator[bytes, None]:
        seen = 0
        async for chunk in request.stream():
            seen += len(chunk)
            if seen > max_bytes + OVERHEAD:
                raise _too_large(max_bytes)
            yield chunk

    parser = _InMemory(request.headers, limited(), max_files=len(FILES), max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    try:
        form = await parser.parse()
    except (KeyError, UnicodeError) as error:
        raise ApiError(400, "bad_multipart", f"the multipart body cannot be read ({type(error).__name__}).") from None
    files: dict[str, bytes] = {}
    fields: dict[str, list[str]] = {}
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name not in FILES:
                    raise ApiError(422, "unknown_field", f"there is no file '{name[:60]}' here; the files are {', '.join(FILES)}.")
                if name in files:
                    raise ApiError(422, "repeated_file", f"the file '{name}' was sent twice.")
                files[name] = await value.read()
            else:
                fields.setdefault(name, []).append(value)
    finally:
        await form.close()
    return _Body(files, fields)


def _question(body: _Body, max_bytes: int) -> Question:
    as_text = [name for name in FILES if name in body.fields]
    if as_text:
        raise ApiError(422, "not_a_file", f"'{as_text[0]}' came as text; send it as a file (with a filename).")
    if "image" not in body.files:
        raise ApiError(422, "no_image", "send the picture as a file called 'image'.")
    if sum(map(len, body.files.values())) > max_bytes:
        raise _too_large(max_bytes)
    unknown = [name for name in body.fields if name not in FIELDS]
    if unknown:
        raise ApiError(422, "unknown_field", f"there is no field '{unknown[0][:60]}'; the fields are {', '.join(FIELDS)}.")
    return Question(
        image=body.files["image"],
        mask=body.files.get("mask"),
        selectors=tuple(_items(body, "selectors")),
        budgets=tuple(_number(text) for text in _items(body, "budgets")),
        preview=_flag(body.fields.get("preview", ["false"])),
    )


def _items(body: _Body, name: str) -> list[str]:
    """A field that is sent several times, or once with commas."""
    return [item.strip() for value in body.fields.get(name, []) for item in value.split(",")]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ApiError(422, "bad_budget", f"a token budget is a number in (0, 1], got '{text[:60]}'.") from None


def _flag(values: list[str]) -> bool:
    if len(values) != 1 or values[0] not in ("true", "false"):
        raise ApiError(422, "bad_preview", "preview is 'true' or 'false'.")
    return values[0] == "true"
