"""The name, color, marker and one-sentence description of every method, and the order methods appear in.

Kept apart from the figure style so that a method looks the same in every table, figure and sentence. Colors follow Okabe and Ito
and stay distinguishable with common forms of color blindness; markers distinguish methods without color.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from medtokenbudget.config import CONTROLS as NO_MODEL
from medtokenbudget.config import PAPER_METHODS
from medtokenbudget.runs import paper

INK = "#1c2733"
LOST = "#d55e00"
CONTROLS: tuple[str, ...] = ("center", "darkness", "random", "oracle")
"""Shown in every table, measured or not: a comparison without them proves little."""
REFERENCES: tuple[str, ...] = ("no-pruning", "oracle", "box-prior")
"""References rather than competitors: one has no budget, the others see the mask."""
PAPER_RECIPE = paper.METHOD_NAMES["LATS"]
"""The method of the paper, shown beside the run's own model."""


@dataclass(frozen=True)
class Look:
    """How one method is shown.

    Attributes:
        name: Name in tables, figures and text.
        color: Color as `#rrggbb`.
        marker: Matplotlib marker.
        line: Matplotlib line style.
        about: What the method does, in one sentence.
    """

    name: str
    color: str
    marker: str
    line: str | tuple[int, tuple[int, int]]
    about: str


LOOKS: dict[str, Look] = {
    "lats": Look("LATS (paper)", "#3a9bd0", "H", "--", "The paper's method: a small network scores every patch."),
    "context": Look("Context (joint)", "#cc79a7", "H", "--", "A small network scores every patch by its neighborhood."),
    "oracle": Look("Oracle", INK, "_", (0, (4, 2)), "Keeps the true lesion patches first, using the mask: the ceiling."),
    "center": Look("Center", "#d55e00", "s", "-", "Keeps the patches nearest the image center, without looking at the image."),
    "darkness": Look("Darkness", "#a8577e", "D", "-", "Keeps the darkest patches. No model."),
    "random": Look("Random", "#7a828a", "x", "--", "Keeps randomly drawn patches."),
    "no-pruning": Look("NoPruning", "#3d4a57", "", "-.", "Keeps all patches: the reference without a budget."),
    "tome": Look("ToMe", "#6a51a3", "P", "-", "Merges similar patches instead of dropping any, so it has purity but no retention."),
    "norm": Look("NormBased", "#c98a00", "^", "-", "Keeps the patches with the largest feature norm."),
    "attention-entropy": Look("AttnEntropy", "#009e73", "v", "-", "Keeps the patches with the most focused attention."),
    "local-contrast": Look("LocalContrast", "#8c8000", "<", "-", "Keeps the patches that differ most from their neighbors."),
    "class-attention": Look("ClassAttention", "#2a7f7f", ">", "-", "Keeps the patches that the class token attends to most."),
    "box-prior": Look("Box prior", INK, "s", ":", "Keeps the patches nearest the lesion's bounding box, using the mask."),
    "evit": Look("EViT", "#2a7f7f", "P", "-", "Keeps the most attended patches, fuses all others into one token."),
    "frequency": Look("Frequency", "#94651f", "P", "-", "Keeps the patches that receive the most attention, averages all others."),
    "ats": Look("ATS", "#2a7f7f", "X", "-", "Samples patches in proportion to class attention times the norm of their values."),
    "tps": Look("TPS", "#4f6d2f", "P", "-", "Keeps the most attended patches, squeezes the others into the most similar of them."),
    "pitome": Look("PiToMe", "#5a5a9c", "P", "-", "Merges patches of large similar groups first, protects isolated ones."),
    "diffrate": Look("DiffRate", "#b5495b", "P", "-", "Drops the least attended patches, merges the next into the kept ones."),
    "dpc-knn": Look("DPC-KNN", "#94651f", "*", "-", "Merges patches into clusters around density peaks."),
    "k-medoids": Look("K-medoids", "#5a5a9c", "*", "-", "Represents clusters of patches by their medoids."),
    "atc": Look("ATC", "#8a3ea0", "*", "-", "Merges the closest pair of clusters until K are left."),
    "dynamicvit": Look("DynamicViT", "#b5495b", "h", "-", "A prediction module learns which patches to keep."),
    "dynamicvit-package": Look("DynamicViT + package", "#b5495b", "p", "-", "DynamicViT with the others in one package token."),
    "cropr": Look("Cropr", "#94651f", "h", "-", "Learned queries, trained by an auxiliary classifier, score the patches."),
    "sparselearn": Look("SparseLearn", "#4f6d2f", "h", "-", "Learns scores through a soft top-K gate with noise."),
    "tokenlearner": Look("TokenLearner", "#8a3ea0", "8", "-", "Mixes all patches into K tokens by learned attention maps."),
    "tc-ssa": Look("TC-SSA", "#5a5a9c", "8", "-", "Routes every patch to two of K learned slots."),
    "rollout": Look("Rollout", "#8a6d3b", "4", "-", "Keeps what the class token attends to, followed back through all blocks."),
    "gradcam-norm1": Look("Grad-CAM at norm1", "#3f6f9f", "1", "-", "Keeps the patches that Grad-CAM shows in a probe's block."),
    "relevance": Look("Relevance", "#9f3f6f", "2", "-", "Keeps the patches with the largest relevance in a probe's attention."),
    "grad-token": Look("Gradient x token", "#2a7f7f", "h", "-", "Keeps the patches that raise the predicted class of a probe."),
    "abmil-attention": Look("ABMIL attention", "#5a5a9c", "h", "-", "Keeps the patches that a MIL classifier attends to."),
    "query-pool": Look("Query pool", "#4f6d2f", "8", "-", "Mixes all patches into K tokens by attention of learned queries."),
}  # fmt: skip
_VARIANT_LOOKS: dict[str, Look] = {
    "context:lesion-first": Look(
        "Context", "#0b4f8a", "*", "-", "A small network that sees the neighborhood, trained on lesion masks."
    ),
    "lats:lesion-first": Look("LATS lesion-first", "#0072b2", "o", "-", "LATS trained to find the lesion before it classifies."),
    "lats:mask-free": Look("LATS mask-free", "#8f7cc0", "h", "--", "LATS trained without lesion masks."),
    "lats:fixed-0.5": Look("LATS fixed 0.5", "#8f7cc0", "p", "--", "LATS trained at a constant budget of 0.5, without curriculum."),
    "lats:no-attention": Look("LATS − attention", "#009e73", "v", ":", "LATS with its attention signal switched off at inference."),
    "lats:no-norm": Look("LATS − norm", "#c98a00", "^", ":", "LATS with its norm signal switched off at inference."),
    "lats:no-contrast": Look("LATS − contrast", "#8c8000", "<", ":", "LATS with its contrast signal switched off at inference."),
    "lats:no-signals": Look("LATS − all signals", "#a8577e", "X", ":", "LATS with all three signals switched off at inference."),
    "lats:with-views": Look("LATS + views", "#17558c", "*", "--", "LATS (paper) trained with additional off-center crops."),
}  # fmt: skip
"""Variants with a look of their own; they may share color and marker with a method that no figure shows beside them."""
_VARIANTS: dict[str, tuple[str, str]] = {
    "epoch-matched": ("epoch-matched", "with a classifier trained for as many epochs as LATS"),
    "matched": ("matched", "with a classifier trained exactly like that of LATS lesion-first"),
    "keys": ("keys", "comparing the keys of the backbone's block instead of the tokens"),
    "mask-free": ("mask-free", "trained without lesion masks"),
    "lesion-first": ("lesion-first", "trained to find the lesion before it classifies"),
    "fixed-0.5": ("fixed 0.5", "trained at a constant budget of 0.5"),
    "with-views": ("+ views", "trained with additional off-center crops"),
    # The `recipe` study changes one part of the lesion-first recipe at a time.
    "lesion-first-without-views": ("without views", "trained on the original images only"),
    "lesion-first-one-view": ("with one crop", "trained with one off-center crop per image instead of several"),
    "lesion-first-raster": ("with 1D contrast", "with the paper's local contrast along the raster"),
    "lesion-first-zero-padding": ("with zero padding", "with the paper's zero-padded smoothing"),
    "lesion-first-all-patches": (
        "with all patches",
        "with every training step using all patches of an image instead of a sample",
    ),
    "lesion-first-balanced": ("with class weights", "with a classification loss that gives rare classes more weight"),
    "lesion-first-joint": ("trained jointly", "with scorer and classifier trained together"),
    "lesion-first-fixed-grid": ("on a fixed grid", "trained without flips and turns of the token grid"),
    "lesion-first-smoothed": ("smoothed", "with scores averaged over 3 x 3 patches"),
}
"""Variant -> what follows the name of its method, and what follows its description."""
_SPARE = ("#b5495b", "#2a7f7f", "#94651f", "#4f6d2f", "#5a5a9c", "#8a3ea0")


def look(method: str) -> Look:
    """Returns the look of a method written as `selector+head:variant`.

    A method that is not listed here, such as a selector of another package, keeps its own name and always gets the same color.
    """
    body, _, variant = method.partition(":")
    selector, _, head = body.partition("+")
    result = _listed(selector, variant) or Look(
        f"{selector}:{variant}" if variant else selector,
        _SPARE[sum(selector.encode()) % len(_SPARE)],
        "d",
        ":" if variant else "-",
        "A selector that does not come with this package.",
    )
    if not head:
        return result
    return replace(result, name=f"{result.name} + {head}", line=":", about=f"{result.about.rstrip('.')}, with the head `{head}`.")


def _listed(selector: str, variant: str) -> Look | None:
    if not variant:
        return LOOKS.get(selector)
    if f"{selector}:{variant}" in _VARIANT_LOOKS:
        return _VARIANT_LOOKS[f"{selector}:{variant}"]
    changes_recipe = variant.startswith("lesion-first-")
    base = _VARIANT_LOOKS.get(f"{selector}:lesion-first") if changes_recipe else LOOKS.get(selector)
    if base is None or variant not in _VARIANTS:
        return None
    suffix, about = _VARIANTS[variant]
    # Rows of the recipe table are long enough without the name of the selector.
    name = base.name.removeprefix("LATS ") if changes_recipe else base.name
    return replace(base, name=f"{name} {suffix}", line=":", about=f"{base.name}, {about}.")


def selector_of(method: str) -> str:
    """Returns the selector in `selector+head:variant`."""
    return method.partition(":")[0].partition("+")[0]


def is_reference(method: str) -> bool:
    """Whether a method is a reference (NoPruning, Oracle, Box prior) rather than a competitor."""
    return selector_of(method) in REFERENCES


def ordered(methods: Iterable[str], learned: Sequence[str] = ()) -> list[str]:
    """Sorts methods for tables: `learned` as given, the paper's baselines, other methods, then the controls.

    Args:
        methods: Methods in any order; duplicates are dropped.
        learned: Methods that come first, in this order.
    """
    known = list(dict.fromkeys(methods))
    first = [m for m in learned if m in known]
    baselines = [m for m in PAPER_METHODS if m not in first]
    controls = [m for m in NO_MODEL if m not in first]
    others = sorted(m for m in known if m not in {*first, *baselines, *controls})
    return [m for m in [*first, *baselines, *others, *controls] if m in known]
