"""ONNX files of a model at one budget: only the routing (tokens to logits and indices) or the whole model (image to the same).

A router without a head gives the scores of the patches in place of logits. In a model whose backbone is routed early the router is
inside the graph: it looks, K patches are chosen, and only those run through the blocks. Before a file is written it is compared
with the PyTorch model in onnxruntime: same patches, logits or scores within 1e-4.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medtokenbudget.config import DEFAULT_BUDGET, NOTICE
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import atomic_write
from medtokenbudget.model.inference import evaluating, select
from medtokenbudget.model.model import MedTokenBudget
from medtokenbudget.routing import Ranker
from medtokenbudget.tokens import TokenBatch

Part = Literal["routing", "whole"]
OPSET = 18
TOLERANCE = 1e-4
ROUNDING = 1e-5
SIGNALS = ("attention_entropy", "cls_attention", "received_attention", "value_norm", "luminance")
"""Fields of `TokenBatch` that a graph can take besides the patches."""


def export_onnx(
    model: MedTokenBudget, out: Path | str, budget: float = DEFAULT_BUDGET, part: Part = "whole", selector: str | None = None
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
    with on_cpu(model):
        graph = _graph(model, budget, part, method)
        # A method text has characters that file systems reject.
        path = Path(out) / f"{part}-{method.replace(':', '-').replace('+', '-')}-{budget:g}.onnx"
        with atomic_write(path) as temporary:
            inputs = _example(model, part, graph, batch=2, seed=0)
            names = ["logits" if model.has_head else "scores", "indices"]
            write_graph(exported(graph, inputs, names, _any_batch(inputs)), temporary, _metadata(model, budget, part, method))
            for batch in (1, 2, 3):
                example = _example(model, part, graph, batch, seed=batch)
                if isinstance(graph, EarlyGraph):
                    _check_early(temporary, graph, example, method)
                else:
                    _check(temporary, model, example, budget, method)
    return path


@contextmanager
def on_cpu(model: MedTokenBudget) -> Iterator[None]:
    """Move a model to the CPU and to evaluation mode inside the block, where graphs are made, and back."""
    device = model.device
    model.to("cpu")
    try:
        with evaluating(model):
            yield
    finally:
        model.to(device)


def require_onnx() -> None:
    """Raise RequestError with the install command if a package of the extra `onnx` is missing."""
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


class _ImageGraph(nn.Module):
    """Base of the graphs that take images, RGB in [0, 1]: normalization and backbone."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: MedTokenBudget) -> None:
        super().__init__()
        self.network, self.backbone = model.backbone.model, model.backbone
        mean, std = _normalization(model)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def tokens(self, image: Tensor, signals: Sequence[str] = ()) -> TokenBatch:
        """Run the backbone on images [B, 3, S, S]."""
        return self.backbone.tokens((image - self.mean) / self.std, tuple(signals))


def _normalization(model: MedTokenBudget) -> tuple[Tensor, Tensor]:
    preprocessing = model.backbone.preprocessing
    return torch.tensor(preprocessing.mean).view(1, 3, 1, 1), torch.tensor(preprocessing.std).view(1, 3, 1, 1)


class WholeGraph(_ImageGraph):
    """Images to logits and indices: normalization, backbone, routing."""

    def __init__(self, model: MedTokenBudget, routing: RoutingGraph) -> None:
        super().__init__(model)
        self.routing = routing

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.tokens(image, self.routing.signals)
        return self.routing(tokens.patches, *(getattr(tokens, name) for name in self.routing.signals))


class EarlyGraph(_ImageGraph):
    """Images [B, 3, S, S], RGB in [0, 1], to logits [B, C] and the kept patches [B, K]: router, chosen patches, blocks, head."""

    def __init__(self, model: MedTokenBudget, head: nn.Module) -> None:
        super().__init__(model)
        assert model.scout is not None
        # Everything with parameters that the graph runs must be a submodule: also the router's selector and network.
        parts: list[Any] = [model.scout.classifier().selector]
        if model.backbone_fingerprint["route"]["way"] != "inside":
            parts.append(model.scout.backbone.model)
        self.head, self.parts = head, nn.ModuleList(part for part in parts if isinstance(part, nn.Module))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.tokens(image)
        assert tokens.places is not None
        return self.head(tokens.patches.mean(1)), tokens.places


def _graph(model: MedTokenBudget, budget: float, part: Part, method: str) -> nn.Module:
    if part not in ("routing", "whole"):
        raise RequestError(f"The part must be 'routing' or 'whole', got '{part}'.")
    early = model.fixed_budget is not None
    if early and part != "whole":
        raise RequestError("The patches of this model are chosen before or inside the backbone. Use --part whole.")
    classifier = model.classifier(method)
    selector, head = classifier.selector, classifier.required_head if early else classifier.head
    foreign = [name for name in selector.requires if name not in SIGNALS]
    if not early and (not isinstance(selector, Ranker) or selector.stochastic or foreign):
        kind = f"reads {', '.join(foreign)}" if foreign else "is random" if selector.stochastic else "merges tokens"
        raise RequestError(f"Selector '{method}' {kind}, so it cannot be exported as a fixed graph. Export another one.")
    if head is not None and head.reads == "tokens":
        raise RequestError(
            f"Head '{head.name}' reads tokens, so it cannot be exported. Export a method with the head mlp or linear."
        )
    if early:
        assert head is not None
        return EarlyGraph(model, head).eval()
    if part == "whole" and "luminance" in selector.requires:
        raise RequestError(f"Selector '{method}' reads luminance, which the whole graph does not compute. Use --part routing.")
    assert isinstance(selector, Ranker)
    routing = RoutingGraph(selector, head, model.grid, model.k(budget, method))
    return (routing if part == "routing" else WholeGraph(model, routing)).eval()


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
        "notice": NOTICE,
    }
    return {key: value if isinstance(value, str) else json.dumps(value, sort_keys=True) for key, value in values.items()}


def exported(graph: nn.Module, inputs: dict[str, Tensor], outputs: list[str], dynamic_shapes: Any = None) -> Any:
    """Export a graph with these example inputs, as an ONNX message."""
    with torch.no_grad(), _quiet_exporter():
        program = torch.onnx.export(
            graph.eval(),
            tuple(inputs.values()),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=dynamic_shapes,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def _any_batch(inputs: dict[str, Tensor]) -> Any:
    """Return the dynamic shapes of inputs whose first dimension is the batch."""
    shapes = [{0: torch.export.Dim("batch", min=1, max=1024)} for _ in inputs]
    # `RoutingGraph.forward` takes its signals as *args, which torch.export sees as one tuple, or not at all if there are none.
    return (shapes[0], tuple(shapes[1:])) if len(shapes) > 1 else (shapes[0],)


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
def _quiet_exporter() -> Iterator[None]:
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


def session(path: Path) -> Any:
    """Open a graph in onnxruntime."""
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def _run(path: Path, inputs: dict[str, Tensor], method: str) -> tuple[Tensor, Tensor]:
    """Run the file in onnxruntime; return its logits (or scores) and indices."""
    opened = session(path)
    if isinstance(opened.get_inputs()[0].shape[0], int):
        raise RequestError(f"Selector '{method}' cannot be exported for any batch size. Export another one.")
    values, indices = opened.run(None, {name: value.numpy() for name, value in inputs.items()})
    return torch.from_numpy(values), torch.from_numpy(indices)


def _check(path: Path, model: MedTokenBudget, inputs: dict[str, Tensor], budget: float, method: str) -> None:
    """Raise an error if the file keeps other patches or gives other logits or scores than the PyTorch model."""
    values, indices = _run(path, inputs, method)
    classifier = model.classifier(method)
    with torch.inference_mode():
        tokens = _tokens(model, inputs)
        selection, scores = select(classifier.selector, tokens, model.k(budget, method))
        assert scores is not None
        assert selection.indices is not None
        # Patches whose scores differ only by rounding may swap between the two runtimes; the logits are of the patches kept.
        apart = (scores.gather(1, indices) - scores.gather(1, selection.indices)).abs().max().item()
        kept = torch.gather(tokens.patches, 1, indices.unsqueeze(-1).expand(-1, -1, tokens.dim))
        expected = scores if classifier.head is None else classifier.head(kept.mean(1))
        difference = (expected - values).abs().max().item()
    if apart > ROUNDING or difference > TOLERANCE:
        what = "logits" if model.has_head else "scores"
        raise WorkError(
            f"The exported graph differs from the model ({what} by {difference:.1e}, scores of kept patches by {apart:.1e}), so "
            "nothing was written."
        )


def _tokens(model: MedTokenBudget, inputs: dict[str, Tensor]) -> TokenBatch:
    if "image" not in inputs:
        fields: dict[str, Any] = inputs
        return TokenBatch(grid=model.grid, **fields)
    mean, std = _normalization(model)
    return model.backbone((inputs["image"] - mean) / std, model.signals)


def _check_early(path: Path, graph: EarlyGraph, inputs: dict[str, Tensor], method: str) -> None:
    """Raise an error unless the file gives what the graph gives in PyTorch: the same patches, numbers within tolerance."""
    values, indices = _run(path, inputs, method)
    with torch.inference_mode():
        expected, places = graph(*inputs.values())
    same = bool((indices.sort(1).values == places.sort(1).values).all())
    difference = (values - expected).abs().max().item()
    if not same or difference > TOLERANCE:
        kept = "the same" if same else "other"
        raise WorkError(f"The exported graph keeps {kept} patches and differs by {difference:.1e}, so nothing was written.")
