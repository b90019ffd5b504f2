"""Clients that are slow, many, malformed or guessing: each meets a limit, and the others are served."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from medtokenbudget.app import connections, uploads
from medtokenbudget.app.guard import Guesses
from medtokenbudget.app.launch import ServeConfig, find_token
from medtokenbudget.app.queue import DeadlineError, Queue
from medtokenbudget.app.service import Question, Service
from medtokenbudget.errors import RequestError
from tests.app.server import Server, mask, picture, running_here
from tests.data.test_decode import many_scans
from tests.small_model import small_model

pytestmark = pytest.mark.slow


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


HEAD = (
    b"POST /v1/route HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 100000\r\n\r\n"
)


def test_slow_bodies_hold_no_places_and_are_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "GRACE_SECONDS", 1.0)
    with running_here(service, waiting=1) as server:
        slow = [connect(server) for _ in range(9)]
        for one in slow:
            one.sendall(HEAD + b"--b")
        assert ask(server, picture()).status_code == 200
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        answers = [one.recv(100) for one in slow]
        assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
        for one in slow:
            one.close()


def test_a_body_that_is_fast_enough_may_take_longer_than_the_grace_time(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "GRACE_SECONDS", 0.5)
    image = picture(600, 400, "PNG")

    def pieces() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="image"; filename="i"\r\n\r\n'
        for start in range(0, len(image), len(image) // 8):
            time.sleep(0.15)
            yield image[start : start + len(image) // 8]
        yield b"\r\n--b--\r\n"

    with running_here(service) as server:
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        assert httpx.post(f"{server.url}/v1/route", content=pieces(), headers=headers, timeout=60).status_code == 200


def test_uploads_that_arrive_together_share_a_bounded_room() -> None:
    room = uploads.Room(100)
    with room.share() as first, room.share() as second:
        first.take(60)
        second.take(40)
        with pytest.raises(uploads.NoRoomError):
            second.take(1)
    assert room.used == 0


def test_a_head_that_does_not_end_is_cut_off_and_an_idle_connection_too(service: Service) -> None:
    with running_here(service, header_seconds=0.5) as server:
        for start in (b"", b"GET /healthz HTTP/1.1\r\nHost: local"):
            with connect(server) as half:
                half.sendall(start)
                assert half.recv(10) == b""
        with connect(server) as twice:
            twice.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert twice.recv(4096).startswith(b"HTTP/1.1 200")
            twice.sendall(b"GET /healthz HT")
            seen = b"x"
            while seen:
                seen = twice.recv(4096)


def test_connections_beyond_the_limit_are_closed_and_the_others_served(service: Service) -> None:
    with running_here(service, connections=5, header_seconds=30) as server:
        half = [connect(server) for _ in range(4)]
        for one in half:
            one.sendall(b"GET / HTTP/1.1\r\n")
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        crowd = [connect(server) for _ in range(20)]
        closed = 0
        for one in crowd:
            one.settimeout(0.5)
            try:
                closed += one.recv(1) == b""
            except ConnectionError:
                closed += 1
            except TimeoutError:
                pass
        assert closed >= 19
        for one in (*half, *crowd):
            one.close()
        for _ in range(100):
            try:
                assert httpx.get(f"{server.url}/healthz").status_code == 200
                break
            except httpx.TransportError:
                time.sleep(0.05)
        else:
            pytest.fail("the server does not answer any more")


def test_the_number_of_connections_fits_the_file_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = {"now": (64, 64)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, value: limits.update(now=value))
    monkeypatch.setattr(connections, "_open_handles", lambda: 20)
    assert connections.affordable_connections(100) == 64 - 20 - connections.BACKLOG - 16
    limits["now"] = (64, 4096)
    assert connections.affordable_connections(100) == 100
    assert limits["now"] == (356, 4096)


def test_clients_cannot_fill_the_log() -> None:
    lines: list[str] = []
    logger = logging.getLogger("limits-of-a-test")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    limit = connections.LogLimit(3)
    logger.addFilter(limit)
    for number in range(1000):
        logger.warning("bad request %d", number)
    assert lines == [f"bad request {number}" for number in range(3)]
    limit.started -= 60
    logger.warning("bad request %d", 1000)
    assert lines[-1] == "(997 messages were left out.) bad request 1000"


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


def grayscale(pixels: np.ndarray, mode: str = "L") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, format="PNG")
    return stream.getvalue()


def test_a_mask_of_zeros_and_ones_is_rejected_with_its_values(server: Server) -> None:
    response = ask(server, picture(), grayscale(np.eye(90, 120, dtype=np.uint8)))
    assert response.status_code == 422
    assert "The mask has values from 0 to 1" in response.json()["error"]["message"]
    assert ask(server, picture(), grayscale(np.zeros((90, 120), np.uint8))).status_code == 200


def test_a_transparent_mask_is_a_fault_of_the_mask(server: Server) -> None:
    stream = io.BytesIO()
    Image.new("RGBA", (120, 90), (255, 255, 255, 0)).save(stream, format="PNG")
    response = ask(server, picture(), stream.getvalue())
    assert code(response) == (422, "alpha")
    assert response.json()["error"]["message"].startswith("The mask has transparent pixels")
    assert ask(server, picture(), b"").json()["error"]["message"].startswith("The mask is empty")


def test_a_request_that_is_not_answered_in_time_is_given_up_and_not_started_late() -> None:
    queue, gate, started = Queue(waiting=3, deadline=0.3), threading.Event(), []

    def work(number: int) -> int:
        started.append(number)
        gate.wait(30)
        return number

    async def crowd() -> list[int | BaseException]:
        answers = await asyncio.gather(*(queue.run(lambda n=n: work(n)) for n in range(3)), return_exceptions=True)
        assert queue.taken == 3, "the work that runs keeps its place"
        gate.set()
        while queue.taken:
            await asyncio.sleep(0.01)
        return answers

    answers = asyncio.run(crowd())
    queue.close()
    assert all(isinstance(answer, DeadlineError) for answer in answers)
    assert started == [0]


def test_readiness_is_apart_from_liveness(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, inside, answer = threading.Event(), threading.Event(), service.answer

    def slow(question: Question) -> dict[str, object]:
        inside.set()
        gate.wait(30)
        return answer(question)

    monkeypatch.setattr(service, "answer", slow)
    with running_here(service, waiting=0) as server:
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        thread = threading.Thread(target=ask, args=(server, picture(), mask()))
        thread.start()
        inside.wait(30)
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        busy = httpx.get(f"{server.url}/readyz")
        assert code(busy) == (503, "queue_full")
        assert int(busy.headers["retry-after"]) >= 1
        gate.set()
        thread.join()
    with running_here(None) as empty:
        assert httpx.get(f"{empty.url}/healthz").json() == {"status": "ok", "model": False}
        assert code(httpx.get(f"{empty.url}/readyz")) == (503, "no_model")


@pytest.mark.parametrize("header", ["secret", "Basic secret", "Bearer", "Bearer  secret", "Bearersecret", "Token secret"])
def test_a_token_counts_only_in_the_bearer_scheme(header: str) -> None:
    with running_here(None, token="secret") as server:
        assert code(httpx.get(f"{server.url}/v1/samples", headers={"Authorization": header})) == (401, "token_required")
        assert httpx.get(f"{server.url}/v1/samples", headers={"Authorization": "bearer secret"}).status_code == 200


def test_guessing_a_token_becomes_slow() -> None:
    with running_here(None, token="secret") as server:
        address = f"{server.url}/v1/samples"
        for number in range(5):
            assert code(httpx.get(address, headers={"Authorization": f"Bearer {number}"})) == (401, "token_required")
        locked = httpx.get(address, headers={"Authorization": "Bearer secret"})
        assert code(locked) == (429, "too_many_guesses")
        assert locked.headers["retry-after"] == "1"
        assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_waits_double_end_and_are_forgotten_after_the_right_token() -> None:
    now = [0.0]
    guesses = Guesses(free=2, longest=8, clock=lambda: now[0])
    waits = []
    for _ in range(7):
        guesses.failed("a")
        waits.append(guesses.wait("a"))
    assert waits == [0, 1, 2, 4, 8, 8, 8]
    assert guesses.wait("b") == 0
    now[0] = 8
    assert guesses.wait("a") == 0
    guesses.succeeded("a")
    guesses.failed("a")
    assert guesses.wait("a") == 0


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
