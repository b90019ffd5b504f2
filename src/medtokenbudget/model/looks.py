"""How a method `selector+head:variant` is shown: title, color, marker and description, the same in every table, figure and page.

They are attributes of the selector's class; only variants of a training are named here. Colors follow Okabe and Ito and stay
distinguishable with common forms of color blindness; markers distinguish methods without color.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from medtokenbudget.heads.head import HEADS
from medtokenbudget.routing import Selector, list_selectors, selector_class


@dataclass(frozen=True)
class Look:
    """How one method is shown; `marker` and `line` as Matplotlib knows them."""

    title: str
    description: str
    color: str
    marker: str
    line: str = "-"


_VARIANTS = {
    "context:lesion-first": Look("Context", "A small network that sees the neighborhood, trained on lesion masks.", "#0b4f8a", "*"),
    "lats:lesion-first": Look("LATS lesion-first", "LATS trained to find the lesion before it classifies.", "#0072b2", "o"),
    "lats:mask-free": Look("LATS mask-free", "LATS trained without lesion masks.", "#8f7cc0", "h", "--"),
    "lats:fixed-0.5": Look("LATS fixed 0.5", "LATS trained at a constant budget of 0.5, without curriculum.", "#8f7cc0", "p", "--"),
    "lats:no-attention": Look("LATS − attention", "LATS with its attention signal switched off at inference.", "#009e73", "v", ":"),
    "lats:no-norm": Look("LATS − norm", "LATS with its norm signal switched off at inference.", "#c98a00", "^", ":"),
    "lats:no-contrast": Look("LATS − contrast", "LATS with its contrast signal switched off at inference.", "#8c8000", "<", ":"),
    "lats:no-signals": Look("LATS − all signals", "LATS with all three signals switched off at inference.", "#a8577e", "X", ":"),
    "lats:with-views": Look("LATS + views", "LATS (paper) trained with additional off-center crops.", "#17558c", "*", "--"),
}
"""Variants with a look of their own; they may share color and marker with a method that no figure shows together with them."""
_SUFFIXES: dict[str, tuple[str, str]] = {
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
    "lesion-first-all-patches": ("with all patches", "with all patches of an image in every step instead of a sample"),
    "lesion-first-balanced": ("with class weights", "with a classification loss that gives rare classes more weight"),
    "lesion-first-joint": ("trained jointly", "with scorer and classifier trained together"),
    "lesion-first-fixed-grid": ("on a fixed grid", "trained without flips and turns of the token grid"),
    "attention-only": ("attention only", "with its signals except attention switched off at inference"),
    "norm-only": ("norm only", "with its signals except norm switched off at inference"),
    "contrast-only": ("contrast only", "with its signals except contrast switched off at inference"),
    "lesion-first-smoothed": ("smoothed", "with scores averaged over 3 x 3 patches"),
}
"""Variants of any selector -> what follows its title and its description."""
_SPARE = ("#b5495b", "#2a7f7f", "#94651f", "#4f6d2f", "#5a5a9c", "#8a3ea0")


def look(method: str) -> Look:
    """Return the look of a method; one that is not registered here keeps its name and always gets the same color."""
    body, _, variant = method.partition(":")
    selector, _, head = body.partition("+")
    result = _look_of(selector, variant)
    if not head:
        return result
    title = HEADS.get(head).title if head in HEADS.names() else ""
    description = f"{result.description.rstrip('.')}, with the head `{head}`."
    return replace(result, title=f"{result.title} + {title or head}", description=description, line=":")


def _look_of(selector: str, variant: str) -> Look:
    kind = registered(selector)
    color = _SPARE[sum(selector.encode()) % len(_SPARE)]
    if kind is None:
        plain = Look(selector, "A selector that is not installed here.", color, "d")
    else:
        plain = Look(kind.title or selector, kind.description, kind.color or color, kind.marker, kind.line)
    method = f"{selector}:{variant}"
    if not variant:
        return plain
    if method in _VARIANTS:
        return _VARIANTS[method]
    changes_recipe = variant.startswith("lesion-first-")
    base = _look_of(selector, "lesion-first") if changes_recipe else plain
    if kind is None or variant not in _SUFFIXES:
        return replace(plain, title=method, line=":")
    suffix, description = _SUFFIXES[variant]
    # Rows of the recipe table are long enough without the name of the selector.
    title = base.title.removeprefix("LATS ") if changes_recipe else base.title
    return replace(base, title=f"{title} {suffix}", description=f"{base.title}, {description}.", line=":")


def registered(selector: str) -> type[Selector] | None:
    return selector_class(selector) if selector in list_selectors() else None


def is_reference(method: str) -> bool:
    """Whether a method is a reference (NoPruning, Oracle, Box prior) rather than a competitor."""
    kind = registered(method.partition(":")[0].partition("+")[0])
    return kind is not None and kind.reference
