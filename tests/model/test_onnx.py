"""Exported graphs against the model itself, through onnxruntime."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.model import onnx as exporter
from medtokenbudget.routing import create_selector
from medtokenbudget.tokens import TokenBatch
from medtokenbudget.training import MLPHead, RoutedClassifier
from tests.small_model import CLASSES, draw_images, small_model

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MedTokenBudget:
    """The small model cut after its second block: less to export, the same path."""
    whole = small_model(tmp_path_factory.mktemp("weights"), baselines=("darkness", "random", "tome", "oracle"))
    config = replace(whole.backbone_config, layer=1)
    backbone = Backbone.load(config)
    cut = MedTokenBudget(config, backbone.fingerprint, CLASSES, whole.classifiers, whole.train_config, main="lats", device="cpu")
    return cut.use_backbone(backbone)


@pytest.fixture(scope="module")
def whole(model: MedTokenBudget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exporter.export_onnx(model, tmp_path_factory.mktemp("onnx"), budget=0.3, graph="whole")


@pytest.mark.slow
def test_the_whole_graph_answers_as_the_model_does_on_image_files(model: MedTokenBudget, whole: Path, tmp_path: Path) -> None:
    session = onnxruntime.InferenceSession(str(whole))
    paths = draw_images(tmp_path, 3)
    pixels = np.stack([np.asarray(Image.open(path).resize((160, 160), Image.Resampling.BICUBIC)) for path in paths])
    logits, indices = session.run(None, {"image": pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255})
    for row, found in enumerate(model.predict(paths, budget=0.3)):
        assert indices[row].tolist() == found.kept.tolist()
        probabilities = np.exp(logits[row]) / np.exp(logits[row]).sum()
        np.testing.assert_allclose(probabilities, list(found.probabilities.values()), atol=1e-4)


@pytest.mark.slow
def test_the_file_says_what_it_is_and_names_no_path_of_the_machine_that_wrote_it(model: MedTokenBudget, whole: Path) -> None:
    data = whole.read_bytes()
    for place in (str(Path(exporter.__file__).parents[2]), str(Path(torch.__file__).parents[1]), "stack_trace", ".py"):
        assert place.encode() not in data, place
    assert whole.name == "whole-lats-0.3.onnx"
    meta = onnxruntime.InferenceSession(str(whole)).get_modelmeta().custom_metadata_map
    assert json.loads(meta["classes"]) == list(CLASSES)
    assert (float(meta["budget"]), int(meta["k"])) == (0.3, 30)
    assert json.loads(meta["preprocessing"])["mean"] == list(model.backbone.preprocessing.mean)
    assert meta["fingerprint"] == model.fingerprint
    assert "not a medical device" in meta["notice"]


@pytest.mark.slow
def test_the_routing_part_takes_tokens_and_breaks_ties_by_index(model: MedTokenBudget, tmp_path: Path) -> None:
    path = exporter.export_onnx(model, tmp_path, budget=0.2, graph="routing")
    session = onnxruntime.InferenceSession(str(path))
    assert [entry.name for entry in session.get_inputs()] == ["patches", "attention_entropy"]
    # Equal patches have equal scores wherever their neighborhood is equal too: all but the border ones tie.
    same = np.ones((1, 100, model.dim), np.float32)
    _, indices = session.run(None, {"patches": same, "attention_entropy": np.full((1, 100), 0.5, np.float32)})
    inner = [y * 10 + x for y in range(1, 9) for x in range(1, 9)]
    assert indices[0].tolist() == inner[:20]


@pytest.mark.slow
def test_a_scorer_with_convolutions_keeps_the_same_patches_in_onnx(model: MedTokenBudget, tmp_path: Path) -> None:
    torch.manual_seed(1)
    selector = create_selector("context", dim=model.dim, channels=8, blocks=2, minimum=8)
    classifiers = {"context:lesion-first": RoutedClassifier(selector, MLPHead(model.dim, len(CLASSES)))}
    settings = (model.backbone_config, model.backbone_fingerprint, CLASSES, classifiers, model.train_config)
    made = MedTokenBudget(*settings, main="context:lesion-first", device="cpu")
    path = exporter.export_onnx(made, tmp_path, budget=0.2, graph="routing")
    session = onnxruntime.InferenceSession(str(path))
    assert [entry.name for entry in session.get_inputs()] == ["patches"]
    patches = torch.randn(3, 100, model.dim, generator=torch.Generator().manual_seed(2))
    _, indices = session.run(None, {"patches": patches.numpy()})
    expected = selector.eval().select(TokenBatch(patches, model.grid), 20).indices
    assert [sorted(row) for row in indices.tolist()] == [sorted(row) for row in expected.tolist()]


@pytest.mark.parametrize(
    ("selector", "graph", "words"),
    [
        ("random", "whole", "is random"),
        ("tome", "routing", "merges tokens"),
        ("oracle", "routing", "reads lesion"),
        ("darkness", "whole", "luminance"),
        ("lats", "half", "must be 'routing' or 'whole'"),
    ],
)
def test_what_has_no_fixed_graph_is_rejected(model: MedTokenBudget, tmp_path: Path, selector: str, graph: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        exporter.export_onnx(model, tmp_path, selector=selector, graph=graph)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_graph_that_differs_from_the_model_is_not_written(
    model: MedTokenBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, bias = exporter._exported, model.classifier().head.output.bias
    before = bias.detach().clone()

    def changed_afterwards(*arguments: Any) -> Any:
        graph = exported(*arguments)
        bias.data += 0.001
        return graph

    monkeypatch.setattr(exporter, "_exported", changed_afterwards)
    try:
        with pytest.raises(WorkError, match=r"logits by 1\.0e-03"):
            exporter.export_onnx(model, tmp_path, budget=0.3, graph="routing")
    finally:
        bias.data = before
    assert list(tmp_path.iterdir()) == []
