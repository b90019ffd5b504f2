"""Method names of a sweep: a selector, or a selector with a variant behind a colon (`lats:mask-free`, `random:epoch-matched`).

A variant is a change of the training configuration, or, for the toggles, of the finished scorer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from medtokenbudget.config import PRESETS, LossWeights, RouterConfig, TrainConfig, preset
from medtokenbudget.errors import UnknownNameError
from medtokenbudget.routing import available


def _as_preset(name: str) -> Callable[[TrainConfig], TrainConfig]:
    """Another preset with the seed, the budgets and the size of the sweep's own configuration: what is shortened stays short."""

    def change(config: TrainConfig) -> TrainConfig:
        wanted = preset(name)
        usual = next(made().epochs for made in PRESETS.values() if made().recipe == config.recipe)
        short = min(1.0, config.epochs / usual)
        return replace(
            wanted,
            epochs=max(1, round(short * wanted.epochs)),
            min_steps=wanted.min_steps if short == 1 else 0,
            head_epochs=config.head_epochs,
            batch_size=config.batch_size,
            lats=replace(wanted.lats, hidden=config.lats.hidden, layers=config.lats.layers),
            seed=config.seed,
            device=config.device,
            precision=config.precision,
            budgets=config.budgets,
        )

    return change


def _lesion_first_but(**changes: Any) -> Callable[[TrainConfig], TrainConfig]:
    """The lesion-first preset with one part taken back: what that part brings."""

    def change(config: TrainConfig) -> TrainConfig:
        wanted = _as_preset("lesion-first")(config)
        if "neighborhood" in changes:
            return replace(wanted, lats=replace(wanted.lats, **changes))
        return replace(wanted, **changes)

    return change


CHANGES: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    "paper": _as_preset("paper"),
    "lesion-first": _as_preset("lesion-first"),
    "lesion-first-without-views": _lesion_first_but(views="none"),
    "lesion-first-one-view": _lesion_first_but(views="off-center"),
    "lesion-first-raster": _lesion_first_but(neighborhood="raster"),
    "lesion-first-zero-padding": _lesion_first_but(router=RouterConfig()),
    "lesion-first-all-patches": _lesion_first_but(patches=0),
    "lesion-first-balanced": _lesion_first_but(class_balance="loss"),
    "lesion-first-joint": _lesion_first_but(
        recipe="joint", patches=0, losses=LossWeights(diversity=0.0, lesion=1.0, distillation=0.0)
    ),
    "mask-free": lambda c: replace(c, recipe="joint", losses=replace(c.losses, classification=1.0, lesion=0.0)),
    "fixed-0.5": lambda c: replace(c, curriculum=replace(c.curriculum, kind="fixed", start=0.5)),
    "with-views": lambda c: replace(c, views="off-center"),
    "epoch-matched": lambda c: replace(c, head_epochs=c.epochs),
    "matched": _as_preset("lesion-first"),
}
OF_BASELINES = ("matched", "epoch-matched")
"""Changes that mean something for a selector that does not learn: its head is trained as that of the lesion-first preset, or as
long as LATS is."""
TOGGLES: dict[str, tuple[str, ...]] = {
    "no-attention": ("norm", "contrast"),
    "no-norm": ("attention", "contrast"),
    "no-contrast": ("attention", "norm"),
    "no-signals": (),
}


@dataclass(frozen=True)
class Variant:
    """A method name taken apart. `signals` is None unless a finished scorer is used with some of them switched off."""

    method: str
    selector: str
    config: TrainConfig
    signals: tuple[str, ...] | None = None

    @property
    def trained_as(self) -> str:
        """The method whose training this one uses: a toggle has none of its own."""
        return self.selector if self.signals is not None else self.method


def variant(method: str, base: TrainConfig) -> Variant:
    """Take `selector:variant` apart; unknown parts are refused with the closest name."""
    selector, _, change = method.partition(":")
    if selector not in available():
        raise UnknownNameError.of("selector", selector, available())
    if not change:
        return Variant(method, selector, base)
    if selector == "lats" and change in TOGGLES:
        return Variant(method, selector, base, TOGGLES[change])
    allowed = [*CHANGES, *TOGGLES] if selector == "lats" else OF_BASELINES
    if change not in allowed:
        raise UnknownNameError.of(f"variant of {selector}", change, allowed)
    return Variant(method, selector, CHANGES[change](base))
