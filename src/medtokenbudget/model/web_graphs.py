"""The two ONNX graphs of the page that runs without a server: one from pixels to tokens and scores, one from rankings to logits.

They are split where the ranking is: the page sorts the scores itself, so that rankings by the mask of an image (the controls) go
through the same heads. The heads answer for every K at once, so that the page has every budget after one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medtokenbudget.backbone.preprocess import luminance
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import atomic_write
from medtokenbudget.model.inference import select
from medtokenbudget.model.model import MedTokenBudget
from medtokenbudget.model.onnx import ROUNDING, SIGNALS, TOLERANCE, exported, on_cpu, require_onnx, session, write_graph
from medtokenbudget.routing import Ranker, Selector
from medtokenbudget.tokens import TokenBatch

TOKENS_GRAPH = "tokens.onnx"
HEADS_GRAPH = "heads.onnx"
FROM_MASK = ("oracle", "box-prior")
"""Rankings by the mask, which the page computes; their heads are in the graph."""


@dataclass(frozen=True)
class WebGraphs:
    """What was written.

    Attributes:
        ranked: Methods whose scores the first graph gives, in the order of its rows.
        fixed: Methods whose scores are the same for every image, with these scores [N].
        methods: All methods of the page, in the order of the rows of the second graph.
        has_heads: Whether there is a second graph; a router without heads has none.
        left_out: The other methods of the model, each with the reason.
    """

    ranked: tuple[str, ...]
    fixed: dict[str, list[float]]
    methods: tuple[str, ...]
    has_heads: bool
    left_out: dict[str, str]


class TokensGraph(nn.Module):
    """Pixels uint8 [1, S, S, 3] to patches [1, N, D], the scores [M, N] of M rankers and, if fitted, the unfamiliarity [1]."""

    def __init__(self, model: MedTokenBudget, ranked: tuple[str, ...]) -> None:
        super().__init__()
        self.backbone, self.network = model.backbone, model.backbone.model
        self.rankers: list[Any] = [model.classifier(name).selector for name in ranked]
        self.parts = nn.ModuleList(ranker for ranker in self.rankers if isinstance(ranker, nn.Module))
        read = {name for ranker in self.rankers for name in ranker.requires}
        self.signals = tuple(name for name in SIGNALS if name in read and name != "luminance")
        self.familiarity = model.familiarity

    @property
    def outputs(self) -> list[str]:
        """Names of what `forward` returns."""
        return ["patches", "scores", *([] if self.familiarity is None else ["unfamiliarity"])]

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        tokens = self.backbone.tokens(self.backbone.normalize(pixels), self.signals)
        fields: dict[str, Any] = {name: getattr(tokens, name) for name in self.signals}
        batch = TokenBatch(tokens.patches, tokens.grid, luminance=luminance(pixels, tokens.grid), **fields)
        scores = [ranker.score(batch).float() for ranker in self.rankers]
        outputs = (tokens.patches, torch.cat(scores))
        return outputs if self.familiarity is None else (*outputs, self.familiarity(tokens))


class HeadsGraph(nn.Module):
    """Patches [1, N, D] and M rankings [M, N] to logits [M, N, C]: row K - 1 is the head on the mean of the first K patches."""

    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, patches: Tensor, orders: Tensor) -> Tensor:
        n = patches.shape[1]
        sums = patches[0][orders].cumsum(1)  # [M, N, D]
        means = sums / torch.arange(1, n + 1, dtype=torch.float32).view(1, -1, 1)
        return torch.stack([head(means[row]) for row, head in enumerate(self.heads)])


def write_web_graphs(model: MedTokenBudget, out: Path) -> WebGraphs:
    """Write both graphs of a model to `out` (a router without heads has only the first), each after a comparison with PyTorch.

    Raises:
        RequestError: If no method of the model can run in a page, or the extra `onnx` is not installed.
        WorkError: If a graph and the PyTorch model disagree; it is not written then.
    """
    require_onnx()
    if model.early is not None:
        raise RequestError("The backbone of this model is routed early, which a page cannot do. Export a model that is not.")
    with on_cpu(model), torch.no_grad():
        graphs, pixels = _plan(model), _examples(model)
        with atomic_write(out / TOKENS_GRAPH) as temporary:
            graph = TokensGraph(model, graphs.ranked)
            write_graph(_halved(exported(graph, {"pixels": pixels[:1]}, graph.outputs)), temporary)
            _check_tokens(temporary, model, graphs, pixels)
        if graphs.has_heads:
            heads: list[nn.Module] = [model.classifier(name).required_head for name in graphs.methods]
            patches, orders = _ranked(model, graphs, pixels[:1])
            with atomic_write(out / HEADS_GRAPH) as temporary:
                write_graph(_halved(exported(HeadsGraph(heads), {"patches": patches, "orders": orders}, ["logits"])), temporary)
                for row in range(len(pixels)):
                    _check_heads(temporary, graphs, heads, *_ranked(model, graphs, pixels[row : row + 1]))
    return graphs


def _plan(model: MedTokenBudget) -> WebGraphs:
    ranked: list[str] = []
    fixed: dict[str, list[float]] = {}
    left_out: dict[str, str] = {}
    for name in model.selectors:
        classifier = model.classifier(name)
        why = _obstacle(model, classifier.selector)
        if classifier.head is not None and classifier.head.reads == "tokens":
            why = f"its head {classifier.head.name} reads tokens"
        if why is not None:
            left_out[name] = why
        elif classifier.selector.stochastic:
            fixed[name] = _fixed_scores(model, classifier.selector)
        elif classifier.selector.name not in FROM_MASK:
            ranked.append(name)
    methods = tuple(name for name in model.selectors if name not in left_out)
    if model.main not in ranked:
        why = left_out.get(model.main, "it does not rank patches by the image")
        raise RequestError(f"The main method '{model.main}' cannot run in a page: {why}.")
    return WebGraphs(tuple(ranked), fixed, methods, model.has_head, left_out)


def _obstacle(model: MedTokenBudget, selector: Selector) -> str | None:
    if not isinstance(selector, Ranker):
        return "it merges tokens"
    foreign = [field for field in selector.requires if field not in SIGNALS]
    if foreign and selector.name not in FROM_MASK:
        return f"it reads {', '.join(foreign)}"
    if selector.stochastic and _fixed_scores(model, selector) != _fixed_scores(model, selector, seed=1):
        return "it draws at random from the tokens"
    return None


def _fixed_scores(model: MedTokenBudget, selector: Selector, seed: int = 0) -> list[float]:
    """Return the scores [N] of a ranker that draws without reading the tokens: its draw starts anew for every image."""
    n = model.grid[0] * model.grid[1]
    tokens = TokenBatch(torch.randn(1, n, model.dim, generator=torch.Generator().manual_seed(seed)), model.grid)
    _, scores = select(selector, tokens, n)
    assert scores is not None
    return [float(value) for value in scores[0].tolist()]


def _examples(model: MedTokenBudget) -> Tensor:
    """Make three pictures, uint8 [3, S, S, 3]: noise with a dark disk, because without structure all scores would tie."""
    size = model.backbone.preprocessing.image_size
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size] / size
    pictures = []
    for _ in range(3):
        picture = np.array([215, 165, 145]) + generator.normal(0, 12, (size, size, 3))
        cy, cx = generator.uniform(0.3, 0.7, 2)
        picture[(y - cy) ** 2 + (x - cx) ** 2 < 0.04] -= 100
        pictures.append(picture.clip(0, 255).astype(np.uint8))
    return torch.from_numpy(np.stack(pictures))


def _ranked(model: MedTokenBudget, graphs: WebGraphs, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the patches [1, N, D] of one picture and the rankings [M, N] of the methods; those by mask get one of their own."""
    tokens = model.encode(pixels)
    orders: list[Tensor] = []
    for name in graphs.methods:
        selector = model.classifier(name).selector
        if selector.name in FROM_MASK:
            orders.append(torch.randperm(tokens.n, generator=torch.Generator().manual_seed(len(orders)))[None])
        else:
            selection, _ = select(selector, tokens, tokens.n)
            assert selection.indices is not None
            orders.append(selection.indices)
    return tokens.patches, torch.cat(orders)


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


def _check_tokens(path: Path, model: MedTokenBudget, graphs: WebGraphs, pixels: Tensor) -> None:
    opened = session(path)
    worst = 0.0
    for row in range(len(pixels)):
        patches, scores, *unfamiliarity = map(torch.from_numpy, opened.run(None, {"pixels": pixels[row : row + 1].numpy()}))
        tokens = model.encode(pixels[row : row + 1])
        pairs = [(patches, tokens.patches)]
        if model.familiarity is not None:
            pairs.append((unfamiliarity[0], model.familiarity(tokens)))
        for place, name in enumerate(graphs.ranked):
            _, expected = select(model.classifier(name).selector, tokens, tokens.n)
            assert expected is not None
            scale = max(1.0, expected.abs().max().item())
            pairs.append((scores[place] / scale * TOLERANCE / ROUNDING, expected[0] / scale * TOLERANCE / ROUNDING))
        worst = max(worst, *((a - b).abs().max().item() for a, b in pairs))
    if worst > TOLERANCE:
        raise WorkError(f"The graph {path.name} differs from the model by {worst:.1e}, so it was not written.")


def _check_heads(path: Path, graphs: WebGraphs, heads: list[nn.Module], patches: Tensor, orders: Tensor) -> None:
    logits = session(path).run(None, {"patches": patches.numpy(), "orders": orders.numpy()})[0]
    for place, head in enumerate(heads):
        for k in {1, patches.shape[1] // 3, patches.shape[1]} - {0}:
            expected = head(patches[0, orders[place, :k]].mean(0, keepdim=True))[0]
            difference = (expected - torch.from_numpy(logits[place, k - 1])).abs().max().item()
            if difference > TOLERANCE:
                raise WorkError(
                    f"The head of '{graphs.methods[place]}' differs from the model by {difference:.1e}, so it was not written."
                )
