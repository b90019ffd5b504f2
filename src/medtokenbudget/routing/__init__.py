"""Routing: signals, the scorer, the router and the selectors. Pure tensors, no files."""

from __future__ import annotations

from medtokenbudget.routing.base import (
    Merger,
    Ranker,
    Selector,
    create_selector,
    default_methods,
    gather,
    list_selectors,
    pooled_means,
    register_selector,
    selector_class,
)
from medtokenbudget.routing.signals import feature_norm, local_contrast
from medtokenbudget.routing.topk import (
    budget_to_k,
    gumbel_noise,
    hard_topk,
    masked_mean,
    rank,
    smooth_scores,
    straight_through_topk,
)
from medtokenbudget.routing.trainable import LearnedSelector, TrainingPass
from medtokenbudget.tokens import Selection, TokenBatch

# isort: split
# After all other names: a selector in that folder may import them from here, as one in another package does.
from medtokenbudget.routing.selectors import LATS, ContextScorer, LATSSelector

__all__ = [
    "LATS",
    "ContextScorer",
    "LATSSelector",
    "LearnedSelector",
    "Merger",
    "Ranker",
    "Selection",
    "Selector",
    "TokenBatch",
    "TrainingPass",
    "budget_to_k",
    "create_selector",
    "default_methods",
    "feature_norm",
    "gather",
    "gumbel_noise",
    "hard_topk",
    "list_selectors",
    "local_contrast",
    "masked_mean",
    "pooled_means",
    "rank",
    "register_selector",
    "selector_class",
    "smooth_scores",
    "straight_through_topk",
]
