"""The page in a real browser (Chromium): tables fit their box on a desktop, and the page never scrolls sideways."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
WIDER = """() => [...document.querySelectorAll('.scroll')]
    .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.getAttribute('aria-label'))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        if os.environ.get("CI") == "true":
            pytest.fail("Chromium is missing, but in CI the browser tests must run.")
        pytest.skip("needs Chromium (Debian: apt install chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_no_table_is_wider_than_its_box_on_a_desktop_and_no_page_than_its_window(browser: Browser, run: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((run / "report.html").resolve().as_uri())
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    if width == 1280:
        assert page.evaluate(WIDER) == []
    page.close()
