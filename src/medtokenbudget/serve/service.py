"""The answers of the service: every method of a model at many budgets, from one pass of the backbone over one image.

No HTTP here: the files and fields of a form come in, JSON values go out, so it can be tested and used without a server.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from medtokenbudget import __version__
from medtokenbudget.config import BUDGETS, USE_NOTICE
from medtokenbudget.config import NOTICE as SHORT_NOTICE
from medtokenbudget.data import decode_image, decode_mask, same_aspect
from medtokenbudget.errors import BudgetError, RequestError
from medtokenbudget.metrics import retention_of_counts
from medtokenbudget.model import Guarantee, MedTokenBudget
from medtokenbudget.model.guarantee import find_guarantee
from medtokenbudget.model.inference import select
from medtokenbudget.model.looks import look
from medtokenbudget.model.saved import describe
from medtokenbudget.routing import Ranker, Selector
from medtokenbudget.routing.conformal import Promise
from medtokenbudget.tokens import Selection, TokenBatch

NOTICE = f"{SHORT_NOTICE} {USE_NOTICE}"
STATIC = Path(__file__).parent / "static"
FILES, FIELDS = ("image", "mask"), ("selectors", "budgets", "retention", "preview")
DEMO_MODEL = Path("runs/demo/model")
MAX_BUDGETS = 128
PREVIEW_SIDE = 1024


def index_page() -> str:
    """Return the page of the explorer."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    return page.replace("{{ notice }}", SHORT_NOTICE).replace("{{ use_notice }}", USE_NOTICE)


@dataclass(frozen=True)
class Limits:
    """The largest request that is accepted.

    Attributes:
        max_bytes: Largest size of image and mask together.
        max_pixels: Largest number of pixels of an image or a mask.
    """

    max_bytes: int = 25_000_000
    max_pixels: int = 50_000_000


class FieldError(RequestError):
    """A form that cannot be understood; `code` names the fault for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Question:
    """One image and what to compute for it.

    Attributes:
        image: Bytes of an image file.
        mask: Bytes of the lesion mask of this image, if there is one.
        selectors: Methods to run; empty means every method that can run.
        budgets: Budgets in addition to the ten standard ones.
        retentions: Calibrated promises to answer; empty means all that the model has.
        preview: Whether to return the decoded image too.
    """

    image: bytes
    mask: bytes | None = None
    selectors: tuple[str, ...] = ()
    budgets: tuple[float, ...] = ()
    retentions: tuple[float, ...] = ()
    preview: bool = False

    @classmethod
    def from_form(cls, files: Mapping[str, bytes], fields: Mapping[str, Sequence[str]]) -> Question:
        """Read the question from a form. Fields with several values may be repeated, or hold values separated by commas.

        Raises:
            FieldError: If a file or a field is unknown or missing, or a value cannot be read.
        """
        for name in FILES:
            if name in fields:
                raise FieldError("not_a_file", f"'{name}' was sent as text. Send it as a file, with a file name.")
        for kind, given, known in (("file field", files, FILES), ("field", fields, FIELDS)):
            for name in given:
                if name not in known:
                    raise FieldError("unknown_field", f"Unknown {kind} '{name[:60]}'. Available: {', '.join(known)}.")
        if "image" not in files:
            raise FieldError("no_image", "The file field 'image' is missing.")
        items = {name: [item.strip() for value in fields.get(name, ()) for item in value.split(",")] for name in FIELDS}
        preview = fields.get("preview", ["false"])
        if list(preview) not in (["true"], ["false"]):
            raise FieldError("bad_preview", "'preview' must be 'true' or 'false'.")
        return cls(
            image=files["image"],
            mask=files.get("mask"),
            selectors=tuple(items["selectors"]),
            budgets=tuple(_number(text, "bad_budget", "A token budget") for text in items["budgets"]),
            retentions=tuple(_number(text, "bad_retention", "A promised retention") for text in items["retention"]),
            preview=preview[0] == "true",
        )


def _number(text: str, code: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FieldError(code, f"{what} must be a number in (0, 1], got '{text[:60]}'.") from None


@dataclass(frozen=True)
class Merged:
    """A merger at several K: `groups` has the output token of each patch, `selections` is what heads read."""

    groups: list[list[int]]
    selections: list[Selection]


class Service:
    """Answers questions about images with one model.

    `answer` is not thread-safe: the server asks one question at a time.

    Args:
        model: The model to use.
        limits: The largest request that is accepted.
        demo: Whether this is the demo model, which was trained on synthetic images.
    """

    def __init__(self, model: MedTokenBudget, limits: Limits | None = None, demo: bool = False) -> None:
        self.model = model
        self.limits = limits or Limits()
        self.demo = demo
        # Computed once, because it hashes every weight of the model.
        self.fingerprint = model.fingerprint
        self.guarantees = [one for one in model.guarantees if one.model == self.fingerprint]

    def warm(self) -> Service:
        """Load and check the backbone now instead of during the first question."""
        size = self.model.backbone.preprocessing.image_size
        self.model.encode(np.zeros((1, size, size, 3), dtype=np.uint8))
        return self

    def describe(self) -> dict[str, Any]:
        """Return the classes, methods, budgets, grid, fingerprint and limits of the model."""
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
            "budgets": list(BUDGETS) if self.model.fixed_budget is None else [self.model.fixed_budget],
            "route": self._early(),
            "main": self.model.main,
            "selectors": [self._described(name) for name in self.model.selectors],
            "limits": {"max_bytes": self.limits.max_bytes, "max_pixels": self.limits.max_pixels, "max_budgets": MAX_BUDGETS},
        }

    def _early(self) -> dict[str, Any] | None:
        """How the backbone is routed early; None if it runs on all patches."""
        early = self.model.early
        return None if early is None else {name: value for name, value in early.items() if name != "router"}

    def _described(self, name: str) -> dict[str, Any]:
        selector, shown = self.model.classifier(name).selector, look(name)
        title, about = shown.title, shown.description
        if self.model.fixed_budget is not None:
            title, about = (
                f"Routed early, {shown.title}",
                "The backbone ran on these patches alone, and the head reads all of them.",
            )
        return {
            "name": name,
            "title": title,
            "about": about,
            "kind": selector.kind,
            "learns": selector.learns,
            "stochastic": selector.stochastic,
            "needs_mask": needs_mask(selector),
            "minimum": selector.minimum,
        }

    @torch.inference_mode()
    def answer(self, question: Question) -> dict[str, Any]:
        """Return patch order, scores and, if the model has a head, class probabilities of every method; with a mask also retention.

        Raises:
            RequestError: If the image, the mask, a method or a budget cannot be used, or a promise was not calibrated.
        """
        names = self._names(question)
        budgets, promised = checked_budgets(question.budgets), self._promised(question.retentions, names)
        if self.model.fixed_budget is not None:
            budgets = list({self.model.budget(asked) for asked in (*question.budgets, None)})
        image = decode_image(question.image, self.limits.max_pixels)
        mask = None if question.mask is None else self._mask(question.mask, image.size)
        tokens = self.model.encode(self.model.backbone.prepare(image)[None], None if mask is None else [mask])
        lesion = None if tokens.lesion is None else tokens.lesion[0].cpu().numpy()
        merged: dict[str, Merged] = {}
        familiarity = self.model.familiarity
        return {
            "model": self.fingerprint,
            "notice": NOTICE,
            "image": {"width": image.width, "height": image.height, "preview": _preview(image) if question.preview else None},
            "grid": list(tokens.grid),
            "n": tokens.grid[0] * tokens.grid[1],
            "classes": list(self.model.classes),
            "budgets": budgets,
            "lesion": None if lesion is None else np.flatnonzero(lesion).tolist(),
            "unfamiliarity": None if familiarity is None else round(float(familiarity(tokens)[0]), 4),
            "selectors": [
                self._selector(name, tokens, budgets, lesion, merged, [one for one in promised if one.selector == name])
                for name in names
            ],
        }

    def _names(self, question: Question) -> list[str]:
        masked = [name for name in self.model.selectors if needs_mask(self.model.classifier(name).selector)]
        if not question.selectors:
            return [name for name in self.model.selectors if question.mask is not None or name not in masked]
        names = list(dict.fromkeys(question.selectors))
        for name in names:
            self.model.classifier(name)
            if name in masked and question.mask is None:
                raise RequestError(f"Method '{name}' needs a lesion mask. Send a mask, or leave this method out.")
        return names

    def _promised(self, asked: Sequence[float], names: Sequence[str]) -> list[Guarantee]:
        """The guarantees of these methods that were asked for, by default all; one that no method has is an error."""
        own = [one for one in self.guarantees if one.selector in names]
        for retention in asked:
            if retention not in [one.retention for one in own]:
                find_guarantee(self.model.guarantees, Promise(retention), names[0], self.fingerprint)
        return [one for one in own if not asked or one.retention in asked]

    def _mask(self, source: bytes, size: tuple[int, int]) -> Image.Image:
        mask = decode_mask(source, self.limits.max_pixels)
        width, height = size
        if not same_aspect(mask.size, size):
            raise RequestError(
                f"The mask has {mask.width} x {mask.height} pixels, but the image has {width} x {height}. "
                "Send a mask with the same aspect ratio as the image."
            )
        return mask

    def _selector(
        self,
        name: str,
        tokens: TokenBatch,
        budgets: list[float],
        lesion: np.ndarray | None,
        merged: dict[str, Merged],
        promised: Sequence[Guarantee],
    ) -> dict[str, Any]:
        classifier = self.model.classifier(name)
        selector = classifier.selector
        counts = [selector.count(budget, tokens.n) for budget in budgets]
        answer: dict[str, Any] = {"name": name, "kind": selector.kind, "k": counts, "order": None, "scores": None, "groups": None}
        answer |= {"retention": None, "ceiling": None, "retention_of_ceiling": None, "promises": []}
        if isinstance(selector, Ranker):
            probabilities = self.model.classify(tokens, budgets, name)[0] if self.model.has_head else None
            selection, scores = select(selector, tokens, tokens.n)
            assert selection.indices is not None
            order = selection.indices[0].cpu().numpy()
            answer["order"] = order.tolist()
            if scores is not None:
                answer["scores"] = [float(f"{score:.6g}") for score in scores[0].cpu().double().tolist()]
                answer["promises"] = [self._promise(one, tokens, scores) for one in promised]
            if lesion is not None and lesion.any():
                answer |= retention(order, lesion, counts)
        else:
            # Several methods can share a merger and differ only in their heads.
            described = describe(classifier)
            key = json.dumps([described["selector"], described["options"]], sort_keys=True)
            if key not in merged:
                merged[key] = _merge(selector, tokens, counts)
            answer["groups"] = merged[key].groups
            if selector.kind == "sampler" and lesion is not None and lesion.any():
                kept = [int(lesion[np.asarray(groups) >= 0].sum()) for groups in merged[key].groups]
                answer |= _measured(kept, lesion, counts)
            probabilities = None
            if classifier.head is not None:
                heads_read = [classifier.head.read(selection, tokens.grid) for selection in merged[key].selections]
                probabilities = torch.cat(heads_read).softmax(-1).cpu().numpy()
        answer["probabilities"] = None if probabilities is None else [[round(float(p), 6) for p in row] for row in probabilities]
        return answer

    def _promise(self, guarantee: Guarantee, tokens: TokenBatch, scores: Tensor) -> dict[str, Any]:
        """How many patches of an image keep a calibrated promise, and the classes that the head reads from them."""
        k = int(guarantee.counts(scores.cpu().double().numpy())[0])
        classifier = self.model.classifier(guarantee.selector)
        probabilities = None
        if classifier.head is not None:
            selection = select(classifier.selector, tokens, k)[0]
            probabilities = [round(p, 6) for p in classifier.head.read(selection, tokens.grid)[0].softmax(-1).tolist()]
        return {"retention": guarantee.retention, "coverage": guarantee.coverage, "k": k, "probabilities": probabilities}


def _merge(selector: Selector, tokens: TokenBatch, counts: Sequence[int]) -> Merged:
    selections = {k: select(selector, tokens, k)[0] for k in sorted(set(counts))}
    return Merged([selections[k].assignment[0].tolist() for k in counts], [selections[k] for k in counts])


def is_demo(model: str | Path) -> bool:
    """Return whether this is the demo model, or its run."""
    return Path(model).resolve() in (DEMO_MODEL.resolve(), DEMO_MODEL.parent.resolve())


def needs_mask(selector: Selector) -> bool:
    """Return whether a selector needs the lesion mask."""
    return "lesion" in selector.requires


def checked_budgets(asked: Sequence[float]) -> list[float]:
    """Return the ten standard budgets and the requested ones, sorted, without repetition."""
    if len(asked) > MAX_BUDGETS:
        raise RequestError(f"A request can have at most {MAX_BUDGETS} budgets, got {len(asked)}.")
    wrong = [budget for budget in asked if not 0 < budget <= 1]
    if wrong:
        raise BudgetError(f"A token budget must be in (0, 1], got {wrong[0]!r}.")
    return sorted({*BUDGETS, *asked})


def retention(order: np.ndarray, lesion: np.ndarray, counts: Sequence[int]) -> dict[str, list[float]]:
    """Return the lesion retention of the first K patches of `order`, its ceiling and its share of the ceiling, for each K."""
    return _measured([int(lesion[order[:k]].sum()) for k in counts], lesion, counts)


def _measured(kept: Sequence[int], lesion: np.ndarray, counts: Sequence[int]) -> dict[str, list[float]]:
    """Retention, ceiling and share of the ceiling of `kept` lesion patches among K, for each K."""
    measured = [retention_of_counts([hits], [lesion.sum()], [k], [lesion.size]) for hits, k in zip(kept, counts)]
    return {
        "retention": [round(row.pooled, 6) for row in measured],
        "ceiling": [round(row.ceiling, 6) for row in measured],
        "retention_of_ceiling": [round(row.of_ceiling, 6) for row in measured],
    }


def _preview(image: Image.Image) -> str:
    """The decoded image as a data URL, reduced for display."""
    small = image.copy()
    small.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    small.save(stream, format="JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
