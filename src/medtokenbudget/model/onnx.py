"""ONNX graphs of a model, each compared with PyTorch in onnxruntime before it is written.

`export_onnx` writes one file per budget. `write_web_graphs` writes the two graphs of the page that runs without a server: one from
pixels to tokens and scores, one from rankings to logits. The page sorts the scores itself, so that rankings by the mask of an image
(the controls) use the same heads. The heads answer for every K at once, so that the page has every budget after one pass.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from medtokenbudget.backbone.backbone import luminance
from medtokenbudget.config import DEFAULT_BUDGET, NOTICE
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import atomic_write
from medtokenbudget.heads import Head
from medtokenbudget.heads.head import RoutedClassifier
from medtokenbudget.model.inference import select
from medtokenbudget.model.model import MedTokenBudget
from medtokenbudget.routing import Ranker
from medtokenbudget.routing.trainable import ScoredRanker, Sight, evaluating
from medtokenbudget.tokens import TokenBatch

Graph = Literal["routing", "whole"]
OPSET = 18
TOLERANCE = 1e-4
"""Largest difference of logits, tokens and unfamiliarity."""
ROUNDING = 1e-5
"""Largest difference of scores: patches whose scores are closer may swap between the two runtimes."""
SIGNALS = ("attention_entropy", "cls_attention", "received_attention", "value_norm", "luminance")
"""Fields of `TokenBatch` that a graph can take besides the patches."""
TOKENS_GRAPH, HEADS_GRAPH = "tokens.onnx", "heads.onnx"
FROM_MASK = ("oracle", "box-prior")
"""Selectors that rank by the mask, which the page does itself; their heads are in the graph."""


def export_onnx(
    model: MedTokenBudget, out: Path | str, budget: float = DEFAULT_BUDGET, graph: Graph = "whole", selector: str | None = None
) -> Path:
    """Write `<graph>-<selector>-<budget>.onnx` with a fixed K and any batch size, checked against PyTorch.

    The graph 'routing' maps patches [B, N, D] and the selector's signals [B, N] to logits [B, C] and indices [B, K]; 'whole' maps
    images [B, 3, S, S], RGB in [0, 1], to the same (normalization is inside). A model without a head gives scores [B, N] in place
    of logits. If graph and model disagree, that is a WorkError, and nothing is written.
    """
    _require_onnx()
    method = model.main if selector is None else selector
    with _on_cpu(model):
        module = _graph(model, budget, graph, method)
        # A method text has characters that file systems reject.
        path = Path(out) / f"{graph}-{method.replace(':', '-').replace('+', '-')}-{budget:g}.onnx"
        with atomic_write(path) as temporary:
            # With one image the exporter would take the size of the batch for a constant.
            inputs = _example(model, module, batch=2, seed=0)
            shapes: Any = [{0: torch.export.Dim("batch", min=1, max=1024)} for _ in inputs]
            # `RoutingGraph.forward` takes its signals as *args, which torch.export sees as one tuple, or as nothing if it is empty.
            shapes = (shapes[0], tuple(shapes[1:])) if len(shapes) > 1 else (shapes[0],)
            proto = _exported(module, inputs, ["logits" if model.has_head else "scores", "indices"], shapes)
            # A number in place of a name: the graph would take this size alone.
            if proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value:
                raise RequestError(f"Selector '{method}' cannot be exported for any batch size. Export another one.")
            _write(proto, temporary, _metadata(model, budget, graph, method))
            for batch in (1, 2, 3):
                _check(temporary, model, module, _example(model, module, batch, seed=batch), model.classifier(method))
    return path


class RoutingGraph(nn.Module):
    """Tokens to logits (without a head: to scores) and indices at a fixed K, with operations that ONNX has."""

    def __init__(self, selector: Ranker, head: Head | None, grid: tuple[int, int], k: int) -> None:
        super().__init__()
        self.selector, self.head, self.grid, self.k = selector, head, grid, k
        self.signals = tuple(name for name in SIGNALS if name in selector.requires)

    def forward(self, patches: Tensor, *signals: Tensor) -> tuple[Tensor, Tensor]:
        fields: dict[str, Any] = dict(zip(self.signals, signals))
        scores = self.selector.score(TokenBatch(patches, self.grid, **fields)).float()
        # For equal values ONNX TopK takes the lower index first, as `rank` does; in PyTorch only a stable sort does.
        indices = torch.topk(scores, self.k, dim=1, sorted=True).indices
        return scores if self.head is None else self.head(_mean_of(patches, indices)), indices


class ImageGraph(nn.Module):
    """Images [B, 3, S, S], RGB in [0, 1], to logits (or scores) and kept patches: normalization, backbone, routing.

    A backbone that is routed early gives only the kept patches; `end` is then the head, otherwise the routing.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: MedTokenBudget, end: RoutingGraph | Head) -> None:
        super().__init__()
        self.backbone, self.network, self.end = model.backbone, model.backbone.model, end
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(model.backbone.preprocessing, name)).view(1, 3, 1, 1))
        # Everything with parameters that the graph runs must be a submodule: also the router's selector and network.
        parts: list[Any] = []
        if model.scout is not None and model.early is not None:
            parts = [model.scout.classifier().selector, *([model.scout.backbone.model] if model.early["way"] == "scout" else [])]
        self.parts = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        normalized = (image - self.mean) / self.std
        if not isinstance(self.end, RoutingGraph):
            tokens = self.backbone.tokens(normalized, ())
            assert tokens.places is not None
            return self.end(tokens.patches.mean(1)), tokens.places
        tokens = self.backbone.tokens(normalized, self.end.signals)
        logits, indices = self.end(tokens.patches, *(getattr(tokens, name) for name in self.end.signals))
        return logits, indices


def _mean_of(patches: Tensor, indices: Tensor) -> Tensor:
    return torch.gather(patches, 1, indices.unsqueeze(-1).expand(-1, -1, patches.shape[-1])).mean(1)


def _graph(model: MedTokenBudget, budget: float, graph: Graph, method: str) -> RoutingGraph | ImageGraph:
    if graph not in ("routing", "whole"):
        raise RequestError(f"`graph` must be 'routing' or 'whole', got '{graph}'.")
    if model.early is not None and graph != "whole":
        raise RequestError('The patches of this model are chosen before or inside the backbone. Use `graph="whole"`.')
    classifier = model.classifier(method)
    selector, head = classifier.selector, classifier.head
    if head is not None and head.reads == "tokens":
        raise RequestError(f"Head '{head.name}' reads tokens, so it cannot be exported. Use the head mlp or linear.")
    if model.early is not None:
        return ImageGraph(model, classifier.required_head)
    foreign = [name for name in selector.requires if name not in SIGNALS]
    if not isinstance(selector, Ranker) or selector.stochastic or foreign:
        kind = f"reads {', '.join(foreign)}" if foreign else "is random" if selector.stochastic else "merges tokens"
        raise RequestError(f"Selector '{method}' {kind}, so it cannot be exported as a fixed graph. Export another one.")
    if graph == "whole" and "luminance" in selector.requires:
        raise RequestError(f"Selector '{method}' reads luminance, which the whole graph does not compute. Use `graph=\"routing\"`.")
    routing = RoutingGraph(selector, head, model.grid, model.k(budget, method))
    return routing if graph == "routing" else ImageGraph(model, routing)


def _example(model: MedTokenBudget, graph: RoutingGraph | ImageGraph, batch: int, seed: int) -> dict[str, Tensor]:
    if isinstance(graph, ImageGraph):
        pictures = _pictures(int(model.backbone_fingerprint["image_size"]), batch, seed)
        return {"image": pictures.permute(0, 3, 1, 2).float() / 255}
    generator, n = torch.Generator().manual_seed(seed), model.grid[0] * model.grid[1]
    patches = {"patches": torch.randn(batch, n, model.dim, generator=generator)}
    return patches | {name: torch.rand(batch, n, generator=generator) for name in graph.signals}


def _pictures(size: int, count: int, seed: int) -> Tensor:
    """Make pictures, uint8 [count, S, S, 3]: noise with a dark disk, because without structure all scores would tie."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] / size
    pictures = np.array([215, 165, 145]) + generator.normal(0, 12, (count, size, size, 3))
    for picture, (cy, cx) in zip(pictures, generator.uniform(0.3, 0.7, (count, 2))):
        picture[(y - cy) ** 2 + (x - cx) ** 2 < 0.04] -= 100
    return torch.from_numpy(pictures.clip(0, 255).astype(np.uint8))


def _metadata(model: MedTokenBudget, budget: float, graph: Graph, selector: str) -> dict[str, str]:
    values: dict[str, Any] = {
        "classes": list(model.classes),
        "budget": budget,
        "k": model.k(budget, selector),
        "grid": list(model.grid),
        "selector": selector,
        "preprocessing": {
            **{key: model.backbone_fingerprint[key] for key in ("image_size", "mean", "std", "interpolation")},
            "input": "RGB in [0, 1], the whole image resized to image_size x image_size; mean and std are applied inside the graph"
            if graph == "whole"
            else "tokens of the backbone below",
        },
        "backbone": model.backbone_fingerprint,
        "fingerprint": model.fingerprint,
        "ties": "equal scores: the lower patch index first",
        "notice": NOTICE,
    }
    return {key: value if isinstance(value, str) else json.dumps(value, sort_keys=True) for key, value in values.items()}


def _check(
    path: Path, model: MedTokenBudget, graph: RoutingGraph | ImageGraph, inputs: dict[str, Tensor], classifier: RoutedClassifier
) -> None:
    values, indices = _run(path, inputs).values()
    with torch.inference_mode():
        if isinstance(graph, ImageGraph) and not isinstance(graph.end, RoutingGraph):
            # Routed early: the model has no scores of all patches to compare, so the kept ones must be the same.
            expected, places = graph(inputs["image"])
            apart = 0.0 if torch.equal(indices.sort(1).values, places.sort(1).values) else float("inf")
        else:
            if isinstance(graph, ImageGraph):
                tokens = model.backbone((inputs["image"] - graph.mean) / graph.std, model.signals)
            else:
                tokens = TokenBatch(grid=model.grid, **inputs)  # type: ignore[arg-type]
            selection = select(classifier.selector, tokens, indices.shape[1])
            scores = selection.scores
            assert scores is not None
            assert selection.indices is not None
            apart = (scores.gather(1, indices) - scores.gather(1, selection.indices)).abs().max().item()
            # Of the patches that the file keeps, which may have swapped.
            expected = scores if classifier.head is None else classifier.head(_mean_of(tokens.patches, indices))
        difference = (expected - values).abs().max().item()
    if apart > ROUNDING or difference > TOLERANCE:
        what = "logits" if model.has_head else "scores"
        by = f"{what} by {difference:.1e}, scores of kept patches by {apart:.1e}"
        raise WorkError(f"The exported graph differs from the model ({by}), so nothing was written.")


@dataclass(frozen=True)
class WebGraphs:
    """What the graphs of a page hold."""

    ranked: tuple[str, ...]
    """Methods whose scores the first graph gives, in the order of its rows."""
    fixed: dict[str, list[float]]
    """Methods whose scores are the same for every image, with these scores [N]."""
    methods: tuple[str, ...]
    """All methods of the page, in the order of the rows of the second graph."""
    left_out: dict[str, str]
    """The other methods of the model, each with the reason."""


class TokensGraph(nn.Module):
    """Pixels uint8 [1, S, S, 3] to patches [1, N, D], scores [M, N] of M rankers, a finer lesion map [h, w] and unfamiliarity [1].

    The last two are left out where the main method or the model has none.
    """

    def __init__(self, model: MedTokenBudget, ranked: tuple[str, ...]) -> None:
        super().__init__()
        self.backbone, self.network = model.backbone, model.backbone.model
        self.rankers: list[Any] = [model.classifier(name).selector for name in ranked]
        # Submodules, so that the exporter finds their weights.
        self.parts = nn.ModuleList(ranker for ranker in self.rankers if isinstance(ranker, nn.Module))
        read = {name for ranker in self.rankers for name in ranker.requires}
        self.signals = tuple(name for name in SIGNALS if name in read and name != "luminance")
        self.familiarity = model.familiarity

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        tokens = self.backbone.tokens(self.backbone.normalize(pixels), self.signals)
        fields: dict[str, Any] = {name: getattr(tokens, name) for name in self.signals}
        batch = TokenBatch(tokens.patches, tokens.grid, cls=tokens.cls, luminance=luminance(pixels, tokens.grid), **fields)
        # One pass of the main method gives scores, lesion map and what the familiarity reads.
        main, *others = self.rankers
        sight = main.see(batch) if isinstance(main, ScoredRanker) else Sight(main.score(batch), batch.patches, batch)
        outputs = [tokens.patches, torch.cat([sight.scores.float(), *(ranker.score(batch).float() for ranker in others)])]
        if isinstance(main, ScoredRanker) and main.finer:
            outputs.append(sight.lesion[0])
        return tuple(outputs if self.familiarity is None else [*outputs, self.familiarity(sight.features)])


class HeadsGraph(nn.Module):
    """Patches [1, N, D] and M rankings [M, N] to logits [M, N, C]: row K - 1 is the head on the mean of the first K patches."""

    def __init__(self, heads: Sequence[Head]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, patches: Tensor, orders: Tensor) -> Tensor:
        n = patches.shape[1]
        # The mean of the first K patches for every K at once, instead of N gathers.
        sums = patches[0][orders].cumsum(1)  # [M, N, D]
        means = sums / torch.arange(1, n + 1, dtype=torch.float32).view(1, -1, 1)
        return torch.stack([head(means[row]) for row, head in enumerate(self.heads)])


def write_web_graphs(model: MedTokenBudget, out: Path) -> WebGraphs:
    """Write both graphs of a model to `out` (a router without heads has only the first), each after a comparison with PyTorch."""
    _require_onnx()
    if model.early is not None:
        raise RequestError("The backbone of this model is routed early, which a page cannot do. Export a model that is not.")
    with _on_cpu(model), torch.no_grad():
        graphs, pictures = _plan(model), _pictures(model.backbone.preprocessing.image_size, count=3, seed=0).split(1)
        main = model.classifier().selector
        outputs = ["patches", "scores", *["lesion"] * (isinstance(main, ScoredRanker) and main.finer)]
        outputs += [] if model.familiarity is None else ["unfamiliarity"]
        _write_web_graph(
            out / TOKENS_GRAPH, TokensGraph(model, graphs.ranked), [{"pixels": pixels} for pixels in pictures], outputs
        )
        if model.has_head:
            heads = HeadsGraph([model.classifier(name).required_head for name in graphs.methods])
            _write_web_graph(out / HEADS_GRAPH, heads, [_ranked(model, graphs, pixels) for pixels in pictures], ["logits"])
    return graphs


def _plan(model: MedTokenBudget) -> WebGraphs:
    ranked, fixed, left_out, n = [], {}, {}, model.grid[0] * model.grid[1]
    for name in model.selectors:
        classifier = model.classifier(name)
        selector, head = classifier.selector, classifier.head
        foreign = [field for field in selector.requires if field not in SIGNALS]
        if head is not None and head.reads == "tokens":
            left_out[name] = f"its head {head.name} reads tokens"
        elif not isinstance(selector, Ranker):
            left_out[name] = "it merges tokens"
        elif selector.name in FROM_MASK:
            continue
        elif foreign:
            left_out[name] = f"it reads {', '.join(foreign)}"
        elif not selector.stochastic:
            ranked.append(name)
        elif not selector.reads_patches and not selector.requires:
            # Its generator starts anew for every image, so it always draws the same scores.
            drawn = select(selector, TokenBatch(torch.zeros(1, n, model.dim), model.grid), n).scores
            fixed[name] = [] if drawn is None else drawn[0].tolist()
        else:
            left_out[name] = "it draws at random from the tokens"
    if model.main not in ranked:
        why = left_out.get(model.main, "it does not rank patches by the image")
        raise RequestError(f"The main method '{model.main}' cannot run in a page: {why}.")
    return WebGraphs(tuple(ranked), fixed, tuple(name for name in model.selectors if name not in left_out), left_out)


def _ranked(model: MedTokenBudget, graphs: WebGraphs, pixels: Tensor) -> dict[str, Tensor]:
    """Return the patches [1, N, D] of one picture and the rankings [M, N] of the methods; a random one where the mask ranks."""
    tokens = model.encode(pixels)
    orders: list[Tensor] = []
    for name in graphs.methods:
        selector = model.classifier(name).selector
        # Any order will do to compare the heads: the page makes this one from the mask.
        if selector.name in FROM_MASK:
            orders.append(torch.randperm(tokens.n, generator=torch.Generator().manual_seed(len(orders)))[None])
        else:
            indices = select(selector, tokens, tokens.n).indices
            assert indices is not None
            orders.append(indices)
    return {"patches": tokens.patches, "orders": torch.cat(orders)}


def _write_web_graph(path: Path, graph: nn.Module, examples: Sequence[dict[str, Tensor]], outputs: list[str]) -> None:
    """Write a graph that gives the same numbers as in PyTorch, or raise an error."""
    with atomic_write(path) as temporary:
        _write(_halved(_exported(graph, examples[0], outputs)), temporary)
        for inputs in examples:
            expected = graph(*inputs.values())
            for (name, values), wanted in zip(_run(temporary, inputs).items(), expected if len(outputs) > 1 else (expected,)):
                # Scores decide by their order alone, so their scale is free, but they must be closer.
                scale = wanted.abs().amax(-1, keepdim=True).clamp(min=1) if name == "scores" else 1
                difference = ((values - wanted).abs() / scale).max().item()
                if difference > (ROUNDING if name == "scores" else TOLERANCE):
                    raise WorkError(f"The {name} of {path.name} differ from the model by {difference:.1e}, so it was not written.")


def _run(path: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    values = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return {output.name: torch.from_numpy(value) for output, value in zip(session.get_outputs(), values)}


def _require_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"ONNX export needs {', '.join(missing)}. Run `pip install 'medtokenbudget[onnx]'`.")


@contextmanager
def _on_cpu(model: MedTokenBudget) -> Iterator[None]:
    device = model.device
    model.to("cpu")
    try:
        with evaluating(model):
            yield
    finally:
        model.to(device)


def _exported(graph: nn.Module, inputs: dict[str, Tensor], outputs: list[str], dynamic_shapes: Any = None) -> Any:
    # The exporter reports its own optimizations at length; what matters is checked afterwards.
    logging.disable(logging.WARNING)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            names: dict[str, Any] = {"input_names": list(inputs), "output_names": outputs, "dynamic_shapes": dynamic_shapes}
            program = torch.onnx.export(
                graph.eval(), tuple(inputs.values()), dynamo=True, opset_version=OPSET, verbose=False, **names
            )
    finally:
        logging.disable(logging.NOTSET)
    assert program is not None
    return program.model_proto


def _halved(proto: Any) -> Any:
    """Store weights that half precision holds exactly in half precision: the same numbers in half the bytes.

    The weights of the embedded backbone are of this kind. The runtime casts them back when it loads the graph.
    """
    import onnx
    from onnx import numpy_helper

    kept, casts = [], []
    for tensor in proto.graph.initializer:
        values = numpy_helper.to_array(tensor)
        with np.errstate(over="ignore"):
            half = values.astype(np.float16) if values.dtype == np.float32 and values.size >= 1024 else None
        if half is None or not np.array_equal(half.astype(np.float32), values):
            kept.append(tensor)
            continue
        kept.append(numpy_helper.from_array(half, f"{tensor.name}.half"))
        casts.append(onnx.helper.make_node("Cast", [f"{tensor.name}.half"], [tensor.name], to=onnx.TensorProto.FLOAT))
    nodes = [*casts, *proto.graph.node]
    del proto.graph.initializer[:], proto.graph.node[:]
    proto.graph.initializer.extend(kept)
    proto.graph.node.extend(nodes)
    return proto


def _write(proto: Any, path: Path, metadata: dict[str, str] | None = None) -> None:
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
