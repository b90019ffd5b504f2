"""Bad requests to the service: each gets its status and code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from medtokenbudget.serve.service import Service
from tests.bad_input.damage import CLEAR, FRAMES, PLAIN, claims, cut, encoded
from tests.serve.server import Server, mask, picture, running_here
from tests.small_model import small_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = small_model(tmp_path_factory.mktemp("server"), baselines=("center", "oracle"))
    service = Service(model, max_bytes=200_000, max_pixels=1_000_000)
    with running_here(service) as running:
        yield running


def files(**parts: bytes) -> dict[str, Any]:
    return {"files": parts}


REQUESTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "JSON": ({"json": {"image": "x"}}, 415, "wrong_type"),
    "no type": ({"content": b"x"}, 415, "wrong_type"),
    "no boundary": ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "bad_multipart"),
    "a broken boundary": ({"content": b"xx", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "bad_multipart"),
    "no image": (files(mask=mask()), 422, "no_image"),
    "an unknown file": (files(image=picture(), other=b"x"), 422, "unknown_field"),
    "an unknown field": ({**files(image=picture()), "data": {"size": "3"}}, 422, "unknown_field"),
    "image as text": ({"files": {"mask": mask()}, "data": {"image": "x"}}, 422, "not_a_file"),
    "too many bytes": (files(image=bytes(300_001)), 413, "too_many_bytes"),
    "too many pixels": (files(image=claims(2000, 2000)), 413, "too_many_pixels"),
    "empty image": (files(image=b""), 422, "empty"),
    "text as image": (files(image=b"hello" * 99), 415, "not_an_image"),
    "half an image": (files(image=cut(picture(600, 400))), 422, "damaged"),
    "transparent image": (files(image=encoded(CLEAR, "PNG")), 422, "alpha"),
    "two frames": (files(image=encoded(PLAIN.convert("P"), "GIF", **FRAMES)), 422, "frames"),
    "mask of another shape": (files(image=picture(), mask=mask(90, 120)), 422, "bad_request"),
    "text as mask": (files(image=picture(), mask=b"hello" * 99), 415, "not_an_image"),
    "mask of zeros and ones": (files(image=picture(), mask=encoded(Image.new("L", (120, 90), 1), "PNG")), 422, "bad_request"),
    "budget is text": ({**files(image=picture()), "data": {"budgets": "many"}}, 422, "bad_budget"),
    "budget above 1": ({**files(image=picture()), "data": {"budgets": "1.5"}}, 422, "bad_request"),
    "budget is NaN": ({**files(image=picture()), "data": {"budgets": "nan"}}, 422, "bad_request"),
    "too many budgets": ({**files(image=picture()), "data": {"budgets": ",".join(["0.5"] * 200)}}, 422, "bad_request"),
    "unknown method": ({**files(image=picture()), "data": {"selectors": "nothing"}}, 422, "bad_request"),
    "a method that needs a mask": ({**files(image=picture()), "data": {"selectors": "oracle"}}, 422, "bad_request"),
    "preview is a number": ({**files(image=picture()), "data": {"preview": "1"}}, 422, "bad_preview"),
    "another origin": ({**files(image=picture()), "headers": {"Origin": "https://evil.example"}}, 403, "cross_origin"),
    "an origin that is none": ({**files(image=picture()), "headers": {"Origin": "http://["}}, 403, "cross_origin"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_bad_request_gets_its_status_and_code(server: Server, case: str) -> None:
    request, status, code = REQUESTS[case]
    response = httpx.post(f"{server.url}/v1/route", timeout=60, **request)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert len(response.json()["error"]["message"]) > 10
