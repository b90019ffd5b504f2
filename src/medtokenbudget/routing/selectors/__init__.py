"""One selector a file, registered by name when this package is imported."""

from __future__ import annotations

from medtokenbudget.routing.selectors.attention_entropy import AttentionEntropy
from medtokenbudget.routing.selectors.center import Center
from medtokenbudget.routing.selectors.class_attention import ClassAttention
from medtokenbudget.routing.selectors.darkness import Darkness
from medtokenbudget.routing.selectors.lats import LATSSelector
from medtokenbudget.routing.selectors.local_contrast import LocalContrast
from medtokenbudget.routing.selectors.no_pruning import NoPruning
from medtokenbudget.routing.selectors.norm import Norm
from medtokenbudget.routing.selectors.oracle import Oracle
from medtokenbudget.routing.selectors.random import Random
from medtokenbudget.routing.selectors.tome import ToMe

__all__ = [
    "AttentionEntropy",
    "Center",
    "ClassAttention",
    "Darkness",
    "LATSSelector",
    "LocalContrast",
    "NoPruning",
    "Norm",
    "Oracle",
    "Random",
    "ToMe",
]
