"""Every setting, as frozen dataclasses. The defaults are the paper's; each field's docstring is its help text.

No heavy import here: the command line reads this file to print its help.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from medtokenbudget.errors import RequestError, UnknownNameError

BUDGETS: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
HEADLINE_BUDGETS: tuple[float, ...] = (0.1, 0.3, 0.5)
PAPER_METHODS: tuple[str, ...] = (
    "no-pruning",
    "random",
    "norm",
    "tome",
    "attention-entropy",
    "local-contrast",
    "lats",
)
CONTROLS: tuple[str, ...] = ("center", "darkness", "oracle")
HEADLINE_METHODS: tuple[str, ...] = ("lats:lesion-first", "lats")
"""Which method of a run becomes the saved model and the headline of its report, the first that the run has."""
DEFAULT_METHODS: tuple[str, ...] = ("lats:lesion-first", *PAPER_METHODS, *CONTROLS)
"""What `mtb sweep` compares unless told otherwise."""
SIGNALS: tuple[str, ...] = ("attention", "norm", "contrast")
Neighborhood = Literal["raster", "grid4", "grid8"]
Padding = Literal["exclude", "zero"]


@dataclass(frozen=True)
class BackboneConfig:
    """The frozen vision transformer."""

    name: str = "vit_base_patch14_dinov2.lvd142m"
    """Any timm vision transformer by name, or 'embedded' for the small one in this package."""
    weights: Path | None = None
    """A safetensors file with the weights; without it they come from the hub."""
    image_size: int = 224
    """Side of the square image that the backbone sees, in pixels."""
    layer: int = -1
    """Block whose tokens and attention are taken, counted from 0, or from the end when negative."""
    attention: Literal["true", "pseudo"] = "true"
    """'true': the attention of the chosen block; 'pseudo': cosine similarity of patches, for blocks without a single one."""


@dataclass(frozen=True)
class ExtractConfig:
    """How images become a store of tokens."""

    batch_size: int = 16
    """Images in one forward pass; halved by itself when memory runs out."""
    shard_size: int = 256
    """Images in one shard file."""
    dtype: Literal["fp16", "fp32"] = "fp16"
    """Number format of the stored patch tokens."""
    views: Literal["none", "flips", "dihedral", "off-center"] = "none"
    """Further views of each image, stored with their masks transformed alike."""
    crops: int = 1
    """Off-center crops of each training image that has a mask; further ones are also flipped or turned. Others get one."""
    view_seed: int = 0
    """Seed of the off-center crops."""
    workers: int = 0
    """Threads that decode images ahead of the forward pass; 0: one a core, at most 16."""
    device: str = "auto"
    """'auto' takes a GPU when there is one; else 'cpu', 'cuda', 'cuda:1', ..."""
    threads: int = 0
    """Threads of the forward pass on a CPU; 0 leaves it to torch."""


@dataclass(frozen=True)
class DistillConfig:
    """A small plain vision transformer that learns to give a large one's tokens."""

    width: int = 192
    """Embedding dimension of the student."""
    depth: int = 6
    """Blocks of the student."""
    heads: int = 3
    """Attention heads of the student."""
    patch_size: int = 14
    """Side of a patch in pixels; the student must have the teacher's token grid."""
    init: Literal["teacher", "random"] = "teacher"
    """'teacher' starts from the teacher's own blocks, projected to the student's width; 'random' from nothing."""
    views: int = 3
    """Stored views of each image: the whole image, then random crops, flipped, turned, in changed colours."""
    epochs: int = 30
    """Passes over the images; each shows one stored view of every image."""
    batch_size: int = 32
    """Images in one step."""
    lr: float = 1e-3
    """Highest learning rate of AdamW: linear warm-up, then cosine to 0."""
    warmup: float = 0.05
    """Share of all steps in which the learning rate rises."""
    weight_decay: float = 0.05
    """Weight decay of AdamW."""
    cls_weight: float = 0.3
    """Weight of the class token's loss beside the patches' loss."""
    attention_weight: float = 0.1
    """Weight of the class-attention loss; ignored for a teacher without a class token."""
    seed: int = 0
    """Seed of the views, of the order and of the start."""
    device: str = "auto"
    """'auto' takes a GPU when there is one; else 'cpu', 'cuda', ..."""
    threads: int = 0
    """Threads on a CPU; 0 leaves it to torch."""


@dataclass(frozen=True)
class LATSConfig:
    """The scorer of the paper."""

    hidden: int = 256
    """Width of the scoring MLP."""
    layers: int = 4
    """Hidden layers of the scoring MLP."""
    dropout: float = 0.1
    """Dropout after each hidden layer."""
    signals: tuple[str, ...] = SIGNALS
    """Auxiliary signals beside the patch embedding: any of attention, norm, contrast."""
    neighborhood: Neighborhood = "raster"
    """Neighbors of the local contrast: 'raster' is the paper's 1D order, 'grid4' and 'grid8' are true 2D neighborhoods."""


@dataclass(frozen=True)
class RouterConfig:
    """From scores to kept patches."""

    minimum: int = 16
    """Fewest patches kept at any budget."""
    smooth: int = 3
    """Side of the average filter over the score grid before selection; 1 switches it off."""
    padding: Padding = "zero"
    """'zero' pads the score grid with zeros as plain average pooling does; 'exclude' averages over the patches that exist."""
    temperature: float = 0.5
    """Gumbel temperature of the training selection."""


@dataclass(frozen=True)
class CurriculumConfig:
    """The training budget over the epochs."""

    kind: Literal["cosine", "fixed"] = "cosine"
    """'cosine' goes from start to end over the given epochs and stays there; 'fixed' stays at start."""
    start: float = 0.5
    """Budget of the first epoch."""
    end: float = 0.25
    """Budget after the annealing."""
    epochs: int = 20
    """Epochs of annealing."""


@dataclass(frozen=True)
class LossWeights:
    """Weights of the paper's objective."""

    classification: float = 1.0
    """Cross-entropy of the head."""
    budget: float = 0.01
    """|K / N - budget|: a diagnostic without gradient."""
    diversity: float = 0.05
    """Similarity of the score maps of different images."""
    lesion: float = 0.1
    """Binary cross-entropy of the scores against the lesion patches, where there is a mask; 0 is the mask-free control."""
    distillation: float = 0.1
    """Squared distance of the scores from the class token's attention."""


@dataclass(frozen=True)
class TrainConfig:
    """One training of LATS and its head."""

    recipe: Literal["joint", "lesion-first"] = "joint"
    """'joint' is the paper's: scorer and head together; 'lesion-first': first the scorer, on masks, then the head."""
    epochs: int = 50
    """Epochs of the scorer (of scorer and head together in the joint recipe)."""
    min_steps: int = 0
    """Fewest steps of the scorer: small data sets get more epochs for it, at most five times as many."""
    head_epochs: int = 30
    """Epochs of a head trained on pooled tokens: the baselines', and the second stage of the lesion-first recipe."""
    batch_size: int = 64
    """Images in one step."""
    patches: int = 0
    """Patches of each image that a step of the lesion-first recipe learns from, drawn anew each time; 0 takes all."""
    lr: float = 1e-3
    """Learning rate of AdamW, cosine to 0."""
    weight_decay: float = 1e-5
    """Weight decay of AdamW."""
    clip: float = 1.0
    """Largest gradient norm."""
    patience: int = 12
    """Epochs without improvement before training stops early."""
    evaluate_every: int = 2
    """Epochs between two looks at the selection metric."""
    min_improvement: float = 0.002
    """Smallest change of the selection metric that counts as an improvement."""
    selection_budget: float = 0.5
    """Budget at which the selection metric is measured."""
    selection_metric: Literal["accuracy", "retention"] = "accuracy"
    """What picks the best epoch; 'retention' is the share of the ceiling, averaged over the headline budgets."""
    protocol: Literal["strict", "paper"] = "strict"
    """'paper' picks the epoch on the validation part; 'strict' on a part cut from training, which no reported number uses."""
    selection_fraction: float = 0.1
    """Share of the training part that the strict protocol cuts off when the manifest has no selection part of its own."""
    class_balance: Literal["none", "loss", "sampler"] = "none"
    """'loss' weights the classes inversely to their frequency, 'sampler' draws them equally often."""
    views: Literal["none", "off-center", "all"] = "none"
    """Train on stored views of the training images too: one off-center crop of each, or 'all' (crops, flips, rotations)."""
    seed: int = 42
    """Seed of everything random in this training."""
    device: str = "auto"
    """'auto' takes a GPU when there is one; else 'cpu', 'cuda', ..."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """'bf16' runs the scorer and the head under bf16 autocast."""
    budgets: tuple[float, ...] = BUDGETS
    """Budgets that pooled heads are trained for; one is drawn for each batch."""
    lats: LATSConfig = field(default_factory=LATSConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    losses: LossWeights = field(default_factory=LossWeights)


def _lesion_first() -> TrainConfig:
    return TrainConfig(
        recipe="lesion-first",
        epochs=8,
        min_steps=1000,
        patches=64,
        min_improvement=0.0,
        selection_metric="retention",
        views="all",
        lats=LATSConfig(neighborhood="grid8"),
        router=RouterConfig(padding="exclude"),
        losses=LossWeights(classification=0.0, budget=0.01, diversity=0.0, lesion=1.0, distillation=0.0),
    )


PRESETS = {"paper": TrainConfig, "lesion-first": _lesion_first}


def preset(name: str, **changes: Any) -> TrainConfig:
    """The training configuration called `name` ('paper', or 'lesion-first', the default outside `reproduce`), with changes."""
    if name not in PRESETS:
        raise UnknownNameError.of("preset", name, PRESETS)
    return replace(PRESETS[name](), **changes)


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain JSON values."""
    return {key: _plain(value) for key, value in asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def train_config_from_dict(values: dict[str, Any]) -> TrainConfig:
    """The inverse of `to_dict` for a training configuration; unknown keys are refused."""
    parts: dict[str, Any] = {
        "lats": LATSConfig,
        "router": RouterConfig,
        "curriculum": CurriculumConfig,
        "losses": LossWeights,
    }
    try:
        flat = {key: parts[key](**_tuples(value)) if key in parts else value for key, value in values.items()}
        return TrainConfig(**_tuples(flat))
    except TypeError as error:
        raise RequestError(f"this is not a training configuration of this version: {error}.") from None


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
