"""`RoutedNetwork`: frozen backbone and routed classifiers as one `nn.Module`, from images to tokens to logits.

The backbone is named and hashed, not copied. It is loaded when it is first needed, and rejected if it is not the one that the
classifiers were trained on. `MedTokenBudget` adds answers for files and folders, saving and loading.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.preprocess import luminance
from medtokenbudget.backbone.shards import routed_early
from medtokenbudget.config import BackboneConfig, TrainConfig
from medtokenbudget.data import patch_labels
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import BudgetError, MismatchError, RequestError, ShapeError, UnknownNameError
from medtokenbudget.model import folder as files
from medtokenbudget.model import parts
from medtokenbudget.model.classifiers import Classifiers
from medtokenbudget.model.early import EarlyRouting
from medtokenbudget.model.guarantee import Guarantee, find_guarantee
from medtokenbudget.model.sources import expand
from medtokenbudget.routing.conformal import Promise
from medtokenbudget.tokens import SIGNALS, TokenBatch
from medtokenbudget.training.classifier import RoutedClassifier
from medtokenbudget.training.familiarity import Familiarity

if TYPE_CHECKING:
    from medtokenbudget.model.routed import MedTokenBudget

DEFAULT_BUDGET = 0.3


class RoutedNetwork(nn.Module):
    """A frozen backbone with one or more trained routed classifiers; `MedTokenBudget` says what its arguments are."""

    classifiers: Classifiers
    familiarity: Familiarity | None

    def __init__(
        self,
        backbone: BackboneConfig,
        backbone_fingerprint: dict[str, Any],
        classes: Sequence[str],
        classifiers: Mapping[str, RoutedClassifier],
        train_config: TrainConfig,
        *,
        main: str,
        card: str = "",
        info: dict[str, Any] | None = None,
        scout: MedTokenBudget | None = None,
        familiarity: Familiarity | None = None,
        guarantees: Sequence[Guarantee] = (),
        device: str = "auto",
    ) -> None:
        super().__init__()
        if main not in classifiers:
            methods = ", ".join(classifiers) or "none"
            raise RequestError(f"The main method '{main}' has no classifier. Methods with a classifier: {methods}.")
        wrong = [name for name, classifier in classifiers.items() if (classifier.head is None) is bool(classes)]
        if wrong:
            has = "has no head, but the model has classes" if classes else "has a head, but the model has no classes"
            raise RequestError(f"The method '{wrong[0]}' {has}. Give every method a head, or none.")
        self.backbone_config = backbone
        self.backbone_fingerprint: dict[str, Any] = json.loads(json.dumps(backbone_fingerprint))
        self.classes = tuple(classes)
        self.train_config = train_config
        self.main = main
        self.card = card
        self.info: dict[str, Any] = dict(info or {})
        self.guarantees = tuple(guarantees)
        self._backbone: Backbone | None = None
        if (self.early is None) is not (scout is None):
            raise RequestError("A model whose backbone is routed early needs its router, and no other model has one.")
        # Not a submodule: like the backbone it is frozen and no part of `parameters()` and `state_dict()`.
        self._scout = (scout,)
        self.classifiers = Classifiers(classifiers)
        self.familiarity = familiarity
        self.to(resolve_device(device))
        self.eval()

    def __repr__(self) -> str:
        h, w = self.grid
        others = ", ".join(self.selectors[1:]) or "none"
        rows = {
            "backbone": f"{Path(self.backbone_fingerprint['name']).name}, {self.backbone_fingerprint['image_size']} pixels",
            "grid": f"{h} x {w} patches of {self.dim} numbers",
            "classes": f"{len(self.classes)} ({', '.join(self.classes)})" if self.classes else "none: a router without a head",
            "main": self.main,
            "others": others,
            "device": str(self.device),
        }
        if self.guarantees:
            rows["promises"] = "; ".join(str(guarantee) for guarantee in self.guarantees)
        return "MedTokenBudget(\n" + "\n".join(f"  {name + ':':<10}{text}" for name, text in rows.items()) + "\n)"

    @property
    def device(self) -> torch.device:
        """Device of the parameters; the CPU if no method has any."""
        first = next(self.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def has_head(self) -> bool:
        """Whether the model predicts classes; a router that was trained from masks alone only keeps patches."""
        return bool(self.classes)

    @property
    def selectors(self) -> list[str]:
        """Methods that this model has a trained classifier for: the main one first, then the others by name."""
        return [self.main, *sorted(name for name in self.classifiers if name != self.main)]

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w) of the patches."""
        h, w = self.backbone_fingerprint["grid"]
        return int(h), int(w)

    @property
    def dim(self) -> int:
        """Embedding dimension D."""
        return int(self.backbone_fingerprint["dim"])

    @property
    def early(self) -> dict[str, Any] | None:
        """How the backbone is routed early (way, budget, k, ...); None for a backbone that runs on all patches."""
        found: dict[str, Any] | None = self.backbone_fingerprint.get("route")
        return found

    @property
    def scout(self) -> MedTokenBudget | None:
        """The router that chooses for the backbone; None for a backbone that runs on all patches."""
        return self._scout[0]

    @property
    def fixed_budget(self) -> float | None:
        """The only budget of a model whose backbone runs on the kept patches alone; None for any other model."""
        return float(self.early["budget"]) if self.early is not None and routed_early(self.backbone_fingerprint) else None

    def budget(self, asked: float | None) -> float:
        """The budget that was asked for, by default 0.3 or the model's only one.

        Raises:
            BudgetError: The model has only one, and it is another.
        """
        fixed = self.fixed_budget
        if fixed is not None and asked not in (None, fixed):
            raise BudgetError(
                f"The backbone of this model runs on {self.backbone_fingerprint['route']['k']} patches (budget {fixed:g}), and its "
                f"head was trained on these, so there is no other budget. Use {fixed:g}, or extract and train at {asked:g}."
            )
        return fixed if fixed is not None else DEFAULT_BUDGET if asked is None else asked

    @property
    def backbone(self) -> Backbone:
        """The backbone, loaded on first use and compared with the one that the classifiers were trained on."""
        if self._backbone is None:
            weights = self.backbone_config.weights
            if weights is not None and not Path(weights).is_file():
                raise RequestError(
                    f"The weights of the backbone are missing: {weights} (SHA-256 {self.backbone_fingerprint['weights']}). "
                    "Put the file into the folder of the model, or pass --weights FILE."
                )
            loaded = Backbone.load(self.backbone_config, self.device)
            if self.early is not None and self.scout is not None:
                loaded = EarlyRouting.of(self.early, self.scout).wrap(loaded)
            self.use_backbone(loaded)
        assert self._backbone is not None
        return self._backbone

    def use_backbone(self, backbone: Backbone) -> Self:
        """Use a backbone that is already loaded, for example one for several models; another one is rejected."""
        expected, found = comparable(self.backbone_fingerprint), comparable(backbone.fingerprint)
        if expected != found:
            raise MismatchError.between(
                "The backbone",
                expected,
                found,
                "The classifiers were trained on tokens of another backbone. Use its weights and image size.",
            )
        self._backbone = backbone
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Everything that moves a module (`to`, `cuda`, `cpu`) ends here; the backbone is no submodule and follows by hand."""
        super()._apply(fn, recurse)
        if self._backbone is not None:
            self._backbone.to(self.device)
        if self.scout is not None:
            self.scout.to(self.device)
        return self

    def classifier(self, selector: str | None = None) -> RoutedClassifier:
        """Selector and head of a method (default: the main one)."""
        method = self.main if selector is None else selector
        if method not in self.classifiers:
            raise UnknownNameError.of("selector", method, self.classifiers, "in this model")
        return self.classifiers[method]

    def k(self, budget: float, selector: str | None = None) -> int:
        """Number of tokens kept at a budget."""
        h, w = self.grid
        n = h * w if self.fixed_budget is None else int(self.backbone_fingerprint["route"]["k"])
        return self.classifier(selector).selector.count(self.budget(budget), n)

    def amount(self, asked: float | Guarantee | None) -> float | Guarantee:
        """A guarantee as it is, or the `budget` that was asked for."""
        return asked if isinstance(asked, Guarantee) else self.budget(asked)

    def guarantee(self, retention: float, coverage: float | None = None, selector: str | None = None) -> Guarantee:
        """A calibrated promise about the lesion, to be used instead of a budget.

        Args:
            retention: Promised share of the lesion patches.
            coverage: None for the promise on average, or the promised share of the images that keep at least `retention`.
            selector: Method; None means the main one.

        Raises:
            RequestError: The model was not calibrated for this promise.
        """
        method = self.main if selector is None else selector
        self.classifier(method)
        return find_guarantee(self.guarantees, Promise(retention, coverage), method, self.fingerprint)

    @property
    def signals(self) -> tuple[str, ...]:
        """The default signals of the backbone, and those that a selector of this model reads."""
        read = [name for method in self.classifiers for name in self.classifiers[method].selector.requires if name in SIGNALS]
        return tuple(dict.fromkeys([*self.backbone.default_signals, *read]))

    @torch.no_grad()
    def encode(self, pixels: np.ndarray | Tensor, masks: Sequence[Image.Image | None] | None = None) -> TokenBatch:
        """Run the backbone on images that are already resized.

        Args:
            pixels: uint8 [B, S, S, 3] as `backbone.prepare` returns them.
            masks: One lesion mask per image, None for an image without.

        Returns:
            Tokens with luminance and, if any image has a mask, with lesion labels.
        """
        batch = torch.as_tensor(pixels).to(self.device)
        size = self.backbone.preprocessing.image_size
        if batch.dtype != torch.uint8 or batch.ndim != 4 or tuple(batch.shape[1:]) != (size, size, 3):
            found = f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
            raise ShapeError(f"Images must be uint8 [B, {size}, {size}, 3], got {found}.")
        # Not through Backbone.__call__: its inference tensors could not be used for training a head.
        images = self.backbone.normalize(batch).to(self.backbone.device)
        tokens = self.backbone.tokens(images, self.signals).to(self.device)
        tokens = replace(tokens, luminance=luminance(batch, tokens.grid))
        if masks is None or all(mask is None for mask in masks):
            return tokens
        empty = np.zeros(tokens.grid[0] * tokens.grid[1], dtype=bool)
        lesion = np.stack([empty if mask is None else patch_labels(mask, tokens.grid) for mask in masks])
        known = torch.tensor([mask is not None for mask in masks], device=self.device)
        return replace(tokens, lesion=torch.from_numpy(lesion).to(self.device), has_mask=known)

    def tokens(self, images: Any) -> TokenBatch:
        """Tokens of a few images, passed in any form that `predict` takes. A `TokenBatch` is only moved to the model's device."""
        if isinstance(images, TokenBatch):
            return images.to(self.device)
        return self.encode(np.stack([self.backbone.prepare(source.open()) for source in expand(images)]))

    def forward(self, images: Any, budget: float | None = None, selector: str | None = None) -> Tensor:
        """Class logits at one budget, with gradients for the head.

        Args:
            images: A `TokenBatch`, or images in any form that `predict` takes.
            budget: Share of the patches that is kept, in (0, 1]; None means 0.3, or the only one of a model routed early.
            selector: Method to use; None means the main one.

        Returns:
            Logits [B, C].
        """
        tokens = self.tokens(images)
        classifier = self.classifier(selector)
        selection, _ = parts.select(classifier.selector, tokens, classifier.selector.count(self.budget(budget), tokens.n))
        return classifier.required_head.read(selection, tokens.grid)

    def router(self, budget: float, selector: str | None = None) -> parts.Router:
        """A function from tokens to the kept ones, for use in other models."""
        chosen = self.classifier(selector).selector
        chosen.count(budget, 1)
        return parts.Router(chosen, budget)

    @torch.inference_mode()
    def classify(self, images: Any, budgets: Sequence[float], selector: str | None = None) -> np.ndarray:
        """Class probabilities [B, len(budgets), C] of tokens or images; rankers order the patches only once for all budgets."""
        classifier = self.classifier(selector)
        with parts.evaluating(classifier):
            return parts.probabilities(classifier, self.tokens(images), budgets).cpu().numpy()

    @property
    def identity(self) -> dict[str, Any]:
        """What all files of a saved model must agree on."""
        return {
            "backbone": self.backbone_fingerprint,
            "classes": list(self.classes),
            "main": self.main,
            "selectors": {name: parts.describe(self.classifiers[name]) for name in self.selectors},
        }

    @property
    def fingerprint(self) -> str:
        """One hash of the whole model: backbone, preprocessing, classes, methods and every number of the classifiers."""
        return files.fingerprint(self.identity, self._tensors())

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return parts.tensors(self.classifiers, self.main, self.familiarity)


def comparable(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint without the parent folders of a backbone folder, which may be elsewhere on another machine."""
    values = json.loads(json.dumps(fingerprint))
    return {**values, "name": Path(values["name"]).name}
