"""Attention rollout (Abnar and Zuidema, ACL 2020): what the class token attends to, followed back through all blocks.

Computed when the tokens are extracted (`mtb extract --signals rollout`): the attention of the heads is averaged, half of it is
replaced by the identity for the residual connection, and the matrices of all blocks up to the chosen one are multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


@register_selector("rollout")
class Rollout(Ranker):
    """Largest rolled-out attention of the class token first."""

    requires = ("rollout",)

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        assert tokens.rollout is not None
        return tokens.rollout.float()
