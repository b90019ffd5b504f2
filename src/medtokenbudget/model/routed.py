"""`MedTokenBudget`: a frozen backbone, routed classifiers, class names and preprocessing as one thing that is saved and loaded.

The backbone is named and hashed, not copied. It is loaded when it is first needed and refused when it is not the one that the
classifiers were trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from medtokenbudget.config import BackboneConfig, TrainConfig, to_dict, train_config_from_dict
from medtokenbudget.data import patch_labels
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import MedTokenBudgetError, MismatchError, RequestError, UnknownNameError
from medtokenbudget.features.backbone import Backbone
from medtokenbudget.features.preprocess import luminance
from medtokenbudget.model import folder as files
from medtokenbudget.model import hub, parts
from medtokenbudget.model.parts import MAIN
from medtokenbudget.model.prediction import Prediction
from medtokenbudget.model.sources import Failure, Source, expand, prepared
from medtokenbudget.tokens import Selection, TokenBatch
from medtokenbudget.training.head import RoutedClassifier


class MedTokenBudget:
    """A trained router with its backbone.

    classes      names, in the order of the logits
    classifiers  method name to selector and its own head; the main one is 'lats'
    info         what the run says about itself (JSON values)
    card         the model card, Markdown
    """

    def __init__(
        self,
        backbone: BackboneConfig,
        backbone_fingerprint: dict[str, Any],
        classes: Sequence[str],
        classifiers: dict[str, RoutedClassifier],
        train_config: TrainConfig,
        card: str = "",
        info: dict[str, Any] | None = None,
        device: str = "auto",
    ) -> None:
        if MAIN not in classifiers:
            raise RequestError(f"a model needs the classifier '{MAIN}', got {', '.join(classifiers) or 'none'}.")
        self.backbone_config = backbone
        self.backbone_fingerprint: dict[str, Any] = json.loads(json.dumps(backbone_fingerprint))
        self.classes = tuple(classes)
        self.train_config = train_config
        self.card = card
        self.info: dict[str, Any] = dict(info or {})
        self.device = resolve_device(device)
        self.classifiers = {name: classifier.to(self.device).eval() for name, classifier in classifiers.items()}

    @property
    def selectors(self) -> list[str]:
        """Selectors that this model has a trained head for: the main one, then the others by name."""
        return [MAIN, *sorted(name for name in self.classifiers if name != MAIN)]

    @property
    def grid(self) -> tuple[int, int]:
        h, w = self.backbone_fingerprint["grid"]
        return int(h), int(w)

    @property
    def dim(self) -> int:
        return int(self.backbone_fingerprint["dim"])

    @cached_property
    def backbone(self) -> Backbone:
        """The backbone, loaded at first use and compared with the one that the classifiers were trained on."""
        backbone = Backbone.load(self.backbone_config, self.device)
        self._check_backbone(backbone)
        return backbone

    def use_backbone(self, backbone: Backbone) -> MedTokenBudget:
        """Take a backbone that is loaded already (one for several models); refused when it is another one."""
        self._check_backbone(backbone)
        self.__dict__["backbone"] = backbone
        return self

    def _check_backbone(self, backbone: Backbone) -> None:
        expected, found = _comparable(self.backbone_fingerprint), _comparable(backbone.fingerprint)
        if expected != found:
            raise MismatchError.between(
                "the backbone",
                expected,
                found,
                "The classifiers know only the tokens they were trained on: use those weights and sizes.",
            )

    def classifier(self, selector: str = MAIN) -> RoutedClassifier:
        if selector not in self.classifiers:
            raise UnknownNameError.of("selector of this model", selector, self.classifiers)
        return self.classifiers[selector]

    def k(self, budget: float, selector: str = MAIN) -> int:
        """Number of tokens kept at a budget."""
        h, w = self.grid
        return self.classifier(selector).selector.count(budget, h * w)

    @torch.inference_mode()
    def encode(self, pixels: np.ndarray | Tensor, masks: Sequence[Image.Image | None] | None = None) -> TokenBatch:
        """Tokens of prepared images (`backbone.prepare`), uint8 [B, S, S, 3]; with luminance, and the lesion where a mask is."""
        batch = torch.as_tensor(pixels).to(self.device)
        tokens = self.backbone(self.backbone.normalise(batch))
        tokens = replace(tokens, luminance=luminance(batch, tokens.grid))
        if masks is None or all(mask is None for mask in masks):
            return tokens
        empty = np.zeros(tokens.n, dtype=bool)
        lesion = np.stack([empty if mask is None else patch_labels(mask, tokens.grid) for mask in masks])
        known = torch.tensor([mask is not None for mask in masks], device=self.device)
        return replace(tokens, lesion=torch.from_numpy(lesion).to(self.device), has_mask=known)

    def tokens(self, images: Any) -> TokenBatch:
        """Tokens of a handful of images, given in any way that `predict` takes."""
        sources = list(expand(images))
        return self.encode(np.stack([self.backbone.prepare(source.open()) for source in sources]))

    def router(self, budget: float, selector: str = MAIN) -> Callable[[TokenBatch], Selection]:
        """A function from tokens to the kept ones, for use in other models."""
        chosen = self.classifier(selector).selector
        chosen.count(budget, 1)

        @torch.inference_mode()
        def route(tokens: TokenBatch) -> Selection:
            return parts.select(chosen, tokens, chosen.count(budget, tokens.n))[0]

        return route

    @torch.inference_mode()
    def classify(self, tokens: TokenBatch, budgets: Sequence[float], selector: str = MAIN) -> np.ndarray:
        """Class probabilities [B, len(budgets), C] at many budgets; rankers order the patches only once."""
        classifier = self.classifier(selector)
        pooled = parts.pooled(classifier.selector, tokens, budgets)
        return classifier.head(pooled).softmax(-1).cpu().numpy()

    def predict(self, images: Any, budget: float = 0.3, selector: str = MAIN, batch_size: int = 16) -> list[Prediction]:
        """Predictions of a path, folder, glob, manifest, picture, uint8 array, or an iterable of these, in order.

        An image that cannot be read is an error; `predict_stream` leaves the choice to its caller.
        """
        return list(self.predict_stream(images, budget, selector, batch_size))

    def predict_stream(
        self,
        images: Any,
        budget: float = 0.3,
        selector: str = MAIN,
        batch_size: int = 16,
        on_error: Callable[[Failure], None] | None = None,
    ) -> Iterator[Prediction]:
        """Predictions one after the other, in constant memory; unreadable images go to `on_error`, or raise without it."""
        for _, answer in self.predict_sources(expand(images), budget, selector, batch_size):
            if isinstance(answer, Prediction):
                yield answer
            elif on_error is None:
                raise RequestError(answer.reason)
            else:
                on_error(answer)

    def predict_sources(
        self, sources: Iterable[Source], budget: float, selector: str = MAIN, batch_size: int = 16, workers: int = 2
    ) -> Iterator[tuple[Source, Prediction | Failure]]:
        """Each source with its prediction, or with the reason why there is none, in order."""
        self.k(budget, selector)
        if batch_size < 1:
            raise RequestError(f"batch_size must be at least 1, got {batch_size}.")
        waiting: list[tuple[Source, np.ndarray | MedTokenBudgetError]] = []
        good = 0
        for item in prepared(sources, self.backbone.prepare, workers, ahead=2 * batch_size):
            waiting.append(item)
            good += isinstance(item[1], np.ndarray)
            if good == batch_size or len(waiting) >= 4 * batch_size:
                yield from self._answers(waiting, budget, selector)
                waiting, good = [], 0
        yield from self._answers(waiting, budget, selector)

    def _answers(
        self, items: list[tuple[Source, np.ndarray | MedTokenBudgetError]], budget: float, selector: str
    ) -> Iterator[tuple[Source, Prediction | Failure]]:
        good = [(source, value) for source, value in items if isinstance(value, np.ndarray)]
        answers = iter(self._predict_batch(good, budget, selector)) if good else iter(())
        for source, value in items:
            if isinstance(value, np.ndarray):
                yield source, next(answers)
            else:
                yield source, Failure(source.name, str(value))

    @torch.inference_mode()
    def _predict_batch(self, items: list[tuple[Source, np.ndarray]], budget: float, selector: str) -> list[Prediction]:
        classifier = self.classifier(selector)
        tokens = self.encode(np.stack([value for _, value in items]))
        selection, scores = parts.select(classifier.selector, tokens, self.k(budget, selector))
        probabilities = classifier.head(selection.pooled()).softmax(-1).cpu().numpy()
        kept = None if selection.indices is None else selection.indices.cpu().numpy()
        gathered, assignment = selection.tokens.float().cpu().numpy(), selection.assignment.cpu().numpy()
        score_rows = None if scores is None else scores.float().cpu().numpy()
        return [
            Prediction(
                image=source.name,
                probabilities={name: float(p) for name, p in zip(self.classes, probabilities[row])},
                label=self.classes[int(probabilities[row].argmax())],
                scores=None if score_rows is None else score_rows[row],
                kept=None if kept is None else kept[row],
                tokens=gathered[row],
                assignment=assignment[row],
                budget=budget,
                k=selection.k,
                grid=tokens.grid,
                selector=selector,
            )
            for row, (source, _) in enumerate(items)
        ]

    @property
    def identity(self) -> dict[str, Any]:
        """What every file of a saved model must agree on."""
        return {
            "backbone": self.backbone_fingerprint,
            "classes": list(self.classes),
            "selectors": {name: parts.describe(self.classifiers[name]) for name in self.selectors},
        }

    @property
    def fingerprint(self) -> str:
        """One hash for the whole model: backbone, preprocessing, classes, selectors and every number of the classifiers."""
        return files.fingerprint(self.identity, parts.tensors(self.classifiers))

    def save_pretrained(self, path: Path | str, portable: bool = False) -> Path:
        """Write the folder; `portable` leaves out where the weights lie on this machine (they are found by name and hash)."""
        target = Path(path)
        backbone = to_dict(self.backbone_config)
        if self.backbone_config.weights is not None:
            weights = Path(self.backbone_config.weights)
            backbone["weights"] = weights.name if portable else str(weights.resolve())
        if Path(self.backbone_config.name).is_dir():
            backbone["name"] = str(Path(self.backbone_config.name).resolve())
        settings = {"backbone": backbone, "train": to_dict(self.train_config), "info": self.info, "fingerprint": self.fingerprint}
        files.write_folder(target, self.identity, settings, parts.tensors(self.classifiers), self.card)
        return target

    @classmethod
    def from_pretrained(
        cls, path: Path | str, revision: str | None = None, weights: Path | str | None = None, device: str = "auto"
    ) -> MedTokenBudget:
        """A saved model from its folder, from a run directory that holds one, or from the hub (`owner/name`).

        `weights` says where the backbone's safetensors file lies on this machine, if not where it lay when the model was saved.
        """
        source = hub.resolve(path, revision)
        config = files.read_config(source)
        train_config = train_config_from_dict(config["train"])
        identity = config["identity"]
        found = {name: files.read_tensors(source, name, config) for name in config["files"]}
        classifiers = parts.build(identity, found, source)
        model = cls(
            backbone=_backbone_config(config["backbone"], source, weights),
            backbone_fingerprint=identity["backbone"],
            classes=identity["classes"],
            classifiers=classifiers,
            train_config=train_config,
            card=files.read_card(source),
            info=config["info"],
            device=device,
        )
        return model

    def push_to_hub(self, repo_id: str, private: bool = True, message: str = "Upload model") -> str:
        """Upload the model to the hub (private unless said otherwise) and return its address."""
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            return hub.upload(self.save_pretrained(folder, portable=True), repo_id, private, message)


load = MedTokenBudget.from_pretrained


def _comparable(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint without the folders above a backbone that is one: it may lie elsewhere on another machine."""
    values = json.loads(json.dumps(fingerprint))
    return {**values, "name": Path(values["name"]).name}


def _backbone_config(values: dict[str, Any], source: Path, weights: Path | str | None) -> BackboneConfig:
    stored = values.get("weights")
    if weights is None and stored is not None:
        beside = source / Path(stored).name
        weights = beside if beside.is_file() and not Path(stored).is_file() else stored
    try:
        return BackboneConfig(**{**values, "weights": None if weights is None else Path(weights)})
    except TypeError as error:
        raise RequestError(f"{source / files.CONFIG} does not describe a backbone of this version: {error}.") from None
