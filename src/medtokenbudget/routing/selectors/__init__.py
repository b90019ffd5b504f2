"""The selectors, registered by name when this package is imported: one published method per file, one-line signals in `simple`."""

from __future__ import annotations

from medtokenbudget.routing.selectors.atc import ATC
from medtokenbudget.routing.selectors.ats import ATS
from medtokenbudget.routing.selectors.context import ContextScorer, ContextSelector
from medtokenbudget.routing.selectors.cropr import Cropr
from medtokenbudget.routing.selectors.diffrate import DiffRate
from medtokenbudget.routing.selectors.dpc_knn import DPCKNN
from medtokenbudget.routing.selectors.dynamicvit import DynamicViT, DynamicViTPackage
from medtokenbudget.routing.selectors.evit import EViT
from medtokenbudget.routing.selectors.frequency import Frequency
from medtokenbudget.routing.selectors.k_medoids import KMedoids
from medtokenbudget.routing.selectors.lats import LATS, LATSSelector
from medtokenbudget.routing.selectors.pitome import PiToMe
from medtokenbudget.routing.selectors.probes import ABMILAttention, GradCAMNorm1, GradToken, Relevance
from medtokenbudget.routing.selectors.query_pool import QueryPool
from medtokenbudget.routing.selectors.simple import (
    AttentionEntropy,
    BoxPrior,
    Center,
    ClassAttention,
    Darkness,
    LocalContrast,
    NoPruning,
    Norm,
    Oracle,
    Random,
    Rollout,
)
from medtokenbudget.routing.selectors.sparselearn import SparseLearn
from medtokenbudget.routing.selectors.tc_ssa import TCSSA
from medtokenbudget.routing.selectors.tokenlearner import TokenLearner
from medtokenbudget.routing.selectors.tome import ToMe
from medtokenbudget.routing.selectors.tps import TPS

__all__ = [
    "ATC",
    "ATS",
    "DPCKNN",
    "LATS",
    "TCSSA",
    "TPS",
    "ABMILAttention",
    "AttentionEntropy",
    "BoxPrior",
    "Center",
    "ClassAttention",
    "ContextScorer",
    "ContextSelector",
    "Cropr",
    "Darkness",
    "DiffRate",
    "DynamicViT",
    "DynamicViTPackage",
    "EViT",
    "Frequency",
    "GradCAMNorm1",
    "GradToken",
    "KMedoids",
    "LATSSelector",
    "LocalContrast",
    "NoPruning",
    "Norm",
    "Oracle",
    "PiToMe",
    "QueryPool",
    "Random",
    "Relevance",
    "Rollout",
    "SparseLearn",
    "ToMe",
    "TokenLearner",
]
