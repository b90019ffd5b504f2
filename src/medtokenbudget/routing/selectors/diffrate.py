"""DiffRate (Chen et al., ICCV 2023): sort by class attention, drop the least attended tokens, merge the next ones.

Post-backbone form: DiffRate learns how many tokens each block drops and merges. After the backbone there is one step, whose two
counts follow from the budget and from the option `dropped`; nothing is learned.
"""

from __future__ import annotations

from typing import Annotated

import torch

from medtokenbudget.config import Range
from medtokenbudget.routing.base import Merger, register_selector
from medtokenbudget.routing.merging import merge, most_similar
from medtokenbudget.routing.topk import rank
from medtokenbudget.tokens import Selection, TokenBatch


@register_selector("diffrate")
class DiffRate(Merger):
    """The K most attended patches; of the others, the least attended are dropped, the rest merge into the most similar of the K.

    Args:
        dropped: Share of the N - K patches that is dropped.
    """

    title = "DiffRate"
    description = "Drops the least attended patches, merges the next into the kept ones."
    color, marker = "#b5495b", "P"
    requires = ("cls_attention",)

    def __init__(self, dropped: Annotated[float, Range(0, 1)] = 0.5, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.dropped = dropped

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        assert tokens.cls_attention is not None
        order = rank(tokens.cls_attention.float())
        kept, dropped = order[:, :k], order[:, tokens.n - int(self.dropped * (tokens.n - k)) :]
        _, host = most_similar(tokens.patches, kept)
        return merge(tokens.patches, host.scatter(1, dropped, -1), k)
