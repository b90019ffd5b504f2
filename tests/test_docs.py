"""Every command and snippet of the README and of the pages in docs/ is run here, in a folder of drawn pictures, or says why not.

A fenced `bash` or `python` block runs unless the line above it is a comment `<!-- not run: why -->`. Where a command that trains
does not say for how many epochs and in how many processes, it trains for one epoch in this process.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

import medtokenbudget
from medtokenbudget.cli import main
from medtokenbudget.config import NOTICE
from medtokenbudget.data.manifest import COLUMNS
from medtokenbudget.data.synthetic import draw
from medtokenbudget.heads import head as heads
from medtokenbudget.routing.base import SELECTORS
from medtokenbudget.runs.run import PREDICTION_COLUMNS, RESULT_COLUMNS
from tests.conftest import REPOSITORY
from tests.drawn import drawn_folder
from tests.routing.batches import tokens_of

BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?```(?P<language>bash|python)\n(?P<body>.*?)```", re.DOTALL)
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def steps(page: Path) -> list[tuple[str, str]]:
    """Language and text of the blocks of a page that are not marked as not run."""
    blocks = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [(block["language"], block["body"]) for block in blocks if block["why"] is None]


def lines(body: str) -> Iterator[str]:
    """The commands of a bash block, continued lines joined, without comments."""
    for line in body.replace("\\\n", " ").splitlines():
        text = line.split("  #")[0].strip()
        if text and not text.startswith("#"):
            yield text


def commands(page: Path) -> Iterator[tuple[str, str | None]]:
    """The commands of a page, each with the reason why it is not run."""
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["language"] == "bash":
            yield from ((text, block["why"]) for text in lines(block["body"]))


def shorter(words: list[str]) -> list[str]:
    """Options that make a command of a page shorter, where it does not give them itself."""
    options = {"train": ["--epochs"], "sweep": ["--epochs", "--jobs"]}.get(words[1], [])
    if words[1] == "train" and {"scouted", "pruned"}.intersection(words):
        options = ["--head-epochs"]  # tokens that are routed already: only the head is trained
    return [part for option in options if option not in words for part in (option, "1")]


def draw_other_layouts(folder: Path) -> None:
    """Drawings in the layouts of Kvasir-SEG (two folders, JPEG masks) and BUSI (masks beside the images, two of one, or empty)."""
    busi = folder / "Dataset_BUSI_with_GT"
    for name in ("Kvasir-SEG/images", "Kvasir-SEG/masks", *(f"{busi.name}/{label}" for label in ("benign", "malignant", "normal"))):
        (folder / name).mkdir(parents=True)
    for number in range(1, 13):
        drawing = draw("NV", 100 + number, size=64)
        image, mask = Image.fromarray(drawing.image), Image.fromarray(drawing.mask).convert("L")
        image.save(folder / "Kvasir-SEG" / "images" / f"c{number}.jpg")
        mask.save(folder / "Kvasir-SEG" / "masks" / f"c{number}.jpg")
        label = ("benign", "malignant", "normal")[number % 3]
        image.save(busi / label / f"{label} ({number}).png")
        (Image.new("L", mask.size) if label == "normal" else mask).save(busi / label / f"{label} ({number})_mask.png")
    mask.transpose(Image.Transpose.ROTATE_180).save(busi / "malignant" / "malignant (1)_mask_1.png")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted: pictures in class folders with masks, a manifest, a store and a trained run."""
    folder = tmp_path_factory.mktemp("workplace")
    rows = [
        f"{image.relative_to(folder)},{image.parent.name},{mask.relative_to(folder)}\n" for image, mask in drawn_folder(folder, 24)
    ]
    (folder / "photos.csv").write_text("image,label,mask\n" + "".join(rows))
    draw_other_layouts(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["data", "folder", "photos", "--masks", "masks", "--out", "photos.parquet"]) == 0
        assert main(["extract", "photos.parquet", "--store", "tokens", "--backbone", "embedded", "--views", "off-center"]) == 0
        assert main(["train", "photos.parquet", "--store", "tokens", "--out", "runs/demo", "--epochs", "1"]) == 0
    shutil.copy(folder / "photos" / "MEL" / "p00.jpg", folder / "photo.jpg")
    # The page about data calls them so.
    shutil.copy(folder / "photos.parquet", folder / "isic.parquet")
    shutil.copytree(folder / "tokens", folder / "stores" / "isic")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if steps(page)], ids=name_of)
def test_the_commands_and_snippets_of_the_page_work_as_written_in_their_order(
    page: Path, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(workplace, tmp_path / "here"))
    if not any("--out runs/first" in text for text, why in commands(page) if why is None):
        shutil.copytree("runs/demo", "runs/first")  # what another page has made
    for known in (SELECTORS, heads.HEADS):
        monkeypatch.setattr(known, "_classes", dict(known._classes))
    names: dict[str, Any] = {"__name__": "page", "tokens": tokens_of(2, (16, 16))}
    for language, body in steps(page):
        if language == "python":
            exec(compile(body, name_of(page), "exec"), names)
            continue
        for text in lines(body):
            words = shlex.split(text)
            assert words[0] == "mtb", f"{name_of(page)}: '{text}' is not an mtb command: mark the block with <!-- not run: why -->"
            assert main([*words[1:], *shorter(words)]) == 0, f"{name_of(page)}: {text}"


def test_the_numbers_in_the_python_about_retention_are_right() -> None:
    (block,) = [body for language, body in steps(DOCS / "method.md") if language == "python"]
    names: dict[str, Any] = {}
    exec(compile(block, "method.md", "exec"), names)
    assert (names["measured"].pooled, names["measured"].of_ceiling) == (0.5, 0.75)
    assert names["measured"].ceiling == pytest.approx(2 / 3)


def test_every_option_of_a_command_that_is_not_run_exists(capsys: pytest.CaptureFixture[str]) -> None:
    helps: dict[str, str] = {}
    for page in PAGES:
        for text, _ in commands(page):
            words = shlex.split(text)
            if words[0] != "mtb" or len(words) < 2 or words[1].startswith("-"):
                continue
            name = " ".join(words[1:3]) if words[1] in ("data", "store") else words[1]
            if name not in helps:
                assert main([*name.split(), "--help-all"]) == 0
                helps[name] = capsys.readouterr().out
            options = [word.split("=")[0] for word in words if word.startswith("--")]
            missing = [option for option in options if option not in helps[name]]
            assert not missing, f"{name_of(page)}: '{text}' uses {missing}, which `mtb {name}` does not know"


def test_every_link_to_a_file_leads_somewhere() -> None:
    pages = {*PAGES, *REPOSITORY.glob("*.md")}
    links = [
        (page, target) for page in pages for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    ]
    assert links
    for page, target in links:
        assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def test_the_docs_are_at_most_22_pages_and_18_000_words() -> None:
    words = [re.findall(r"\S*[^\W\d_]\S*", page.read_text(encoding="utf-8")) for page in PAGES[1:]]  # no numbers, no bars of tables
    assert len(words) <= 22
    assert sum(map(len, words)) <= 18_000


def test_every_page_is_in_the_navigation_once() -> None:
    def leaves(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from leaves(part)

    listed = list(leaves(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    written = [str(page.relative_to(DOCS)) for page in PAGES[1:]]
    assert sorted(listed) == sorted(written)


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra 'docs'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES)
    loaded = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//([^"' >]+)""")
    for page in pages:
        assert loaded.findall(page.read_text(encoding="utf-8")) == [], page.name
    styles = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.css"))
    assert "url(http" not in styles
    python_page = (tmp_path / "site" / "reference" / "api.html").read_text(encoding="utf-8")
    assert all(f'id="medtokenbudget.{name}"' in python_page for name in medtokenbudget.__all__ if name != "__version__")
    assert NOTICE in python_page


def test_the_page_of_the_python_names_shows_each_of_them() -> None:
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    first = "".join(re.findall(r"^\|([^|]*)\|", text, flags=re.MULTILINE))
    assert sorted([*re.findall(r"`(\w+)`", first), "__version__"]) == sorted(medtokenbudget.__all__)


def test_the_page_of_the_file_formats_has_every_column() -> None:
    text = (DOCS / "reference" / "formats.md").read_text(encoding="utf-8")
    sections = {part.split("\n", 1)[0].strip(): part for part in re.split(r"^#+ ", text, flags=re.MULTILINE)}
    expected = {
        "Manifest (`.parquet`)": COLUMNS,
        "results.csv": RESULT_COLUMNS,
        "predictions.parquet": PREDICTION_COLUMNS,
    }
    for title, columns in expected.items():
        first = "".join(re.findall(r"^\|([^|]*)\|", sections[title], flags=re.MULTILINE))
        assert sorted(set(re.findall(r"`(\w+)`", first))) == sorted(columns), title
