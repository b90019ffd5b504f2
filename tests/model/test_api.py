"""The Python API: every public name is there, typed, documented, and its example runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import medtokenbudget as mtb
from medtokenbudget.config import BackboneConfig, ExtractConfig
from tests.drawn import Drawn, quick
from tests.small_model import draw_images

EXPECTED = (
    *("load", "extract", "train", "sweep", "reproduce", "report", "overlay", "lesion_retention"),
    *("list_selectors", "create_selector", "register_selector", "list_heads", "create_head"),
    *("Manifest", "FeatureStore", "TokenBatch", "Selection", "MedTokenBudget", "Run"),
)


def test_every_promised_name_is_public() -> None:
    assert set(EXPECTED) <= set(mtb.__all__)
    for name in mtb.__all__:
        assert getattr(mtb, name) is not None, name
    assert set(dir(mtb)) == set(mtb.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mtb.trian
    importlib.import_module("medtokenbudget.reporting")  # a package of a similar name does not hide the verb
    assert callable(mtb.report)


PROGRAM = """
import sys
from medtokenbudget.cli import main
code = main(sys.argv[1:])
own = {name.split(".")[1] for name in sys.modules if name.startswith("medtokenbudget.")}
foreign = {"api", "reporting", "runs", "serve"} if sys.argv[1] == "route" else {"reporting"}
print(code, sorted(own & foreign), "matplotlib" in sys.modules)
"""


@pytest.mark.slow
def test_routing_loads_no_code_of_runs_training_none_of_reports_and_both_no_plotting_library(drawn: Drawn, tmp_path: Path) -> None:
    (photo,) = draw_images(tmp_path, 1)
    small = ["--epochs", "1", "--head-epochs", "1", "--min-steps", "0", "--lats.hidden", "8", "--budgets", "0.3"]
    for command in (
        ["route", str(photo), "--out", str(tmp_path / "routed")],
        ["train", str(drawn.manifest_path), "--store", str(drawn.store_path), "--out", str(tmp_path / "run"), *small],
    ):
        done = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "0 [] False"
    assert "Known failures" in (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")


def test_every_public_name_has_a_docstring_and_types() -> None:
    for name in set(mtb.__all__) - {"__version__"}:
        entry = getattr(mtb, name)
        assert inspect.getdoc(entry), name
        function = entry.__init__ if inspect.isclass(entry) else entry
        missing = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty and p.name != "self"]
        assert not missing, name


@pytest.fixture(scope="module")
def workplace(drawn: Drawn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the examples assume it: photos.parquet, tokens, photo.jpg."""
    folder = tmp_path_factory.mktemp("workplace")
    manifest = drawn.manifest.take(range(40))
    manifest.write(folder / "photos.parquet")
    mtb.extract(manifest, folder / "tokens", backbone="embedded", views="off-center")
    shutil.copy(draw_images(folder / "images", 1)[0], folder / "photo.jpg")
    return folder


EXAMPLES = ("train", "Run", "sweep", "reproduce", "report", "extract", "create_selector", "create_head", "TokenBatch", "Selection")


@pytest.mark.slow
def test_the_examples_in_the_docstrings_run(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the list: `Run` and `report` look at what `train` left behind."""
    monkeypatch.chdir(workplace)
    known = {"mtb": mtb, "torch": torch, "config": quick("lesion-first"), "create_selector": mtb.create_selector}
    known["TokenBatch"] = mtb.TokenBatch
    for name in EXAMPLES:
        entry = getattr(mtb, name)
        found = [
            test for test in doctest.DocTestFinder(recurse=False).find(entry, name, globs={**known, name: entry}) if test.examples
        ]
        assert found, f"{name} has no example"
        for test in found:
            assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0, name


@pytest.mark.slow
def test_verbs_take_objects_as_well_as_paths(drawn: Drawn, tmp_path: Path) -> None:
    run = mtb.train(drawn.manifest, drawn.store, tmp_path / "objects", quick("lesion-first"))
    other = mtb.train(str(drawn.manifest_path), drawn.store_path, tmp_path / "paths", quick("lesion-first"))
    assert run.results.equals(other.results)
    assert (run.main, run.model.main) == ("lats:lesion-first", "lats:lesion-first")
    assert set(run.predictions["predicted_name"]) <= set(run.classes)
    assert "border-contrast, center, darkness, lats:lesion-first, random on drawn dermoscopy, seeds 42" in repr(run)
    count = len(drawn.manifest.part("val"))
    assert f"n = {count} images, {count} with a lesion mask" in str(run)
    assert run._repr_html_().startswith("<table")
    assert run.report(pictures=False).is_file()
    few = mtb.extract(drawn.manifest.take(range(2)), tmp_path / "tokens", BackboneConfig("embedded"), ExtractConfig(dtype="fp32"))
    assert len(few) == 2


SCRIPT = """
from pathlib import Path

import medtokenbudget as mtb

manifest = mtb.Manifest.read("photos.parquet")
store = mtb.extract(manifest, "tokens", backbone="embedded")
run = mtb.train(manifest, store, "runs/first", "lesion-first")
accuracy: float = run.results["accuracy"].mean()
page: Path = run.report()
model: mtb.MedTokenBudget = mtb.load("runs/first")
label: str = model.predict("photo.jpg", budget=0.3)[0].label
share: float = mtb.lesion_retention([1, 0, 1], [1, 1, 0]).of_ceiling
names: list[str] = mtb.list_selectors() + mtb.list_heads()
reveal_type(mtb.sweep)
mtb.sweep(manifest, store, "runs/sweep", methods=3)
mtb.load(1.5)
"""


@pytest.mark.slow
def test_mypy_understands_a_users_script(tmp_path: Path, repository: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    source = Path(mtb.__file__).parents[1]
    # Types of other packages are not followed: reading those of torch would take most of the time.
    others = "".join(
        f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in ("torch", "pandas", "matplotlib", "timm", "sklearn", "scipy")
    )
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\nignore_missing_imports = true\n" + others)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(tmp_path / "mypy.ini")]
    command += ["--cache-dir", str(tmp_path / "cache"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "MYPYPATH": str(source)})
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    wrong = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if "methods=3" in line or "load(1.5)" in line]
    assert [int(line.split(":")[1]) for line in errors] == wrong, done.stdout
    assert "def (manifest: " in done.stdout
    assert "Run" in done.stdout
