"""The explorer in a real browser (Chromium): what a person does, how errors look, and an automatic accessibility check."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from medtokenbudget.config import NOTICE
from medtokenbudget.model import load
from medtokenbudget.model.looks import look
from medtokenbudget.serve.samples import sample_files
from medtokenbudget.serve.service import Service
from tests.serve.axe import serious
from tests.serve.server import Server, huge_png, mask, picture, running_here
from tests.small_model import early_model, small_model

pytestmark = pytest.mark.slow

MAIN = "lats:lesion-first"
expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def server(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = small_model(tmp_path_factory.mktemp("explorer"), main=MAIN)
    with running_here(Service(model)) as server:
        yield server


Open = Callable[..., Page]


@pytest.fixture
def opened(chromium: Browser, server: Server) -> Iterator[Open]:
    """Opens the page and waits for the first sample; fails if anything was logged as an error in the console."""
    contexts, complaints = [], []

    def open_page(width: int = 1200, height: int = 900, dark: bool = False) -> Page:
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(server.url)
        expect(page.locator("#k-value")).to_contain_text("30 of 100")
        return page

    yield open_page
    for context in contexts:
        context.close()
    # The browser logs rejected uploads by itself.
    assert [text for text in complaints if "Failed to load resource" not in text] == []


def painted(page: Page, side: str = "a") -> str:
    return str(page.locator(f"[data-side={side}] canvas").evaluate("canvas => canvas.toDataURL()"))


def bars(page: Page, side: str = "a") -> list[str]:
    return page.locator(f"[data-side={side}] .bars .value").all_inner_texts()


def stat(page: Page, title: str, side: str = "a") -> str:
    row = page.locator(f"[data-side={side}] .stats div", has=page.get_by_text(title, exact=True))
    return row.locator("dd").inner_text()


def drop(page: Page, contents: dict[str, bytes]) -> None:
    transfer = page.evaluate_handle(
        """contents => {
            const transfer = new DataTransfer();
            for (const [name, bytes] of Object.entries(contents)) transfer.items.add(new File([new Uint8Array(bytes)], name));
            return transfer;
        }""",
        {name: list(data) for name, data in contents.items()},
    )
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})


def downloaded(page: Page, button: str) -> str:
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    return download.value.suggested_filename


def settle(page: Page) -> None:
    """Wait two frames, enough for a move of the slider to be drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_a_sample_and_the_slider_change_k_the_picture_and_the_numbers_without_a_request(opened: Open) -> None:
    page = opened()
    page.locator(".sample").nth(1).click()
    expect(page.locator(".sample").nth(1)).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".sample img[src]")).to_have_count(8)
    settle(page)
    before = painted(page), bars(page), stat(page, "Kept")
    assert before[2].startswith("30")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.locator("#budget").focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    settle(page)
    expect(page.locator("#k-value")).to_have_text("35 of 100 patches")
    expect(page.locator("#budget-value")).to_have_text("35%")
    after = painted(page), bars(page), stat(page, "Kept")
    assert all(old != new for old, new in zip(before, after))
    assert requests == []
    page.keyboard.press("End")
    expect(page.locator("#k-value")).to_have_text("100 of 100 patches")
    assert stat(page, "Retention").startswith("100%")
    assert stat(page, "Lesion lost").startswith("0")
    expect(page.locator("#summary")).to_contain_text(f"Budget 100%. {look(MAIN).title}: 100 of 100 patches kept; retention 100%")


def test_the_numbers_of_the_page_are_those_of_the_answer(opened: Open) -> None:
    page = opened()
    with page.expect_download() as download:
        page.get_by_role("button", name="Data (JSON)").click()
    data = json.loads(Path(download.value.path()).read_text())
    (row,) = data["selectors"]
    at = data["budgets"].index(0.3)
    assert data["shown"] == {"budget": 0.3, "selectors": [MAIN]}
    assert stat(page, "Retention").startswith(f"{round(100 * row['retention'][at])}%")
    assert stat(page, "Ceiling").startswith(f"{round(100 * row['ceiling'][at])}%")
    assert bars(page) == [f"{round(100 * p)}%" for p in row["probabilities"][at]]
    with page.expect_download() as download:
        page.get_by_role("button", name="Image (PNG)").click()
    with Image.open(download.value.path()) as saved:
        assert saved.format == "PNG"
        assert min(saved.size) > 600


def test_mask_boxes_and_crop_are_those_of_route(opened: Open, server: Server, tmp_path: Path) -> None:
    page, path = opened(), tmp_path / "spot.png"
    path.write_bytes(picture(333, 250, "PNG"))
    page.set_input_files("#image-file", path)
    expect(page.locator("#image-line")).to_contain_text("spot.png")
    settle(page)
    (routing,) = server.model.route(path)
    saved = {}
    for kind, button in {"mask": "Lesion mask (PNG)", "box": "Lesion boxes (JSON)", "crop": "Lesion crop (PNG)"}.items():
        with page.expect_download() as download:
            page.get_by_role("button", name=button).click()
        assert Path(download.value.suggested_filename).stem == f"spot_{kind}"
        saved[kind] = Path(download.value.path()).read_bytes()
    assert routing.boxes, "there is something to compare"
    drawn = np.asarray(Image.open(io.BytesIO(saved["mask"])).convert("L"))
    np.testing.assert_array_equal(drawn, routing.mask() * np.uint8(255))
    assert json.loads(saved["box"]) == {"image": {"width": 333, "height": 250}, "boxes": [list(box) for box in routing.boxes]}
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(saved["crop"])).convert("RGB")), np.asarray(routing.crop()))
    page.locator("[data-side=a] select").select_option("center")
    expect(page.get_by_role("button", name="Lesion mask (PNG)")).to_be_disabled()


def test_methods_have_their_names_in_the_report_and_are_compared_side_by_side_each_with_its_own_head(opened: Open) -> None:
    page = opened()
    assert page.locator("#selector-a").input_value() == MAIN
    names = page.locator("#selector-a option").evaluate_all("options => options.map(option => [option.value, option.text])")
    assert names[0][0] == MAIN
    assert all(title == look(method).title for method, title in names)
    expect(page.locator(".about")).to_have_text(look(MAIN).description)
    page.get_by_label("Compare").check()
    page.get_by_label("Second method", exact=True).locator("select").select_option("center")
    expect(page.locator("[data-side=b] .about")).to_have_text(look("center").description)
    expect(page.locator("#chart")).to_contain_text(look("center").title)
    settle(page)
    assert painted(page, "a") != painted(page, "b")
    page.locator("#budget").focus()
    page.keyboard.press("End")
    settle(page)
    # With all patches kept both pool the same tokens: only the heads differ.
    assert bars(page, "a") != bars(page, "b")
    page.locator("#selector-b").select_option("tome")
    expect(page.locator("[data-side=b] .about")).to_contain_text("Merges")
    expect(page.locator("[data-side=b] .stats")).not_to_contain_text("Retention")
    page.get_by_label("Score map").check()
    expect(page.locator("[data-side=a] .legend")).to_contain_text("score")
    page.get_by_label("Compare").uncheck()
    expect(page.locator("[data-side=b]")).to_have_count(0)


def test_an_uploaded_image_gets_retention_with_its_mask_and_survives_files_that_cannot_be_read(
    opened: Open, tmp_path: Path
) -> None:
    (tmp_path / "skin.v2.jpg").write_bytes(picture(240, 180))
    (tmp_path / "other_segmentation.png").write_bytes(mask(240, 180))
    page = opened()
    page.locator("#image-file").set_input_files(tmp_path / "skin.v2.jpg")
    expect(page.locator("#image-line")).to_contain_text("skin.v2.jpg · 240 × 180 pixels · no mask")
    expect(page.locator(".stats")).not_to_contain_text("Retention")
    expect(page.locator("#curve-retention")).to_be_disabled()
    expect(page.locator("#curve-text")).to_contain_text("Add a mask")
    assert "Oracle" not in page.locator("#selector-a option").all_inner_texts()
    page.locator("#mask-file").set_input_files(tmp_path / "other_segmentation.png")
    expect(page.locator("#image-line")).to_contain_text("lesion on")
    expect(page.locator(".stats")).to_contain_text("Retention")
    assert "Oracle" in page.locator("#selector-a option").all_inner_texts()
    page.locator("#selector-a").select_option("oracle")
    settle(page)
    assert stat(page, "Of ceiling").startswith("100%")
    # A file that cannot be read is a message, and the page keeps what it has.
    (tmp_path / "huge.png").write_bytes(huge_png())
    page.locator("#image-file").set_input_files(tmp_path / "huge.png")
    expect(page.get_by_role("alert")).to_contain_text(re.compile(r"huge\.png: .*pixels"))
    page.get_by_role("button", name="Close").click()
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#image-line")).to_contain_text("skin.v2.jpg · 240 × 180 pixels · lesion on")
    # Named after the image, although its mask was added later.
    assert downloaded(page, "Data (JSON)") == "skin.v2-budget-30.json"
    assert downloaded(page, "Image (PNG)") == "skin.v2-budget-30.png"


def test_an_image_and_its_mask_can_be_dropped_together_or_one_after_the_other(opened: Open) -> None:
    page = opened()
    image, lesion = {"spot.png": picture(100, 100, "PNG")}, {"spot_mask.png": mask(100, 100)}
    with_lesion = re.compile(r"spot\.png · 100 × 100 pixels · lesion on \d+ of 100")
    drop(page, image | lesion)
    expect(page.locator("#image-line")).to_contain_text(with_lesion)
    drop(page, image)
    expect(page.locator("#image-line")).to_contain_text("spot.png · 100 × 100 pixels · no mask")
    drop(page, lesion)
    expect(page.locator("#image-line")).to_contain_text(with_lesion)


def test_a_sample_shows_a_class_only_if_the_model_has_it(opened: Open) -> None:
    page = opened()
    titles = [" ".join(text.split()) for text in page.locator(".sample").all_inner_texts()]
    known = ["MEL", "NV off-center", "BCC", "MEL off-center"]
    assert titles == [*known, "Lesion 1", "Lesion 2 off-center", "Lesion 3", "Lesion 4"]
    expect(page.locator(".bars tr.truth th")).to_have_text("MEL")
    assert downloaded(page, "Data (JSON)") == "sample-mel-budget-30.json"
    page.locator(".sample").nth(4).click()
    expect(page.locator("#image-line")).to_contain_text("Sample Lesion 1")
    expect(page.locator(".bars tr.truth")).to_have_count(0)


def test_nothing_can_be_controlled_before_the_first_image_is_analyzed(chromium: Browser, server: Server) -> None:
    page = chromium.new_page()
    page.route("**/v1/route", lambda route: route.abort())
    page.goto(server.url)
    expect(page.get_by_role("alert")).to_contain_text("The server does not respond")
    expect(page.locator("#budget")).to_be_hidden()
    expect(page.locator(".waiting")).to_be_visible()
    expect(page.locator("#mask-file")).to_be_disabled()
    page.unroute("**/v1/route")
    page.locator(".sample").first.click()
    expect(page.locator("#k-value")).to_have_text("30 of 100 patches")
    expect(page.locator(".waiting")).to_be_hidden()
    page.close()


def test_the_notice_the_keyboard_path_and_a_chosen_theme_are_there(opened: Open) -> None:
    page = opened()
    expect(page.get_by_text(NOTICE)).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#budget")).to_be_focused()
    assert page.locator("#budget").get_attribute("aria-valuetext") == "30%, 30 of 100 patches"
    color = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(color)
    page.locator("#theme").click()
    assert page.evaluate(color) == light
    page.locator("#theme").click()
    dark = page.evaluate(color)
    assert dark != light
    page.reload()
    expect(page.locator("#theme")).to_contain_text("dark")
    assert page.evaluate(color) == dark


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (375, True)])
def test_axe_finds_nothing_serious_and_nothing_sticks_out(opened: Open, axe: str, width: int, dark: bool) -> None:
    page = opened(width, 740, dark)
    expect(page.locator(".sample img[src]")).to_have_count(8)
    for compare in (False, True):
        page.get_by_label("Compare").set_checked(compare)
        page.get_by_label("Score map").check()
        settle(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        expect(page.locator("#budget")).to_be_in_viewport()
    assert serious(page, axe) == []


def test_the_page_asks_for_the_token_or_takes_it_from_its_address(chromium: Browser, tmp_path: Path) -> None:
    with running_here(Service(small_model(tmp_path, ("center",), main=MAIN)), token="a-b-c") as server:
        page = chromium.new_page()
        page.goto(server.url)
        page.get_by_label("Token", exact=True).fill("wrong")
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_role("alert")).to_contain_text("Wrong token")
        page.get_by_label("Token", exact=True).fill("a-b-c")
        page.get_by_role("button", name="Continue").click()
        expect(page.locator("#k-value")).to_contain_text("30 of 100")
        fresh = chromium.new_page()
        fresh.goto(f"{server.url}/#token=a-b-c")
        expect(fresh.locator("#k-value")).to_contain_text("30 of 100")
        assert "a-b-c" not in fresh.url
        fresh.close()
        page.close()


def test_a_model_that_is_routed_early_shows_its_one_budget(chromium: Browser, tmp_path: Path) -> None:
    with running_here(Service(early_model(tmp_path, "scout"))) as server:
        page = chromium.new_page(viewport={"width": 1000, "height": 900})
        page.goto(server.url)
        expect(page.locator("#app")).to_have_attribute("data-ready", "")
        expect(page.locator("#model-line")).to_contain_text("routed before")
        expect(page.locator("#budget")).to_be_disabled()
        expect(page.locator("#k-value")).to_have_text("30 of 100 patches")
        page.close()


def test_a_promise_stays_on_for_the_next_image_until_the_budget_is_moved(chromium: Browser) -> None:
    model = load("dermoscopy", device="cpu")
    with running_here(Service(model, name="dermoscopy")) as server:
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(30_000)
        page.goto(server.url)
        promise = page.locator("#promises button", has_text="95%")
        expect(page.locator("#promises")).to_contain_text("on average")
        expect(promise).to_have_attribute("aria-pressed", "false")
        promise.click()
        for sample in ("mel", "nv-off-center"):
            page.locator(f"[data-sample={sample}]").click()
            expect(page.locator(f"[data-sample={sample}]")).to_have_attribute("aria-pressed", "true")
            settle(page)
            image = Image.open(io.BytesIO(sample_files(sample)[0]))
            k = model.route(image, budget=model.guarantee(0.95))[0].k
            # The slider has whole percents: the first one that keeps at least K patches.
            assert page.locator("#budget").input_value() == str(math.ceil(100 * k / 256))
            expect(promise).to_have_attribute("aria-pressed", "true")
        expect(page.locator("#code")).to_have_text(
            'model = mtb.load("dermoscopy")\nmodel.route("photo.jpg", budget=model.guarantee(0.95))\n'
            'fast = mtb.wrap(vit, router="dermoscopy", retention=0.95)  # your own transformer',
            use_inner_text=True,
        )
        page.locator("#budget").focus()
        page.keyboard.press("ArrowRight")
        expect(promise).to_have_attribute("aria-pressed", "false")
        page.close()


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_picture_is_in_view_without_scrolling(opened: Open, width: int, height: int) -> None:
    page = opened(width, height)
    shown, control = page.locator("canvas").bounding_box(), page.locator(".control").bounding_box()
    bottom = shown["y"] + shown["height"]
    assert bottom <= height
    assert bottom <= control["y"] or shown["y"] >= control["y"] + control["height"]


def test_an_error_goes_away_when_other_files_are_opened(opened: Open) -> None:
    page = opened()
    drop(page, {"notes.txt": b"just some words"})
    expect(page.get_by_role("alert")).to_be_visible()
    drop(page, {"spot.png": picture(100, 100, "PNG")})
    expect(page.locator("#image-line")).to_contain_text("spot.png")
    expect(page.get_by_role("alert")).to_be_hidden()
