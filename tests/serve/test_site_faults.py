"""The page without a server when something is wrong: a clear message each time, and the page goes on working. Also: offline."""

from __future__ import annotations

import io
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from medtokenbudget.serve import site as exporter
from tests.serve.axe import serious
from tests.serve.server import huge_png, mask, picture
from tests.serve.sites import SiteHandler, serving

pytestmark = pytest.mark.slow
expect.set_options(timeout=60_000)


@contextmanager
def new_page(chromium: Browser, address: str, ready: bool = True, **options: Any) -> Iterator[Page]:
    """A page in a context of its own, so with an empty cache."""
    context = chromium.new_context(reduced_motion="reduce", **{"viewport": {"width": 1200, "height": 900}, **options})
    page = context.new_page()
    page.goto(address)
    if ready:
        expect(page.locator("#k-value")).to_contain_text("30 of 100")
    yield page
    context.close()


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()


def test_a_file_that_cannot_be_used_gets_a_clear_message_and_the_page_keeps_working(
    chromium: Browser, site_url: str, tmp_path: Path
) -> None:
    red, blue = Image.new("RGB", (40, 40), "red"), Image.new("RGB", (40, 40), "blue")
    files = {
        "notes.txt": (b"just some words\n" * 40, "not an image"),
        "empty.png": (b"", "empty"),
        "cut.jpg": (picture(400, 300)[:2000], "damaged or incomplete"),
        "cut.png": (picture(100, 80, "PNG")[:-60], "damaged or incomplete"),
        "huge.png": (huge_png(), "more than the allowed 50,000,000"),
        "moving.gif": (saved(red, "GIF", save_all=True, append_images=[blue]), "several frames"),
        "moving.webp": (saved(red, "WEBP", save_all=True, append_images=[blue]), "several frames"),
        "clear.png": (saved(Image.new("RGBA", (40, 40), (255, 0, 0, 9)), "PNG"), "transparent pixels"),
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


def test_a_damaged_model_file_is_a_message_and_a_whole_one_works_after_a_reload(chromium: Browser, site: Path) -> None:
    class Damaged(SiteHandler):
        damage = True

        def do_GET(self) -> None:
            if not (self.path.endswith("tokens.onnx") and Damaged.damage):
                return super().do_GET()
            data = bytearray((site / "model" / "tokens.onnx").read_bytes())
            data[len(data) // 2] ^= 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with serving(site, Damaged) as address, new_page(chromium, address, ready=False) as page:
        expect(page.get_by_role("alert")).to_contain_text(
            "model/tokens.onnx is damaged (its hash is not that of the exported file)"
        )
        expect(page.locator("#loading")).to_be_hidden()
        Damaged.damage = False
        page.reload()
        expect(page.locator("#k-value")).to_contain_text("30 of 100")


def test_a_missing_model_file_is_a_message(chromium: Browser, site: Path) -> None:
    class Incomplete(SiteHandler):
        def do_GET(self) -> None:
            if self.path.endswith("heads.onnx"):
                return self.send_error(404)
            return super().do_GET()

    with serving(site, Incomplete) as address, new_page(chromium, address, ready=False) as page:
        expect(page.get_by_role("alert")).to_contain_text("model/heads.onnx cannot be downloaded (status 404)")


def test_a_browser_without_webassembly_is_told_so(chromium: Browser, site_url: str) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.add_init_script("delete globalThis.WebAssembly")
    page.goto(site_url)
    expect(page.get_by_role("alert")).to_contain_text("WebAssembly with SIMD is missing or switched off")
    context.close()


def test_when_memory_runs_out_the_page_says_so_and_takes_the_next_image(chromium: Browser, site: Path, tmp_path: Path) -> None:
    class Small(SiteHandler):
        """Serves a resize that fails on large images as a browser does that has no memory left."""

        def do_GET(self) -> None:
            if not self.path.endswith("resize.js"):
                return super().do_GET()
            source = (site / "static" / "page" / "resize.js").read_text()
            place = "constructor(width, height, toWidth, toHeight, filter, channels = 3) {"
            assert place in source
            data = source.replace(
                place, place + ' if (width > 900) throw new RangeError("Array buffer allocation failed");'
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/javascript")
            self.end_headers()
            self.wfile.write(data)

    (tmp_path / "large.png").write_bytes(picture(1000, 20, "PNG"))
    (tmp_path / "small.png").write_bytes(picture(100, 80, "PNG"))
    with serving(site, Small) as address, new_page(chromium, address) as page:
        page.locator("#image-file").set_input_files(tmp_path / "large.png")
        expect(page.get_by_role("alert")).to_contain_text("large.png: There is not enough memory for this image.")
        page.locator("#image-file").set_input_files(tmp_path / "small.png")
        expect(page.locator("#image-line")).to_contain_text("small.png · 100 × 80 pixels")


def test_after_the_first_visit_the_page_opens_without_a_network(chromium: Browser, site: Path) -> None:
    with serving(site) as address, new_page(chromium, address) as page:
        page.evaluate("navigator.serviceWorker.ready")
        page.context.set_offline(True)
        page.goto("about:blank")
        page.goto(address)
        expect(page.locator(".sample img[src]")).to_have_count(8)
        expect(page.locator("#k-value")).to_contain_text("30 of 100")


def test_a_new_version_of_the_site_replaces_the_old_one_in_the_cache(chromium: Browser, site: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.copytree(site, folder, ignore=shutil.ignore_patterns(".lock"))
    names = "caches.keys()"
    with serving(folder) as address, new_page(chromium, address) as page:
        page.evaluate("navigator.serviceWorker.ready")
        (old,) = page.evaluate(names)
        values = json.loads((folder / exporter.DESCRIPTION).read_text())
        values["model"]["version"] = "9.9.9"
        exporter._finish(folder, {key: value for key, value in values.items() if key not in ("version", "files")})
        page.goto(address)
        for _ in range(120):
            found = page.evaluate(names)
            if len(found) == 1 and found != [old]:
                break
            page.wait_for_timeout(500)
        page.reload()
        expect(page.locator("#fingerprint")).to_contain_text("MedTokenBudget 9.9.9")
        expect(page.locator("#k-value")).to_contain_text("30 of 100")


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (375, True)])
def test_axe_finds_nothing_serious_and_nothing_sticks_out(
    chromium: Browser, site_url: str, axe: str, tmp_path: Path, width: int, dark: bool
) -> None:
    for number in range(2):
        (tmp_path / f"skin-{number}.png").write_bytes(picture(120, 90, "PNG", number))
    (tmp_path / "broken.png").write_bytes(b"no image")
    scheme = "dark" if dark else "light"
    with new_page(chromium, site_url, viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        expect(page.locator(".sample img[src]")).to_have_count(8)
        page.get_by_label("Compare").check()
        page.locator("#image-file").set_input_files(sorted(tmp_path.iterdir()))
        expect(page.locator("#sheet-line")).to_contain_text("3 of 3 images")
        assert serious(page, axe) == []
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_progress_of_loading_is_shown_and_can_be_read_aloud(chromium: Browser, site: Path) -> None:
    class Slow(SiteHandler):
        def do_GET(self) -> None:
            if not self.path.endswith(".wasm"):
                return super().do_GET()
            data = (site / "runtime" / "ort-wasm-simd-threaded.wasm").read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            going.wait(30)
            self.wfile.write(data[len(data) // 2 :])

    going = threading.Event()
    with serving(site, Slow) as address, new_page(chromium, address, ready=False) as page:
        bar = page.get_by_role("progressbar", name="Loading the model")
        expect(page.locator("#loading-text")).to_contain_text(re.compile(r"1\d\.\d of 1\d\.\d MB"))
        assert 0.5 < float(bar.get_attribute("value") or 0) < 0.7
        going.set()
        expect(page.locator("#k-value")).to_contain_text("30 of 100")
        expect(page.locator("#loading")).to_be_hidden()


def test_the_keyboard_reaches_the_slider_and_moves_it(chromium: Browser, site_url: str) -> None:
    with new_page(chromium, site_url) as page:
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#budget")).to_be_focused()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#k-value")).to_have_text("31 of 100 patches")
        expect(page.locator("#summary")).to_contain_text("31 of 100 patches kept")
