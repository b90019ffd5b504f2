"""The server over real HTTP: statuses, hosts, tokens, limits for slow, many and malformed clients, and its OpenAPI description."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from medtokenbudget.cli import main
from medtokenbudget.config import ServeConfig
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.serve import server as serving
from medtokenbudget.serve.server import HEAD_BYTES, find_token
from medtokenbudget.serve.service import Question, Service
from tests.serve.server import Server, address_of, picture, running_here, saved_model
from tests.small_model import small_model

HEAD = b"POST /v1/route HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n"
FORM = {"Content-Type": "multipart/form-data; boundary=b"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(small_model(tmp_path_factory.mktemp("server"), baselines=("center", "random", "tome")), max_bytes=1_500_000)


@pytest.fixture(scope="module")
def server(service: Service) -> Iterator[Server]:
    with running_here(service) as running:
        yield running


def ask(server: Server, image: bytes, **fields: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/route", files={"image": image}, data=fields, timeout=60)


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


def test_every_address_answers(server: Server, service: Service) -> None:
    answers = {name: httpx.get(f"{server.url}/{name}", timeout=60) for name in ("v1/model", "healthz", "readyz", "v1/samples")}
    assert answers["v1/model"].json()["fingerprint"] == service.model.fingerprint
    assert answers["healthz"].json() == answers["readyz"].json() == {"status": "ok", "model": True}
    name = answers["v1/samples"].json()["samples"][0]["id"]
    for what, kind in (("image", "image/jpeg"), ("mask", "image/png")):
        assert httpx.get(f"{server.url}/v1/samples/{name}/{what}", timeout=60).headers["content-type"] == kind
    assert ask(server, picture(), selectors="lats").json()["selectors"][0]["name"] == "lats"
    assert code(httpx.get(f"{server.url}/v1/route")) == (405, "wrong_method")
    assert code(httpx.get(f"{server.url}/v1/nothing")) == (404, "not_found")
    assert code(httpx.get(f"{server.url}/v1/samples/nothing/image")) == (404, "unknown_sample")


def test_head_answers_like_get_without_a_body(server: Server) -> None:
    for path in ("", "docs", "healthz", "v1/model", "static/explorer.css"):
        head, get = (ask(f"{server.url}/{path}", timeout=60) for ask in (httpx.head, httpx.get))
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(get.content))
        assert head.headers["content-security-policy"] == get.headers["content-security-policy"]
    assert httpx.head(f"{server.url}/v1/route").status_code == 405


def test_the_docs_describe_every_operation_and_field_and_load_only_our_own_style(server: Server) -> None:
    page = httpx.get(f"{server.url}/docs", timeout=60).text
    described = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    for path, operations in described["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in page
    form = described["paths"]["/v1/route"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert {"image", "mask", "budgets"} <= set(form["properties"])
    assert all(f"<dt>{name}</dt>" in page for name in form["properties"])
    assert set(re.findall(r"(?:src|href)='?([^'> ]+)", page)) == {"static/explorer.css", "openapi.json"}
    assert "<script" not in page


# No Docker engine is needed: the file is read, not built.
def test_the_dockerfile_runs_the_service_as_a_user_with_a_health_check_and_holds_no_secret(repository: Path) -> None:
    text = re.sub(r"\\\n\s*", "", (repository / "Dockerfile").read_text(encoding="utf-8"))
    steps = [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line and line[0] != "#")]
    given = dict(steps)
    order = [word for word, _ in steps]
    assert re.fullmatch(r"python:3\.\d+-[\w-]+", given["FROM"])  # a version, not `latest`
    assert given["USER"] not in ("root", "0")
    assert order.index("RUN") < order.index("USER") < order.index("ENTRYPOINT")
    assert "/healthz" in given["HEALTHCHECK"]
    assert f":{ServeConfig().port}/" in given["HEALTHCHECK"]
    assert given["EXPOSE"] == str(ServeConfig().port)
    assert json.loads(given["ENTRYPOINT"]) == ["mtb", "serve", "--host", "0.0.0.0"]
    assert not any(word in ("ENV", "ADD") for word in order)
    assert not re.search(r"https?://(?!127\.0\.0\.1)", text)
    assert "token" not in " ".join(rest for word, rest in steps if word in ("ARG", "RUN", "COPY")).lower()
    kept = {line[1:] for line in (repository / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")}
    copied = {name for word, rest in steps if word == "COPY" for name in rest.split()[:-1]}
    assert copied == kept
    assert all((repository / name).exists() for name in copied)


def test_an_upload_up_to_the_limit_is_read_never_to_disk_and_one_byte_more_is_not(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Above one megabyte the usual form parser moves a file to disk, by this method.
    rolled: list[bool] = []
    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", lambda self: rolled.append(True))
    image = picture(1000, 800, "PNG")
    assert len(image) > 1_100_000
    with running_here(Service(service.model, max_bytes=len(image), max_pixels=1000 * 800)) as server:
        assert ask(server, image, selectors="lats").status_code == 200
        large = ask(server, image + b"\0")
        assert code(large) == (413, "too_many_bytes")
        assert "MB" in large.json()["error"]["message"]
        many = ask(server, picture(1001, 800))
        assert code(many) == (413, "too_many_pixels")
        assert "accepts up to 0.8 million pixels" in many.json()["error"]["message"]
    assert rolled == []


def test_a_body_without_a_length_and_a_head_without_an_end_are_stopped_at_the_limit(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="image"; filename="i"\r\n\r\n'
        for _ in range(100):
            yield bytes(20_000)

    response = httpx.post(f"{server.url}/v1/route", content=endless(), headers=FORM, timeout=30)
    assert code(response) == (413, "too_many_bytes")
    with connect(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 2 * HEAD_BYTES)
        assert client.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
def test_a_client_that_is_still_sending_sees_why_it_was_refused(server: Server, connection: bytes) -> None:
    with connect(server) as client:
        pieces = 19
        client.sendall((HEAD % (pieces * 100_000)).replace(b"Host:", b"Connection: " + connection + b"\r\nHost:"))
        # A browser sends all of it before it looks for an answer; a connection that is closed meanwhile is an error without one.
        for number in range(pieces):
            part = b'--b\r\nContent-Disposition: form-data; name="image"; filename="i"\r\n\r\n' if number == 0 else b""
            client.sendall(part.ljust(100_000, b"x"))
            time.sleep(0.01)
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_foreign_host_names_are_rejected_and_every_response_has_the_security_headers(server: Server) -> None:
    foreign = ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "[")
    for host in (*foreign, "localhost:1", "127.0.0.1", "[::1]:80"):
        for path in ("/", "/v1/model"):
            assert httpx.get(f"{server.url}{path}", headers={"Host": host}).status_code == (400 if host in foreign else 200), host
    assert httpx.get(f"{server.url}/healthz", headers={"Origin": server.url}).status_code == 200
    for path in ("/", "/static/explorer.js", "/v1/model", "/nothing"):
        headers = httpx.get(f"{server.url}{path}").headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    page = httpx.get(server.url).text
    assert "http://" not in page
    assert "https://" not in page


def test_a_proxy_on_this_machine_may_pass_on_the_host_names_that_were_allowed_and_no_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []

    def noted(*given: Any) -> Any:
        asked.append(given[-1])
        raise WorkError("That is all this test needs.")

    monkeypatch.setattr(serving, "find_service", lambda *_: service)
    monkeypatch.setattr(serving, "create_app", noted)
    with pytest.raises(WorkError, match="all this test needs"):
        serving.serve(None, ServeConfig(port=0, allowed_hosts=("mtb.example.org", "*.clinic.example")))
    with running_here(service, hosts=asked[0]) as server:
        status = {
            "mtb.example.org": 200,
            "a.clinic.example": 200,
            "localhost": 200,
            "evil.example": 400,
            "mtb.example.org.evil": 400,
        }
        assert {host: httpx.get(f"{server.url}/healthz", headers={"Host": host}).status_code for host in status} == status
    for wrong in ("*", "a*.example", "https://mtb.example.org", "mtb.example.org:443"):
        with pytest.raises(RequestError, match="are host names such as"):
            serving.serve(None, ServeConfig(port=0, allowed_hosts=(wrong,)))


def test_with_a_token_only_requests_that_send_it_are_answered(service: Service) -> None:
    with running_here(service, token="secret", hosts=("*",)) as server:
        address = f"{server.url}/v1/samples"
        for header in ("", "secret", "Basic secret", "Bearer", "Bearersecret", "Token secret", "Bearer secret2", "Bearer secre"):
            refused = httpx.get(address, headers={"Authorization": header})
            assert code(refused) == (401, "token_required"), header
            assert refused.headers["www-authenticate"] == "Bearer"
        assert code(ask(server, picture())) == (401, "token_required")
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        for scheme in ("Bearer", "bearer"):
            proxied = {"Host": "some.example", "Origin": "https://some.example", "Authorization": f"{scheme} secret"}
            assert httpx.get(address, headers=proxied).status_code == 200
        assert code(httpx.get(address, headers={**proxied, "Origin": "https://evil.example"})) == (403, "cross_origin")
        described = httpx.get(f"{server.url}/openapi.json").json()
        assert described["paths"]["/v1/route"]["post"]["security"] == [{"token": []}]


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MTB_TOKEN", raising=False)
    assert find_token(ServeConfig()) is None
    with pytest.raises(RequestError, match="`token_file` or MTB_TOKEN"):
        find_token(ServeConfig(host="0.0.0.0"))
    monkeypatch.setenv("MTB_TOKEN", "from-the-environment")
    assert find_token(ServeConfig(host="0.0.0.0")) == "from-the-environment"
    path = tmp_path / "token"
    with pytest.raises(RequestError, match="No such file"):
        find_token(ServeConfig(token_file=path))
    for content, words in ((b"\n", "is empty"), (b"\xff\xfe", "not text"), (b"two words", "without spaces")):
        path.write_bytes(content)
        with pytest.raises(RequestError, match=words):
            find_token(ServeConfig(token_file=path))
    path.write_text("from-a-file\n")
    assert find_token(ServeConfig(token_file=path)) == "from-a-file"
    assert not hasattr(ServeConfig(), "token"), "an argument is visible in the list of processes"


@pytest.fixture
def gated(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[int]]]:
    """A gate that holds every answer until it is set, and the number of answers in work whenever one starts."""
    gate, started, answer, ended = threading.Event(), [], service.answer, []

    def slow(question: Question) -> dict[str, Any]:
        started.append(len(started) + 1 - len(ended))
        gate.wait(30)
        result = answer(question)
        ended.append(result)
        return result

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
        refused = [*(one.result() for one in crowd if one.done()), httpx.get(f"{server.url}/readyz")]
        assert [code(response) for response in refused] == [(503, "queue_full")] * 4
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        assert httpx.get(f"{server.url}/healthz").status_code == 200
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


def test_a_connection_that_is_idle_after_an_answer_is_closed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "IDLE_SECONDS", 0.3)
    with running_here(service) as server, connect(server) as idle:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        idle.settimeout(3)  # less than uvicorn's own limit of 5 s
        while idle.recv(4096):
            pass


@pytest.mark.parametrize("command", ["serve", "explore"])
def test_a_device_that_this_machine_does_not_have_is_an_error_before_anything_is_served(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # On a taken port, so that a server that does not check its device ends too.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main([command, "--device", "cuda", "--port", port]) == 2
        assert "Device 'cuda' is not available on this machine." in "".join(capsys.readouterr())
        assert main([command, "--device", "cpu", "--port", port]) == 1
        assert f"Cannot listen on 127.0.0.1:{port}" in "".join(capsys.readouterr())


@pytest.mark.slow
def test_the_command_opens_the_browser_logs_no_malformed_request_and_stops_at_ctrl_c(tmp_path: Path) -> None:
    browser = tmp_path / "browser.sh"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path / "opened"}\n')
    browser.chmod(0o755)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "BROWSER": f"{browser} %s"}
    program = "from medtokenbudget.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "explore", str(saved_model(tmp_path, ("center",))), "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        # A job in the background of a shell ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        url = address_of(process)
        for number in range(20):
            response = httpx.post(f"{url}/v1/route", content=b"--b\r\nwrong %d" % number, headers=FORM, timeout=60)
            assert code(response) == (400, "bad_multipart")
            with connect(Server(url, process.pid)) as client:
                client.sendall(b"this is not HTTP\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.1 400")
        until(lambda: (tmp_path / "opened").exists() and (tmp_path / "opened").read_text().strip() == url)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "Server stopped.\n"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_api_keeps_to_its_own_description(service: Service, tmp_path: Path) -> None:
    (tmp_path / "images.py").write_text(HOOKS)
    program = str(Path(sys.executable).parent / "st")
    # Without 'oracle': a form's description cannot say that it needs a mask.
    with running_here(service) as server:
        report = subprocess.run(
            [program, "run", f"{server.url}/openapi.json", "--max-time", "8", "--seed", "1", "--checks", "all"],
            cwd=tmp_path,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "images", "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert report.returncode == 0, report.stdout[-6000:] + report.stderr[-2000:]
        assert httpx.get(f"{server.url}/healthz").status_code == 200


# Schemathesis draws random bytes for a file; what is described are images. They are bright, since they also stand for masks.
HOOKS = """
import io
import schemathesis
from hypothesis import strategies as st
from PIL import Image

def image(size, color, kind):
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, format=kind)
    return stream.getvalue()

for kind in ("PNG", "JPEG"):
    pictures = st.builds(image, st.sampled_from([(8, 8), (40, 40)]), st.sampled_from(["white", "#caa"]), st.just(kind))
    schemathesis.openapi.media_type(f"image/{kind.lower()}", pictures)
"""
