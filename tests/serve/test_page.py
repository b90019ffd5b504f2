"""The page without a server in Chromium: it answers as Python does, works offline, and says what is wrong when something is."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from medtokenbudget.data import decode_image
from medtokenbudget.serve import site as exporter
from medtokenbudget.serve.service import Question, Service
from tests.serve.axe import serious
from tests.serve.server import huge_png, mask, picture
from tests.serve.sites import MAIN, SiteHandler, serving, site_model

pytestmark = pytest.mark.slow

STOPS = [round(stop / 100, 2) for stop in range(1, 101)]
expect.set_options(timeout=60_000)

# The engine of the page, asked as the page asks it.
ROUTE = """async ([image, mask, budgets]) => {
    const { engine } = await import(new URL("static/engine.js", document.baseURI).href);
    const bytes = (data) => data && new Blob([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))]);
    const answer = await engine.route(bytes(image), bytes(mask), budgets);
    return { ...answer, image: { ...answer.image, preview: null } };
}"""


@pytest.fixture(scope="module")
def service(site: Path) -> Service:
    return Service(site_model(site.with_name("site-weights")))


@contextmanager
def new_page(chromium: Browser, address: str, ready: bool = True, **options: Any) -> Iterator[Page]:
    """A page in a context of its own, so with an empty cache."""
    context = chromium.new_context(reduced_motion="reduce", **{"viewport": {"width": 1200, "height": 900}, **options})
    page = context.new_page()
    page.goto(address)
    if ready:
        expect(page.locator(".sample img[src]")).to_have_count(8)
        expect(page.locator("#k-value")).to_contain_text("30 of 100")
    yield page
    context.close()


@pytest.fixture(scope="module")
def page(chromium: Browser, site_url: str) -> Iterator[Page]:
    """A page that is ready; fails if anything was logged as an error."""
    complaints: list[str] = []
    with new_page(chromium, site_url) as page:
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        yield page
    assert complaints == []


def ask(page: Page, image: bytes, lesion: bytes | None = None, budgets: Sequence[float] = STOPS) -> dict[str, Any]:
    encoded = [None if data is None else base64.b64encode(data).decode() for data in (image, lesion)]
    answer: dict[str, Any] = page.evaluate(ROUTE, [*encoded, list(budgets)])
    return answer


def test_the_resize_of_the_page_is_that_of_pillow_to_the_last_bit(page: Page) -> None:
    generator = np.random.default_rng(0)
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC, "lanczos": Image.Resampling.LANCZOS}
    sizes = [(300, 225, 112), (97, 331, 112), (112, 112, 112), (1023, 5, 16), (60, 300, 50), (60, 70, 50), (60, 71, 50), (1, 1, 7)]
    for width, height, side in sizes:
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        pixels[: height // 2] = pixels[: height // 2] // 128 * 255  # hard edges, where the filter overshoots
        rgba = np.dstack([pixels, np.full((height, width), 255, np.uint8)])
        for name, filter_ in filters.items():
            found = page.evaluate(
                """async ([data, width, height, side, filter]) => {
                    const { Resizer } = await import(new URL("static/page/resize.js", document.baseURI).href);
                    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
                    return [3, 1].map((channels) => {
                        const resizer = new Resizer(width, height, side, side, filter, channels);
                        const cut = 4 * width * Math.floor(height / 3);
                        resizer.push(bytes.subarray(0, cut));
                        resizer.push(bytes.subarray(cut));
                        return btoa(resizer.finish().reduce((text, byte) => text + String.fromCharCode(byte), ""));
                    });
                }""",
                [base64.b64encode(rgba.tobytes()).decode(), width, height, side, name],
            )
            for mode, values in zip(("RGB", "L"), found):
                expected = np.asarray(Image.fromarray(pixels).convert(mode).resize((side, side), filter_))
                values = np.frombuffer(base64.b64decode(values), np.uint8)
                np.testing.assert_array_equal(values, expected.ravel(), err_msg=f"{name} {width} x {height} {mode}")


@pytest.mark.parametrize("masked", [False, True])
def test_the_page_answers_as_the_service_does(page: Page, service: Service, masked: bool) -> None:
    for seed, (width, height) in enumerate([(240, 180), (150, 150), (97, 331)]):
        data, lesion = picture(width, height, "PNG", seed), mask(width, height) if masked else None
        expected = service.answer(Question(data, lesion, budgets=tuple(STOPS)))
        found = ask(page, data, lesion)
        rows, others = found.pop("selectors"), [row for row in expected.pop("selectors") if row["name"] != "tome"]
        assert found | {"model": ""} == expected | {"model": ""}
        assert [row["name"] for row in rows] == [row["name"] for row in others]
        for mine, theirs in zip(rows, others):
            assert mine["k"] == theirs["k"]
            assert len(mine["promises"]) == len(theirs["promises"]) == (mine["name"] == MAIN)
            for found_promise, promise in zip(mine["promises"], theirs["promises"]):
                assert found_promise["k"] == promise["k"]
                np.testing.assert_allclose(found_promise["probabilities"], promise["probabilities"], atol=5e-3)
            np.testing.assert_allclose(mine["scores"], theirs["scores"], atol=2e-5, err_msg=mine["name"])
            assert (mine["lesion_map"] is None) == (theirs["lesion_map"] is None) == (mine["name"] != MAIN)
            if mine["lesion_map"]:
                assert mine["lesion_map"]["grid"] == theirs["lesion_map"]["grid"]
                np.testing.assert_allclose(mine["lesion_map"]["values"], theirs["lesion_map"]["values"], atol=2e-5)
            # The same order, but for patches whose scores differ by rounding.
            assert sorted(mine["order"]) == sorted(theirs["order"])
            scores = np.array(theirs["scores"])
            np.testing.assert_allclose(scores[mine["order"]], scores[theirs["order"]], atol=2e-5)
            np.testing.assert_allclose(mine["probabilities"], by_hand(service, data, mine), atol=1e-4, err_msg=mine["name"])
            for key in ("retention", "ceiling", "retention_of_ceiling"):
                assert (mine[key] is None) == (theirs[key] is None)
                if mine["order"] == theirs["order"] and mine[key] is not None:
                    assert mine[key] == theirs[key]


def by_hand(service: Service, image: bytes, row: dict[str, Any]) -> np.ndarray:
    """Probabilities of the head of a method on the mean of the patches that the page kept, at each K."""
    model = service.model
    with torch.inference_mode():
        patches = model.encode(model.backbone.prepare(decode_image(image))[None]).patches[0]
        means = torch.stack([patches[row["order"][:k]].mean(0) for k in row["k"]])
        return model.classifier(row["name"]).head(means).softmax(-1).numpy()


def test_a_photo_that_lies_on_its_side_is_turned_by_its_exif_orientation(page: Page, service: Service) -> None:
    upright = Image.open(io.BytesIO(picture(200, 120, "PNG", 3)))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stream = io.BytesIO()
        upright.save(stream, format="PNG", exif=exif)
        expected = service.answer(Question(stream.getvalue(), selectors=("darkness",)))
        found = ask(page, stream.getvalue())
        assert found["image"] == expected["image"], orientation
        darkness = next(row for row in found["selectors"] if row["name"] == "darkness")
        np.testing.assert_allclose(darkness["scores"], expected["selectors"][0]["scores"], atol=1e-5, err_msg=str(orientation))


def test_after_the_first_visit_everything_works_without_the_network_and_no_request_leaves_the_page(
    chromium: Browser, site_url: str, tmp_path: Path
) -> None:
    (tmp_path / "skin.png").write_bytes(picture(240, 180, "PNG"))
    (tmp_path / "skin_mask.png").write_bytes(mask(240, 180))
    requests: list[str] = []
    with new_page(chromium, site_url) as page:
        page.evaluate("navigator.serviceWorker.ready")
        page.context.set_offline(True)
        page.goto("about:blank")
        page.goto(site_url)
        expect(page.locator(".sample img[src]")).to_have_count(8)
        expect(page.locator("#k-value")).to_contain_text("30 of 100")
        page.context.on("request", lambda request: requests.append(request.url))
        page.locator(".sample").nth(1).click()
        expect(page.locator(".sample").nth(1)).to_have_attribute("aria-pressed", "true")
        page.locator("#image-file").set_input_files(tmp_path / "skin.png")
        expect(page.locator("#image-line")).to_contain_text("skin.png · 240 × 180 pixels · no mask")
        page.locator("#mask-file").set_input_files(tmp_path / "skin_mask.png")
        expect(page.locator("#image-line")).to_contain_text("lesion on")
        page.get_by_label("Compare").check()
        page.locator("#selector-b").select_option("oracle")
        page.locator("#budget").fill("12")
        expect(page.locator("#k-value")).to_have_text("12 of 100 patches")
        with page.expect_download() as download:
            page.get_by_role("button", name="Data (JSON)").click()
        data = json.loads(Path(download.value.path()).read_text())
        assert data["shown"] == {"budget": 0.12, "selectors": [MAIN, "oracle"]}
        with page.expect_download() as download:
            page.get_by_role("button", name="Image (PNG)").click()
        assert download.value.suggested_filename == "skin-budget-12.png"
    assert [address for address in requests if not address.startswith(("blob:", "data:"))] == []


def test_the_policy_of_the_page_stops_requests_to_other_places_from_the_page_and_from_its_worker(
    chromium: Browser, site_url: str
) -> None:
    asked: list[str] = []

    class Elsewhere(SiteHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    send = """address => fetch(address, { mode: "no-cors" }).then(() => "sent", () => "blocked")"""
    with serving(Path(__file__).parent, Elsewhere) as address, new_page(chromium, site_url) as page:
        (worker,) = page.workers
        assert page.evaluate(send, address) == "blocked"
        assert worker.evaluate(send, address) == "blocked"
        assert asked == []


def test_a_stack_of_images_becomes_a_contact_sheet_with_a_table(page: Page, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"skin-{number}.png").write_bytes(picture(120, 90, "PNG", number))
    (tmp_path / "skin-1_mask.png").write_bytes(mask(120, 90))
    (tmp_path / "cut.jpg").write_bytes(picture(120, 90)[:1500])
    (tmp_path / "notes.txt").write_text("not an image")
    page.locator("#image-file").set_input_files(sorted(tmp_path.iterdir()))
    expect(page.locator("#sheet-line")).to_have_text("4 of 4 images · 1 could not be read · 1 other file left out")
    rows = page.locator("#sheet-table tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["cut.jpg", "skin-0.png", "skin-1.png", "skin-2.png"]
    assert "damaged or incomplete" in rows[0]
    assert rows[1].split("\t")[1] == "30 of 100"
    page.locator("#budget").fill("50")
    expect(page.locator("#sheet-table tr").nth(1)).to_contain_text("50 of 100")
    with page.expect_download() as download:
        page.get_by_role("button", name="Table (CSV)").click()
    table = pd.read_csv(download.value.path())
    assert table["file"].tolist() == ["cut.jpg", "skin-0.png", "skin-1.png", "skin-2.png"]
    assert table["k"].tolist()[1:] == [50, 50, 50]
    assert table["retention"].notna().tolist() == [False, False, True, False]
    shares = table[["p_MEL", "p_NV", "p_BCC"]].dropna()
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-5)
    page.get_by_role("button", name="skin-1.png").click()
    expect(page.locator("#image-line")).to_contain_text("skin-1.png · 120 × 90 pixels · lesion on")
    page.get_by_role("button", name="Close the contact sheet").click()
    expect(page.locator("#sheet")).to_be_hidden()
    page.locator("#budget").fill("30")


def test_a_pasted_image_is_opened_and_a_phone_offers_its_camera(page: Page, chromium: Browser, site_url: str) -> None:
    page.evaluate(
        """data => {
            const transfer = new DataTransfer();
            const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
            transfer.items.add(new File([bytes], "pasted.png", { type: "image/png" }));
            dispatchEvent(new ClipboardEvent("paste", { clipboardData: transfer }));
        }""",
        base64.b64encode(picture(80, 60, "PNG")).decode(),
    )
    expect(page.locator("#image-line")).to_contain_text("pasted.png · 80 × 60 pixels")
    expect(page.get_by_text("Take photo…")).to_be_hidden()
    with new_page(chromium, site_url, viewport={"width": 375, "height": 740}, has_touch=True, is_mobile=True) as phone:
        expect(phone.get_by_text("Take photo…")).to_be_visible()
        assert phone.locator("#camera").get_attribute("capture") == "environment"


def test_a_file_that_cannot_be_used_gets_a_clear_message_and_the_page_keeps_working(
    chromium: Browser, site_url: str, tmp_path: Path
) -> None:
    def saved(kind: str, *pictures: Image.Image, **options: Any) -> bytes:
        stream = io.BytesIO()
        pictures[0].save(stream, format=kind, append_images=pictures[1:], **options)
        return stream.getvalue()

    red, blue = Image.new("RGB", (40, 40), "red"), Image.new("RGB", (40, 40), "blue")
    files = {
        "notes.txt": (b"just some words\n" * 40, "not an image"),
        "empty.png": (b"", "empty"),
        "cut.jpg": (picture(400, 300)[:2000], "damaged or incomplete"),
        "cut.png": (picture(100, 80, "PNG")[:-60], "damaged or incomplete"),
        "huge.png": (huge_png(), "more than the allowed 50,000,000"),
        "moving.gif": (saved("GIF", red, blue, save_all=True), "several frames"),
        "moving.webp": (saved("WEBP", red, blue, save_all=True), "several frames"),
        "clear.png": (saved("PNG", Image.new("RGBA", (40, 40), (255, 0, 0, 9))), "transparent pixels"),
    }
    with new_page(chromium, site_url) as page:
        shown = page.locator("#image-line").inner_text()
        for name, (data, says) in files.items():
            (tmp_path / name).write_bytes(data)
            page.locator("#image-file").set_input_files(tmp_path / name)
            expect(page.get_by_role("alert")).to_contain_text(re.compile(f"{re.escape(name)}: .*{says}"))
            assert page.locator("#image-line").inner_text() == shown
            page.get_by_role("button", name="Close", exact=True).click()
        for kind, name in (("BMP", "skin.bmp"), ("WEBP", "skin.webp"), ("GIF", "skin.gif")):
            (tmp_path / name).write_bytes(picture(60, 48, kind))
            page.locator("#image-file").set_input_files(tmp_path / name)
            expect(page.locator("#image-line")).to_contain_text(f"{name} · 60 × 48 pixels")
        (tmp_path / "other.png").write_bytes(mask(48, 60))
        page.locator("#mask-file").set_input_files(tmp_path / "other.png")
        expect(page.get_by_role("alert")).to_contain_text("other.png: The mask has 48 x 60 pixels, but the image has 60 x 48.")
        page.locator("#budget").fill("20")
        expect(page.locator("#k-value")).to_contain_text("20 of 100")


def altered(alter: Callable[[str, bytes], bytes | None]) -> type[SiteHandler]:
    """Serve a site in which `alter` may change the bytes of a file, or leave it out (None)."""

    class Altered(SiteHandler):
        def do_GET(self) -> None:
            path = Path(self.translate_path(self.path))
            data = alter(path.name, path.read_bytes()) if path.is_file() else b""
            if data is None:
                return self.send_error(404)
            if not path.is_file():
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", self.guess_type(str(path)))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return None

    return Altered


def test_damaged_or_missing_model_files_and_a_browser_without_webassembly_get_a_message(chromium: Browser, site: Path) -> None:
    fault = "missing"

    def faulty(name: str, data: bytes) -> bytes | None:
        if name != "tokens.onnx" or fault == "none":
            return data
        return None if fault == "missing" else data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]

    with serving(site, altered(faulty)) as address, new_page(chromium, address, ready=False) as page:
        expect(page.get_by_role("alert")).to_contain_text("model/tokens.onnx cannot be downloaded (status 404)")
        fault = "damaged"
        page.reload()
        expect(page.get_by_role("alert")).to_contain_text(
            "model/tokens.onnx is damaged (its hash is not that of the exported file)"
        )
        expect(page.locator("#loading")).to_be_hidden()
        fault = "none"
        page.reload()
        expect(page.locator("#k-value")).to_contain_text("30 of 100")
        page.add_init_script("delete globalThis.WebAssembly")
        page.reload()
        expect(page.get_by_role("alert")).to_contain_text("WebAssembly with SIMD is missing or switched off")


def test_when_memory_runs_out_the_page_says_so_and_takes_the_next_image(chromium: Browser, site: Path, tmp_path: Path) -> None:
    def small(name: str, data: bytes) -> bytes:
        """Let the resize fail on large images as in a browser that has no memory left."""
        place = b"constructor(width, height, toWidth, toHeight, filter, channels = 3) {"
        assert place in data or name != "resize.js"
        return data.replace(place, place + b' if (width > 900) throw new RangeError("Array buffer allocation failed");')

    (tmp_path / "large.png").write_bytes(picture(1000, 20, "PNG"))
    (tmp_path / "small.png").write_bytes(picture(100, 80, "PNG"))
    with serving(site, altered(small)) as address, new_page(chromium, address) as page:
        page.locator("#image-file").set_input_files(tmp_path / "large.png")
        expect(page.get_by_role("alert")).to_contain_text("large.png: There is not enough memory for this image.")
        page.locator("#image-file").set_input_files(tmp_path / "small.png")
        expect(page.locator("#image-line")).to_contain_text("small.png · 100 × 80 pixels")


def test_a_new_version_of_the_site_replaces_the_old_one_in_the_cache(chromium: Browser, site: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.copytree(site, folder, ignore=shutil.ignore_patterns(".lock"))
    names = "caches.keys()"
    with serving(folder) as address, new_page(chromium, address) as page:
        page.evaluate("navigator.serviceWorker.ready")
        (old,) = page.evaluate(names)
        values = json.loads((folder / exporter.DESCRIPTION).read_text())
        values["model"]["version"] = "9.9.9"
        exporter.write_description(folder, {key: value for key, value in values.items() if key not in ("version", "files")})
        page.goto(address)
        for _ in range(120):
            found = page.evaluate(names)
            if len(found) == 1 and found != [old]:
                break
            page.wait_for_timeout(500)
        page.reload()
        expect(page.locator("#fingerprint")).to_contain_text("MedTokenBudget 9.9.9")
        expect(page.locator("#k-value")).to_contain_text("30 of 100")


def test_axe_finds_nothing_serious_and_nothing_sticks_out_on_a_dark_phone(
    chromium: Browser, site_url: str, axe: str, tmp_path: Path
) -> None:
    for number in range(2):
        (tmp_path / f"skin-{number}.png").write_bytes(picture(120, 90, "PNG", number))
    (tmp_path / "broken.png").write_bytes(b"no image")
    with new_page(chromium, site_url, viewport={"width": 375, "height": 900}, color_scheme="dark") as page:
        page.get_by_label("Compare").check()
        page.locator("#image-file").set_input_files(sorted(tmp_path.iterdir()))
        expect(page.locator("#sheet-line")).to_contain_text("3 of 3 images")
        assert serious(page, axe) == []
        assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_the_progress_of_loading_is_shown_and_can_be_read_aloud(chromium: Browser, site: Path) -> None:
    class Slow(SiteHandler):
        def copyfile(self, source: Any, outputfile: Any) -> None:
            data = source.read()
            outputfile.write(data[: len(data) // 2])
            outputfile.flush()
            if self.path.endswith(".wasm"):
                going.wait(30)
            outputfile.write(data[len(data) // 2 :])

    going = threading.Event()
    with serving(site, Slow) as address, new_page(chromium, address, ready=False) as page:
        bar = page.get_by_role("progressbar", name="Loading the model")
        expect(page.locator("#loading-text")).to_contain_text(re.compile(r"1\d\.\d of 1\d\.\d MB"))
        assert 0.5 < float(bar.get_attribute("value") or 0) < 0.7
        going.set()
        expect(page.locator("#k-value")).to_contain_text("30 of 100")
        expect(page.locator("#loading")).to_be_hidden()
