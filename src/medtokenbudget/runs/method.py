"""`Method`: what a row of a table is about, written `selector+head:variant`, and the training settings it stands for.

A name means the same thing in every run: a learned selector without a variant is trained with the paper's recipe,
`lats:lesion-first` with ours. A variant changes the training settings, or (an ablation) switches off parts of a selector that is
already trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from medtokenbudget.config import PRESETS, TrainConfig, given_settings, preset, settings_of, with_settings
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.heads import list_heads
from medtokenbudget.routing import LearnedSelector, create_selector, list_selectors, selector_class

DEFAULT_HEAD = "mlp"


@dataclass(frozen=True)
class Variant:
    """How a method is trained: a preset, and the settings by dotted name that the variant `fixes` whatever the user asks for.

    Without a preset the settings of the run stay. `only` is the one selector that has the part which the variant changes.
    """

    preset: str | None = None
    fixes: Mapping[str, Any] = field(default_factory=dict)
    only: str | None = None

    def apply(self, base: TrainConfig) -> TrainConfig:
        """Return the preset, changed by what the user gave in `base`, then by what the recipe and the variant fix."""
        if self.preset is None:
            return with_settings(base, self.fixes)
        # The later ones win: what the user chose for the run must not change what a recipe is.
        values = {**given_settings(base), **RECIPES[self.preset], **self.fixes, "given": base.given}
        return with_settings(PRESETS[self.preset], values)


RECIPES: dict[str, dict[str, Any]] = {
    "paper": {"recipe": "joint", "patches": 0},
    # The head is not trained yet when the epoch is chosen, so masks must choose it. Validation masks are used only for evaluation,
    # so it is chosen on training images.
    "lesion-first": {"recipe": "lesion-first", "protocol": "strict", "selection_metric": "retention"},
}
"""What a recipe fixes, by the name of its preset."""
LEARNED: dict[str, Variant] = {
    "": Variant("paper"),
    "mask-free": Variant("paper", {"losses.lesion": 0.0}),
    "fixed-0.5": Variant("paper", {"curriculum.kind": "fixed", "curriculum.start": 0.5}),
    "with-views": Variant("paper", {"views": "off-center"}),
    "lesion-first": Variant("lesion-first"),
    "lesion-first-without-views": Variant("lesion-first", {"views": "none"}),
    "lesion-first-one-view": Variant("lesion-first", {"views": "off-center"}),
    "lesion-first-raster": Variant("lesion-first", {"lats.neighborhood": "raster"}, only="lats"),
    "lesion-first-zero-padding": Variant("lesion-first", {"router.padding": "zero"}, only="lats"),
    "lesion-first-all-patches": Variant("lesion-first", {"patches": 0}, only="lats"),
    "lesion-first-fixed-grid": Variant("lesion-first", {"context.turns": False}, only="context"),
    "lesion-first-smoothed": Variant("lesion-first", {"context.smooth": 3}, only="context"),
    "lesion-first-balanced": Variant("lesion-first", {"class_balance": "loss"}),
    "lesion-first-joint": Variant("lesion-first", {"recipe": "joint", "patches": 0, "losses.classification": 1.0}),
}
"""Variants of a selector that learns. The empty name is the paper's recipe."""

EPOCH_MATCHED = "epoch-matched"
FIXED: dict[str, Variant] = {"": Variant(), "matched": Variant("lesion-first"), EPOCH_MATCHED: Variant()}
"""Variants of a selector that does not learn: its head trains like that of the lesion-first recipe, or for as long as LATS."""

# What a training reads, by what it does. Anything else would change nothing, so it is refused.
_ALWAYS = {"seed", "device", "budgets", "router.minimum"}
_SELECTOR = {
    *("recipe", "epochs", "min_steps", "batch_size", "lr", "weight_decay", "clip", "patience", "evaluate_every"),
    *("min_improvement", "protocol", "selection_metric", "views", "precision"),
}
_JOINT = {"class_balance", "patches", "losses.classification", "curriculum.kind", "curriculum.start"}
"""The joint recipe reads `patches` to reject a sample."""
_POOLED_HEAD = {"head_epochs", "batch_size", "lr", "weight_decay", "clip", "class_balance", "views", "protocol"}


@dataclass(frozen=True, order=True)
class Method:
    """A selector, the head behind it, and a variant of how they are trained.

    Example:
        >>> method = Method.parse("lats:lesion-first")
        >>> method.selector, method.head, method.variant
        ('lats', 'mlp', 'lesion-first')
        >>> str(Method("center"))
        'center'
    """

    selector: str
    head: str = DEFAULT_HEAD
    variant: str = ""

    @classmethod
    def parse(cls, text: str | Method) -> Method:
        """Parse `selector`, `selector:variant`, `selector+head` or `selector+head:variant`, checking every part."""
        if isinstance(text, Method):
            return text
        left, _, variant = text.partition(":")
        selector, plus, head = left.partition("+")
        if not selector or (plus and not head):
            raise RequestError(f"'{text}' is not a method. Write it as selector, selector:variant or selector+head:variant.")
        method = cls(selector, head or DEFAULT_HEAD, variant)
        if selector not in list_selectors():
            raise UnknownNameError.of("selector", selector, list_selectors())
        if method.head not in list_heads():
            raise UnknownNameError.of("head", method.head, list_heads())
        known = [*method._variants, *method._ablations]
        if variant not in known:
            raise UnknownNameError.of(f"variant of {selector}", variant, [name for name in known if name])
        return method

    def __str__(self) -> str:
        head = "" if self.head == DEFAULT_HEAD else f"+{self.head}"
        return f"{self.selector}{head}{':' if self.variant else ''}{self.variant}"

    @property
    def learned(self) -> bool:
        return selector_class(self.selector).learns

    @property
    def ablation(self) -> str | None:
        return self.variant if self.variant in self._ablations else None

    @property
    def trained_as(self) -> Method:
        """Return the method whose training this one uses: an ablation has none of its own."""
        return self if self.ablation is None else replace(self, variant="")

    def config(self, base: TrainConfig) -> TrainConfig:
        """Return the training settings of this method in a run whose common settings are `base`.

        What the user gave reaches every method; the rest comes from the preset that the method's name stands for.
        """
        config = self._variants[self.trained_as.variant].apply(base)
        return replace(config, head_epochs=base.epochs) if self.variant == EPOCH_MATCHED and not self.learned else config

    def reads(self, base: TrainConfig, labels: bool = True) -> set[str]:
        """Return the dotted names of the settings that this method depends on; without `labels` there is no head to train."""
        config, names, kind = self.config(base), set(_ALWAYS), selector_class(self.selector)
        if issubclass(kind, LearnedSelector):
            names |= _SELECTOR | (_JOINT if config.recipe == "joint" else set())
            names |= set(kind.settings(config))
            if config.protocol == "strict":
                names.add("selection_fraction")
            if config.selection_metric == "accuracy":
                names.add("selection_budget")
            if "curriculum.kind" in names and config.curriculum.kind == "cosine":
                names |= {"curriculum.end", "curriculum.epochs"}
        # In the joint recipe the head is trained with the selector, by the same settings.
        if labels and not (self.learned and config.recipe == "joint"):
            names |= _POOLED_HEAD
            if config.protocol == "paper":  # keeps the best epoch of the head, as of the selector
                names |= {"evaluate_every", "min_improvement", "selection_budget"}
        if self.variant == EPOCH_MATCHED and not self.learned:
            names |= {"epochs"}
        # A part stands for all of its settings.
        return {name for name in settings_of(config) if name in names or name.partition(".")[0] in names}

    @property
    def options(self) -> Mapping[str, Any]:
        return selector_class(self.selector).variants.get(self.variant, {})

    @property
    def requires(self) -> tuple[str, ...]:
        """Return the fields of a batch, besides the patches, that the selector reads, as far as known before training."""
        if self.learned:
            return tuple(selector_class(self.selector).requires)
        return create_selector(self.selector, **self.options).requires

    @property
    def _variants(self) -> Mapping[str, Variant]:
        if not self.learned:
            return FIXED | dict.fromkeys(selector_class(self.selector).variants, FIXED[""])
        return {name: variant for name, variant in LEARNED.items() if variant.only in (None, self.selector)}

    @property
    def _ablations(self) -> tuple[str, ...]:
        return selector_class(self.selector).ablations


def unused_settings(methods: Sequence[Method], base: TrainConfig, labels: bool = True) -> dict[str, Any]:
    """Return the settings that the user gave in `base` and no method uses: it does not read them, or fixes another value."""
    left = given_settings(base)
    for method in methods:
        trained = settings_of(method.config(base))
        read = method.reads(base, labels)
        left = {name: value for name, value in left.items() if name not in read or trained[name] != value}
    return left


def with_heads(methods: Sequence[str], heads: Sequence[str] | None) -> tuple[str, ...]:
    """Combine every method with every head; a method that names its head keeps it.

    Example:
        >>> with_heads(["lats:lesion-first", "center+linear"], ["mlp", "abmil"])
        ('lats:lesion-first', 'lats+abmil:lesion-first', 'center+linear')
    """
    if not heads:
        return tuple(methods)
    for head in heads:
        if head not in list_heads():
            raise UnknownNameError.of("head", head, list_heads())
    parsed = [(Method.parse(text), "+" in text) for text in methods]
    combined = [method if names_head else replace(method, head=head) for method, names_head in parsed for head in heads]
    return tuple(dict.fromkeys(map(str, combined)))


def method_of(selector: str, config: TrainConfig) -> Method:
    method = Method.parse(selector)
    if not method.learned:
        raise RequestError(f"Selector '{selector}' does not learn. Evaluate it with a sweep instead.")
    return replace(method, variant="" if config.recipe == preset("paper").recipe else config.recipe)
