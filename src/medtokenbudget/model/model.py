"""`MedTokenBudget`: frozen backbone, routed classifiers, classes and preprocessing as one module that is saved and loaded whole.

The backbone is named and hashed, not copied. It is loaded when it is first needed, and rejected if it is not the one that the
classifiers were trained on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from medtokenbudget import config as settings
from medtokenbudget.backbone.backbone import PIXELS, Backbone, luminance
from medtokenbudget.backbone.store import FeatureStore
from medtokenbudget.config import DEFAULT_BUDGET, BackboneConfig, TrainConfig
from medtokenbudget.data import patch_labels
from medtokenbudget.errors import BudgetError, MismatchError, RequestError, ShapeError, UnknownNameError
from medtokenbudget.files import exclusive
from medtokenbudget.heads.head import RoutedClassifier
from medtokenbudget.model import inference, saved
from medtokenbudget.model.inference import Answer, ImageSource, Prediction, Routing, expand, open_picture
from medtokenbudget.routing import Ranker, pooled_means, rank
from medtokenbudget.routing.conformal import Guarantee, Promise
from medtokenbudget.routing.trainable import ScoredRanker, Sight, evaluating
from medtokenbudget.runtime import resolve_device
from medtokenbudget.tokens import SIGNALS, Selection, TokenBatch
from medtokenbudget.training.familiarity import Familiarity

DEFAULT_MODEL = "dermoscopy"
"""The router that comes with the package."""
Amount = float | str | Guarantee | None
"""Share of the patches to keep, such as 0.3 or '30%', or a guarantee; None means `DEFAULT_BUDGET`, or the only one of a model that
is routed early."""
Normalized = bool | inference.Statistics
"""Whether float tensors are normalized: True means with mean and std of the model, `(mean, std)` with others."""
OnError = Callable[[ImageSource], None] | None
"""Takes an image that could not be read, with the `reason`; None raises an error instead."""


class Extra(TypedDict, total=False):
    """Further arguments of `route` and `predict`."""

    batch_size: int
    retention: float | str | None
    normalized: Normalized


class MedTokenBudget(nn.Module):
    """A frozen backbone with one or more trained routed classifiers.

    Load one with `mtb.load`. It starts in evaluation mode. `parameters()` and `state_dict()` cover the classifiers; the frozen
    backbone follows `.to()` but belongs to neither.

    Args:
        backbone_fingerprint: `Backbone.fingerprint` of the backbone that the classifiers were trained on.
        classes: Class names in the order of the logits; empty for a router without a head.
        classifiers: Method text (such as 'lats:lesion-first' or 'center') to its selector and head.
        main: The method that is used unless another one is requested.
        info: What the run recorded about itself, as JSON values.
        scout: The router of a model whose backbone is routed early (`backbone_fingerprint` has a 'route').
        tokens_from: The backbone of the kept tokens, with its fingerprint, if the selectors read those of another one, such as
            pixels.

    Example:
        >>> model = mtb.load("runs/demo")
        >>> model.main
        'lats:lesion-first'
        >>> model.predict("photo.jpg", budget=0.3)[0].k
        30
    """

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
        tokens_from: tuple[BackboneConfig, dict[str, Any]] | None = None,
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
        self.backbone_config, self.train_config, self.main, self.card = backbone, train_config, main, card
        # As it comes back from a file, with lists for tuples, so that the two can be compared.
        self.backbone_fingerprint: dict[str, Any] = json.loads(json.dumps(backbone_fingerprint))
        self.classes, self.guarantees, self.info = tuple(classes), tuple(guarantees), dict(info or {})
        self.tokens_from = None if tokens_from is None else (tokens_from[0], json.loads(json.dumps(tokens_from[1])))
        self._backbone: Backbone | None = None
        self._token_backbone: Backbone | None = None
        if self.tokens_from is not None and self.tokens_from[1]["grid"] != self.backbone_fingerprint["grid"]:
            raise RequestError("The grid of the backbone in `tokens_from` is not the one that the selectors read.")
        if (self.early is None) is not (scout is None):
            raise RequestError("A model whose backbone is routed early needs its router, and no other model has one.")
        # Not a submodule: like the backbone it is frozen and no part of `parameters()` and `state_dict()`.
        self._scout = (scout,)
        self.methods = nn.ModuleDict({_state_key(method): classifier for method, classifier in classifiers.items()})
        self._names = tuple(classifiers)
        self.familiarity = familiarity
        self.to(resolve_device(device))
        self.eval()

    def __repr__(self) -> str:
        h, w = self.grid
        backbones = [self.backbone_fingerprint, *([] if self.tokens_from is None else [self.tokens_from[1]])]
        rows = {
            "backbone": "; tokens from ".join(f"{Path(one['name']).name}, {one['image_size']} pixels" for one in backbones),
            "grid": f"{h} x {w} patches of {self.dim} numbers",
            "classes": f"{len(self.classes)} ({', '.join(self.classes)})" if self.classes else "none: a router without a head",
            "main": self.main,
            "others": ", ".join(self.selectors[1:]) or "none",
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
    def classifiers(self) -> dict[str, RoutedClassifier]:
        """Method text to its selector and head."""
        return {name: cast(RoutedClassifier, self.methods[_state_key(name)]) for name in self._names}

    @property
    def has_head(self) -> bool:
        """Whether the model predicts classes; a router that was trained from masks alone only keeps patches."""
        return bool(self.classes)

    @property
    def selectors(self) -> list[str]:
        """Methods that this model has a trained classifier for: the main one first, then the others by name."""
        return [self.main, *sorted(name for name in self._names if name != self.main)]

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
        return self.backbone_fingerprint.get("route")

    @property
    def scout(self) -> MedTokenBudget | None:
        """The router that chooses for the backbone; None for a backbone that runs on all patches."""
        return self._scout[0]

    @property
    def fixed_budget(self) -> float | None:
        """The only budget of a model whose backbone is routed early; None for any other model."""
        return None if self.early is None else float(self.early["budget"])

    def budget(self, asked: float | str | None) -> float:
        """Return the budget that was asked for, by default `DEFAULT_BUDGET` or the model's only one; any other is an error then."""
        asked = None if asked is None else settings.read_share("budget", asked)
        if self.early is None:
            return DEFAULT_BUDGET if asked is None else asked
        fixed = float(self.early["budget"])
        if asked not in (None, fixed):
            raise BudgetError(
                f"The backbone of this model runs on {self.early['k']} patches (budget {fixed:g}), and its head was trained on "
                f"these, so there is no other budget. Use {fixed:g}, or extract and train at {asked:g}."
            )
        return fixed

    def amount(
        self,
        budget: Amount = None,
        retention: float | str | None = None,
        coverage: float | str | None = None,
        selector: str | None = None,
    ) -> float | Guarantee:
        """Return the guarantee of a `retention`, or the `budget` that was asked for; both at once are an error."""
        if retention is None:
            if coverage is not None:
                raise RequestError("`coverage` belongs to `retention`: it is the share of the images that keep at least so much.")
            return budget if isinstance(budget, Guarantee) else self.budget(budget)
        if budget is not None:
            raise RequestError("`budget` and `retention` exclude each other: a guarantee decides for each image how much is kept.")
        return self.guarantee(retention, coverage, selector)

    def k(self, budget: float | str | None, selector: str | None = None) -> int:
        """Return the number of tokens that are kept at a budget."""
        n = self.grid[0] * self.grid[1] if self.early is None else int(self.early["k"])
        return self.classifier(selector).selector.count(self.budget(budget), n)

    @property
    def backbone(self) -> Backbone:
        """The backbone, loaded on first use and compared with the one that the classifiers were trained on."""
        if self._backbone is None:
            loaded = self._loaded(self.backbone_config, self.backbone_fingerprint)
            if self.early is not None and self.scout is not None:
                from medtokenbudget.model.early import EarlyRouting  # here, because a router of early routing is itself a model

                loaded = EarlyRouting.of(self.early, self.scout).wrap(loaded)
            self.use_backbone(loaded)
        assert self._backbone is not None
        return self._backbone

    def use_backbone(self, backbone: Backbone) -> Self:
        """Use a backbone that is already loaded, for example one for several models; another one is rejected."""
        self._backbone = _require_same(backbone, self.backbone_fingerprint)
        return self

    @property
    def token_backbone(self) -> Backbone:
        """The backbone of the kept tokens, loaded on first use: the one of `tokens_from`, or the one that the selectors read."""
        if self.tokens_from is None:
            return self.backbone
        if self._token_backbone is None:
            self._token_backbone = _require_same(self._loaded(*self.tokens_from), self.tokens_from[1])
        return self._token_backbone

    def _loaded(self, config: BackboneConfig, fingerprint: dict[str, Any]) -> Backbone:
        if config.weights is not None and not Path(config.weights).is_file():
            raise RequestError(
                f"The weights of the backbone are missing: {config.weights} (SHA-256 {fingerprint['weights']}). "
                "Put the file into the folder of the model, or pass its path as `weights`."
            )
        return Backbone.load(config, self.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Everything that moves a module (`to`, `cuda`, `cpu`) ends here; the backbone is no submodule and follows by hand.
        super()._apply(fn, recurse)
        for backbone in (self._backbone, self._token_backbone):
            if backbone is not None:
                backbone.to(self.device)
        if self.scout is not None:
            self.scout.to(self.device)
        return self

    def classifier(self, selector: str | None = None) -> RoutedClassifier:
        """Return selector and head of a method (default: the main one)."""
        method = self.main if selector is None else selector
        if method not in self._names:
            raise UnknownNameError.of("selector", method, self._names, "in this model")
        return self.classifiers[method]

    def guarantee(self, retention: float | str, coverage: float | str | None = None, selector: str | None = None) -> Guarantee:
        """Return the calibrated promise to keep a share of the lesion, such as 0.95 or '95%', to be used instead of a budget.

        Without `coverage` it is the promise on average, otherwise that of keeping so much in this share of the images.
        """
        method = self.main if selector is None else selector
        covered = None if coverage is None else settings.read_share("coverage", coverage)
        promise = Promise(settings.read_share("retention", retention), covered)
        self.classifier(method)
        given = f"`retention={promise.retention:g}`" + ("" if covered is None else f", `coverage={covered:g}`")
        for guarantee in self.guarantees:
            if guarantee.keeps(promise, method):
                if guarantee.model != self.fingerprint:
                    raise RequestError(
                        f"The guarantee of {promise} was calibrated for another version of this model and does not hold. "
                        f"Calibrate the model again: `mtb calibrate` with {given}."
                    )
                return guarantee
        known = "; ".join(str(guarantee) for guarantee in self.guarantees if guarantee.selector == method) or "nothing"
        advice = f"Use a budget, or calibrate it on images with masks that it was not trained on: `mtb calibrate` with {given}."
        raise RequestError(f"'{method}' of this model is not calibrated for {promise}. Calibrated: {known}. {advice}")

    @property
    def signals(self) -> tuple[str, ...]:
        """The default signals of the backbone, and what the selectors of this model read besides."""
        read = [name for one in self.classifiers.values() for name in one.selector.requires if name in SIGNALS]
        return tuple(dict.fromkeys([*self.backbone.default_signals, *read]))

    @torch.no_grad()
    def encode(self, pixels: np.ndarray | Tensor, masks: Sequence[Image.Image | None] | None = None) -> TokenBatch:
        """Run the backbone on images uint8 [B, S, S, 3] as `backbone.prepare` returns them, with one lesion mask or None for each.

        The tokens have luminance and, if any image has a mask, lesion labels.
        """
        batch = torch.as_tensor(pixels).to(self.device)
        size = self.backbone.preprocessing.image_size
        if batch.dtype != torch.uint8 or batch.ndim != 4 or tuple(batch.shape[1:]) != (size, size, 3):
            given = f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
            raise ShapeError(f"Images must be uint8 [B, {size}, {size}, 3], got {given}.")
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

    def tokens(self, images: Any, normalized: Normalized = False) -> TokenBatch:
        """Return tokens of a few images in any form that `route` takes. A `TokenBatch` is only moved to the model's device."""
        if isinstance(images, TokenBatch):
            # Pixels are never negative, features of a backbone are; without this check their scores would be noise.
            reads_pixels = self.backbone_fingerprint["name"] == PIXELS and images.pixels is None
            if reads_pixels and (images.dim != self.backbone.dim or bool((images.patches[:, :, :3] < 0).any())):
                raise RequestError("The router reads pixels, but these tokens are of a backbone. Pass `model.tokens(images)`.")
            return images.to(self.device)
        statistics, side = self.statistics(normalized), self.backbone.preprocessing.image_size
        if isinstance(images, Tensor):
            images, statistics = inference.as_pixels(images, "`images`", statistics), None
            if self.tokens_from is None and tuple(images.shape[1:3]) == (side, side):  # stays on its device
                return self.encode(images)
        pictures = [source.open() for source in expand(images, statistics)]
        if not pictures:
            raise RequestError("`images` contains no image.")
        tokens = self.encode(np.stack([self.backbone.prepare(picture) for picture in pictures]))
        if self.tokens_from is None:
            return tokens
        backbone = self.token_backbone
        batch = torch.from_numpy(np.stack([backbone.prepare(picture) for picture in pictures])).to(backbone.device)
        with torch.no_grad():
            kept_from = backbone.tokens(backbone.normalize(batch)).to(self.device)
        return replace(kept_from, pixels=tokens.patches, luminance=tokens.luminance)

    def statistics(self, normalized: Normalized) -> inference.Statistics | None:
        """Return the mean and std that float tensors were normalized with; None if they were not."""
        if not isinstance(normalized, bool):
            return inference.read_statistics("`normalized` must be True, False, or (mean, std)", normalized)
        mean, std = (tuple(self.backbone_fingerprint[name]) for name in ("mean", "std"))
        if normalized and (mean, std) == ((0, 0, 0), (1, 1, 1)):
            raise RequestError("The model reads pixels in [0, 1] and has no mean and std. Pass yours: `normalized=(mean, std)`.")
        return (mean, std) if normalized else None

    def forward(self, images: Any, budget: float | str | None = None, selector: str | None = None) -> Tensor:
        """Compute class logits [B, C] of a `TokenBatch` or images at one budget, with gradients for the head."""
        tokens = self.tokens(images)
        classifier = self.classifier(selector)
        selection = inference.select(classifier.selector, tokens, classifier.selector.count(self.budget(budget), tokens.n))
        return classifier.required_head.read(selection, tokens.grid)

    def router(
        self, budget: float | str | None = None, selector: str | None = None, normalized: Normalized = False
    ) -> Callable[[Any], Selection]:
        """Return a function from a batch to its `Selection`, for use in other models and training loops; without gradients.

        The function takes images in any form that `route` takes, or a `TokenBatch`. The selection of a tensor is on its device.

        Example:
            >>> route = mtb.load().router(0.3)
            >>> selection = route(torch.rand(8, 3, 224, 224))
            >>> selection.kept.shape, selection.scores.shape, selection.tokens.shape
            (torch.Size([8, 256]), torch.Size([8, 256]), torch.Size([8, 76, 192]))
        """
        if isinstance(budget, Guarantee):
            raise RequestError("A guarantee keeps another number of patches of each image, which are no batch. Use `route`.")
        chosen, share = self.classifier(selector).selector, self.budget(budget)  # a wrong budget is an error here already
        # Wrong statistics are an error here already, too.
        self.statistics(normalized)

        @torch.no_grad()
        def routed(images: Any) -> Selection:
            tokens = self.tokens(images, normalized)
            selection = inference.select(chosen, tokens, chosen.count(share, tokens.n))
            return selection.to(images.device) if isinstance(images, Tensor) else selection

        return routed

    @torch.inference_mode()
    def classify(self, images: Any, budgets: Sequence[float], selector: str | None = None) -> np.ndarray:
        """Compute class probabilities [B, len(budgets), C] of tokens or images; rankers score the patches once for all budgets."""
        classifier, tokens = self.classifier(selector), self.tokens(images)
        chosen, head = classifier.selector, classifier.required_head
        with evaluating(classifier):
            counts = [chosen.count(budget, tokens.n) for budget in budgets]
            scores = inference.select(chosen, tokens, tokens.n).scores if isinstance(chosen, Ranker) else None
            if scores is not None and head.reads == "mean":
                # One sum along the order serves all budgets: a fifth of the time of gathering the tokens of a hundred.
                logits = head(pooled_means(tokens.patches, rank(scores), counts))
            else:
                selections = [inference.select(chosen, tokens, k, scores) for k in counts]
                logits = torch.stack([head.read(selection, tokens.grid) for selection in selections], 1)
        return logits.softmax(-1).cpu().numpy()

    @property
    def identity(self) -> dict[str, Any]:
        """What all files of a saved model must agree on."""
        return {
            "backbone": self.backbone_fingerprint,
            **({} if self.tokens_from is None else {"tokens": self.tokens_from[1]}),
            "classes": list(self.classes),
            "main": self.main,
            "selectors": {name: saved.describe(self.classifier(name)) for name in self.selectors},
        }

    @property
    def fingerprint(self) -> str:
        """One hash of the whole model: backbone, preprocessing, classes, methods and every number of the classifiers."""
        return saved.fingerprint(self.identity, saved.tensors_of(self.classifiers, self.main, self.familiarity))

    def route(self, images: Any, budget: Amount = None, selector: str | None = None, **more: Unpack[Extra]) -> list[Routing]:
        """Route images: return the patches that are kept of each, in order, without classes; also for a model without a head.

        Args:
            images: A path, folder, glob, `Manifest`, Pillow picture, the bytes of a file, an open file, an array or tensor (uint8,
                or floats in [0, 1]; [B, 3, H, W], [B, H, W, 3] or one image), a `DataLoader`, or an iterable of these. All are
                resized like files.
            budget: Share of the patches that is kept, such as 0.3 or '30%', or a guarantee of the model (`model.guarantee(0.95)`);
                None means `DEFAULT_BUDGET`, or the only one of a model routed early.
            selector: Method to use; None means the main one.
            more: `batch_size`: images per forward pass. `retention`: instead of a budget, the share of the lesion to keep that the
                model was calibrated for. `normalized`: True if float tensors were normalized with mean and std of the model's
                backbone, `(mean, std)` if with others.
        """
        return list(self.stream(images, budget, selector, kind=Routing, **more))

    def predict(self, images: Any, budget: Amount = None, selector: str | None = None, **more: Unpack[Extra]) -> list[Prediction]:
        """Like `route`, with the classes that the head reads from the kept patches; a router without a head is a NoHeadError."""
        return list(self.stream(images, budget, selector, kind=Prediction, **more))

    def stream(
        self,
        images: Any,
        budget: Amount = None,
        selector: str | None = None,
        batch_size: int = 16,
        *,
        retention: float | str | None = None,
        normalized: Normalized = False,
        kind: type[Answer] = Routing,  # type: ignore[assignment]
        on_error: OnError = None,
    ) -> Iterator[Answer]:
        """Like `route` (or `predict`, with `kind=mtb.Prediction`), one image at a time in constant memory.

        Images that cannot be read are passed to `on_error`; without it they raise a RequestError.
        """
        amount = self.amount(budget, retention, selector=selector)
        sources = expand(images, self.statistics(normalized))
        return _readable(self.answers(sources, amount, selector, batch_size, kind=kind), on_error)

    def answers(
        self,
        sources: Iterable[ImageSource],
        budget: Amount,
        selector: str | None = None,
        batch_size: int = 16,
        workers: int = 2,
        masks: bool = False,
        kind: type[Answer] = Routing,  # type: ignore[assignment]
        maps: bool = False,
        store: FeatureStore | None = None,
    ) -> Iterator[tuple[ImageSource, Answer | None]]:
        """Yield each source with its answer, or with None if it could not be read (`reason` of the source says why), in order.

        The request is checked at once, before the first image is opened. `kind` is `Routing`, or `Prediction` to read the classes
        too. With `masks` each answer has the lesion patches of its source's mask; where it cannot be used, `mask_reason` says why.
        With `maps` it has its lesion map from the same pass; otherwise that is computed when it is read. With a `store` tokens are
        read from it by the ids of the images, which are not opened.
        """
        settings.check_values({"batch_size": (batch_size, settings.Count), "workers": (workers, settings.Parallel)})
        method, amount = self.main if selector is None else selector, self.amount(budget)
        classifier = self.classifier(method)
        if not isinstance(amount, Guarantee):
            self.k(amount, method)
        elif amount.selector != method:
            raise RequestError(f"This guarantee is for '{amount.selector}', not for '{method}'. Calibrate '{method}' first.")
        if issubclass(kind, Prediction):
            _ = classifier.required_head
        return inference.answers(self, sources, amount, method, kind, batch_size, workers, masks, maps, store)

    def require_store(self, store: FeatureStore) -> None:
        expected, stored = comparable(self.backbone_fingerprint), comparable(store.config["backbone"])
        if expected != stored:
            advice = "Leave out `store` to compute the tokens, or pass a store of the model's backbone and grid."
            raise MismatchError.between(f"The store {store.path}", expected, stored, advice)
        if store.config["keep"] != "patches":
            raise RequestError(f"Store {store.path} has only routed tokens, but the model reads all patches. Leave out `store`.")

    def unfamiliarity(self, tokens: TokenBatch, sight: Sight | None = None) -> Tensor | None:
        """Return the distance [B] of images to the training images; `sight` is what the main method saw of them, if it looked."""
        selector = self.classifier().selector
        if self.familiarity is None:
            return None
        if sight is None and isinstance(selector, ScoredRanker) and selector.finer:
            sight = selector.see(tokens)
        distance: Tensor = self.familiarity(tokens if sight is None else sight.features)
        return distance

    def check_lesions(self, selector: str | None = None) -> None:
        """Reject a method that does not know where the lesion is, because it learned without masks."""
        method = self.main if selector is None else selector
        masks = self.info.get("run", {}).get("masks")
        without = self.train_config.losses.lesion <= 0 or masks == 0 or method.endswith(":mask-free")
        if self.classifier(method).selector.learns and without:
            raise RequestError(
                f"The router's method '{method}' was trained without lesion masks, so it does not know where the lesion is. "
                "Use a router that was trained with masks, such as `mtb train` makes by default."
            )

    def require_lesion_map(self, selector: str | None = None) -> ScoredRanker:
        """Return the selector of a method that scores patches by a lesion probability; any other is an error."""
        if self.scout is not None:
            return self.scout.require_lesion_map()
        selecting = self.classifier(selector).selector
        if not isinstance(selecting, ScoredRanker):
            method = selector or self.main
            raise RequestError(f"The method '{method}' gives no lesion probability. Use one that learns scores, such as 'lats'.")
        self.check_lesions(selector)
        return selecting

    @torch.no_grad()
    def lesion_map(self, image: Any, selector: str | None = None) -> np.ndarray:
        """Return the lesion probability of an image as `route` takes it, float32 [h, w] on the finest grid that the method has."""
        if self.scout is not None:
            return self.scout.lesion_map(image)
        selecting = self.require_lesion_map(selector)
        with evaluating(selecting):
            tokens = self.encode(self.backbone.prepare(open_picture(image))[None])
            return selecting.see(selecting.check(tokens)).lesion[0].float().cpu().numpy()

    def save_pretrained(self, path: Path | str) -> Path:
        """Save the model as a folder without local paths, and return it; the backbone's weights are found by name and hash."""
        target = Path(path)
        values: dict[str, Any] = {
            "backbone": _portable(self.backbone_config, self.backbone_fingerprint),
            **({} if self.tokens_from is None else {"tokens": _portable(*self.tokens_from)}),
            "train": settings.to_dict(self.train_config),
            "info": self.info,
            "fingerprint": self.fingerprint,
            "guarantees": [guarantee.to_json() for guarantee in self.guarantees],
        }
        with exclusive(target):
            if self.scout is not None:
                self.scout.save_pretrained(target / saved.ROUTER)
            tensors = saved.tensors_of(self.classifiers, self.main, self.familiarity)
            saved.write_folder(target, self.identity, values, tensors, self.card)
        return target

    def push_to_hub(self, repo_id: str, private: bool = True, message: str = "Upload model") -> str:
        """Upload the model to the hub, as a private repository by default, and return its address."""
        with tempfile.TemporaryDirectory() as folder:
            return saved.upload(self.save_pretrained(folder), repo_id, private, message)


def load(
    path: Path | str = DEFAULT_MODEL, revision: str | None = None, weights: Path | str | None = None, device: str = "auto"
) -> MedTokenBudget:
    """Load a saved model.

    Args:
        path: A run directory, a model folder, a hub id (`owner/name`), or 'dermoscopy', the router that comes with the package.
        revision: Branch, tag or commit on the hub.
        weights: Safetensors file of the backbone, if it is no longer where it was when the model was saved.
        device: 'auto' uses a GPU if there is one; otherwise 'cpu', 'cuda', 'cuda:1', ...

    Example:
        >>> model = mtb.load("runs/demo")
        >>> [prediction.label for prediction in model.predict(["photo.jpg"], budget=0.1)]
        ['NV']
    """
    source = saved.resolve(path, revision)
    config = saved.read_config(source)
    identity = config["identity"]
    classifiers, familiarity = saved.read_parts(source, config)
    return MedTokenBudget(
        backbone=saved.backbone_config(config, source, weights),
        backbone_fingerprint=identity["backbone"],
        classes=identity["classes"],
        classifiers=classifiers,
        train_config=settings.train_config_from_dict(config["train"]),
        main=identity["main"],
        card=saved.read_card(source),
        info=config["info"],
        scout=load(source / saved.ROUTER, device=device) if "route" in identity["backbone"] else None,
        familiarity=familiarity,
        guarantees=saved.read_guarantees(source, config),
        tokens_from=(saved.backbone_config(config, source, None, "tokens"), identity["tokens"]) if "tokens" in identity else None,
        device=device,
    )


def route(
    images: Any,
    budget: Amount = None,
    model: MedTokenBudget | Path | str = DEFAULT_MODEL,
    selector: str | None = None,
    **more: Unpack[Extra],
) -> list[Routing]:
    """Return the patches that a router keeps of images; no training, no labels, no masks.

    Args:
        images: Paths, folders, globs, pictures, arrays, tensors, bytes, data loaders. `MedTokenBudget.route` describes these and
            all arguments that are not listed here.
        model: A model, or what `mtb.load` takes. Default: the router that comes with the package, for dermoscopic images.

    Returns:
        One `Routing` per image: `kept`, `scores`, `tokens`, `unfamiliar`. In a notebook it shows the image with its kept patches.

    Example:
        >>> routing = mtb.route("photo.jpg", budget=0.3)[0]
        >>> routing.k, routing.tokens.shape
        (76, (76, 192))
    """
    return loaded(model).route(images, budget, selector, **more)


def predict(
    images: Any,
    model: MedTokenBudget | Path | str,
    budget: Amount = None,
    selector: str | None = None,
    **more: Unpack[Extra],
) -> list[Prediction]:
    """Predict classes of images from the patches that a model keeps. It takes the arguments of `MedTokenBudget.route`, and:

    Args:
        model: A model with a head, or what `mtb.load` takes. The router that comes with the package has no head.

    Returns:
        One `Prediction` per image: `label`, `probabilities`, and everything that a `Routing` has.

    Example:
        >>> mtb.predict("photo.jpg", "runs/demo", budget=0.3)[0].label
        'NV'
    """
    return loaded(model).predict(images, budget, selector, **more)


def loaded(model: MedTokenBudget | Path | str) -> MedTokenBudget:
    return model if isinstance(model, MedTokenBudget) else load(model)


def _state_key(method: str) -> str:
    """Return the name of a method among the submodules."""
    # A dot would split the keys of the state dict, and `nn.ModuleDict` rejects the names of its own functions, such as 'values'.
    return "method:" + method.replace("%", "%25").replace(".", "%2E")


def _readable(answers: Iterable[tuple[ImageSource, Answer | None]], on_error: OnError) -> Iterator[Answer]:
    for source, answer in answers:
        if answer is not None:
            yield answer
        elif on_error is None:
            raise RequestError(source.reason)
        else:
            on_error(source)


def _portable(config: BackboneConfig, fingerprint: dict[str, Any]) -> dict[str, Any]:
    weights = None if config.weights is None else Path(config.weights).name
    return {**settings.to_dict(config), "weights": weights, "name": fingerprint["name"]}


def _require_same(backbone: Backbone, fingerprint: dict[str, Any]) -> Backbone:
    expected, given = comparable(fingerprint), comparable(backbone.fingerprint)
    if expected != given:
        advice = "The classifiers were trained on tokens of another backbone. Use its weights and image size."
        raise MismatchError.between("The backbone", expected, given, advice)
    return backbone


def comparable(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return a fingerprint without the parent folders of a backbone folder, which may be elsewhere on another machine."""
    values = json.loads(json.dumps(fingerprint))
    return {**values, "name": Path(values["name"]).name}
