"""Clients that are slow, many, malformed or without the token: each meets a limit, and the others are served."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from medtokenbudget.config import ServeConfig
from medtokenbudget.errors import RequestError
from medtokenbudget.serve import server as serving
from medtokenbudget.serve.server import HEAD_BYTES, find_token
from medtokenbudget.serve.service import Limits, Question, Service
from tests.data.pictures import many_scans
from tests.serve.server import Server, picture, running_here, saved_model, wait_for
from tests.small_model import small_model

HEAD = b"POST /v1/route HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(small_model(tmp_path_factory.mktemp("limits"), baselines=("center",)))


@pytest.fixture(scope="module")
def server(service: Service) -> Iterator[Server]:
    with running_here(service) as running:
        yield running


def ask(server: Server, image: bytes, mask: bytes | None = None) -> httpx.Response:
    files = {"image": image} if mask is None else {"image": image, "mask": mask}
    return httpx.post(f"{server.url}/v1/route", files=files, timeout=60)


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)


def until(happens: Callable[[], bool]) -> None:
    for _ in range(600):
        if happens():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen within 30 s")


@pytest.fixture
def gated(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[int]]]:
    """A gate that holds every answer until it is set, and the number of answers in work whenever one starts."""
    gate, started, answer, inside = threading.Event(), [], service.answer, [0]

    def slow(question: Question) -> dict[str, Any]:
        inside[0] += 1
        started.append(inside[0])
        gate.wait(30)
        try:
            return answer(question)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(service, "answer", slow)
    yield gate, started
    gate.set()


def test_one_image_is_in_work_at_a_time_and_beyond_the_queue_the_answer_is_503(
    service: Service, gated: tuple[threading.Event, list[int]]
) -> None:
    gate, started = gated
    with running_here(service, waiting=2) as server, ThreadPoolExecutor(6) as clients:
        crowd: list[Future[httpx.Response]] = [clients.submit(ask, server, picture()) for _ in range(6)]
        until(lambda: sum(one.done() for one in crowd) == 3)
        refused = [one.result() for one in crowd if one.done()]
        assert [code(response) for response in refused] == [(503, "queue_full")] * 3
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        assert httpx.get(f"{server.url}/healthz").json() == {"status": "ok", "model": True}
        busy = httpx.get(f"{server.url}/readyz")
        assert code(busy) == (503, "queue_full")
        assert int(busy.headers["retry-after"]) >= 1
        gate.set()
        assert sorted(one.result().status_code for one in crowd) == [200] * 3 + [503] * 3
        assert started == [1, 1, 1]
        assert httpx.get(f"{server.url}/readyz").status_code == 200


def test_a_request_whose_turn_does_not_come_in_time_is_given_up_and_not_started_late(
    service: Service, gated: tuple[threading.Event, list[int]]
) -> None:
    gate, started = gated
    with running_here(service, waiting=3, deadline=0.5) as server, ThreadPoolExecutor(1) as clients:
        first = clients.submit(ask, server, picture())
        until(lambda: started == [1])
        late = ask(server, picture())
        assert code(late) == (503, "too_late")
        assert int(late.headers["retry-after"]) >= 1
        gate.set()
        assert first.result().status_code == 200
        assert started == [1]
        assert ask(server, picture()).status_code == 200


def test_an_error_inside_the_service_is_a_500_and_frees_its_place(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(question: Question) -> dict[str, Any]:
        raise ZeroDivisionError

    with running_here(service, waiting=0) as server:
        with monkeypatch.context() as patch:
            patch.setattr(service, "answer", broken)
            for _ in range(3):
                response = ask(server, picture())
                assert code(response) == (500, "internal")
                assert response.headers["x-content-type-options"] == "nosniff"
        assert ask(server, picture()).status_code == 200


def test_slow_bodies_hold_no_places(service: Service) -> None:
    with running_here(service, waiting=0) as server:
        slow = [connect(server) for _ in range(9)]
        for one in slow:
            one.sendall(HEAD % 100_000 + b"--b")
        assert ask(server, picture()).status_code == 200
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        for one in slow:
            one.close()


def test_requests_beyond_the_open_connections_get_503_and_the_others_are_served(service: Service) -> None:
    with running_here(service, connections=5) as server:
        half = [connect(server) for _ in range(4)]
        for one in half:
            one.sendall(b"GET / HTTP/1.1\r\n")
        # The first answer ends with its connection, so that the second is the fifth again.
        for _ in range(2):
            until(lambda: httpx.get(f"{server.url}/healthz").status_code == 200)
        half.append(connect(server))
        until(lambda: httpx.get(f"{server.url}/healthz").status_code == 503)
        for one in half:
            one.close()
        until(lambda: httpx.get(f"{server.url}/healthz").status_code == 200)


def test_a_head_that_does_not_end_is_refused(server: Server) -> None:
    with connect(server) as endless:
        endless.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 2 * HEAD_BYTES)
        assert endless.recv(100).startswith(b"HTTP/1.1 400")


def test_a_connection_that_is_idle_after_an_answer_is_closed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "IDLE_SECONDS", 0.3)
    with running_here(service) as server, connect(server) as idle:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        idle.settimeout(3)  # less than uvicorn's own limit of 5 s
        while idle.recv(4096):
            pass


@pytest.mark.slow
def test_malformed_requests_write_nothing_to_the_log(tmp_path: Path) -> None:
    folder, log = saved_model(tmp_path, ("center",)), tmp_path / "log"
    program = "from medtokenbudget.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "serve", str(folder), "--port", "0"]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        until(lambda: "Explorer: " in log.read_text())
        url = log.read_text().partition("Explorer: ")[2].split()[0]
        wait_for(url)
        before = log.read_text()
        for number in range(50):
            headers = {"Content-Type": "multipart/form-data; boundary=b"}
            response = httpx.post(f"{url}/v1/route", content=b"--b\r\nwrong %d" % number, headers=headers)
            assert code(response) == (400, "bad_multipart")
            with connect(Server(url, process.pid)) as client:
                client.sendall(b"this is not HTTP\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.1 400")
        assert log.read_text() == before
    finally:
        process.terminate()
        process.wait(30)


def test_an_upload_up_to_the_limit_is_read_and_one_byte_more_is_not(service: Service) -> None:
    image = picture(300, 200, "PNG")
    model = service.model
    with running_here(Service(model, Limits(max_bytes=len(image)))) as server:
        assert ask(server, image).status_code == 200
        assert code(ask(server, image + b"\0")) == (413, "too_many_bytes")
    with running_here(Service(model, Limits(max_pixels=300 * 200))) as server:
        assert ask(server, image).status_code == 200
        assert code(ask(server, picture(301, 200, "PNG"))) == (413, "too_many_pixels")


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
def test_a_client_that_is_still_sending_sees_why_it_was_refused(service: Service, connection: bytes) -> None:
    with running_here(Service(service.model, Limits(max_bytes=1_000_000))) as server, connect(server) as client:
        pieces = 19
        client.sendall((HEAD % (pieces * 100_000)).replace(b"Host:", b"Connection: " + connection + b"\r\nHost:"))
        # A browser sends all of it before it looks for an answer; a connection that is closed meanwhile is an error without one.
        for number in range(pieces):
            part = b'--b\r\nContent-Disposition: form-data; name="image"; filename="i"\r\n\r\n' if number == 0 else b""
            client.sendall(part.ljust(100_000, b"x"))
            time.sleep(0.01)
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_malformed_posts_write_no_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    for number in range(50):
        answer = httpx.post(f"{server.url}/v1/route", content=b"no boundary %d" % number, headers=kind, timeout=60)
        assert code(answer) == (400, "bad_multipart")
    assert [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))] == []


def test_an_origin_that_cannot_be_parsed_is_another_origin(server: Server) -> None:
    assert code(httpx.get(f"{server.url}/healthz", headers={"Origin": "http://["})) == (403, "cross_origin")


def test_a_jpeg_of_thousands_of_scans_is_rejected(server: Server) -> None:
    assert code(ask(server, many_scans(256, 3000))) == (422, "too_many_scans")


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "WEBP", "JPEG2000", "PPM", "BMP"])
def test_the_rarer_formats_are_answered_too(server: Server, kind: str) -> None:
    assert ask(server, picture(kind=kind)).status_code == 200


def grayscale(pixels: np.ndarray, mode: str = "L") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, format="PNG")
    return stream.getvalue()


def test_a_mask_of_zeros_and_ones_is_rejected_with_its_values(server: Server) -> None:
    response = ask(server, picture(), grayscale(np.eye(90, 120, dtype=np.uint8)))
    assert response.status_code == 422
    assert "The mask has only the values 0 and 1" in response.json()["error"]["message"]
    assert ask(server, picture(), grayscale(np.zeros((90, 120), np.uint8))).status_code == 200


def test_a_transparent_mask_is_a_fault_of_the_mask(server: Server) -> None:
    stream = io.BytesIO()
    Image.new("RGBA", (120, 90), (255, 255, 255, 0)).save(stream, format="PNG")
    response = ask(server, picture(), stream.getvalue())
    assert code(response) == (422, "alpha")
    assert response.json()["error"]["message"].startswith("The mask has transparent pixels")
    assert ask(server, picture(), b"").json()["error"]["message"].startswith("The mask is empty")


def test_a_token_counts_only_in_the_bearer_scheme(service: Service) -> None:
    with running_here(service, token="secret") as server:
        address = f"{server.url}/v1/samples"
        for header in ("secret", "Basic secret", "Bearer", "Bearer  secret", "Bearersecret", "Token secret", "Bearer secret2"):
            refused = httpx.get(address, headers={"Authorization": header})
            assert code(refused) == (401, "token_required"), header
            assert refused.headers["www-authenticate"] == "Bearer"
        assert httpx.get(address, headers={"Authorization": "bearer secret"}).status_code == 200
        assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MTB_TOKEN", raising=False)
    assert find_token(ServeConfig()) is None
    monkeypatch.setenv("MTB_TOKEN", "from-the-environment")
    assert find_token(ServeConfig()) == "from-the-environment"
    (tmp_path / "token").write_text("from-a-file\n")
    assert find_token(ServeConfig(token_file=tmp_path / "token")) == "from-a-file"
    for content, words in ((None, "No such file"), (b"\n", "is empty"), (b"\xff\xfe", "not text")):
        path = tmp_path / "other"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(RequestError, match=words):
            find_token(ServeConfig(token_file=path))
    assert not hasattr(ServeConfig(), "token"), "an argument is visible in the list of processes"
