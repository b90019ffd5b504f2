"""What is made to be shared (reports, models, stores, exports, sites) names no folder and no person of the machine that made it."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.data import Drawings, synthetic_manifest
from medtokenbudget.serve.site import HASHES, write_site
from tests.small_model import small_backbone

pytestmark = pytest.mark.slow

NAME = "tell-tale-name-4711"
BUDGET = ["--budgets", "0.3"]
SMALL = ["--epochs", "1", "--head-epochs", "1", "--min-steps", "0", "--controls", "false", "--device", "cpu", *BUDGET]
BACKBONE = ["--backbone", "test_vit", "--image-size", "160"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with everything that a person makes and passes on, all given as absolute paths; the weights are in another folder."""
    patch = pytest.MonkeyPatch()
    home = tmp_path_factory.mktemp(NAME)
    for name in ("HOME", "XDG_STATE_HOME"):
        patch.setenv(name, str(home))
    weights = small_backbone(home / NAME).weights
    manifest, store, run = synthetic_manifest(home / "data", Drawings(20, seed=3, size=96)), home / "tokens", home / "run"
    next((home / "data").rglob("*.jpg")).write_bytes(b"damaged")
    extract = ["extract", str(manifest), "--store", str(store), "--views", "off-center", *BACKBONE, f"--weights={weights}"]
    assert main(extract) == 0
    assert main(["train", str(manifest), "--store", str(store), "--out", str(run), *SMALL]) == 0
    assert main(["report", str(run)]) == 0
    assert main(["evaluate", str(manifest), "--model", str(run / "model"), "--out", str(home / "evaluated"), *BUDGET]) == 0
    assert main(["report", str(run), str(home / "evaluated"), "--out", str(home / "compared"), "--pictures", "false"]) == 0
    for kind, options in {"onnx": ["--graph", "routing"], "hub": []}.items():  # the site below has graphs of the whole model
        assert main(["export", str(run / "model"), "--format", kind, "--out", str(home / kind), *options]) == 0
    for file in HASHES:
        (home / file).write_text("the runtime, which is not ours")
    write_site(mtb.load(run / "model", device="cpu"), home / "site", home)
    patch.undo()
    return home


def contents(path: Path) -> list[bytes]:
    """The bytes of a file, and of what is compressed inside it."""
    data = path.read_bytes()
    found = [path.name.encode(), data]
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        found += [str(table.schema.metadata).encode(), json.dumps(table.to_pydict(), default=str).encode()]
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            found += [part for name in archive.namelist() for part in (name.encode(), archive.read(name))]
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            found += [arrays[name].tobytes() for name in arrays.files]
    return found


@pytest.mark.parametrize("folder", ["tokens", "run", "evaluated", "compared", "onnx", "hub", "site"])
def test_nothing_that_is_shared_names_the_folder_it_was_made_in(home: Path, folder: str) -> None:
    files = [path for path in (home / folder).rglob("*") if path.is_file()]
    assert files
    # The exporter of graphs would name the folders of the sources.
    places = [NAME.encode(), *(str(Path(module.__file__).parents[1]).encode() for module in (mtb, torch))]
    named = [str(path.relative_to(home)) for path in files if any(place in part for part in contents(path) for place in places)]
    assert named == []


def test_a_store_takes_the_same_weights_under_another_name_and_refuses_others(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = small_backbone(home / NAME).weights
    (home / "other.safetensors").write_bytes(weights.read_bytes())
    before = (home / "tokens" / "store.json").read_bytes()
    assert json.loads(before)["weights"] == "vit-0.safetensors"
    manifest, store = home / "data" / "manifest.parquet", home / "tokens"
    extract = ["extract", str(manifest), "--store", str(store), "--views", "off-center", *BACKBONE]
    assert main([*extract, "--weights", str(home / "other.safetensors")]) == 0
    assert (home / "tokens" / "store.json").read_bytes() == before
    assert main([*extract, "--weights", str(small_backbone(home / NAME, seed=1).weights)]) == 2
    assert "backbone.weights" in capsys.readouterr().err


def test_a_page_names_no_folder_of_a_manifest_a_store_and_a_model_that_are_elsewhere(home: Path) -> None:
    run = mtb.Run(shutil.copytree(home / "evaluated", home / "moved"))
    run.manifest_path, run.store_path = home / NAME / "lesions.parquet", home / NAME / "tokens"
    run.evaluation["model"] = f"../{NAME}/model"
    run.record_command("train", [str(run.manifest_path), "--store", str(run.store_path)])
    assert main(["report", str(run.path), "--pictures", "false", "--out", str(home / "elsewhere")]) == 0
    page = (home / "elsewhere" / "report.html").read_text(encoding="utf-8")
    assert "lesions.parquet" in page
    assert NAME not in page


def test_a_page_without_pictures_names_no_image(home: Path) -> None:
    ids = pq.read_table(home / "run" / "predictions.parquet", columns=["image_id"])["image_id"].unique().to_pylist()
    page = home / "run" / "report.html"
    assert any(name in page.read_text(encoding="utf-8") for name in ids)
    assert main(["report", str(home / "run"), "--pictures", "false", "--out", str(home / "page")]) == 0
    for file in (home / "page").rglob("*"):
        if file.is_file():
            assert not [name for name in ids if name.encode() in file.read_bytes()], file.name
