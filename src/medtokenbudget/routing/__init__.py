"""Routing: signals, the scorer, the router and the selectors. Pure tensors, no files."""

from __future__ import annotations

from medtokenbudget.routing.context import ContextScorer
from medtokenbudget.routing.lats import LATS
from medtokenbudget.routing.learned import LearnedSelector, TrainingPass
from medtokenbudget.routing.registry import ENTRY_POINT_GROUP, create_selector, list_selectors, register_selector, selector_class
from medtokenbudget.routing.router import (
    budget_to_k,
    check_k,
    gumbel_noise,
    hard_topk,
    masked_mean,
    rank,
    smooth_scores,
    straight_through_topk,
)
from medtokenbudget.routing.scored import ScoredRanker
from medtokenbudget.routing.selector import Merger, Ranker, Selector, gather, pooled_means
from medtokenbudget.routing.selectors import ContextSelector, LATSSelector
from medtokenbudget.routing.signals import attention_entropy, feature_norm, local_contrast, pseudo_attention
from medtokenbudget.tokens import Selection, TokenBatch

__all__ = [
    "ENTRY_POINT_GROUP",
    "LATS",
    "ContextScorer",
    "ContextSelector",
    "LATSSelector",
    "LearnedSelector",
    "Merger",
    "Ranker",
    "ScoredRanker",
    "Selection",
    "Selector",
    "TokenBatch",
    "TrainingPass",
    "attention_entropy",
    "budget_to_k",
    "check_k",
    "create_selector",
    "feature_norm",
    "gather",
    "gumbel_noise",
    "hard_topk",
    "list_selectors",
    "local_contrast",
    "masked_mean",
    "pooled_means",
    "pseudo_attention",
    "rank",
    "register_selector",
    "selector_class",
    "smooth_scores",
    "straight_through_topk",
]
