"""`MedTokenBudget`: a routed network with class names and preprocessing, that answers for files and is saved and loaded as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from medtokenbudget.backbone.backbone import located
from medtokenbudget.config import BackboneConfig, to_dict, train_config_from_dict
from medtokenbudget.errors import RequestError
from medtokenbudget.locks import exclusive
from medtokenbudget.model import folder as files
from medtokenbudget.model import hub, parts, predicting
from medtokenbudget.model.guarantee import Guarantee, read_guarantees
from medtokenbudget.model.network import RoutedNetwork
from medtokenbudget.model.predicting import Answer
from medtokenbudget.model.prediction import Prediction, Routing
from medtokenbudget.model.sources import Failure, Source, expand


class MedTokenBudget(RoutedNetwork):
    """A frozen backbone with one or more trained routed classifiers.

    Load one with `mtb.load`. It starts in evaluation mode. `parameters()` and `state_dict()` cover the classifiers; the frozen
    backbone follows `.to()` but belongs to neither.

    Args:
        backbone: Name, weights and image size of the backbone.
        backbone_fingerprint: `Backbone.fingerprint` of the backbone that the classifiers were trained on.
        classes: Class names in the order of the logits; empty for a router without a head.
        classifiers: Method text (such as 'lats:lesion-first' or 'center') to its selector and head.
        train_config: Configuration that the main method was trained with.
        main: The method that is used unless another one is requested.
        card: Model card in Markdown.
        info: What the run recorded about itself, as JSON values.
        scout: The router of a model whose backbone is routed early (`backbone_fingerprint` has a 'route').
        familiarity: What tells images that are unlike the training images; None if that was not fitted.
        guarantees: What was calibrated with `mtb calibrate`.
        device: 'auto' uses a GPU if there is one.

    Raises:
        RequestError: If `main` is not one of the classifiers, or only some of them have a head.

    Example:
        >>> model = mtb.load("runs/demo")
        >>> model.main
        'lats:lesion-first'
        >>> model.predict("photo.jpg", budget=0.3)[0].k
        30
    """

    def route(
        self, images: Any, budget: float | Guarantee | None = None, selector: str | None = None, batch_size: int = 16
    ) -> list[Routing]:
        """The patches that are kept of images, in order, without classes; also for a model without a head.

        Args:
            images: A path, folder, glob, `Manifest`, Pillow picture, uint8 array [H, W, 3] or [B, H, W, 3], the bytes of a file, or
                an iterable of these.
            budget: Share of the patches that is kept, in (0, 1], or a guarantee of the model (`model.guarantee(0.95)`); None means
                0.3, or the only one of a model routed early.
            selector: Method to use; None means the main one.
            batch_size: Images per forward pass.

        Returns:
            One `Routing` per image.

        Raises:
            RequestError: If an image cannot be read; use `route_stream` with `on_error` to continue with the others.
        """
        return list(self.route_stream(images, budget, selector, batch_size))

    def route_stream(
        self,
        images: Any,
        budget: float | Guarantee | None = None,
        selector: str | None = None,
        batch_size: int = 16,
        on_error: Callable[[Failure], None] | None = None,
    ) -> Iterator[Routing]:
        """Like `route`, one image at a time in constant memory.

        Images that cannot be read are passed to `on_error`; without it they raise an error.
        """
        return _good(self.route_sources(expand(images), budget, selector, batch_size), on_error)

    def route_sources(
        self,
        sources: Iterable[Source],
        budget: float | Guarantee | None,
        selector: str | None = None,
        batch_size: int = 16,
        workers: int = 2,
        masks: bool = False,
    ) -> Iterator[tuple[Source, Routing | Failure]]:
        """Yield each source with its routing, or with the reason why it could not be read, in order.

        With `masks` each routing knows the lesion patches of its source's mask.
        """
        method = self.main if selector is None else selector
        streaming = predicting.Streaming(batch_size, workers, masks)
        return predicting.route_sources(self, sources, self.amount(budget), method, streaming)

    def predict(
        self, images: Any, budget: float | Guarantee | None = None, selector: str | None = None, batch_size: int = 16
    ) -> list[Prediction]:
        """Like `route`, with the classes that the head of the model reads from the kept patches.

        Returns:
            One `Prediction` per image.

        Raises:
            RequestError: If an image cannot be read; use `predict_stream` with `on_error` to continue with the others.
            NoHeadError: If the model is a router without a head; use `route`.
        """
        return list(self.predict_stream(images, budget, selector, batch_size))

    def predict_stream(
        self,
        images: Any,
        budget: float | Guarantee | None = None,
        selector: str | None = None,
        batch_size: int = 16,
        on_error: Callable[[Failure], None] | None = None,
    ) -> Iterator[Prediction]:
        """Like `predict`, one image at a time in constant memory; errors as in `route_stream`."""
        return _good(self.predict_sources(expand(images), budget, selector, batch_size), on_error)

    def predict_sources(
        self,
        sources: Iterable[Source],
        budget: float | Guarantee | None,
        selector: str | None = None,
        batch_size: int = 16,
        workers: int = 2,
    ) -> Iterator[tuple[Source, Prediction | Failure]]:
        """Yield each source with its prediction, or with the reason why it could not be read, in order."""
        method = self.main if selector is None else selector
        return predicting.predict_sources(self, sources, self.amount(budget), method, predicting.Streaming(batch_size, workers))

    def save_pretrained(self, path: Path | str) -> Path:
        """Save the model as a folder without local paths; the weights of the backbone are found by name and hash.

        Args:
            path: Folder to write.

        Returns:
            The folder.
        """
        target = Path(path)
        backbone = to_dict(self.backbone_config)
        if self.backbone_config.weights is not None:
            backbone["weights"] = Path(self.backbone_config.weights).name
        backbone["name"] = self.backbone_fingerprint["name"]
        settings: dict[str, Any] = {
            "backbone": backbone,
            "train": to_dict(self.train_config),
            "info": self.info,
            "fingerprint": self.fingerprint,
        }
        settings["guarantees"] = [guarantee.to_json() for guarantee in self.guarantees]
        with exclusive(target):
            if self.scout is not None:
                self.scout.save_pretrained(target / files.ROUTER)
            files.write_folder(target, self.identity, settings, self._tensors(), self.card)
        return target

    @classmethod
    def from_pretrained(
        cls, path: Path | str, revision: str | None = None, weights: Path | str | None = None, device: str = "auto"
    ) -> MedTokenBudget:
        """See `mtb.load`."""
        source = hub.resolve(path, revision)
        config = files.read_config(source)
        identity = config["identity"]
        found = {name: files.read_tensors(source, name, config) for name in config["files"]}
        familiarity = parts.take_familiarity(identity, found, source)
        return cls(
            backbone=_backbone_config(config, source, weights),
            backbone_fingerprint=identity["backbone"],
            classes=identity["classes"],
            classifiers=parts.build(identity, found, source),
            train_config=train_config_from_dict(config["train"]),
            main=identity["main"],
            card=files.read_card(source),
            info=config["info"],
            scout=cls.from_pretrained(source / files.ROUTER, device=device) if "route" in identity["backbone"] else None,
            familiarity=familiarity,
            guarantees=read_guarantees(config.get("guarantees", [])),
            device=device,
        )

    def push_to_hub(self, repo_id: str, private: bool = True, message: str = "Upload model") -> str:
        """Upload the model to the hub, as a private repository by default, and return its address."""
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            return hub.upload(self.save_pretrained(folder), repo_id, private, message)


def load(path: Path | str, revision: str | None = None, weights: Path | str | None = None, device: str = "auto") -> MedTokenBudget:
    """Load a saved model.

    Args:
        path: A run directory, a model folder, a hub id (`owner/name`), or 'dermoscopy' for the router that comes with the package.
        revision: Branch, tag or commit on the hub.
        weights: Safetensors file of the backbone, if it is no longer where it was when the model was saved.
        device: 'auto' uses a GPU if there is one; otherwise 'cpu', 'cuda', 'cuda:1', ...

    Returns:
        The model in evaluation mode. Its backbone is loaded when it is first needed.

    Raises:
        RequestError: If there is no such model, or one of its files is damaged, edited or of another version.

    Example:
        >>> model = mtb.load("runs/demo")
        >>> [prediction.label for prediction in model.predict(["photo.jpg"], budget=0.1)]
        ['NV']
    """
    return MedTokenBudget.from_pretrained(path, revision, weights, device)


def _good(answers: Iterable[tuple[Source, Answer | Failure]], on_error: Callable[[Failure], None] | None) -> Iterator[Answer]:
    """The answers without the failures, which go to `on_error` or, without it, end the stream with an error."""
    for _, answer in answers:
        if not isinstance(answer, Failure):
            yield answer
        elif on_error is None:
            raise RequestError(answer.reason)
        else:
            on_error(answer)


def _backbone_config(config: dict[str, Any], source: Path, weights: Path | str | None) -> BackboneConfig:
    values = config["backbone"]
    stored = values.get("weights") if weights is None else weights
    try:
        found = BackboneConfig(**{**values, "weights": None if stored is None else Path(stored)})
    except TypeError as error:
        raise RequestError(f"{source / files.CONFIG} does not describe a backbone of this version: {error}.") from None
    return found if weights is not None else located(found, config["identity"]["backbone"]["weights"], source)
