"""ONNX files of a model at one budget: only the routing (tokens to logits and indices) or the whole model (image to the same).

A router without a head gives the scores of the patches in place of logits. Before a file is written it is compared with the
PyTorch model in onnxruntime: same patches, logits or scores within 1e-4.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import atomic_write
from medtokenbudget.model import parts
from medtokenbudget.model.onnx_early import EarlyGraph, check_early, early_graph
from medtokenbudget.model.routed import MedTokenBudget
from medtokenbudget.routing import Ranker
from medtokenbudget.tokens import TokenBatch

Part = Literal["routing", "whole"]
OPSET = 18
TOLERANCE = 1e-4
ROUNDING = 1e-5
SIGNALS = ("attention_entropy", "cls_attention", "received_attention", "value_norm", "luminance")
"""Fields of `TokenBatch` that a graph can take besides the patches."""


def export_onnx(
    model: MedTokenBudget, out: Path | str, budget: float = 0.3, part: Part = "whole", selector: str | None = None
) -> Path:
    """Write `<part>-<selector>-<budget>.onnx` with a fixed K and any batch size, checked against PyTorch.

    Args:
        model: The model; it is moved to the CPU for the export and back.
        out: Folder to write to.
        budget: Share of the patches that is kept, in (0, 1].
        part: 'routing' maps patches [B, N, D] and the selector's signals [B, N] to logits [B, C] and indices [B, K]; 'whole' maps
            images [B, 3, S, S], RGB in [0, 1], to the same (normalization is inside). A model without a head gives scores [B, N]
            in place of logits.
        selector: Method to export; None means the main one.

    Returns:
        Path of the file.

    Raises:
        RequestError: If the selector cannot be written as a fixed graph, or the extra `onnx` is not installed.
        WorkError: If the exported graph and the PyTorch model disagree; nothing is written then.
    """
    require_onnx()
    method = model.main if selector is None else selector
    device = model.device
    model.to("cpu")
    try:
        with parts.evaluating(model):
            return _export(model, Path(out), budget, part, method)
    finally:
        model.to(device)


def _export(model: MedTokenBudget, out: Path, budget: float, part: Part, method: str) -> Path:
    graph = _graph(model, budget, part, method)
    inputs = _example(model, part, graph, batch=2, seed=0)
    path = out / f"{part}-{_file_name(method)}-{budget:g}.onnx"
    with atomic_write(path) as temporary:
        first = "logits" if model.has_head else "scores"
        _write(graph, inputs, temporary, _metadata(model, budget, part, method), first)
        for batch in (1, 2, 3):
            example = _example(model, part, graph, batch, seed=batch)
            if isinstance(graph, EarlyGraph):
                check_early(graph, example, _session(temporary, method), TOLERANCE)
            else:
                _check(temporary, model, example, budget, method)
    return path


def _file_name(method: str) -> str:
    """A method text without characters that file systems reject."""
    return method.replace(":", "-").replace("+", "-")


def require_onnx() -> None:
    """Raise RequestError with the install command if a package of the extra `onnx` is missing."""
    import importlib.util

    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"ONNX export needs {', '.join(missing)}. Run `pip install 'medtokenbudget[onnx]'`.")


class RoutingGraph(nn.Module):
    """Tokens to logits (without a head: to scores) and indices at a fixed K, with operations that ONNX has."""

    def __init__(self, selector: Ranker, head: nn.Module | None, grid: tuple[int, int], k: int) -> None:
        super().__init__()
        self.selector, self.head, self.grid, self.k = selector, head, grid, k
        self.signals = tuple(name for name in SIGNALS if name in selector.requires)

    def forward(self, patches: Tensor, *signals: Tensor) -> tuple[Tensor, Tensor]:
        fields: dict[str, Any] = dict(zip(self.signals, signals))
        tokens = TokenBatch(patches, self.grid, **fields)
        # For equal values ONNX TopK takes the lower index first, as `rank` does; in PyTorch only a stable sort does.
        scores = self.selector.score(tokens).float()
        indices = torch.topk(scores, self.k, dim=1, sorted=True).indices
        if self.head is None:
            return scores, indices
        kept = torch.gather(patches, 1, indices.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
        return self.head(kept.mean(1)), indices


class WholeGraph(nn.Module):
    """Images to logits and indices: normalization, backbone, routing."""

    def __init__(self, model: MedTokenBudget, routing: RoutingGraph) -> None:
        super().__init__()
        self.routing, self.network, self.backbone = routing, model.backbone.model, model.backbone
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (self.backbone.preprocessing.mean, self.backbone.preprocessing.std))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    mean: Tensor
    std: Tensor

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.backbone.tokens((image - self.mean) / self.std, self.routing.signals)
        return self.routing(tokens.patches, *(getattr(tokens, name) for name in self.routing.signals))


def _graph(model: MedTokenBudget, budget: float, part: Part, selector: str) -> nn.Module:
    if part not in ("routing", "whole"):
        raise RequestError(f"The part must be 'routing' or 'whole', got '{part}'.")
    early = early_graph(model, part, selector)
    if early is not None:
        return early.eval()
    classifier = model.classifier(selector)
    chosen = classifier.selector
    foreign = [name for name in chosen.requires if name not in SIGNALS]
    if not isinstance(chosen, Ranker) or chosen.stochastic or foreign:
        kind = f"reads {', '.join(foreign)}" if foreign else "is random" if chosen.stochastic else "merges tokens"
        raise RequestError(f"Selector '{selector}' {kind}, so it cannot be exported as a fixed graph. Export another one.")
    if classifier.head is not None and classifier.head.reads == "tokens":
        raise RequestError(
            f"Head '{classifier.head.name}' reads tokens, so it cannot be exported. Export a method with the head mlp or linear."
        )
    if part == "whole" and "luminance" in chosen.requires:
        raise RequestError(f"Selector '{selector}' reads luminance, which the whole graph does not compute. Use --part routing.")
    routing = RoutingGraph(chosen, classifier.head, model.grid, model.k(budget, selector))
    graph: nn.Module = routing if part == "routing" else WholeGraph(model, routing)
    return graph.eval()


def _example(model: MedTokenBudget, part: Part, graph: Any, batch: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = model.grid[0] * model.grid[1]
    if part != "routing":
        size = int(model.backbone_fingerprint["image_size"])
        # Noise and a dark disk: without any structure all scores would be equal up to rounding.
        y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
        center = torch.rand(batch, 2, generator=generator) * 0.4 + 0.3
        disk = (y - center[:, 0].view(-1, 1, 1)).square() + (x - center[:, 1].view(-1, 1, 1)).square() < 0.04
        noise = torch.rand(batch, 3, size, size, generator=generator) * 0.2
        return {"image": 0.75 + noise - 0.5 * disk.unsqueeze(1).float()}
    patches = {"patches": torch.randn(batch, n, model.dim, generator=generator)}
    return patches | {name: torch.rand(batch, n, generator=generator) for name in graph.signals}


def _metadata(model: MedTokenBudget, budget: float, part: Part, selector: str) -> dict[str, str]:
    values: dict[str, Any] = {
        "classes": list(model.classes),
        "budget": budget,
        "k": model.k(budget, selector),
        "grid": list(model.grid),
        "selector": selector,
        "preprocessing": {
            **{key: model.backbone_fingerprint[key] for key in ("image_size", "mean", "std", "interpolation")},
            "input": "RGB in [0, 1], the whole image resized to image_size x image_size; mean and std are applied inside the graph"
            if part == "whole"
            else "tokens of the backbone below",
        },
        "backbone": model.backbone_fingerprint,
        "fingerprint": model.fingerprint,
        "ties": "equal scores: the lower patch index first",
        "notice": "Research software, not a medical device.",
    }
    return {key: value if isinstance(value, str) else json.dumps(value, sort_keys=True) for key, value in values.items()}


def _write(graph: nn.Module, inputs: dict[str, Tensor], path: Path, metadata: dict[str, str], first: str) -> None:
    batch = torch.export.Dim("batch", min=1, max=1024)
    with torch.no_grad(), quiet_exporter():
        program = torch.onnx.export(
            graph,
            tuple(inputs.values()),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=[first, "indices"],
            dynamic_shapes=_dynamic(inputs, batch),
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    write_graph(proto, path, metadata)


def write_graph(proto: Any, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Check and write a graph with `metadata` as its only notes.

    The exporter notes on every node which line of which source file it came from: paths of this machine, and a user's name.
    """
    import onnx

    _clear_notes(proto)
    onnx.helper.set_model_props(proto, metadata or {})
    onnx.checker.check_model(proto)
    path.write_bytes(proto.SerializeToString(deterministic=True))


def _clear_notes(message: Any) -> None:
    for name in ("doc_string", "metadata_props"):
        if name in message.DESCRIPTOR.fields_by_name:
            message.ClearField(name)
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if isinstance(value, Sequence) else [value]:
                _clear_notes(part)


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence the exporter's notes on its own optimizations; what matters is checked afterwards."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir", "torch.onnx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def _dynamic(inputs: dict[str, Tensor], batch: Any) -> Any:
    shapes = [{0: batch} for _ in inputs]
    # `RoutingGraph.forward` takes its signals as *args, which torch.export sees as one tuple, or not at all if there are none.
    return (shapes[0], tuple(shapes[1:])) if len(shapes) > 1 else (shapes[0],)


def _session(path: Path, selector: str) -> Callable[[dict[str, Any]], Any]:
    """Runs the file in onnxruntime: from inputs by name to its outputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    if isinstance(session.get_inputs()[0].shape[0], int):
        raise RequestError(f"Selector '{selector}' cannot be exported for any batch size. Export another one.")
    return lambda values: session.run(None, values)


def _check(path: Path, model: MedTokenBudget, inputs: dict[str, Tensor], budget: float, selector: str) -> None:
    """Raise an error if the file keeps other patches or gives other logits or scores than the PyTorch model."""
    found_first, found_indices = _session(path, selector)({name: value.numpy() for name, value in inputs.items()})
    found = torch.from_numpy(found_indices)
    classifier = model.classifier(selector)
    with torch.inference_mode():
        tokens = _tokens(model, inputs)
        selection, scores = parts.select(classifier.selector, tokens, model.k(budget, selector))
        assert scores is not None
        assert selection.indices is not None
        # Patches whose scores differ only by rounding may swap between the two runtimes; the logits are of the patches kept.
        apart = (scores.gather(1, found) - scores.gather(1, selection.indices)).abs().max().item()
        kept = torch.gather(tokens.patches, 1, found.unsqueeze(-1).expand(-1, -1, tokens.dim))
        expected = scores if classifier.head is None else classifier.head(kept.mean(1))
        difference = (expected - torch.from_numpy(found_first)).abs().max().item()
    first = "logits" if model.has_head else "scores"
    if apart > ROUNDING or difference > TOLERANCE:
        raise WorkError(
            f"The exported graph differs from the model ({first} by {difference:.1e}, scores of kept patches by {apart:.1e}), so "
            "nothing was written."
        )


def _tokens(model: MedTokenBudget, inputs: dict[str, Tensor]) -> TokenBatch:
    if "image" not in inputs:
        fields: dict[str, Any] = inputs
        return TokenBatch(grid=model.grid, **fields)
    preprocessing = model.backbone.preprocessing
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (preprocessing.mean, preprocessing.std))
    return model.backbone((inputs["image"] - mean) / std, model.signals)
