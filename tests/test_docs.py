"""Every command of the README and of the pages in docs/ is run here, in a folder of drawn pictures, or says why it is not.

A fenced `bash` block runs unless the line above it is a comment `<!-- not run: why -->`.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from medtokenbudget.cli import main
from medtokenbudget.data.dermoscopy import draw
from medtokenbudget.routing import registry
from tests.conftest import REPOSITORY

BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?```bash\n(?P<body>.*?)```", re.DOTALL)
PYTHON = re.compile(BLOCK.pattern.replace("bash", "python"), re.DOTALL)
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def commands(page: Path) -> Iterator[tuple[str, str | None]]:
    """The lines of the bash blocks of a page, continued lines joined, each with the reason why it is not run."""
    for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
        for line in found["body"].replace("\\\n", " ").splitlines():
            text = line.split("  #")[0].strip()
            if text and not text.startswith("#"):
                yield text, found["why"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted: pictures in class folders with masks, a manifest, a store and a trained run."""
    folder = tmp_path_factory.mktemp("workplace")
    rows = ["image,label,mask"]
    for number in range(24):
        label = ("MEL", "NV", "BCC")[number % 3]
        drawing = draw(label, number, size=96)
        image, mask = folder / "photos" / label / f"p{number:02d}.jpg", folder / "masks" / f"p{number:02d}.png"
        for path in (image, mask):
            path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawing.image).save(image, quality=92)
        Image.fromarray(drawing.mask).convert("L").save(mask)
        rows.append(f"{image.relative_to(folder)},{label},{mask.relative_to(folder)}")
    (folder / "photos.csv").write_text("\n".join(rows) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["data", "folder", "photos", "--masks", "masks", "--out", "photos.parquet"]) == 0
        assert main(["extract", "photos.parquet", "--store", "tokens", "--backbone", "embedded", "--views", "off-center"]) == 0
        assert main(["train", "photos.parquet", "--store", "tokens", "--out", "runs/demo", "--epochs", "1"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_the_page_work_as_written(
    page: Path, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(workplace, tmp_path / "here"))
    for text, why in commands(page):
        if why is not None:
            continue
        words = shlex.split(text)
        assert words[0] == "mtb", f"{page.name}: '{text}' is not an mtb command: mark the block with <!-- not run: why -->"
        assert main(words[1:]) == 0, f"{page.name}: {text}"


def test_the_python_of_the_retention_page_works_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "retention.md").read_text(encoding="utf-8")
    blocks = [found["body"] for found in PYTHON.finditer(page) if found["why"] is None]
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), "retention.md", "exec"), names)
    assert len(blocks) == 3
    assert (names["found"].pooled, names["found"].of_ceiling) == (0.5, 0.75)
    assert names["found"].ceiling == pytest.approx(2 / 3)
    assert capsys.readouterr().out.startswith("retention 0.")
    assert names["total"].compute().n > 0


@pytest.mark.slow
def test_the_comparison_of_the_selectors_page_prints_rows_that_can_be_told_apart(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs" / "selectors.md").read_text(encoding="utf-8")
    blocks = [found["body"] for found in PYTHON.finditer(page)]
    written = [body for body in blocks if "class Outlier" in body or "mtb.sweep" in body]
    assert len(written) == 2
    monkeypatch.chdir(shutil.copytree(workplace, tmp_path / "here"))
    monkeypatch.setattr(registry.SELECTORS, "_classes", dict(registry.SELECTORS._classes))
    names: dict[str, Any] = {}
    exec(compile("\n".join(written), "selectors.md", "exec"), names)
    shown = names["results"].query("budget == 0.3")
    assert len(shown) == 4 * 2, "four methods on two views"
    assert not shown[["method", "view"]].duplicated().any()
    printed = [tuple(line.split()[1:3]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert printed == list(zip(shown["method"], shown["view"]))


def test_every_option_of_a_command_that_is_not_run_exists(capsys: pytest.CaptureFixture[str]) -> None:
    helps: dict[str, str] = {}
    for page in PAGES:
        for text, _ in commands(page):
            words = shlex.split(text)
            if words[0] != "mtb" or len(words) < 2:
                continue
            name = " ".join(words[1:3]) if words[1] in ("data", "store") else words[1]
            if name not in helps:
                with pytest.raises(SystemExit):
                    main([*name.split(), "--help"])
                helps[name] = capsys.readouterr().out
            options = [word.split("=")[0] for word in words if word.startswith("--")]
            missing = [option for option in options if option not in helps[name]]
            assert not missing, f"{page.name}: '{text}' uses {missing}, which `mtb {name}` does not know"


def test_every_link_to_a_file_leads_somewhere() -> None:
    links = [
        (page, target) for page in PAGES for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    ]
    assert links
    for page, target in links:
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
