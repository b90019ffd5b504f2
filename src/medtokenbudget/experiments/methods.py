"""`Method`: what a row of a table is about, written `selector+head:variant`, and the training settings it stands for.

A name means the same thing in every run: a learned selector without a variant is trained with the paper's recipe,
`lats:lesion-first` with ours. A variant changes the training settings, or (an ablation) switches off parts of a selector that is
already trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from medtokenbudget.config import PRESETS, LossWeights, RouterConfig, TrainConfig, preset
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.routing import create_selector, list_selectors, selector_class
from medtokenbudget.training.heads import list_heads

Change = Callable[[TrainConfig], TrainConfig]
DEFAULT_HEAD = "mlp"


def with_recipe(name: str, base: TrainConfig) -> TrainConfig:
    """The settings of preset `name` at the size of `base`; `base` itself if it already follows that preset's recipe.

    Seed, budgets, device and network width carry over, and a shortened run stays short.
    """
    wanted = preset(name)
    if base.recipe == wanted.recipe:
        return base
    usual = next(made().epochs for made in PRESETS.values() if made().recipe == base.recipe)
    short = min(1.0, base.epochs / usual)
    return replace(
        wanted,
        epochs=max(1, round(short * wanted.epochs)),
        min_steps=wanted.min_steps if short == 1 else 0,
        head_epochs=base.head_epochs,
        batch_size=base.batch_size,
        lats=replace(wanted.lats, hidden=base.lats.hidden, layers=base.lats.layers),
        context=base.context,
        seed=base.seed,
        device=base.device,
        precision=base.precision,
        budgets=base.budgets,
    )


def _paper(change: Change = lambda config: config) -> Change:
    """The paper's recipe with one change."""
    return lambda base: change(with_recipe("paper", base))


def _lesion_first(**changes: Any) -> Change:
    """The lesion-first recipe with one part taken back, to show what that part brings."""

    def change(base: TrainConfig) -> TrainConfig:
        config = with_recipe("lesion-first", base)
        if "neighborhood" in changes:
            return replace(config, lats=replace(config.lats, **changes))
        if "turns" in changes or "smooth" in changes:
            return replace(config, context=replace(config.context, **changes))
        return replace(config, **changes)

    return change


LEARNED: dict[str, Change] = {
    "": _paper(),
    "mask-free": _paper(lambda c: replace(c, losses=replace(c.losses, classification=1.0, lesion=0.0))),
    "fixed-0.5": _paper(lambda c: replace(c, curriculum=replace(c.curriculum, kind="fixed", start=0.5))),
    "with-views": _paper(lambda c: replace(c, views="off-center")),
    "lesion-first": _lesion_first(),
    "lesion-first-without-views": _lesion_first(views="none"),
    "lesion-first-one-view": _lesion_first(views="off-center"),
    "lesion-first-raster": _lesion_first(neighborhood="raster"),
    "lesion-first-zero-padding": _lesion_first(router=RouterConfig()),
    "lesion-first-all-patches": _lesion_first(patches=0),
    "lesion-first-fixed-grid": _lesion_first(turns=False),
    "lesion-first-smoothed": _lesion_first(smooth=3),
    "lesion-first-balanced": _lesion_first(class_balance="loss"),
    "lesion-first-joint": _lesion_first(recipe="joint", patches=0, losses=LossWeights(diversity=0.0, lesion=1.0, distillation=0.0)),
}
"""Variants of a selector that learns. The empty name is the paper's recipe."""
ONLY: dict[str, tuple[str, ...]] = {
    "lats": ("lesion-first-raster", "lesion-first-zero-padding", "lesion-first-all-patches"),
    "context": ("lesion-first-fixed-grid", "lesion-first-smoothed"),
}
"""Variants that change a part which only one selector has."""

FIXED: dict[str, Change] = {
    "": lambda base: base,
    "matched": lambda base: with_recipe("lesion-first", base),
    "epoch-matched": lambda base: replace(base, head_epochs=base.epochs),
}
"""Variants of a selector that does not learn: its head trains like that of the lesion-first recipe, or for as long as LATS."""


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
        """Parse `selector`, `selector:variant`, `selector+head` or `selector+head:variant`, checking every part.

        Raises:
            UnknownNameError: A part is not registered; the message suggests the closest name.
        """
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
        known = [*method._changes, *method._ablations]
        if variant not in known:
            raise UnknownNameError.of(f"variant of {selector}", variant, [name for name in known if name])
        return method

    def __str__(self) -> str:
        head = "" if self.head == DEFAULT_HEAD else f"+{self.head}"
        return f"{self.selector}{head}{':' if self.variant else ''}{self.variant}"

    @property
    def learned(self) -> bool:
        """Whether the selector itself is trained."""
        return selector_class(self.selector).learns

    @property
    def ablation(self) -> str | None:
        """The part of the trained selector that is switched off, or None."""
        return self.variant if self.variant in self._ablations else None

    @property
    def trained_as(self) -> Method:
        """The method whose training this one uses: an ablation has none of its own."""
        return self if self.ablation is None else replace(self, variant="")

    def config(self, base: TrainConfig) -> TrainConfig:
        """The training settings of this method in a run whose common settings are `base`."""
        return self._changes[self.trained_as.variant](base)

    @property
    def options(self) -> Mapping[str, Any]:
        """Options that a selector which does not learn is created with: those of its variant."""
        return selector_class(self.selector).variants.get(self.variant, {})

    @property
    def requires(self) -> tuple[str, ...]:
        """Fields of a batch that the selector reads beside the patches, as far as they are known before training."""
        if self.learned:
            return tuple(selector_class(self.selector).requires)
        return create_selector(self.selector, **self.options).requires

    @property
    def _changes(self) -> Mapping[str, Change]:
        if not self.learned:
            return FIXED | dict.fromkeys(selector_class(self.selector).variants, FIXED[""])
        foreign = {name for selector, names in ONLY.items() if selector != self.selector for name in names}
        return {name: change for name, change in LEARNED.items() if name not in foreign}

    @property
    def _ablations(self) -> tuple[str, ...]:
        return selector_class(self.selector).ablations


def with_heads(methods: Sequence[str], heads: Sequence[str] | None) -> tuple[str, ...]:
    """Every method with every head; a method that names its head keeps it.

    Example:
        >>> with_heads(["lats:lesion-first", "center+linear"], ["mlp", "abmil"])
        ('lats:lesion-first', 'lats+abmil:lesion-first', 'center+linear')
    """
    if not heads:
        return tuple(methods)
    crossed = [
        str(method if "+" in text else replace(method, head=head))
        for text in methods
        for method in (Method.parse(text),)
        for head in heads
    ]
    for head in heads:
        if head not in list_heads():
            raise UnknownNameError.of("head", head, list_heads())
    return tuple(dict.fromkeys(crossed))


def method_of(selector: str, config: TrainConfig) -> Method:
    """The method that training a learned `selector` under `config` makes: its name follows from the recipe."""
    method = Method.parse(selector)
    if not method.learned:
        raise RequestError(f"Selector '{selector}' does not learn. Evaluate it with a sweep instead.")
    return replace(method, variant="" if config.recipe == preset("paper").recipe else config.recipe)
