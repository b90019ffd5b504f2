"""CLAM (Lu et al., Nature Biomedical Engineering 2021): gated attention with instance-level clustering, in one or more branches.

The instance classifiers learn with cross-entropy, where the publication has a smooth SVM loss. Classes exclude each other here, so
the most attended tokens are also negative examples of the other classes, as in its subtyping setting.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medtokenbudget.config import Count
from medtokenbudget.heads.abmil import GatedPooling
from medtokenbudget.heads.head import register_head

BAG_WEIGHT = 0.7
"""Weight of the bag loss in the publication; the instance loss has the rest, so here `0.3 / 0.7` relative to a weight of 1."""


@register_head("clam-sb")
class CLAMSB(GatedPooling):
    """One attention branch for all classes."""

    description = "Gated attention with instance clustering, one branch for all classes."
    branch_per_class: ClassVar[bool] = False

    def __init__(
        self, dim: int, classes: int, width: int = 256, attention: int = 128, dropout: float = 0.1, instances: Count = 8
    ) -> None:
        super().__init__(dim, classes, width, attention, dropout, classes if self.branch_per_class else 1)
        self.instances, self.needs = instances, 2 * instances
        # Before the output layer, because seeded weights are drawn in the order of the layers.
        self.instance = nn.ModuleList(nn.Linear(width, 2) for _ in range(classes))
        self.output = nn.Linear(width, classes)

    def training_step(self, kept: Any, label: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the logits, and the instance loss weighted relative to a bag loss of weight 1."""
        features, attention, logits = self.attended(self.check(kept), generator)
        return logits, (1 - BAG_WEIGHT) / BAG_WEIGHT * self.instance_loss(features, attention, kept.padding, label)

    def instance_loss(self, features: Tensor, attention: Tensor, padding: Tensor, label: Tensor) -> Tensor:
        """Average the cross-entropy of the instance classifiers over the images and classes.

        For the class of an image its most attended tokens are positive and its least attended negative; for every other class its
        most attended tokens are negative. Features are [B, K, width], attention logits [B, branches, K], padding [B, K] marks
        tokens that do not count, and labels [B] are -1 where unknown.
        """
        known = label >= 0
        if not bool(known.any()):
            return features.sum() * 0.0
        hidden = padding.unsqueeze(1)
        # Detached: which tokens are examples has no gradient. Tokens that do not count are neither.
        top = attention.detach().masked_fill(hidden, -torch.inf).topk(self.instances, dim=2).indices
        bottom = attention.detach().masked_fill(hidden, torch.inf).topk(self.instances, dim=2, largest=False).indices
        total = features.new_zeros(())
        for number, classify in enumerate(self.instance):
            branch = number if attention.shape[1] > 1 else 0
            of_class, others = known & (label == number), known & (label != number)
            losses = []
            for rows, examples in ((of_class, ((top, 1), (bottom, 0))), (others, ((top, 0),))):
                if bool(rows.any()):
                    each = [self._examples(classify, features[rows], chosen[rows, branch], target) for chosen, target in examples]
                    losses.append(torch.cat(each, 1).mean(1))
            total = total + torch.cat(losses).mean()
        return total / self.classes

    def _examples(self, classify: nn.Module, features: Tensor, chosen: Tensor, target: int) -> Tensor:
        return -classify(features.take_along_dim(chosen.unsqueeze(-1), 1)).log_softmax(-1)[..., target]


@register_head("clam-mb")
class CLAMMB(CLAMSB):
    """One attention branch and one classifier for each class; arguments as in `clam-sb`."""

    description = "Gated attention with instance clustering, one branch per class."
    branch_per_class = True

    def bag(self, pooled: Tensor) -> Tensor:
        # Class c reads its own pooled features: the diagonal of all classifiers on all branches.
        return (pooled * self.output.weight).sum(-1) + self.output.bias
