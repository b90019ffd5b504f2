"""Decoding within a time limit: the same pictures and messages as in place, and no file that holds the server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from medtokenbudget.app import decoding
from medtokenbudget.app.decoding import Decoder
from medtokenbudget.app.service import Limits, Service
from medtokenbudget.data import DecodeError, decode_image, decode_mask
from tests.app.server import running_here
from tests.app.test_limits import ask, code
from tests.data.pictures import lesion_picture
from tests.data.test_decode import encoded, transparent
from tests.small_model import small_model

pytestmark = pytest.mark.slow
PIXELS = 1_000_000
SLOW = b"P5\n" + b"#\n" * 4_000_000 + b"1 1 255\n\0"
"""A picture of one pixel with four million comments, which takes more than a second."""


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    decoder = Decoder(seconds=60)
    yield decoder
    decoder.close()


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "WEBP", "JPEG2000", "PPM", "BMP"])
def test_the_other_process_sees_what_is_seen_in_place(decoder: Decoder, kind: str) -> None:
    data = encoded(lesion_picture(0), kind)
    image, mask = decoder.decode(data, "image", PIXELS), decoder.decode(data, "mask", PIXELS)
    assert decoder._process is not None
    assert (image.mode, mask.mode) == ("RGB", "L")
    assert np.array_equal(image, decode_image(data))
    assert np.array_equal(mask, decode_mask(data))


@pytest.mark.parametrize(
    "data", [b"BM" + bytes(100), encoded(transparent(), "TIFF"), encoded(Image.new("L", (2000, 2000)), "GIF"), b"", b"text"]
)
def test_errors_of_the_other_process_are_those_in_place(decoder: Decoder, data: bytes) -> None:
    with pytest.raises(DecodeError) as here:
        decode_image(data, PIXELS)
    with pytest.raises(DecodeError) as there:
        decoder.decode(data, "image", PIXELS)
    assert (str(there.value), there.value.kind) == (str(here.value), here.value.kind)


def test_small_jpeg_and_png_files_are_decoded_in_place_and_large_ones_are_not(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = Decoder()
    for kind in ("JPEG", "PNG"):
        assert idle.decode(encoded(lesion_picture(0), kind), "image", PIXELS).mode == "RGB"
    assert idle._process is None
    monkeypatch.setattr(decoding, "IN_PLACE_BYTES", 10)
    monkeypatch.setattr(decoding, "_decode", lambda *_: pytest.fail("decoded in place"))
    assert decoder.decode(encoded(lesion_picture(0), "PNG"), "image", PIXELS).mode == "RGB"


def test_a_decoder_that_was_killed_is_started_again(decoder: Decoder) -> None:
    data = encoded(lesion_picture(0), "BMP")
    decoder.decode(data, "image", PIXELS)
    assert decoder._process is not None
    os.kill(decoder._process.pid or 0, signal.SIGKILL)
    decoder._process.join()
    assert decoder.decode(data, "image", PIXELS).mode == "RGB"


def test_a_file_that_takes_too_long_is_given_up_and_the_next_one_is_answered(tmp_path_factory: pytest.TempPathFactory) -> None:
    service = Service(small_model(tmp_path_factory.mktemp("slow"), baselines=("center",)), Limits(decode_seconds=0.2))
    with running_here(service) as server:
        response = ask(server, SLOW)
        assert code(response) == (422, "too_slow")
        assert response.json()["error"]["message"].startswith("The image takes more than 0.2 s to decode.")
        assert service._decoder._process is None, "it still decodes"
        service._decoder.seconds = 60
        assert ask(server, encoded(lesion_picture(0), "TIFF")).status_code == 200
    assert service._decoder._process is None, "it outlives the server"
