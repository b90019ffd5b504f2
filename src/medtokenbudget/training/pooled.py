"""Training a head behind a fixed selector: the paper's baselines, and the second stage of the lesion-first recipe.

Every method uses the same optimizer and budget sampling. Under the strict protocol no epoch is chosen: the rate falls to zero and
the last one counts. Under the paper's the rate is constant and the best epoch on validation images counts, as for LATS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.heads import Head, create_head
from medtokenbudget.metrics import accuracy
from medtokenbudget.routing import Selector
from medtokenbudget.routing.losses import classification_loss
from medtokenbudget.tokens import TokenSet
from medtokenbudget.training.checkpoints import module_tensors
from medtokenbudget.training.pooling import BATCH, pool_and_judge, token_sets
from medtokenbudget.training.schedule import EarlyStopping, cosine_lr, is_looked_at
from medtokenbudget.training.seeds import generator


def class_weights(label: np.ndarray, classes: int) -> Tensor:
    """Weights inverse to the class frequencies, mean 1 over the images; classes that do not occur get 0."""
    counts = np.bincount(label, minlength=classes).astype(np.float64)
    present = counts > 0
    weights = np.where(present, len(label) / (present.sum() * np.maximum(counts, 1)), 0.0)
    return torch.tensor(weights, dtype=torch.float32)


def epoch_order(label: np.ndarray, config: TrainConfig, epoch: int, classes: int) -> Tensor:
    """Positions of one epoch's images: shuffled, or drawn so that the classes come equally often."""
    noise = generator(config.seed, "order", epoch)
    if config.class_balance == "sampler":
        weights = class_weights(label, classes)[torch.from_numpy(label)]
        return torch.multinomial(weights, len(label), replacement=True, generator=noise)
    return torch.randperm(len(label), generator=noise)


def require_labels(label: np.ndarray, what: str) -> None:
    if len(label) and int(label.min()) < 0:
        count = int((label < 0).sum())
        raise RequestError(f"{count} {what} images have no label. Label them in the manifest, or remove them.")


OnEpoch = Callable[[str, int, int], None]
"""Called after every epoch with the stage, the epochs done and the epochs in all."""


Judge = Callable[[Head], float]
"""How good a head is: what its epoch is chosen by."""


def epoch_judge(store: FeatureStore, rows: np.ndarray, selector: Selector, config: TrainConfig) -> Judge | None:
    """Accuracy on the selection rows at the selection budget, for heads of the paper's protocol; None under the strict one.

    The paper looks at validation accuracy to keep an epoch of LATS. Heads of baselines that kept their last epoch instead would be
    compared at a disadvantage.
    """
    if config.protocol == "strict":
        return None
    if "has_mask" in selector.requires:
        rows = rows[store.has_mask.numpy()[rows]]
    if not len(rows):
        raise RequestError("There are no validation images to choose the epoch of the head on. Use --protocol strict.")
    budgets, label = (config.selection_budget,), store.label.numpy()[rows]

    @cache
    def pooled() -> np.ndarray:  # the selector is fixed, so once is enough
        return pool_and_judge(store, rows, selector, budgets, config.seed)[0]

    def judge(head: Head) -> float:
        if head.reads == "tokens":
            found = token_probabilities(head, store, rows, selector, budgets, config.seed)
        else:
            found = probabilities(head, pooled())
        return accuracy(label, found[:, 0].argmax(-1))

    return judge


class PooledHead:
    """A head that learns behind a fixed selector, on pooled tokens or on the tokens themselves, as it reads them.

    Args:
        on_epoch: Called after every epoch.
        judge: Chooses the epoch, and makes the learning rate constant; without one the last epoch of a falling rate is kept.
    """

    def __init__(
        self,
        head: str,
        dim: int,
        classes: int,
        config: TrainConfig,
        on_epoch: OnEpoch | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.config, self.classes, self.on_epoch, self.judge = config, classes, on_epoch, judge
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.head = create_head(head, dim, classes)

    def train_on_file(self, pooled: np.ndarray, label: np.ndarray) -> list[dict[str, Any]]:
        """Train on pooled tokens `[n, T, D]` of a deterministic selector; a budget is drawn for each batch."""
        budgets = pooled.shape[1]

        def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
            order = epoch_order(label, self.config, epoch, self.classes).numpy()
            draws = torch.randint(budgets, (len(order) // self.config.batch_size + 1,), generator=self._noise("budget", epoch))
            for number, start in enumerate(range(0, len(order), self.config.batch_size)):
                rows = order[start : start + self.config.batch_size]
                yield torch.from_numpy(pooled[rows, int(draws[number])]), torch.from_numpy(label[rows])

        return self._train(batches, label)

    def train_on_store(
        self, store: FeatureStore, rows: np.ndarray, label: np.ndarray, selector: Selector, budgets: Sequence[float]
    ) -> list[dict[str, Any]]:
        """Train on tokens that are selected again in every epoch, for selectors that draw and for heads that read tokens."""

        def batches(epoch: int) -> Iterator[tuple[Tensor | TokenSet, Tensor]]:
            order = epoch_order(label, self.config, epoch, self.classes).numpy()
            draws = torch.randint(len(budgets), (len(order),), generator=self._noise("budget", epoch))
            noise = self._noise("selector", epoch)
            start = 0
            for number, batch in enumerate(store.batches(rows[order], self.config.batch_size, signals=selector.requires)):
                budget = budgets[int(draws[number])]
                kept: Tensor | TokenSet
                with torch.no_grad():
                    if self.head.reads == "tokens":
                        kept = token_sets(selector, batch, [selector.count(budget, batch.n)], noise)[0]
                    else:
                        kept = selector.pooled(batch, (budget,), noise)[:, 0]
                yield kept, torch.from_numpy(label[order[start : start + len(batch)]])
                start += len(batch)

        return self._train(batches, label)

    def _noise(self, purpose: str, epoch: int) -> torch.Generator:
        return generator(self.config.seed, purpose, epoch)

    def _train(self, batches: Any, label: np.ndarray) -> list[dict[str, Any]]:
        require_labels(label, "training")
        config = self.config
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        weights = class_weights(label, self.classes) if config.class_balance == "loss" else None
        history = []
        # The paper trains heads for all of their epochs: the rule only says which one is the best.
        rule = EarlyStopping(config.head_epochs, config.min_improvement)
        best: dict[str, Tensor] = {}
        for epoch in range(config.head_epochs):
            self.head.train()
            lr = config.lr if self.judge else cosine_lr(config.lr, epoch, config.head_epochs)
            optimizer.param_groups[0]["lr"] = lr
            total, seen, noise = 0.0, 0, self._noise("head-dropout", epoch)
            for features, target in batches(epoch):
                logits, own = self.head.training_step(features, target, noise)
                loss = classification_loss(logits, target, weights)
                loss = loss if own is None else loss + own
                if not torch.isfinite(loss):
                    raise WorkError(f"The loss of the head is not finite in epoch {epoch}. Lower --lr, or check the tokens.")
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.head.parameters(), config.clip)
                optimizer.step()
                total, seen = total + loss.item() * len(target), seen + len(target)
            history.append({"epoch": epoch, "stage": "head", "lr": lr, "classification": total / seen})
            if self.judge and is_looked_at(epoch, config.head_epochs, config.evaluate_every):
                history[-1]["selection"] = value = self.judge(self.head)
                if rule.improved(value, epoch):
                    best = module_tensors(self.head, "")
            if self.on_epoch is not None:
                self.on_epoch("head", epoch + 1, config.head_epochs)
        if best:
            self.head.load_state_dict(best)
        self.head.eval()
        return history


@torch.no_grad()
def token_probabilities(
    head: Head,
    store: FeatureStore,
    rows: np.ndarray,
    selector: Selector,
    budgets: Sequence[float],
    seed: int,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Class probabilities `[n, T, C]` by a head that reads tokens; draws like `pool_and_judge` with the same seed."""
    head.eval()
    counts = [selector.count(budget, store.per_image) for budget in budgets]
    parts = []
    for index, batch in enumerate(store.batches(rows, BATCH, signals=selector.requires)):
        noise = generator(seed, "evaluation", index) if selector.stochastic else None
        kept = token_sets(selector, batch.to(device), counts, noise)
        parts.append(torch.stack([head(tokens).softmax(-1) for tokens in kept], 1).cpu())
    return torch.cat(parts).numpy()


@torch.no_grad()
def probabilities(head: Head, pooled: np.ndarray) -> np.ndarray:
    """Class probabilities `[n, T, C]` of pooled tokens `[n, T, D]`."""
    head.eval()
    parts = [
        head(torch.from_numpy(np.ascontiguousarray(chunk))).softmax(-1) for chunk in np.array_split(pooled, len(pooled) // 512 + 1)
    ]
    return torch.cat(parts).numpy()
