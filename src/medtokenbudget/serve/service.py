"""The answers of the service: every method of a model at many budgets, from one pass of the backbone over one image.

No HTTP here: the files and fields of a form come in, JSON values go out, so it can be tested and used without a server.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from medtokenbudget import __version__
from medtokenbudget.config import BUDGETS, USE_NOTICE
from medtokenbudget.config import NOTICE as SHORT_NOTICE
from medtokenbudget.data import decode_image, decode_mask, same_aspect
from medtokenbudget.errors import BudgetError, RequestError
from medtokenbudget.metrics import retention_of_counts
from medtokenbudget.model import Guarantee, MedTokenBudget
from medtokenbudget.model.inference import select
from medtokenbudget.model.looks import look
from medtokenbudget.routing import Ranker
from medtokenbudget.routing.trainable import ScoredRanker
from medtokenbudget.tokens import Selection, TokenBatch

NOTICE = f"{SHORT_NOTICE} {USE_NOTICE}"
STATIC = Path(__file__).parent / "static"
FILES, FIELDS = ("image", "mask"), ("selectors", "budgets", "retention", "preview")
DEMO_MODEL = Path("runs/demo/model")
MAX_BUDGETS = 128
PREVIEW_SIDE = 1024


def index_page() -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    return page.replace("{{ notice }}", SHORT_NOTICE).replace("{{ use_notice }}", USE_NOTICE)


def docs_page(openapi: dict[str, Any]) -> str:
    """Write the OpenAPI description as a page that loads nothing from elsewhere."""

    def listed(rows: Mapping[str, Any]) -> str:
        return "".join(f"<dt>{escape(name)}</dt><dd>{escape(row.get('description', ''))}</dd>" for name, row in rows.items())

    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'><title>MedTokenBudget API</title>"
    parts = [f"<h1>MedTokenBudget API</h1><p>{escape(openapi['info']['description'])} <a href='openapi.json'>openapi.json</a></p>"]
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            form = operation.get("requestBody", {}).get("content", {}).get("multipart/form-data", {}).get("schema", {})
            fields, answers = listed(form.get("properties", {})), listed(operation["responses"])
            title = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['description'])}</p>"
            parts.append(f"<section class=card>{title}<dl>{fields}</dl><h3>Responses</h3><dl>{answers}</dl></section>")
    head += "<link rel=stylesheet href='static/explorer.css'>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><main class=docs>{''.join(parts)}</main></body></html>"


class FieldError(RequestError):
    """A form that cannot be understood; `code` names the fault for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Question:
    """One image file, its mask if there is one, and what to compute for it."""

    image: bytes
    mask: bytes | None = None
    selectors: tuple[str, ...] = ()
    """Methods to run; empty means every method that can run."""
    budgets: tuple[float, ...] = ()
    """Budgets in addition to the ten standard ones."""
    retentions: tuple[float, ...] = ()
    """Calibrated promises to answer; empty means all that the model has."""
    preview: bool = False
    """Whether to return the decoded image too."""

    @classmethod
    def from_form(cls, files: Mapping[str, bytes], fields: Mapping[str, Sequence[str]]) -> Question:
        """Read the question from a form. Fields with several values may be repeated, or hold values separated by commas."""
        for name in FILES:
            if name in fields:
                raise FieldError("not_a_file", f"'{name}' was sent as text. Send it as a file, with a file name.")
        for kind, given, known in (("file field", files, FILES), ("field", fields, FIELDS)):
            if unknown := [name for name in given if name not in known]:
                raise FieldError("unknown_field", f"Unknown {kind} '{unknown[0][:60]}'. Available: {', '.join(known)}.")
        if "image" not in files:
            raise FieldError("no_image", "The file field 'image' is missing.")
        preview = list(fields.get("preview", ["false"]))
        if preview not in (["true"], ["false"]):
            raise FieldError("bad_preview", "'preview' must be 'true' or 'false'.")
        items = {name: [item.strip() for value in fields.get(name, ()) for item in value.split(",")] for name in FIELDS}
        return cls(
            image=files["image"],
            mask=files.get("mask"),
            selectors=tuple(items["selectors"]),
            budgets=tuple(_number(text, "bad_budget", "A token budget") for text in items["budgets"]),
            retentions=tuple(_number(text, "bad_retention", "A promised retention") for text in items["retention"]),
            preview=preview == ["true"],
        )


def _number(text: str, code: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FieldError(code, f"{what} must be a number in (0, 1], got '{text[:60]}'.") from None


class Service:
    """Answers questions about images with one model. `answer` is not thread-safe: the server asks one question at a time.

    `demo` says that this is the demo model, which was trained on synthetic images; `name` is what `load` takes, unless it is a
    folder, which is private; the limits are those of `ServeConfig`.
    """

    def __init__(
        self,
        model: MedTokenBudget,
        max_bytes: int = 25_000_000,
        max_pixels: int = 50_000_000,
        demo: bool = False,
        name: str = "MODEL",
    ) -> None:
        self.model, self.max_bytes, self.max_pixels, self.demo, self.name = model, max_bytes, max_pixels, demo, name or "MODEL"
        # Computed once, because it hashes every weight of the model.
        self.fingerprint = model.fingerprint
        self.guarantees = [guarantee for guarantee in model.guarantees if guarantee.model == self.fingerprint]

    def seer(self, name: str) -> ScoredRanker | None:
        """Return the selector of a method that knows a lesion probability; None for any other."""
        try:
            return self.model.require_lesion_map(name)
        except RequestError:
            return None

    def describe(self) -> dict[str, Any]:
        (h, w), early = self.model.grid, self.model.early
        return {
            "version": __version__,
            "notice": NOTICE,
            "demo": self.demo,
            "name": self.name,
            "fingerprint": self.fingerprint,
            "backbone": str(self.model.backbone_fingerprint["name"]),
            "classes": list(self.model.classes),
            "grid": [h, w],
            "n": h * w,
            "budgets": list(BUDGETS) if self.model.fixed_budget is None else [self.model.fixed_budget],
            "route": None if early is None else {name: value for name, value in early.items() if name != "router"},
            "main": self.model.main,
            "selectors": [self._describe_method(name) for name in self.model.selectors],
            "limits": {"max_bytes": self.max_bytes, "max_pixels": self.max_pixels, "max_budgets": MAX_BUDGETS},
        }

    def _describe_method(self, name: str) -> dict[str, Any]:
        selector, title, about = self.model.classifier(name).selector, look(name).title, look(name).description
        if self.model.fixed_budget is not None:
            title, about = f"Routed early, {title}", "The backbone ran on these patches alone, and the head reads all of them."
        described = {field: getattr(selector, field) for field in ("kind", "learns", "stochastic", "minimum")}
        return {"name": name, "title": title, "about": about, "needs_mask": self._needs_mask(name), **described}

    def _needs_mask(self, name: str) -> bool:
        return "lesion" in self.model.classifier(name).selector.requires

    @torch.inference_mode()
    def answer(self, question: Question) -> dict[str, Any]:
        """Return patch order, scores, class probabilities (with a head) and retention (with a mask) of every method."""
        names = list(dict.fromkeys(question.selectors)) or self.model.selectors
        if question.mask is None and (masked := [name for name in names if self._needs_mask(name)]):
            if question.selectors:
                raise RequestError(f"Method '{masked[0]}' needs a lesion mask. Send a mask, or leave this method out.")
            # Of all methods, those that cannot run are left out; one that was named is an error above.
            names = [name for name in names if name not in masked]
        budgets, guarantees = self._budgets(question.budgets), self._promised(question.retentions, names)
        image, mask = decode_image(question.image, self.max_pixels), None
        if question.mask is not None:
            mask = decode_mask(question.mask, self.max_pixels)
            if not same_aspect(mask.size, image.size):
                raise RequestError(
                    f"The mask has {mask.width} x {mask.height} pixels, but the image has {image.width} x {image.height}. "
                    "Send a mask with the same aspect ratio as the image."
                )
        tokens = self.model.encode(self.model.backbone.prepare(image)[None], [mask])
        lesion = None if tokens.lesion is None else tokens.lesion[0].cpu().numpy()
        unfamiliarity = self.model.unfamiliarity(tokens)
        merged: dict[tuple[str, int], Selection] = {}
        return {
            "model": self.fingerprint,
            "notice": NOTICE,
            "image": {"width": image.width, "height": image.height, "preview": _preview(image) if question.preview else None},
            "grid": list(tokens.grid),
            "n": tokens.grid[0] * tokens.grid[1],
            "classes": list(self.model.classes),
            "budgets": budgets,
            "lesion": None if lesion is None else np.flatnonzero(lesion).tolist(),
            "unfamiliarity": None if unfamiliarity is None else round(float(unfamiliarity[0]), 4),
            "selectors": [
                {
                    **self._answer_of(name, tokens, budgets, lesion, guarantees, merged),
                    "lesion_map": self._lesion_map(name, tokens, image),
                }
                for name in names
            ],
        }

    def _lesion_map(self, name: str, tokens: TokenBatch, image: Image.Image) -> dict[str, Any] | None:
        seer = self.seer(name)
        if seer is None:
            return None
        seen = self.model.lesion_map(image) if self.model.scout else seer.see(seer.check(tokens)).lesion[0].cpu().numpy()
        return {"grid": list(seen.shape), "values": [float(f"{value:.6g}") for value in seen.ravel().tolist()]}

    def _budgets(self, asked: Sequence[float]) -> list[float]:
        """Return the ten standard budgets and the requested ones, sorted, or the only one of a model that is routed early."""
        if len(asked) > MAX_BUDGETS:
            raise RequestError(f"A request can have at most {MAX_BUDGETS} budgets, got {len(asked)}.")
        # NaN is in no range, so it is refused too.
        if wrong := [budget for budget in asked if not 0 < budget <= 1]:
            raise BudgetError(f"A token budget must be in (0, 1], got {wrong[0]!r}.")
        if self.model.fixed_budget is None:
            return sorted({*BUDGETS, *asked})
        return list({self.model.budget(budget) for budget in (*asked, None)})

    def _promised(self, asked: Sequence[float], names: Sequence[str]) -> list[Guarantee]:
        """Return the guarantees of these methods that were asked for, by default all; one that no method has is an error."""
        calibrated = [guarantee for guarantee in self.guarantees if guarantee.selector in names]
        for retention in asked:
            if retention not in [guarantee.retention for guarantee in calibrated]:
                self.model.guarantee(retention, selector=names[0])
        return [guarantee for guarantee in calibrated if not asked or guarantee.retention in asked]

    def _answer_of(
        self,
        name: str,
        tokens: TokenBatch,
        budgets: list[float],
        lesion: np.ndarray | None,
        guarantees: Sequence[Guarantee],
        merged: dict[tuple[str, int], Selection],
    ) -> dict[str, Any]:
        """Answer with one method; `merged` has the selections of mergers that other methods made before."""
        classifier = self.model.classifier(name)
        selector, head = classifier.selector, classifier.head
        counts = [selector.count(budget, tokens.n) for budget in budgets]
        order = scores = groups = kept = probabilities = None
        promises = []
        if isinstance(selector, Ranker):
            probabilities = None if head is None else self.model.classify(tokens, budgets, name)[0]
            selection = select(selector, tokens, tokens.n)
            assert selection.indices is not None
            order = selection.indices[0].tolist()
            if selection.scores is not None:  # not if the backbone was routed early
                values = selection.scores.cpu().double().numpy()
                scores = [float(f"{score:.6g}") for score in values[0]]
                for guarantee in guarantees:
                    if guarantee.selector == name:
                        promises.append(self._promise(guarantee, tokens, int(guarantee.counts(values)[0])))
            kept = [order[:k] for k in counts]
        else:
            # Several methods can share a merger and differ only in their heads.
            merger = json.dumps([selector.name, selector.options()], sort_keys=True)
            for k in counts:
                if (merger, k) not in merged:
                    merged[merger, k] = select(selector, tokens, k)
            selections = [merged[merger, k] for k in counts]
            groups = [selection.assignment[0].tolist() for selection in selections]
            if selector.kind == "sampler":
                kept = [np.flatnonzero(np.asarray(group) >= 0).tolist() for group in groups]
            if head is not None:
                logits = torch.cat([head.read(selection, tokens.grid) for selection in selections])
                probabilities = logits.softmax(-1).cpu().numpy()
        measured = dict.fromkeys(("retention", "ceiling", "retention_of_ceiling"))
        if lesion is not None and kept is not None and lesion.any():
            measured |= retention(kept, lesion, counts)
        return {
            "name": name,
            "kind": selector.kind,
            "k": counts,
            "order": order,
            "scores": scores,
            "groups": groups,
            **measured,
            "promises": promises,
            "probabilities": None if probabilities is None else [[round(float(p), 6) for p in row] for row in probabilities],
        }

    def _promise(self, guarantee: Guarantee, tokens: TokenBatch, k: int) -> dict[str, Any]:
        classifier, probabilities = self.model.classifier(guarantee.selector), None
        if classifier.head is not None:
            selection = select(classifier.selector, tokens, k)
            probabilities = [round(p, 6) for p in classifier.head.read(selection, tokens.grid)[0].softmax(-1).tolist()]
        return {"retention": guarantee.retention, "coverage": guarantee.coverage, "k": k, "probabilities": probabilities}


def is_demo(model: str | Path) -> bool:
    return Path(model).resolve() in (DEMO_MODEL.resolve(), DEMO_MODEL.parent.resolve())


def retention(kept: Sequence[Any], lesion: np.ndarray, counts: Sequence[int]) -> dict[str, list[float]]:
    rows = [retention_of_counts([lesion[one].sum()], [lesion.sum()], [k], [lesion.size]) for one, k in zip(kept, counts)]
    return {
        "retention": [round(row.pooled, 6) for row in rows],
        "ceiling": [round(row.ceiling, 6) for row in rows],
        "retention_of_ceiling": [round(row.of_ceiling, 6) for row in rows],
    }


def _preview(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    small.save(stream, format="JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
