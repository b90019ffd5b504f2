"""Every example runs, from a folder of drawn images to a classifier without torch."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import medtokenbudget as mtb
from medtokenbudget.data import Drawings, Manifest, synthetic_manifest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
pytestmark = pytest.mark.slow


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `train_on_your_folder` leaves behind: manifest, tokens and run of 48 images in class folders."""
    root = tmp_path_factory.mktemp("examples")
    drawn = Manifest.read(synthetic_manifest(root / "drawn", Drawings(48, seed=3, size=128)))
    (root / "masks").mkdir()
    for row, (name, label) in enumerate(zip(drawn.ids, drawn.rows["label"])):
        (root / "photos" / label).mkdir(parents=True, exist_ok=True)
        shutil.copy(drawn.image_path(row), root / "photos" / label)
        mask = drawn.mask_path(row)
        assert mask is not None
        shutil.copy(mask, root / "masks" / f"{name}_mask{mask.suffix}")
    example("train_on_your_folder").main(root / "photos", root / "masks", root / "out", epochs=3, head_epochs=3)
    return root / "out"


def test_a_folder_of_images_becomes_a_model_with_a_card(mine: Path) -> None:
    model = mtb.load(mine / "run")
    assert model.selectors == ["lats:lesion-first", "center", "random"]
    assert model.main == "lats:lesion-first"
    manifest = Manifest.read(mine / "manifest.parquet")
    assert model.classes == manifest.classes
    card = (mine / "run" / "model" / "README.md").read_text()
    assert "## Results on the validation part" in card
    assert model.fingerprint in card


def test_a_new_selector_is_in_the_sweep(mine: Path, tmp_path: Path) -> None:
    results = example("add_a_selector").main(mine / "manifest.parquet", mine / "tokens", tmp_path / "run", head_epochs=2)
    assert set(results["method"]) == {"edges", "center", "random"}
    edges = results[results["method"] == "edges"]
    assert (edges["retention"] <= edges["ceiling"] + 1e-9).all()
    assert edges["retention"].notna().all()


def test_routed_tokens_train_a_small_transformer(mine: Path) -> None:
    accuracy = example("tokens_to_transformer").main(mine / "run", mine / "manifest.parquet", mine / "tokens", epochs=2)
    assert 0 <= accuracy <= 1


def test_routed_tokens_train_a_scikit_learn_classifier(mine: Path) -> None:
    assert 0 <= example("tokens_to_sklearn").main(mine / "run", mine / "manifest.parquet") <= 1


def test_the_onnx_file_answers_like_the_model_where_torch_cannot_be_imported(mine: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    from medtokenbudget.model.onnx import export_onnx

    model, manifest = mtb.load(mine / "run", device="cpu"), Manifest.read(mine / "manifest.parquet")
    path = export_onnx(model, tmp_path, budget=0.3, part="whole")
    images = [str(manifest.image_path(row)) for row in range(3)]
    script = (
        "import importlib.util, json, sys\n"
        "sys.modules['torch'] = sys.modules['medtokenbudget'] = None\n"
        "spec = importlib.util.spec_from_file_location('example', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "print(json.dumps(module.main(sys.argv[2], sys.argv[3:])))\n"
    )
    command = [sys.executable, "-c", script, str(EXAMPLES / "onnx_without_torch.py"), str(path), *images]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout.splitlines()[-1])
    for answer, wanted in zip(answers, model.predict(images, budget=0.3)):
        assert list(answer) == list(model.classes)
        np.testing.assert_allclose(list(answer.values()), list(wanted.probabilities.values()), atol=1e-4)
