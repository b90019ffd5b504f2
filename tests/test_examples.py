"""Every example does what it promises, from a folder of drawn images to a classifier without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import timm
from safetensors.torch import load_file

import medtokenbudget as mtb
from medtokenbudget.data import Manifest
from medtokenbudget.runs.run import read_results
from tests.conftest import REPOSITORY
from tests.drawn import drawn_folder
from tests.machine import script

CLASSES = ("MEL", "NV", "BCC")
CHANCE = 1 / len(CLASSES)  # the classes are equally frequent
EXAMPLES = REPOSITORY / "examples"
pytestmark = pytest.mark.slow


def example(name: str) -> ModuleType:
    return script(EXAMPLES / f"{name}.py")


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `train_on_your_folder` leaves behind: manifest, tokens and run of 90 images of three classes."""
    root = tmp_path_factory.mktemp("examples")
    drawn_folder(root, 90, size=128, classes=CLASSES)
    example("train_on_your_folder").main(root / "photos", root / "masks", root / "out", epochs=3, head_epochs=10)
    return root / "out"


def test_a_folder_of_images_becomes_a_model_that_keeps_the_lesion(mine: Path) -> None:
    model = mtb.load(mine / "run")
    assert model.selectors == ["lats:lesion-first", "border-contrast", "center", "darkness", "random"]
    assert model.classes == tuple(sorted(CLASSES))
    card = (mine / "run" / "model" / "README.md").read_text()
    assert model.fingerprint in card
    results = read_results(mine / "run" / "results.csv")
    kept = results[results["budget"] == 0.3].set_index("method")["retention_of_ceiling"]
    assert kept["lats:lesion-first"] > 0.9
    assert kept["lats:lesion-first"] > 2 * kept["random"]


def test_a_new_selector_is_in_the_sweep_and_keeps_more_of_the_lesion_than_chance(mine: Path, tmp_path: Path) -> None:
    results = example("add_a_selector").main(mine / "manifest.parquet", mine / "tokens", tmp_path / "run", head_epochs=2)
    assert set(results["method"]) == {"edges", "center", "random"}
    kept = results.pivot(index="budget", columns="method", values="retention")
    assert list(kept.index) == [0.1, 0.3, 0.5]
    # At the smallest budget the rim of the lens, an edge too, takes most of the patches.
    assert (kept["edges"] > kept["random"])[[0.3, 0.5]].all(), "the border of a lesion is an edge"
    edges = results[results["method"] == "edges"]
    assert (edges["retention"] <= edges["ceiling"]).all()


def test_routed_tokens_train_a_small_transformer_to_more_than_chance(mine: Path) -> None:
    accuracy = example("tokens_to_transformer").main(mine / "run", mine / "manifest.parquet", mine / "tokens", epochs=10)
    assert accuracy > CHANCE + 0.2


def test_routed_tokens_train_a_scikit_learn_classifier_to_more_than_chance(mine: Path) -> None:
    assert example("tokens_to_sklearn").main(mine / "run", mine / "manifest.parquet") > CHANCE + 0.2


def test_the_onnx_file_answers_like_the_model_where_torch_cannot_be_imported(mine: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    from medtokenbudget.model.onnx import export_onnx

    model, manifest = mtb.load(mine / "run", device="cpu"), Manifest.read(mine / "manifest.parquet")
    path = export_onnx(model, tmp_path, budget=0.3, graph="whole")
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


def test_the_onnx_file_of_a_router_without_classes_prints_the_patches_that_it_keeps(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    from medtokenbudget.model.onnx import export_onnx

    router, manifest = mtb.load(device="cpu"), Manifest.read(mine / "manifest.parquet")
    path = export_onnx(router, tmp_path, budget=0.3, graph="whole")
    assert example("onnx_without_torch").main(path, [manifest.image_path(0)]) == []
    kept = router.route(manifest.image_path(0), budget=0.3)[0].kept[:5].tolist()
    assert f": patches {kept} ... of K = 76" in capsys.readouterr().out


def test_a_wrapped_model_fine_tunes_on_a_folder_to_more_than_chance(tmp_path: Path) -> None:
    drawn_folder(tmp_path, 45, size=128, classes=CLASSES)
    options = {"budget": 0.3, "epochs": 4, "size": 128, "lr": 1e-3, "pretrained": False}
    accuracy = example("finetune_wrapped").main(tmp_path / "photos", "test_vit", tmp_path / "out" / "model.safetensors", **options)
    assert accuracy > CHANCE + 0.15
    model = timm.create_model("test_vit", num_classes=len(CLASSES), img_size=128)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
