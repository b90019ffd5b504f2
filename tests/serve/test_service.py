"""The service over real HTTP: answers, errors, behavior under load, and its OpenAPI description."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from medtokenbudget.cli import main
from medtokenbudget.config import BUDGETS, ServeConfig
from medtokenbudget.data import patch_labels
from medtokenbudget.errors import RequestError
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.model.looks import look
from medtokenbudget.serve.samples import offers
from medtokenbudget.serve.server import find_service, serve
from medtokenbudget.serve.service import Question, Service, retention
from tests.serve.server import Server, address_of, huge_png, mask, picture, running, running_here, saved_model, wait_for
from tests.small_model import small_model

MAX_BYTES = 400_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def model(folder: Path) -> MedTokenBudget:
    return MedTokenBudget.from_pretrained(folder, device="cpu")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    limits = ("--max_bytes", str(MAX_BYTES), "--max_pixels", "5000000", "--queue", "4")
    with running(str(folder), *limits, browser=folder.parent / "opened") as server:
        yield server


def ask(server: Server, image: bytes, with_mask: bytes | None = None, **fields: str) -> httpx.Response:
    files = {"image": ("image", image)} | ({} if with_mask is None else {"mask": ("mask", with_mask)})
    return httpx.post(f"{server.url}/v1/route", files=files, data=fields, timeout=60)


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_the_model_describes_itself(server: Server, model: MedTokenBudget) -> None:
    info = httpx.get(f"{server.url}/v1/model").json()
    assert info["classes"] == list(model.classes)
    assert [row["name"] for row in info["selectors"]] == model.selectors
    assert info["main"] == model.main
    titles = {row["name"]: row["title"] for row in info["selectors"]}
    assert titles == {name: look(name).title for name in model.selectors}
    assert all(row["about"].endswith(".") for row in info["selectors"])
    assert info["grid"] == [10, 10]
    assert info["budgets"] == list(BUDGETS)
    assert info["fingerprint"] == model.fingerprint
    assert "not a medical device" in info["notice"]
    assert httpx.get(f"{server.url}/healthz").json() == {"status": "ok", "model": True}


def test_explore_opens_the_browser_on_its_own_address(server: Server, folder: Path) -> None:
    assert (folder.parent / "opened").read_text().strip() == server.url


def test_an_answer_agrees_with_predict_at_every_budget_and_selector(server: Server, model: MedTokenBudget) -> None:
    data = picture()
    answer = ask(server, data, budgets="0.25,0.07").json()
    assert answer["budgets"] == sorted([0.07, 0.25, *BUDGETS])
    assert [row["name"] for row in answer["selectors"]] == [name for name in model.selectors if name != "oracle"]
    image = Image.open(io.BytesIO(data))
    for row in answer["selectors"]:
        for budget in (0.07, 0.3, 1.0):
            at = answer["budgets"].index(budget)
            expected = model.predict(image, budget, row["name"])[0]
            assert row["k"][at] == expected.k
            np.testing.assert_allclose(row["probabilities"][at], list(expected.probabilities.values()), atol=2e-6)
            if expected.kept is None:
                assert row["order"] is None
                assert row["retention"] is None
                assert row["groups"][at] == expected.assignment.tolist()
            else:
                assert row["order"][: expected.k] == expected.kept.tolist()
                assert row["groups"] is None
                np.testing.assert_allclose(row["scores"], expected.scores, rtol=1e-5)


def test_retention_and_ceiling_are_counted_from_the_mask(server: Server) -> None:
    answer = ask(server, picture(), mask()).json()
    lesion = set(np.flatnonzero(patch_labels(Image.open(io.BytesIO(mask())), (10, 10))).tolist())
    assert set(answer["lesion"]) == lesion
    rows = {row["name"]: row for row in answer["selectors"]}
    for row in rows.values():
        if row["order"] is None:
            continue
        for k, kept, ceiling in zip(row["k"], row["retention"], row["ceiling"]):
            assert kept == pytest.approx(len(lesion & set(row["order"][:k])) / len(lesion), abs=1e-6)
            assert ceiling == pytest.approx(min(k, len(lesion)) / len(lesion), abs=1e-6)
    assert rows["oracle"]["retention"] == rows["oracle"]["ceiling"]
    assert rows["tome"]["retention"] is None


def test_retention_by_hand() -> None:
    # Lesion patches 1 and 3; the order keeps 3 first, then two others, then 1.
    lesion = np.array([False, True, False, True])
    found = retention(np.array([3, 0, 2, 1]), lesion, [1, 2, 3, 4])
    assert found == {
        "retention": [0.5, 0.5, 0.5, 1.0],
        "ceiling": [0.5, 1.0, 1.0, 1.0],
        "retention_of_ceiling": [1.0, 0.5, 0.5, 1.0],
    }


def test_a_mask_without_lesion_gives_no_retention_rather_than_zero(server: Server) -> None:
    empty = io.BytesIO()
    Image.new("L", (120, 90)).save(empty, format="PNG")
    answer = ask(server, picture(), empty.getvalue(), selectors="lats").json()
    assert answer["lesion"] == []
    assert answer["selectors"][0]["retention"] is None


def test_the_same_image_gives_the_same_answer_and_the_preview_is_that_image(server: Server) -> None:
    first, second = (ask(server, picture(), selectors="random,lats", preview="true") for _ in range(2))
    assert first.content == second.content
    assert [row["name"] for row in first.json()["selectors"]] == ["random", "lats"]
    preview = first.json()["image"]["preview"]
    assert preview.startswith("data:image/jpeg;base64,")


@pytest.mark.parametrize(
    ("image", "expected", "says"),
    [
        (b"just some words\n" * 40, (415, "not_an_image"), "not an image"),
        (picture()[:900], (422, "damaged"), "incomplete"),
        (huge_png(), (413, "too_many_pixels"), "accepts up to 5 million pixels"),
        (b"", (422, "empty"), "empty"),
        (os.urandom(MAX_BYTES + 1), (413, "too_many_bytes"), "0.4 MB"),
    ],
    ids=["text", "truncated", "huge", "empty", "bytes"],
)
def test_a_file_that_cannot_be_used_is_rejected_with_the_reason(
    server: Server, image: bytes, expected: tuple[int, str], says: str
) -> None:
    response = ask(server, image)
    assert code(response) == expected
    assert says in response.json()["error"]["message"]
    assert ask(server, picture(), selectors="lats").status_code == 200


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"selectors": "latz"}, "Did you mean 'lats'?"),
        ({"selectors": "oracle"}, "mask"),
        ({"budgets": "0"}, "(0, 1]"),
        ({"budgets": "nan"}, "(0, 1]"),
        ({"budgets": "much"}, "'much'"),
        ({"budgets": ",".join(["0.5"] * 200)}, "at most 128"),
        ({"retention": "0.95"}, "not calibrated for 95% of the lesion"),
        ({"retention": "most"}, "A promised retention must be a number"),
        ({"retention": "1.5"}, "between 0 and 1"),
        ({"preview": "maybe"}, "preview"),
        ({"color": "red"}, "'color'"),
    ],
)
def test_a_wrong_field_is_rejected_with_the_reason(server: Server, fields: dict[str, str], says: str) -> None:
    response = ask(server, picture(), **fields)
    assert response.status_code == 422
    assert says in response.json()["error"]["message"]


def test_a_mask_with_another_aspect_ratio_than_the_image_is_rejected(server: Server) -> None:
    response = ask(server, picture(), mask(90, 120))
    assert response.status_code == 422
    assert "aspect ratio" in response.json()["error"]["message"]


def test_a_mask_of_zeros_and_ones_is_rejected(server: Server) -> None:
    dark = io.BytesIO()
    Image.fromarray((np.asarray(Image.open(io.BytesIO(mask()))) > 0).astype(np.uint8)).save(dark, format="PNG")
    response = ask(server, picture(), dark.getvalue())
    assert response.status_code == 422
    assert "Multiply its values by 255" in response.json()["error"]["message"]


def test_requests_that_are_not_multipart_or_lack_the_image_are_rejected(server: Server) -> None:
    address = f"{server.url}/v1/route"
    assert code(httpx.post(address, json={"image": "x"})) == (415, "wrong_type")
    assert code(httpx.post(address, files={"mask": mask()})) == (422, "no_image")
    assert code(httpx.post(address, content=b"x", headers={"Content-Type": "multipart/form-data"})) == (400, "bad_multipart")
    assert code(httpx.get(address)) == (405, "wrong_method")
    assert code(httpx.get(f"{server.url}/v1/nothing")) == (404, "not_found")
    assert code(httpx.get(f"{server.url}/v1/samples/nothing/image")) == (404, "unknown_sample")


def test_a_body_without_a_length_is_stopped_at_the_limit(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="image"; filename="i"\r\n\r\n'
        for _ in range(100):
            yield bytes(20_000)

    response = httpx.post(
        f"{server.url}/v1/route", content=endless(), headers={"Content-Type": "multipart/form-data; boundary=b"}, timeout=30
    )
    assert code(response) == (413, "too_many_bytes")


def test_an_upload_is_never_written_to_disk(model: MedTokenBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    # Above one megabyte the usual form parser moves a file to disk, by this method.
    rolled: list[bool] = []
    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", lambda self: rolled.append(True))
    with running_here(Service(model)) as server:
        assert code(ask(server, os.urandom(3_000_000))) == (415, "not_an_image")
    assert rolled == []


def test_foreign_host_names_and_origins_are_rejected(server: Server) -> None:
    for host, status in {
        "evil.example": 400,
        "127.0.0.1.evil.example:80": 400,
        "localhost.evil.example": 400,
        "[": 400,
        "localhost:1": 200,
        "127.0.0.1": 200,
        "[::1]:80": 200,
    }.items():
        for path in ("/", "/v1/model"):
            assert httpx.get(f"{server.url}{path}", headers={"Host": host}).status_code == status, host
    foreign = httpx.post(f"{server.url}/v1/route", files={"image": picture()}, headers={"Origin": "https://evil.example"})
    assert code(foreign) == (403, "cross_origin")
    assert httpx.get(f"{server.url}/healthz", headers={"Origin": server.url}).status_code == 200


def test_every_response_has_the_security_headers(server: Server) -> None:
    for path in ("/", "/static/explorer.js", "/v1/model", "/nothing"):
        headers = httpx.get(f"{server.url}{path}").headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    page = httpx.get(server.url).text
    assert "http://" not in page
    assert "https://" not in page


def test_samples_are_pictures_with_masks_of_the_same_size(server: Server) -> None:
    samples = httpx.get(f"{server.url}/v1/samples").json()["samples"]
    assert len({sample["id"] for sample in samples}) == len(samples) >= 6
    address = f"{server.url}/v1/samples/{samples[0]['id']}"
    image, lesion = (Image.open(io.BytesIO(httpx.get(f"{address}/{what}", timeout=60).content)) for what in ("image", "mask"))
    assert image.size == lesion.size
    assert lesion.getextrema() == (0, 255)


def test_samples_keep_their_class_only_if_the_model_has_it(server: Server, model: MedTokenBudget) -> None:
    samples = {sample["id"]: sample for sample in httpx.get(f"{server.url}/v1/samples").json()["samples"]}
    assert {sample["label"] for sample in samples.values()} == {"MEL", "NV", "BCC", None}
    assert {"MEL", "NV", "BCC"} <= set(model.classes)
    assert (samples["vasc-off-center"]["title"], samples["vasc-off-center"]["label"]) == ("Lesion 2, off-center", None)
    assert all(offer.label is None for offer in offers(["polyp", "normal"]))


@pytest.mark.parametrize("command", ["serve", "explore"])
@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
def test_a_device_that_this_machine_does_not_have_is_an_error_before_anything_is_served(
    command: str, given: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # On a taken port, so that a server that does not check its device ends too.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["--device", "cuda", "--port", str(taken.getsockname()[1])]
        assert main([command, *([str(folder)] if given else []), *arguments]) == 2
    assert "Device 'cuda' is not available on this machine." in "".join(capsys.readouterr())


def test_an_address_that_other_machines_can_reach_needs_a_token() -> None:
    with pytest.raises(RequestError, match="--token-file or MTB_TOKEN"):
        serve(None, ServeConfig(host="0.0.0.0"))


@pytest.mark.slow
def test_ctrl_c_stops_the_server_and_is_not_an_error(tmp_path: Path) -> None:
    program = "from medtokenbudget.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "serve", "--port", "0"]
    # A job in the background of a shell ignores SIGINT, and so would its children.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **heard)
    try:
        url = address_of(process)
        wait_for(url)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.read() == "Server stopped.\n"
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def open_server(model: MedTokenBudget) -> Iterator[Server]:
    """With a token, under any host name."""
    with running_here(Service(model), token="a-b-c", hosts=("*",)) as server:
        yield server


def test_with_a_token_only_requests_that_send_it_are_answered(open_server: Server) -> None:
    address = f"{open_server.url}/v1/samples"
    assert code(httpx.get(address)) == (401, "token_required")
    assert code(httpx.get(address, headers={"Authorization": "Bearer a-b"})) == (401, "token_required")
    assert httpx.get(address, headers={"Authorization": "Bearer a-b-c"}).status_code == 200
    assert code(httpx.post(f"{open_server.url}/v1/route", files={"image": picture()})) == (401, "token_required")
    behind_a_proxy = {"Host": "service.example", "Origin": "https://service.example", "Authorization": "Bearer a-b-c"}
    assert httpx.get(address, headers=behind_a_proxy).status_code == 200
    assert code(httpx.get(address, headers={**behind_a_proxy, "Origin": "https://evil.example"})) == (403, "cross_origin")
    assert httpx.get(f"{open_server.url}/openapi.json").json()["security"] == [{"token": []}]


def test_the_router_of_the_package_is_the_default_and_the_demo_model_is_known_by_its_place(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    service = find_service(None, ServeConfig(device="cpu"))
    assert "comes with the package" in capsys.readouterr().err
    assert service.describe()["classes"] == []
    assert not service.demo
    shutil.copytree(folder, tmp_path / "runs" / "demo" / "model")
    assert find_service("runs/demo", ServeConfig(device="cpu")).describe()["demo"] is True
    assert not find_service(str(folder), ServeConfig(device="cpu")).demo


def test_a_selector_answers_with_its_own_head_and_never_with_another(model: MedTokenBudget) -> None:
    answer = Service(model).answer(Question(picture()))
    full = {row["name"]: row["probabilities"][-1] for row in answer["selectors"]}
    # At the full budget all rankers pool the same patches: what differs is the head alone.
    assert len({tuple(values) for values in full.values()}) == len(full)


@pytest.mark.slow
def test_the_api_keeps_to_its_own_description(tmp_path: Path) -> None:
    (tmp_path / "images.py").write_text(HOOKS)
    program = str(Path(sys.executable).parent / "st")
    # Without 'oracle': that it goes with a mask only is a rule that the description of a form cannot hold, and is tested above.
    service = Service(small_model(tmp_path / "backbone", baselines=("random", "center", "tome")))
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


@pytest.mark.slow
def test_twenty_clients_at_once_get_right_answers_or_503_and_memory_does_not_grow(server: Server) -> None:
    pictures = [picture(seed=seed) for seed in range(3)]
    expected = [ask(server, data, selectors="lats,center").content for data in pictures]
    load(server, pictures, expected, seconds=2)
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    counts = load(server, pictures, expected, seconds=8)
    grown = process.memory_info().rss - before
    assert counts[200] > 10
    assert counts.get(503, 0) > 0
    assert grown < 30e6


def load(server: Server, pictures: list[bytes], expected: list[bytes], seconds: float, clients: int = 20) -> dict[int, int]:
    """How often each status came; anything but the right answer or a 503 with Retry-After fails."""
    counts: dict[int, int] = {}

    async def client(number: int, http: httpx.AsyncClient, end: float) -> None:
        while time.monotonic() < end:
            which = number % len(pictures)
            files, data = {"image": ("image", pictures[which])}, {"selectors": "lats,center"}
            response = await http.post(f"{server.url}/v1/route", files=files, data=data)
            counts[response.status_code] = counts.get(response.status_code, 0) + 1
            if response.status_code == 503:
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] == "queue_full"
                # As asked, but sooner: the queue shall be kept full.
                await asyncio.sleep(0.1)
            else:
                assert response.status_code == 200
                assert response.content == expected[which]

    async def crowd() -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=clients)) as http:
            end = time.monotonic() + seconds
            await asyncio.gather(*(client(number, http, end) for number in range(clients)))

    asyncio.run(crowd())
    return counts
