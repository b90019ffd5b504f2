"""One selector per file, registered by name when this package is imported."""

from __future__ import annotations

from medtokenbudget.routing.selectors.abmil_attention import ABMILAttention
from medtokenbudget.routing.selectors.atc import ATC
from medtokenbudget.routing.selectors.ats import ATS
from medtokenbudget.routing.selectors.attention_entropy import AttentionEntropy
from medtokenbudget.routing.selectors.box_prior import BoxPrior
from medtokenbudget.routing.selectors.center import Center
from medtokenbudget.routing.selectors.class_attention import ClassAttention
from medtokenbudget.routing.selectors.context import ContextSelector
from medtokenbudget.routing.selectors.cropr import Cropr
from medtokenbudget.routing.selectors.darkness import Darkness
from medtokenbudget.routing.selectors.diffrate import DiffRate
from medtokenbudget.routing.selectors.dpc_knn import DPCKNN
from medtokenbudget.routing.selectors.dynamicvit import DynamicViT, DynamicViTPackage
from medtokenbudget.routing.selectors.evit import EViT
from medtokenbudget.routing.selectors.frequency import Frequency
from medtokenbudget.routing.selectors.grad_token import GradToken
from medtokenbudget.routing.selectors.gradcam_norm1 import GradCAMNorm1
from medtokenbudget.routing.selectors.k_medoids import KMedoids
from medtokenbudget.routing.selectors.lats import LATSSelector
from medtokenbudget.routing.selectors.local_contrast import LocalContrast
from medtokenbudget.routing.selectors.no_pruning import NoPruning
from medtokenbudget.routing.selectors.norm import Norm
from medtokenbudget.routing.selectors.oracle import Oracle
from medtokenbudget.routing.selectors.pitome import PiToMe
from medtokenbudget.routing.selectors.query_pool import QueryPool
from medtokenbudget.routing.selectors.random import Random
from medtokenbudget.routing.selectors.relevance import Relevance
from medtokenbudget.routing.selectors.rollout import Rollout
from medtokenbudget.routing.selectors.sparselearn import SparseLearn
from medtokenbudget.routing.selectors.tc_ssa import TCSSA
from medtokenbudget.routing.selectors.tokenlearner import TokenLearner
from medtokenbudget.routing.selectors.tome import ToMe
from medtokenbudget.routing.selectors.tps import TPS

__all__ = [
    "ATC",
    "ATS",
    "DPCKNN",
    "TCSSA",
    "TPS",
    "ABMILAttention",
    "AttentionEntropy",
    "BoxPrior",
    "Center",
    "ClassAttention",
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
