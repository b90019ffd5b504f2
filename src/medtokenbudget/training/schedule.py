"""What changes over the epochs: the learning rate, the budget of the curriculum, and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from medtokenbudget.config import CurriculumConfig
from medtokenbudget.errors import RequestError


def cosine_lr(base: float, epoch: int, epochs: int) -> float:
    """Cosine from `base` at epoch 0 to 0 after the last epoch."""
    return 0.5 * base * (1 + math.cos(math.pi * epoch / epochs))


def curriculum_budget(config: CurriculumConfig, epoch: int) -> float:
    """Return the budget of an epoch, counted from 0: a cosine from start to end over `config.epochs`, then constant; or fixed.

    The curriculum ablation changes nothing but this.
    """
    if epoch < 0:
        raise RequestError(f"Epochs are counted from 0, got {epoch}.")
    if config.kind == "fixed":
        return config.start
    if epoch >= config.epochs:
        return config.end
    share = (1 + math.cos(math.pi * epoch / config.epochs)) / 2
    # Twelve digits: a budget that is 0.3749999... by rounding would cost a patch.
    return round(config.end + (config.start - config.end) * share, 12)


def is_looked_at(epoch: int, epochs: int, every: int) -> bool:
    """Whether the selection metric is computed after this epoch: every so often, and after the last."""
    return (epoch + 1) % every == 0 or epoch + 1 == epochs


def epochs_for(images: int, batch_size: int, epochs: int, min_steps: int) -> int:
    """`epochs`, or as many as `min_steps` steps take, at most five times as many."""
    steps = math.ceil(images / batch_size)
    return min(5 * epochs, max(epochs, math.ceil(min_steps / steps)))


@dataclass
class EarlyStopping:
    """Keeps the best value and stops after `patience` epochs without an improvement of `min_improvement`."""

    patience: int
    min_improvement: float
    best: float = -math.inf
    best_epoch: int = -1

    def improved(self, value: float, epoch: int) -> bool:
        if value > self.best + self.min_improvement or self.best_epoch < 0:
            self.best, self.best_epoch = value, epoch
            return True
        return False

    def stop(self, epoch: int) -> bool:
        return epoch - self.best_epoch >= self.patience
