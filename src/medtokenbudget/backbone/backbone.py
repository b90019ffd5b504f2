"""`Backbone`: a frozen timm vision transformer as a function from images to a `TokenBatch`.

Everything that depends on the model (grid, prefix tokens, mean and standard deviation) is read from the model. Weights come from a
file, from this package or from the Hugging Face Hub; they are never random.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import timm
import torch
from PIL import Image
from timm.models.vision_transformer import Attention, checkpoint_filter_fn
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.backbone import attention
from medtokenbudget.backbone.encoders import Model, encoder_of, no_grid, vision_tower
from medtokenbudget.config import BackboneConfig, plain
from medtokenbudget.data.manifest import listed
from medtokenbudget.errors import GridError, RequestError, ShapeError, UnknownNameError, WorkError, first_line
from medtokenbudget.files import fetch, read_sealed, remember, sha256_file, write_sealed
from medtokenbudget.runtime import resolve_device
from medtokenbudget.tokens import TokenBatch

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "weights.safetensors"
PACKAGED: dict[str, Path] = {"embedded": Path(__file__).parent / "embedded"}
"""Names and folders of the backbones in this package."""
PIXELS = "pixels"
"""Name of the backbone that is none: its tokens are pixels."""
PIXEL_GRID = (16, 16)
HUB = "hf:"
"""Start of the names of backbones that transformers loads: 'hf:owner/name', or 'hf:folder'."""
_AGAIN = "Copy the folder of the backbone again; if it is part of this package, install medtokenbudget again."


_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
REC601 = (0.299, 0.587, 0.114)
"""Share of red, green and blue in the gray value."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the input of a backbone: its side, mean and std of values in [0, 1], and the filter of the resize."""

    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        if self.interpolation not in _RESAMPLING:
            known = ", ".join(_RESAMPLING)
            raise RequestError(f"Unknown interpolation '{self.interpolation}' of the backbone. Available: {known}.")

    def to_dict(self) -> dict[str, Any]:
        return {key: plain(value) for key, value in asdict(self).items()}

    def prepare(self, image: Image.Image) -> np.ndarray:
        """Resize the whole RGB image to uint8 [S, S, 3]. Nothing is cropped, so masks stay aligned."""
        if image.mode != "RGB":
            raise RequestError(f"An image of mode {image.mode} must be converted to RGB first, for example with `decode_image`.")
        size = (self.image_size, self.image_size)
        if image.size != size:
            image = image.resize(size, _RESAMPLING[self.interpolation])
        return np.array(image, dtype=np.uint8)

    def normalize(self, images: Tensor) -> Tensor:
        """Normalize images with mean and standard deviation, from uint8 [B, S, S, 3] to float [B, 3, S, S]."""
        if images.ndim != 4 or images.shape[-1] != 3:
            raise ShapeError(f"Images must be [B, S, S, 3], got {list(images.shape)}.")
        mean, std = self.statistics(images.device)
        pixels = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        # In place, and the division by 255 and by the deviation as one product: two passes over the batch instead of three.
        return pixels.mul_(1.0 / (255.0 * std)).sub_(mean / std)

    def denormalize(self, images: Tensor) -> Tensor:
        mean, std = self.statistics(images.device)
        return images * std + mean

    def statistics(self, device: torch.device) -> list[Tensor]:
        """Return mean and standard deviation, [1, 3, 1, 1] each."""
        return [torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (self.mean, self.std)]


def luminance(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Compute the mean gray value (Rec. 601) of each patch of a grid (h, w): uint8 [B, S, S, 3] to [B, N] in [0, 1]."""
    if images.ndim != 4 or images.shape[-1] != 3:
        raise ShapeError(f"Images must be [B, S, S, 3], got {list(images.shape)}.")
    b, height, width, _ = images.shape
    h, w = grid
    if height % h or width % w:
        raise GridError(f"An image of {height} x {width} pixels cannot be divided into a grid of {h} x {w} patches.")
    cells = images.reshape(b, h, height // h, w, width // w, 3).float().mean(dim=(2, 4))
    return (cells @ torch.tensor(REC601, device=images.device) / 255.0).reshape(b, h * w)


class Backbone:
    """A frozen vision transformer that gives `dim` numbers per patch of its `grid`, the class token and signals of the attention of
    `layer`.

    `prefix` tokens are before the patches (class token, registers); `fingerprint` has JSON values that are equal for equal
    backbones.

    Example:
        >>> backbone = Backbone.load(BackboneConfig(name="embedded"))
        >>> backbone.grid, backbone.dim
        ((16, 16), 192)
    """

    def __init__(self, model: Model, config: BackboneConfig, weights_sha256: str, device: torch.device | str = "cpu") -> None:
        self.device = resolve_device(device)
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.config = config
        self.encoder = encoder = encoder_of(model, config.name)
        size, patch = config.image_size, encoder.patch
        if size % patch[0] or size % patch[1]:
            fits = size // patch[0] * patch[0]
            raise RequestError(
                f"An image of {size} pixels is not a whole number of {patch[0]} x {patch[1]} patches of '{config.name}'. "
                f"Use `image_size={fits}` or `image_size={fits + patch[0]}`."
            )
        self.grid = encoder.grid(size, size)
        self.dim, self.prefix, self.has_cls, self.depth = encoder.dim, encoder.prefix, encoder.has_cls, len(encoder.blocks)
        if not -self.depth <= config.layer < self.depth:
            blocks = f"the backbone has the blocks 0 to {self.depth - 1}. Use -1 for the last."
            raise RequestError(f"`layer` {config.layer} does not exist: {blocks}")
        self.layer = config.layer % self.depth
        if (wanted := encoder.normalization()) is None:
            advice = "Set its `pretrained_cfg`, or put the `preprocessor_config.json` of its publisher next to the weights."
            raise RequestError(f"'{config.name}' does not say which mean and standard deviation it expects. {advice}")
        self.preprocessing = Preprocessing(size, *wanted)
        self._tap = attention.AttentionTap(encoder.blocks[self.layer], config.name) if config.attention == "true" else None
        self._rollout = attention.AttentionRollout(encoder.blocks[: self.layer], config.name) if self._tap is not None else None
        about = {"name": _shared_name(config.name), "weights": weights_sha256, "layer": self.layer, "attention": config.attention}
        self.fingerprint: dict[str, Any] = {**about, "grid": list(self.grid), "dim": self.dim, **self.preprocessing.to_dict()}
        if config.attention == "pseudo":
            # Stores and models of another scale have another entropy of the same tokens: they must not be mixed.
            self.fingerprint["pseudo_temperature"] = attention.PSEUDO_TEMPERATURE
        # timm's own attention is known to be recorded; any other must prove it.
        if self._tap is not None and not isinstance(getattr(encoder.blocks[self.layer], "attn", None), Attention):
            self(torch.zeros(1, 3, size, size, dtype=next(model.parameters()).dtype))  # fails now, not in the middle of the work

    @classmethod
    def load(cls, config: BackboneConfig, device: torch.device | str = "cpu") -> Backbone:
        if config.name == PIXELS:
            return Pixels(config, device)
        if config.name.startswith(HUB):
            return _from_transformers(config, device)
        if config.name in PUBLISHED and config.weights is None:
            raise RequestError(f"'{config.name}' comes as a checkpoint of its authors. Download it and pass it as `weights`.")
        recipe = find_recipe(config.name)
        model = build(config.name, config.image_size, recipe)
        path = Path(config.weights or (recipe.weights if recipe else None) or _from_hub(config.name, model))
        # A missing file is an error of `load_weights`, which says more.
        digest = sha256_file(path) if path.is_file() else ""
        if recipe is not None and path == recipe.weights and digest not in ("", recipe.sha256):
            raise RequestError(f"{path} is damaged: its hash is not the one in {CONFIG_FILE}. {_AGAIN}")
        load_weights(model, path)
        # Weights of the hub and of this package are found by name; others only by this note.
        if config.weights is not None or (recipe is not None and config.name not in PACKAGED):
            remember(path, digest)
        return cls(model, config, digest, device)

    @classmethod
    def from_model(
        cls,
        model: Model,
        name: str,
        layer: int = -1,
        attention: Literal["true", "pseudo"] = "true",
        device: torch.device | str = "cpu",
    ) -> Backbone:
        """Make a backbone of a model of timm or transformers that is already in memory; its weights are hashed."""
        encoder_of(model, name)
        tower = vision_tower(model)
        size = model.patch_embed.img_size[0] if tower is None else tower.config.image_size
        config = BackboneConfig(name=name, image_size=int(size), layer=layer, attention=attention)
        return cls(model, config, _sha256_state(model), device)

    def to(self, device: torch.device | str) -> Backbone:
        self.device = torch.device(device)
        self.model.to(self.device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Backbone:
        """Return this backbone: it is frozen, so copies of a model share it."""
        return self

    def prepare(self, image: Image.Image) -> np.ndarray:
        return self.preprocessing.prepare(image)

    def normalize(self, batch: Tensor) -> Tensor:
        return self.preprocessing.normalize(batch)

    @property
    def default_signals(self) -> tuple[str, ...]:
        """The signals that are computed unless others are requested: those of `DEFAULT` that this backbone has."""
        return tuple(name for name in attention.DEFAULT if self.has_cls or not attention.REGISTRY[name].needs_cls)

    def check_signals(self, names: Sequence[str]) -> None:
        """Raise a RequestError for signals that do not exist or that this backbone cannot give."""
        for name in names:
            if name not in attention.REGISTRY:
                raise UnknownNameError.of("signal", name, attention.REGISTRY)
        if without := [name for name in names if attention.REGISTRY[name].needs_cls and not self.has_cls]:
            raise RequestError(
                f"{', '.join(without)} needs a class token, which the backbone '{self.config.name}' does not have. "
                "Leave it out of `signals`."
            )
        if self._tap is None and (without := [name for name in names if not attention.REGISTRY[name].pseudo]):
            raise RequestError(
                f'{", ".join(without)} needs the attention of the backbone itself, but `attention="pseudo"` replaces it. '
                'Leave it out of `signals`, or use a backbone with `attention="true"`.'
            )

    @torch.inference_mode()
    def __call__(self, images: Tensor, signals: Sequence[str] | None = None) -> TokenBatch:
        """Compute the tokens and signals (None means `default_signals`) of normalized images, float [B, 3, S, S].

        Blocks after `layer` do not run.
        """
        size = self.preprocessing.image_size
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, size, size):
            raise ShapeError(f"Images must be [B, 3, {size}, {size}], got {list(images.shape)}.")
        return self.tokens(images.to(self.device), signals)

    def tokens(self, images: Tensor, signals: Sequence[str] | None = None) -> TokenBatch:
        """Do the same without checks of the images, and with gradients if the model has any; for training and export."""
        names = self.default_signals if signals is None else tuple(signals)
        self.check_signals(names)
        rolls = self._rollout.collecting() if self._rollout is not None and "rollout" in names else nullcontext()
        with rolls:
            patches, prefix = self.encoder.tokens(images, self.layer)
        cls = prefix[:, 0] if self.has_cls and prefix is not None else None
        if self._tap is None or self._rollout is None:
            values: dict[str, Any] = dict(attention.pseudo_signals(patches, cls, names))
        else:
            earlier = self._rollout.product() if "rollout" in names else None
            values = dict(attention.reduce_attention(self._tap.inputs(), self.prefix, names, earlier))
        return TokenBatch(patches, self.grid, cls=cls, **values)


class Pixels(Backbone):
    """The image itself as tokens: 16 x 16 patches, each the RGB values of its pixels in [0, 1]. For networks that read images."""

    def __init__(self, config: BackboneConfig, device: torch.device | str = "cpu") -> None:
        h, w = self.grid = PIXEL_GRID
        if config.image_size % h:
            raise RequestError(f"`image_size` must be a multiple of {h} for the backbone '{PIXELS}', got {config.image_size}.")
        if config.weights is not None or config.attention != "true" or config.layer != -1:
            raise RequestError(f"The backbone '{config.name}' has one form. Leave out `weights`, `layer` and `attention`.")
        self.device, self.config, self.model = resolve_device(device), config, torch.nn.Identity()
        self.side = config.image_size // h
        self.dim, self.prefix, self.has_cls, self.depth, self.layer = 3 * self.side**2, 0, False, 0, -1
        self.preprocessing = Preprocessing(config.image_size, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), "bilinear")
        self._tap = self._rollout = None
        about = {"name": config.name, "weights": "", "layer": -1, "attention": "true", "grid": [h, w], "dim": self.dim}
        self.fingerprint = {**about, **self.preprocessing.to_dict()}

    @property
    def default_signals(self) -> tuple[str, ...]:
        """No signals: there is no attention."""
        return ()

    def check_signals(self, names: Sequence[str]) -> None:
        if names:
            raise RequestError(f"The backbone '{self.config.name}' has no {', '.join(names)}. Leave out `signals`.")

    def tokens(self, images: Tensor, signals: Sequence[str] | None = None) -> TokenBatch:
        """Cut images [B, 3, S, S] into patches [B, N, 3 p p], each channel by channel and row by row."""
        self.check_signals(signals or ())
        patches = F.pixel_unshuffle(images, self.side)
        return TokenBatch(patches.flatten(2).transpose(1, 2), self.grid)


@dataclass(frozen=True)
class Recipe:
    """How to build a backbone that timm does not know by name: a folder with `config.json`, `weights.safetensors` and a card.

    Such folders are in this package, by name, or written by `tools/distill.py`, by path.
    """

    architecture: str
    """Name of the timm model to start from."""
    arguments: dict[str, Any]
    """Keywords of `timm.create_model` that change it."""
    preprocessing: dict[str, Any]
    """Mean, standard deviation and interpolation."""
    license: str
    sha256: str | None = None
    """Hash of the file of the weights."""
    weights: Path | None = None

    def write(self, folder: Path) -> None:
        """Write `config.json` next to the weights, which are in the folder already."""
        values = asdict(replace(self, sha256=sha256_file(folder / WEIGHTS_FILE)))
        del values["weights"]
        write_sealed(folder / CONFIG_FILE, values)


_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "interpolation": "bicubic"}
_CAE = {"use_abs_pos_emb": True, "use_rel_pos_bias": False, "global_pool": "token", "init_values": 0.1}
PUBLISHED = {
    "panderm-base": Recipe("beit_base_patch16_224", _CAE, _IMAGENET, "CC-BY-NC-ND-4.0"),
    "panderm-large": Recipe("beit_large_patch16_224", _CAE, _IMAGENET, "CC-BY-NC-ND-4.0"),
}
"""Encoders that are published elsewhere, as checkpoints to pass as `weights`: PanDerm (Yan et al., 2025)."""


def find_recipe(name: str) -> Recipe | None:
    """Read the recipe of a packaged backbone or of a folder; None for a name that timm may know."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    folder = PACKAGED.get(name, Path(name))
    if name not in PACKAGED and not (folder / CONFIG_FILE).is_file():
        return None
    values = read_sealed(folder / CONFIG_FILE, _AGAIN)
    try:
        return Recipe(**values, weights=folder / WEIGHTS_FILE)
    except TypeError as error:
        raise RequestError(f"{folder / CONFIG_FILE} does not describe a backbone: {error}.") from None


def build(name: str, image_size: int, recipe: Recipe | None) -> Model:
    if recipe is None and not timm.is_model(name.split(".")[0]):
        known = timm.list_models(["*vit*", "eva*", "beit*", "deit*"], pretrained=True)
        close = difflib.get_close_matches(name, [*PACKAGED, *PUBLISHED, PIXELS, *known], n=1, cutoff=0.5)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        advice = "Use the name of a timm vision transformer, 'hf:owner/name' or 'embedded'."
        raise RequestError(f"Unknown backbone '{name}'.{hint} {advice}")
    architecture, arguments = (recipe.architecture, recipe.arguments) if recipe else (name, {})
    try:
        model: Model = timm.create_model(architecture, pretrained=False, num_classes=0, **{**arguments, "img_size": image_size})
    except TypeError:  # convolutions have no `img_size`
        raise no_grid(name) from None
    except (RuntimeError, AssertionError, ValueError) as error:
        raise RequestError(f"timm cannot build '{name}' for images of {image_size} pixels: {error}") from None
    if recipe:
        model.pretrained_cfg = {**model.pretrained_cfg, **recipe.preprocessing}
    encoder_of(model, name)
    return model


def load_weights(model: Model, path: Path) -> None:
    """Load a file of weights strictly. Position embeddings are resampled to the grid of the model by timm."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise RequestError(f"The weights {path} do not exist. Check `weights`.")
    try:
        state = _tensors(path) if path.suffix.lower() in (".pth", ".pt", ".bin", ".ckpt") else load_file(path)
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{path} is not a valid safetensors file ({error}). Download it again.") from None
    # Some checkpoints are in half precision; the backbone computes in fp32.
    state = {key: value.float() for key, value in state.items()}
    # The family's own filter, which renames keys of other layouts and resamples positions.
    filter_fn = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", checkpoint_filter_fn)
    try:
        state = filter_fn(state, model)
    except (KeyError, RuntimeError, ValueError, AttributeError, IndexError) as error:
        raise RequestError(f"{path} has not the weights of this backbone ({error}). Check `backbone` and `weights`.") from None
    expected = model.state_dict()
    # A published checkpoint may contain a classifier, which the backbone does not have.
    classifier = model.pretrained_cfg.get("classifier") or ()
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    state = {key: value for key, value in state.items() if key in expected or key.rsplit(".", 1)[0] not in heads}
    shapes = {key: (list(state[key].shape), list(value.shape)) for key, value in expected.items() if key in state}
    differences = {
        "missing": [key for key in expected if key not in state],
        "unexpected": [key for key in state if key not in expected],
        "wrong shape": [f"{key} {has}, expected {wanted}" for key, (has, wanted) in shapes.items() if has != wanted],
    }
    problems = "\n".join(f"  {what} ({len(keys)}): {listed(keys)}" for what, keys in differences.items() if keys)
    if problems:
        raise RequestError(f"{path} has not the weights of this backbone:\n{problems}\nCheck `backbone` and `weights`.")
    # Strict: a layer that keeps its random weights would give tokens that look plausible.
    model.load_state_dict(state, strict=True)


def _tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint of torch without running any code of it, with the names that timm knows."""
    try:
        # The settings of a training are often next to its weights, as a plain record.
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch refuses code and reports damage with errors of many kinds
        raise RequestError(
            f"{path} is damaged, or contains more than tensors, which could run code when it is loaded ({first_line(error)}). "
            "Save its weights with safetensors."
        ) from None
    for name in ("model", "module", "state_dict"):
        state = state[name] if isinstance(state, dict) and isinstance(state.get(name), dict) else state
    if not isinstance(state, dict):
        raise RequestError(f"{path} contains no weights by name. Save them with safetensors.")
    # Masked image modeling (CAE, PanDerm) saves the encoder next to its teacher and decoder.
    encoder = {key.removeprefix("encoder."): value for key, value in state.items() if key.startswith("encoder.")}
    unused = ("mask_token", "lm_head.")
    return {key: value for key, value in (encoder or state).items() if isinstance(value, Tensor) and not key.startswith(unused)}


def _from_hub(name: str, model: Model) -> Path:
    source = model.pretrained_cfg.get("hf_hub_id")
    if not source:
        raise WorkError(f"No weights are published for '{name}'. Pass a file as `weights`, or use `backbone=\"embedded\"`.")
    try:
        return fetch(source, "model.safetensors")
    except Exception as error:  # errors of the hub's client, of its transport and of the system
        raise WorkError(
            f"Cannot download the weights of '{name}': {first_line(error)} Download {source}/model.safetensors "
            'elsewhere and pass it as `weights`, or use `backbone="embedded"`, which needs no network.'
        ) from None


def _from_transformers(config: BackboneConfig, device: torch.device | str) -> Backbone:
    try:
        from transformers import AutoModel
    except ImportError:
        raise RequestError(f"'{config.name}' needs transformers: pip install 'medtokenbudget[hf]'.") from None
    source = config.name.removeprefix(HUB)
    if config.weights is not None:
        raise RequestError(f"'{config.name}' brings its weights along. Leave out `weights`, or name another folder.")
    try:
        # Never a pickled checkpoint, which could run code.
        found = AutoModel.from_pretrained(source, use_safetensors=True)
    except (OSError, ValueError) as error:  # no such folder or repository, no network, no safetensors, no such architecture
        raise WorkError(f"transformers cannot load '{source}': {first_line(error)}") from None
    if (model := vision_tower(found)) is None:
        raise no_grid(config.name)
    model.name_or_path = source
    digest = _sha256_state(model)
    if (file := Path(source) / CONFIG_FILE).is_file():
        remember(file, digest)
    return Backbone(model, config, digest, device)


def _shared_name(name: str) -> str:
    folder = name.removeprefix(HUB)
    if find_recipe(name) is None and not (name.startswith(HUB) and Path(folder).is_dir()):
        return name
    return (HUB if name.startswith(HUB) else "") + Path(folder).resolve().name


def _sha256_state(model: Model) -> str:
    digest = hashlib.sha256()
    # Sorted: the order of a state dict follows the code of the model, not its weights.
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
