"""Makes `docs/images/explorer-*.png`: the explorer on synthetic samples, on desktop and phone, light and dark.

Run `python docs/make_screenshots.py MODEL` after changing the page, and look at the result. Needs Chromium. With the folder of a
site (`mtb export --format web`) in place of the model it makes `docs/images/site.png` of that.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

IMAGES = Path(__file__).parent / "images"


def shoot(browser: Browser, url: str, name: str, size: tuple[int, int], sample: str, budget: int, **options: bool) -> None:
    """Take one screenshot of a sample at a budget in percent; options: dark, compare, scores, narrow (a phone)."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if options.get("dark") else "light",
        reduced_motion="reduce",
        device_scale_factor=1.5 if options.get("narrow") else 1,
    )
    page = context.new_page()
    page.goto(url)
    expect(page.locator(".sample img[src]")).to_have_count(8, timeout=120_000)
    page.locator(f"[data-sample={sample}]").click()
    expect(page.locator(f"[data-sample={sample}]")).to_have_attribute("aria-pressed", "true", timeout=60_000)
    page.get_by_label("Compare").set_checked(bool(options.get("compare")))
    page.get_by_label("Score map").set_checked(bool(options.get("scores")))
    page.locator("#budget").fill(str(budget))
    if options.get("compare"):  # both pictures, below the budget that stays in view
        page.locator(".control").evaluate("control => control.scrollIntoView()")
    _save(page, IMAGES / f"explorer-{name}.png")
    context.close()


def _save(page: Page, path: Path) -> None:
    expect(page.locator("#busy")).to_be_hidden(timeout=60_000)
    page.wait_for_timeout(800)
    page.screenshot(path=path)
    with Image.open(path) as shot:
        # With k-means, the palette also contains the colors of thin lines.
        small = shot.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=3)
    small.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def shoot_site(folder: Path) -> None:
    """Take one screenshot of an exported site with its own samples as a contact sheet."""
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        expect(page.locator(".sample img[src]")).to_have_count(8, timeout=120_000)
        page.locator("#image-file").set_input_files(sorted((folder / "samples").iterdir()))
        expect(page.locator("#sheet-line")).to_have_text("8 of 8 images", timeout=120_000)
        page.locator("#budget").fill("20")
        page.locator("#budget").blur()
        page.locator("#sheet").evaluate("sheet => scrollTo(0, sheet.offsetTop - 160)")  # below the budget that stays in view
        _save(page, IMAGES / "site.png")
        browser.close()
        server.shutdown()


def main(model: str) -> None:
    command = [str(Path(sys.executable).parent / "mtb"), "serve", model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        found = next(match for line in server.stdout if (match := re.search(r"Explorer: (\S+)", line)))
        IMAGES.mkdir(exist_ok=True)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            shoot(browser, found[1], "desktop", (1280, 900), "mel", 20)
            shoot(browser, found[1], "compare", (1280, 900), "mel-off-center", 15, compare=True, dark=True)
            shoot(browser, found[1], "phone", (390, 844), "nv-off-center", 20, narrow=True)
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/make_screenshots.py MODEL or SITE")
    if (Path(sys.argv[1]) / "site.json").is_file():
        shoot_site(Path(sys.argv[1]))
    else:
        main(sys.argv[1])
