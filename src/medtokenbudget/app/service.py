"""What the service answers about one image: every selector of a model at many budgets, from one pass of the backbone.

No HTTP here: bytes and names come in, plain JSON values go out, so that it can be tested and used without a server.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from medtokenbudget import __version__
from medtokenbudget.config import BUDGETS
from medtokenbudget.data import decode_image, decode_mask, same_aspect
from medtokenbudget.errors import BudgetError, RequestError
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.model.parts import describe, select
from medtokenbudget.routing import Ranker, Selector
from medtokenbudget.tokens import TokenBatch

NOTICE = "Research software, not a medical device. Its output must not be used to diagnose or to treat."
MAX_BUDGETS = 128
PREVIEW_SIDE = 1024


@dataclass(frozen=True)
class Limits:
    """What one request may cost."""

    max_bytes: int = 25_000_000
    max_pixels: int = 50_000_000


@dataclass(frozen=True)
class Question:
    """One image and what is to be said about it; no selectors or budgets means all selectors and the ten budgets."""

    image: bytes
    mask: bytes | None = None
    selectors: tuple[str, ...] = ()
    budgets: tuple[float, ...] = ()
    preview: bool = False


@dataclass(frozen=True)
class Merged:
    """A merger at several K: `groups` is the output token of each patch, `pooled` [len(K), D] what the head reads."""

    groups: list[list[int]]
    pooled: torch.Tensor


class Service:
    """A model that answers questions. `answer` is not made for several threads at once; the queue calls it from one."""

    def __init__(self, model: MedTokenBudget, limits: Limits | None = None, demo: bool = False) -> None:
        self.model = model
        self.limits = limits or Limits()
        self.demo = demo
        # Hashed once: it covers every number of the model.
        self.fingerprint = model.fingerprint

    def warm(self) -> Service:
        """Load the backbone now rather than during the first question; a changed one is refused here."""
        size = self.model.backbone.preprocessing.image_size
        self.model.encode(np.zeros((1, size, size, 3), dtype=np.uint8))
        return self

    def describe(self) -> dict[str, Any]:
        """The model: classes, selectors, budgets, grid, fingerprint, notice."""
        h, w = self.model.grid
        return {
            "version": __version__,
            "notice": NOTICE,
            "demo": self.demo,
            "fingerprint": self.fingerprint,
            "backbone": str(self.model.backbone_fingerprint["name"]),
            "classes": list(self.model.classes),
            "grid": [h, w],
            "n": h * w,
            "budgets": list(BUDGETS),
            "selectors": [self._described(name) for name in self.model.selectors],
            "limits": {"max_bytes": self.limits.max_bytes, "max_pixels": self.limits.max_pixels, "max_budgets": MAX_BUDGETS},
        }

    def _described(self, name: str) -> dict[str, Any]:
        selector = self.model.classifier(name).selector
        return {
            "name": name,
            "kind": selector.kind,
            "learns": selector.learns,
            "stochastic": selector.stochastic,
            "needs_mask": needs_mask(selector),
            "minimum": selector.minimum,
        }

    @torch.inference_mode()
    def answer(self, question: Question) -> dict[str, Any]:
        """Order, scores and class probabilities of every selector; with a mask also retention and ceiling."""
        names = self._names(question)
        budgets = checked_budgets(question.budgets)
        image = decode_image(question.image, max_pixels=self.limits.max_pixels)
        mask = None if question.mask is None else self._mask(question.mask, image.size)
        tokens = self.model.encode(self.model.backbone.prepare(image)[None], None if mask is None else [mask])
        lesion = None if tokens.lesion is None else tokens.lesion[0].cpu().numpy()
        merged: dict[str, Merged] = {}
        return {
            "model": self.fingerprint,
            "notice": NOTICE,
            "image": {"width": image.width, "height": image.height, "preview": _preview(image) if question.preview else None},
            "grid": list(tokens.grid),
            "n": tokens.n,
            "classes": list(self.model.classes),
            "budgets": budgets,
            "lesion": None if lesion is None else np.flatnonzero(lesion).tolist(),
            "selectors": [self._selector(name, tokens, budgets, lesion, merged) for name in names],
        }

    def _names(self, question: Question) -> list[str]:
        without = [name for name in self.model.selectors if needs_mask(self.model.classifier(name).selector)]
        if not question.selectors:
            return [name for name in self.model.selectors if question.mask is not None or name not in without]
        names = list(dict.fromkeys(question.selectors))
        for name in names:
            self.model.classifier(name)
            if name in without and question.mask is None:
                raise RequestError(f"selector '{name}' reads the lesion. Send a mask too, or leave this selector out.")
        return names

    def _mask(self, source: bytes, size: tuple[int, int]) -> Image.Image:
        mask = decode_mask(source, max_pixels=self.limits.max_pixels)
        width, height = size
        if not same_aspect(mask.size, size):
            raise RequestError(
                f"the mask has {mask.width} x {mask.height} pixels and the image {width} x {height}: with another aspect ratio it "
                "would not lie on the lesion. Send the mask of this image."
            )
        return mask

    def _selector(
        self, name: str, tokens: TokenBatch, budgets: list[float], lesion: np.ndarray | None, merged: dict[str, Merged]
    ) -> dict[str, Any]:
        classifier = self.model.classifier(name)
        selector = classifier.selector
        counts = [selector.count(budget, tokens.n) for budget in budgets]
        answer: dict[str, Any] = {"name": name, "kind": selector.kind, "k": counts, "order": None, "scores": None, "groups": None}
        answer |= {"retention": None, "ceiling": None}
        if isinstance(selector, Ranker):
            probabilities = self.model.classify(tokens, budgets, name)[0]
            selection, scores = select(selector, tokens, tokens.n)
            assert selection.indices is not None
            assert scores is not None
            order = selection.indices[0].cpu().numpy()
            answer["order"] = order.tolist()
            answer["scores"] = [float(f"{score:.6g}") for score in scores[0].cpu().double().tolist()]
            if lesion is not None and lesion.any():
                answer |= retention(order, lesion, counts)
        else:
            # Two methods can share a merger and differ in the training of their heads.
            described = describe(classifier)
            key = json.dumps([described["selector"], described["options"]], sort_keys=True)
            if key not in merged:
                merged[key] = _merge(selector, tokens, counts)
            answer["groups"] = merged[key].groups
            probabilities = classifier.head(merged[key].pooled).softmax(-1).cpu().numpy()
        answer["probabilities"] = [[round(float(p), 6) for p in row] for row in probabilities]
        return answer


def _merge(selector: Selector, tokens: TokenBatch, counts: Sequence[int]) -> Merged:
    selections = {k: select(selector, tokens, k)[0] for k in sorted(set(counts))}
    pooled = torch.cat([selections[k].pooled() for k in counts])
    return Merged([selections[k].assignment[0].tolist() for k in counts], pooled)


def needs_mask(selector: Selector) -> bool:
    return "lesion" in selector.requires


def checked_budgets(asked: Sequence[float]) -> list[float]:
    """The ten budgets and the ones asked for, each once, ascending."""
    if len(asked) > MAX_BUDGETS:
        raise RequestError(f"at most {MAX_BUDGETS} budgets in one request, got {len(asked)}.")
    wrong = [budget for budget in asked if not 0 < budget <= 1]
    if wrong:
        raise BudgetError(f"a token budget lies in (0, 1], got {wrong[0]!r}.")
    return sorted({*BUDGETS, *asked})


def retention(order: np.ndarray, lesion: np.ndarray, counts: Sequence[int]) -> dict[str, list[float]]:
    """Share of the lesion patches among the first K of `order` [N], and the largest share that any K patches can hold."""
    total = int(lesion.sum())
    kept = np.cumsum(lesion[order])
    return {
        "retention": [round(float(kept[k - 1] / total), 6) for k in counts],
        "ceiling": [round(min(k, total) / total, 6) for k in counts],
    }


def _preview(image: Image.Image) -> str:
    """The picture as it was read, small enough to be shown, as a data address."""
    small = image.copy()
    small.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    small.save(stream, format="JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
