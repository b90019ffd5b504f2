"""ONNX files of a model at one budget: the routing part (tokens to logits and indices) or the whole (image to logits and indices).

A file is checked against the model itself with onnxruntime before it appears: the same patches, logits to 1e-4.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import atomic_write
from medtokenbudget.model import parts
from medtokenbudget.model.parts import MAIN
from medtokenbudget.model.routed import MedTokenBudget
from medtokenbudget.routing import Ranker
from medtokenbudget.tokens import TokenBatch

Part = Literal["routing", "whole"]
OPSET = 18
TOLERANCE = 1e-4
ROUNDING = 1e-5
SIGNALS = ("attention_entropy", "cls_attention", "luminance")
"""Fields of `TokenBatch` that a graph can take beside the patches."""


def export_onnx(model: MedTokenBudget, out: Path, budget: float = 0.3, part: Part = "whole", selector: str = MAIN) -> Path:
    """Write `out`/`<part>-<selector>-<budget>.onnx` with K fixed and any batch size, checked against PyTorch.

    routing  patches [B, N, D] and the selector's signals [B, N] to logits [B, C] and indices [B, K]
    whole    image [B, 3, S, S], RGB in [0, 1] (the normalisation is inside), to logits [B, C] and indices [B, K]
    """
    _require_extra()
    graph: nn.Module = _graph(model, budget, part, selector)
    inputs = _example(model, part, graph, batch=2, seed=0)
    path = Path(out) / f"{part}-{selector.replace(':', '-')}-{budget:g}.onnx"
    with atomic_write(path) as temporary:
        _write(graph, inputs, temporary, _metadata(model, budget, part, selector))
        for batch in (1, 2, 3):
            _check(temporary, model, _example(model, part, graph, batch, seed=batch), budget, selector)
    return path


def _require_extra() -> None:
    import importlib.util

    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"exporting needs {', '.join(missing)}: pip install 'medtokenbudget[onnx]'.")


class RoutingGraph(nn.Module):
    """Tokens to logits and indices at a fixed K, in operations that ONNX has."""

    def __init__(self, selector: Ranker, head: nn.Module, grid: tuple[int, int], k: int) -> None:
        super().__init__()
        self.selector, self.head, self.grid, self.k = selector, head, grid, k
        self.signals = tuple(name for name in SIGNALS if name in selector.requires)

    def forward(self, patches: Tensor, *signals: Tensor) -> tuple[Tensor, Tensor]:
        fields: dict[str, Any] = dict(zip(self.signals, signals))
        tokens = TokenBatch(patches, self.grid, **fields)
        # ONNX TopK gives equal values the lower index first, as `rank` does; in PyTorch itself only a stable sort does.
        indices = torch.topk(self.selector.score(tokens).float(), self.k, dim=1, sorted=True).indices
        kept = torch.gather(patches, 1, indices.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
        return self.head(kept.mean(1)), indices


class WholeGraph(nn.Module):
    """An image to logits and indices: normalisation, backbone, routing."""

    def __init__(self, model: MedTokenBudget, routing: RoutingGraph) -> None:
        super().__init__()
        self.routing, self.network, self.backbone = routing, model.backbone.model, model.backbone
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (self.backbone.preprocessing.mean, self.backbone.preprocessing.std))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    mean: Tensor
    std: Tensor

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.backbone.tokens((image - self.mean) / self.std)
        return self.routing(tokens.patches, *(getattr(tokens, name) for name in self.routing.signals))


def _graph(model: MedTokenBudget, budget: float, part: Part, selector: str) -> nn.Module:
    if part not in ("routing", "whole"):
        raise RequestError(f"part must be 'routing' or 'whole', got '{part}'.")
    classifier = model.classifier(selector)
    chosen = classifier.selector
    foreign = [name for name in chosen.requires if name not in SIGNALS]
    if not isinstance(chosen, Ranker) or chosen.stochastic or foreign:
        kind = f"reads {', '.join(foreign)}" if foreign else "draws at random" if chosen.stochastic else "merges tokens"
        raise RequestError(f"selector '{selector}' {kind}: it cannot be exported to a fixed graph. Export 'lats'.")
    if part == "whole" and "luminance" in chosen.requires:
        raise RequestError(f"selector '{selector}' reads luminance, which the whole graph does not compute. Use --part routing.")
    routing = RoutingGraph(chosen, classifier.head, model.grid, model.k(budget, selector))
    graph: nn.Module = routing if part == "routing" else WholeGraph(model, routing)
    return graph.cpu().eval()


def _example(model: MedTokenBudget, part: Part, graph: Any, batch: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = model.grid[0] * model.grid[1]
    if part == "whole":
        size = int(model.backbone_fingerprint["image_size"])
        # Noise on a dark disk: a picture without any structure would leave all scores within rounding of each other.
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
            "input": "RGB in [0, 1], the whole picture resized to image_size x image_size; mean and std are applied inside"
            if part == "whole"
            else "tokens of the backbone below",
        },
        "backbone": model.backbone_fingerprint,
        "fingerprint": model.fingerprint,
        "ties": "equal scores: the lower patch index first",
        "notice": "Research software, not a medical device.",
    }
    return {key: value if isinstance(value, str) else json.dumps(value, sort_keys=True) for key, value in values.items()}


def _write(graph: nn.Module, inputs: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    import onnx

    batch = torch.export.Dim("batch", min=1, max=1024)
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            graph,
            tuple(inputs.values()),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=["logits", "indices"],
            dynamic_shapes=_dynamic(inputs, batch),
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, metadata)
    onnx.checker.check_model(proto)
    path.write_bytes(proto.SerializeToString(deterministic=True))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes on its own optimisations; what matters is checked afterwards."""
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
    # `RoutingGraph.forward` takes its signals as *args, which torch.export sees as one tuple.
    return (shapes[0], tuple(shapes[1:])) if "patches" in inputs else (shapes[0],)


def _check(path: Path, model: MedTokenBudget, inputs: dict[str, Tensor], budget: float, selector: str) -> None:
    """Refuse a file that keeps other patches or gives other logits than the model in PyTorch."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    if isinstance(session.get_inputs()[0].shape[0], int):
        raise RequestError(f"the scores of selector '{selector}' cannot be written for any batch size. Export 'lats'.")
    found_logits, found_indices = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    found = torch.from_numpy(found_indices)
    classifier = model.classifier(selector)
    with torch.inference_mode():
        tokens = _tokens(model, inputs)
        selection, scores = parts.select(classifier.selector, tokens, model.k(budget, selector))
        assert scores is not None
        assert selection.indices is not None
        # Scores that differ by rounding only may change places between two programs; the logits are those of the patches kept.
        apart = (scores.gather(1, found) - scores.gather(1, selection.indices)).abs().max().item()
        kept = torch.gather(tokens.patches, 1, found.unsqueeze(-1).expand(-1, -1, tokens.dim))
        difference = (classifier.head(kept.mean(1)) - torch.from_numpy(found_logits)).abs().max().item()
    if apart > ROUNDING or difference > TOLERANCE:
        raise WorkError(
            f"the exported graph differs from the model (logits by {difference:.1e}, scores of kept patches by {apart:.1e}); "
            "nothing was written."
        )


def _tokens(model: MedTokenBudget, inputs: dict[str, Tensor]) -> TokenBatch:
    if "image" not in inputs:
        fields: dict[str, Any] = inputs
        return TokenBatch(grid=model.grid, **fields)
    preprocessing = model.backbone.preprocessing
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (preprocessing.mean, preprocessing.std))
    return model.backbone((inputs["image"] - mean) / std)
