"""The page without a server in Firefox: it answers as Python does, and works offline and on a narrow screen."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medtokenbudget.serve.service import Question, Service
from tests.machine import absent
from tests.serve.firefox import Firefox, firefox
from tests.serve.server import mask, picture
from tests.serve.sites import MAIN, site_model

pytestmark = pytest.mark.slow

READY = "document.querySelectorAll('.sample img[src]').length === 8 && document.querySelector('#app[data-ready]')"


@pytest.fixture(scope="module")
def page(site_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    """The page, ready; its downloads ask no question."""
    if not (shutil.which("firefox-esr") or shutil.which("firefox")):
        absent("needs Firefox (Debian: apt install firefox-esr)")
    preferences = {"browser.download.folderList": 2, "browser.download.useDownloadDir": True}
    with firefox(tmp_path_factory.mktemp("firefox") / "profile", **preferences) as browser:
        browser.open(site_url)
        browser.wait(READY)
        yield browser


def test_firefox_answers_as_python_does_and_its_downloads_say_so(page: Firefox, site: Path, tmp_path: Path) -> None:
    service = Service(site_model(site.with_name("site-weights")))
    page.privileged("Services.prefs.setStringPref('browser.download.dir', arguments[0]);", str(tmp_path))
    for seed, (width, height, kind) in enumerate([(240, 180, "JPEG"), (97, 331, "PNG")]):
        image, lesion = tmp_path / f"skin-{seed}.{kind.lower()}", tmp_path / f"skin-{seed}_mask.png"
        image.write_bytes(picture(width, height, kind, seed))
        lesion.write_bytes(mask(width, height))
        expected = service.answer(Question(image.read_bytes(), lesion.read_bytes(), selectors=(MAIN,)))
        page.choose("#image-file", [image])
        page.wait(f"document.querySelector('#image-line').textContent.startsWith('{image.name}')")
        page.choose("#mask-file", [lesion])
        page.wait("document.querySelector('#image-line').textContent.includes('lesion on')")
        page.run("document.querySelector('#save-data').click(); return true;")
        found = downloaded(tmp_path / f"skin-{seed}-budget-30.json")
        assert found["lesion"] == expected["lesion"]
        assert found["unfamiliarity"] == pytest.approx(expected["unfamiliarity"], abs=1e-3)
        (mine,), (theirs,) = found["selectors"], expected["selectors"]
        places = [found["budgets"].index(budget) for budget in expected["budgets"]]
        assert len({*mine["order"][:30]} & {*theirs["order"][:30]}) >= 0.98 * 30
        np.testing.assert_allclose([mine["probabilities"][i] for i in places], theirs["probabilities"], atol=0.02)
        np.testing.assert_allclose([mine["retention"][i] for i in places], theirs["retention"], atol=0.005)


def downloaded(path: Path, seconds: float = 30) -> Any:
    """A JSON file, once the browser has written it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and path.stat().st_size:
            return json.loads(path.read_text())
        time.sleep(0.2)
    raise AssertionError(f"{path.name} was not downloaded")


def test_in_firefox_the_page_opens_and_works_without_a_network(page: Firefox, site_url: str, tmp_path: Path) -> None:
    (tmp_path / "skin.png").write_bytes(picture(120, 90, "PNG"))
    (tmp_path / "skin_mask.png").write_bytes(mask(120, 90))
    (tmp_path / "cut.jpg").write_bytes(picture(120, 90)[:1500])
    page.run("await navigator.serviceWorker.ready; return true;")
    page.offline(True)
    try:
        page.open("about:blank")
        page.open(site_url)
        page.wait(READY)
        page.send("WebDriver:SetWindowRect", {"width": 500, "height": 800})
        assert page.run("return document.documentElement.scrollWidth <= innerWidth;") is True
        page.choose("#image-file", [tmp_path / "skin.png"])
        page.wait("document.querySelector('#image-line').textContent.includes('skin.png · 120 × 90 pixels · no mask')")
        page.choose("#mask-file", [tmp_path / "skin_mask.png"])
        page.wait("document.querySelector('#image-line').textContent.includes('lesion on')")
        page.press("#budget", "\ue014")  # arrow right
        page.wait("document.querySelector('#k-value').textContent === '31 of 100 patches'")
        page.choose("#image-file", [tmp_path / "cut.jpg"])
        page.wait("document.querySelector('#alert-text').textContent.includes('cut.jpg: The image is damaged or incomplete')")
        page.choose("#image-file", [*sorted(tmp_path.glob("skin*")), tmp_path / "cut.jpg"])
        page.wait("document.querySelector('#sheet-line').textContent === '2 of 2 images · 1 could not be read'")
    finally:
        page.offline(False)
