"""Routers that need no training: a selector by its name as a model, to compare trained routers with in early routing.

Its own file, because `early.py` is read by the network and cannot make one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.partial import Way
from medtokenbudget.config import BackboneConfig, TrainConfig
from medtokenbudget.errors import RequestError
from medtokenbudget.model.hub import SHIPPED
from medtokenbudget.model.routed import MedTokenBudget
from medtokenbudget.routing import create_selector, list_selectors, selector_class
from medtokenbudget.training.classifier import RoutedClassifier


def is_untrained_router(name: str) -> bool:
    """Whether `name` is a selector and not a model; a folder of that name wins."""
    return name not in SHIPPED and name in list_selectors() and not Path(name).exists()


def untrained_router(name: str, way: Way, backbone: BackboneConfig, block: int = 4) -> MedTokenBudget:
    """A router by the name of its selector, without a head.

    Args:
        name: A selector that does not learn, such as 'class-attention', 'evit', 'frequency' or 'center'.
        way: 'inside' reads the tokens of the backbone itself; 'scout' looks with the embedded backbone.
        backbone: The backbone that will be routed.
        block: The first block that will run on the kept patches ('inside').

    Raises:
        RequestError: The selector learns, so that it must be trained first.
    """
    if selector_class(name).learns:
        store = f"a store of this backbone (mtb extract --layer {block - 1})" if way == "inside" else "a store of a small backbone"
        raise RequestError(
            f"The selector '{name}' learns, so it cannot choose before it is trained. Train it on {store} with "
            f"mtb train --selector {name}, and pass the run as --router."
        )
    seen = backbone if way == "inside" else BackboneConfig(name="embedded")
    fingerprint = Backbone.load(seen).fingerprint
    if way == "inside":
        seen, fingerprint = replace(seen, layer=block - 1), {**fingerprint, "layer": block - 1}
    classifiers = {name: RoutedClassifier(create_selector(name), None)}
    return MedTokenBudget(seen, fingerprint, (), classifiers, TrainConfig(), main=name, device="cpu")
