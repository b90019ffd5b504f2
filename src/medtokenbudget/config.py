"""Every setting, as frozen dataclasses. The defaults are the paper's; each field's docstring is its help text.

No heavy import here: the command line reads this file to print its help.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from medtokenbudget.errors import RequestError, UnknownNameError

BUDGET = "budget"
Budget = Annotated[float, BUDGET]
"""A share of the patches in (0, 1]. The command line also reads it as a percentage, such as 30%."""

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
DEFAULT_SELECTOR = "lats"
"""What `mtb train` trains unless told otherwise."""
HEADLINE_METHODS: tuple[str, ...] = ("lats:lesion-first", "lats")
"""Which method of a run becomes the saved model and the headline of its report, the first that the run has."""
DEFAULT_METHODS: tuple[str, ...] = ("lats:lesion-first", *PAPER_METHODS, *CONTROLS)
"""What `mtb sweep` compares unless told otherwise."""
HEADLINE_SELECTORS: tuple[str, ...] = ("lats", "lats:lesion-first", "center", "random", "evit", "tome", "no-pruning", "oracle")
"""What the study `zoo` combines with every head."""
SIGNALS: tuple[str, ...] = ("attention", "norm", "contrast")
Neighborhood = Literal["raster", "grid4", "grid8"]
Padding = Literal["exclude", "zero"]


@dataclass(frozen=True)
class BackboneConfig:
    """The frozen backbone, a vision transformer."""

    name: str = "vit_base_patch14_dinov2.lvd142m"
    """Name of a timm vision transformer, 'embedded' for the small one in this package, or a folder written by tools/distill.py."""
    weights: Path | None = None
    """Weights of the backbone (.safetensors). Default: download them from the Hugging Face Hub."""
    image_size: int = 224
    """Side of the square input image, in pixels."""
    layer: int = -1
    """Block to take tokens and attention from, counted from 0; -1 is the last."""
    attention: Literal["true", "pseudo"] = "true"
    """Source of the attention. true: the block itself. pseudo: cosine similarity of patches, for blocks without a readable one."""


@dataclass(frozen=True)
class ExtractConfig:
    """Extraction: from images to a store of tokens."""

    batch_size: int = 16
    """Images per forward pass; halved automatically if memory runs out."""
    shard_size: int = 256
    """Images per shard file."""
    dtype: Literal["fp16", "fp32"] = "fp16"
    """Number format of the stored tokens."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward pass; on a GPU, bf16 is faster at nearly the same tokens."""
    views: Literal["none", "flips", "dihedral", "off-center"] = "none"
    """Extra views to store with each image and its mask: flipped and rotated copies, or crops with the lesion off-center."""
    crops: int = 1
    """With --views off-center: number of crops per training image with a mask; the second and later ones are also rotated or
    flipped. Other images with a mask get one."""
    view_seed: int = 0
    """Random seed of the off-center crops."""
    signals: tuple[str, ...] = ()
    """Signals to store with the tokens, any of attention_entropy, cls_attention, received_attention, value_norm, mean_key, rollout.
    Default: the first two, and those that the store already has. A finished store gains the missing ones; its tokens stay."""
    workers: int = 0
    """Threads that decode images; 0 uses one per core, up to 16."""
    device: str = "auto"
    """Device to run on: auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""
    threads: int = 0
    """CPU threads of the forward pass; 0 uses the default of PyTorch."""


@dataclass(frozen=True)
class LATSConfig:
    """The LATS scorer: an MLP that gives each patch a score."""

    hidden: int = 256
    """Width of the hidden layers."""
    layers: int = 4
    """Number of hidden layers."""
    dropout: float = 0.1
    """Dropout after each hidden layer."""
    signals: tuple[str, ...] = SIGNALS
    """Signals that the scorer sees in addition to the patch embedding: any of attention, norm, contrast."""
    neighborhood: Neighborhood = "raster"
    """Neighbors for the local contrast: 'raster' is the previous and next patch, as in the paper; 'grid4' and 'grid8' are neighbors
    on the 2D grid."""


@dataclass(frozen=True)
class ContextConfig:
    """The context scorer: a small convolutional network over the token grid."""

    channels: int = 128
    """Width of the blocks."""
    blocks: int = 3
    """Number of blocks, each a depthwise convolution and an MLP."""
    kernel: int = 5
    """Side of the convolutions, in patches; odd."""
    expansion: int = 2
    """Width of the MLP of a block, in multiples of the channels."""
    dropout: float = 0.0
    """Dropout of what a block adds."""
    turns: bool = True
    """Show the blocks the token grid flipped and turned at random during training."""
    smooth: int = 1
    """Smooth the score map of this scorer with an average filter of this size before selection; 1 turns it off."""
    min_steps: int = 400
    """Train this scorer for at least this many steps, where --min-steps asks for more: it learns from all patches of an image."""


@dataclass(frozen=True)
class RouterConfig:
    """The router: from scores to kept patches."""

    minimum: int = 16
    """Keep at least this many patches at any budget."""
    smooth: int = 3
    """Smooth the score map with an average filter of this size before selection; 1 turns it off. The context scorer, which sees
    the neighborhood by itself, has its own setting."""
    padding: Padding = "zero"
    """How the smoothing treats the border: 'zero' pads with zeros, 'exclude' averages only over existing patches."""
    temperature: float = 0.5
    """Gumbel temperature of the selection during training."""


@dataclass(frozen=True)
class CurriculumConfig:
    """The budget curriculum: which budget is used in which epoch of training."""

    kind: Literal["cosine", "fixed"] = "cosine"
    """'cosine' anneals the budget from start to end, 'fixed' keeps it at start."""
    start: Budget = 0.5
    """Budget in the first epoch."""
    end: Budget = 0.25
    """Budget after annealing."""
    epochs: int = 20
    """Number of epochs over which the budget is annealed."""


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss terms."""

    classification: float = 1.0
    """Weight of the cross-entropy of the classification head."""
    budget: float = 0.01
    """Weight of |K / N - budget|, which has no gradient and is only logged."""
    diversity: float = 0.05
    """Weight of the diversity loss, which penalizes similar score maps for different images."""
    lesion: float = 0.1
    """Weight of the lesion loss, the binary cross-entropy between scores and lesion mask; 0 trains without masks."""
    distillation: float = 0.1
    """Weight of the distillation loss, the squared distance between scores and class-token attention."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run of a selector and its head."""

    recipe: Literal["joint", "lesion-first"] = "joint"
    """'joint' trains scorer and head together, as in the paper; 'lesion-first' trains the scorer on masks, then the head."""
    epochs: int = 50
    """Epochs for the scorer, or for scorer and head together with the joint recipe."""
    min_steps: int = 0
    """Train the scorer for at least this many steps: small data sets get more epochs, up to five times as many."""
    head_epochs: int = 30
    """Epochs for heads that are trained on pooled tokens: all baselines, and the second stage of the lesion-first recipe."""
    batch_size: int = 64
    """Images per training step."""
    patches: int = 0
    """With the lesion-first recipe, sample this many patches per image in each step; 0 uses all of them."""
    lr: float = 1e-3
    """Initial learning rate of AdamW, with cosine decay to 0."""
    weight_decay: float = 1e-5
    """Weight decay of AdamW."""
    clip: float = 1.0
    """Maximum gradient norm."""
    patience: int = 12
    """Stop early after this many epochs without improvement."""
    evaluate_every: int = 2
    """Compute the selection metric every this many epochs."""
    min_improvement: float = 0.002
    """Smallest change of the selection metric that counts as an improvement."""
    selection_budget: Budget = 0.5
    """Budget at which the selection metric is computed."""
    selection_metric: Literal["accuracy", "retention"] = "accuracy"
    """Metric that selects the best epoch; 'retention' is the share of the retention ceiling, averaged over 0.1, 0.3 and 0.5."""
    protocol: Literal["strict", "paper"] = "strict"
    """'strict' selects the epoch on images held out from the training set; 'paper' selects it on the validation set."""
    selection_fraction: float = 0.1
    """Share of the training set that the strict protocol holds out if the manifest has no selection set."""
    class_balance: Literal["none", "loss", "sampler"] = "none"
    """'loss' weights classes by inverse frequency, 'sampler' draws all classes equally often."""
    views: Literal["none", "off-center", "all"] = "none"
    """Also train on views in the store: 'off-center' uses one off-center crop per image, 'all' uses crops, flips and rotations."""
    seed: int = 42
    """Random seed."""
    device: str = "auto"
    """Device to run on: auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """'bf16' runs scorer and head in bf16 autocast."""
    budgets: tuple[Budget, ...] = BUDGETS
    """Token budgets to evaluate at. Heads that are trained on pooled tokens draw one of them per batch."""
    lats: LATSConfig = field(default_factory=LATSConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
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
    """Return a training configuration by name, with changes.

    Args:
        name: 'lesion-first', the default outside `mtb reproduce`, or 'paper'.
        **changes: Fields of `TrainConfig` to replace.

    Raises:
        UnknownNameError: There is no such preset.
    """
    if name not in PRESETS:
        raise UnknownNameError.of("preset", name, PRESETS)
    return replace(PRESETS[name](), **changes)


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as plain JSON values."""
    return {key: _plain(value) for key, value in asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def train_config_from_dict(values: dict[str, Any]) -> TrainConfig:
    """Build a training configuration from the values that `to_dict` returned.

    Raises:
        RequestError: A key is unknown, because the values come from another version.
    """
    parts: dict[str, Any] = {
        "lats": LATSConfig,
        "context": ContextConfig,
        "router": RouterConfig,
        "curriculum": CurriculumConfig,
        "losses": LossWeights,
    }
    try:
        flat = {key: parts[key](**_tuples(value)) if key in parts else value for key, value in values.items()}
        return TrainConfig(**_tuples(flat))
    except (TypeError, AttributeError) as error:
        raise RequestError(f"Not a training configuration of this version: {error}. Train the model again.") from None


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
