"""Every setting, as frozen dataclasses. The defaults are the paper's; each field's docstring is its help text.

A number says its range in its type, and every value is checked when the dataclass is made. No heavy import here: the command line
reads this file to print its help.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from decimal import Decimal
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from medtokenbudget.errors import BudgetError, RequestError, UnknownNameError


@dataclass(frozen=True)
class Range:
    """The finite numbers that a setting accepts: from `low` (or above it) to `high` (or below it), perhaps only odd ones."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False
    odd: bool = False

    def __contains__(self, value: float) -> bool:
        high_enough = value > self.low if self.above else value >= self.low
        low_enough = value < self.high if self.below else value <= self.high
        return math.isfinite(value) and high_enough and low_enough and (not self.odd or value % 2 == 1)

    def __str__(self) -> str:
        bounds = [f"{'above' if self.above else 'at least'} {self.low:g}"]
        if self.high < math.inf:
            # Not `:g`, which writes 2**32 - 1 as 4.29497e+09.
            bounds.append(f"{'below' if self.below else 'at most'} {self.high:.15g}")
        return " and ".join(["odd"] * self.odd + bounds)


BUDGET = Range(0, 1, above=True)
Budget = Annotated[float, BUDGET]
"""A share of the patches in (0, 1]. The command line also reads it as a percentage, such as 30%."""
Count = Annotated[int, Range(1)]
Positive = Annotated[float, Range(0, above=True)]
Weight = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1, below=True)]
OddSide = Annotated[int, Range(1, odd=True)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
"""A random seed; NumPy accepts no others."""
Parallel = Annotated[int, Range(0, 1024)]
"""Threads or processes; 0 leaves the number to the program. Operating systems refuse to start many more."""
Share = Annotated[float, Range(0, 1, above=True)]
"""A share in (0, 1] of something else than patches."""
Folds = Annotated[int, Range(2)]
Side = Annotated[int, Range(1, 8192)]
"""Side of a square image, in pixels."""
DrawnSide = Annotated[int, Range(32, 8192)]
"""Side of a drawn image, in pixels: details of a lesion need some."""
Natural = Annotated[int, Range(0)]


@dataclass(frozen=True)
class Kind:
    """What an annotation allows: `tuple[Budget, ...] | None` is several floats in a range, or None."""

    type: Any
    """The type of one value: `int`, `Path`, a `Literal`, ...; a union of several types is checked where it is used."""
    several: bool = False
    optional: bool = False
    notes: tuple[Any, ...] = ()
    """What `Annotated` adds: a `Range`, or how the command line reads it."""

    @classmethod
    def of(cls, annotation: Any) -> Kind:
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            inner = cls.of(arguments[0])
            return replace(inner, notes=(*arguments[1:], *inner.notes))
        if origin in (Union, types.UnionType):
            # `X | None` is an optional X; of several types, the code that uses the value decides.
            inside = [argument for argument in arguments if argument is not type(None)]
            return replace(cls.of(inside[0]) if len(inside) == 1 else cls(Any), optional=len(inside) < len(arguments))
        return replace(cls.of(arguments[0]), several=True) if origin is tuple else cls(annotation)

    @property
    def limits(self) -> Range | None:
        return next((note for note in self.notes if isinstance(note, Range)), None)


class Settings:
    """Base of configuration dataclasses: every value is checked against the type of its field when one is made."""

    prefix: ClassVar[str] = ""
    """What the names of the fields start with in messages, for settings that are part of others: 'router.'."""

    def __post_init__(self) -> None:
        settings: type = type(self)
        check_values({f"{self.prefix}{name}": (getattr(self, name), kind) for name, kind in field_annotations(settings).items()})


@cache
def field_annotations(settings: type) -> dict[str, Any]:
    """Return the annotation of each field of a dataclass, with what `Annotated` adds."""
    hints = get_type_hints(settings, include_extras=True)
    return {entry.name: hints[entry.name] for entry in fields(settings)}


def check_values(values: Mapping[str, tuple[Any, Any]]) -> None:
    """Reject values that do not fit their annotations, all at once: `{"jobs": (jobs, Parallel)}`."""
    faults: list[RequestError] = []
    for name, (value, annotation) in values.items():
        kind = Kind.of(annotation)
        if value is None and kind.optional:
            continue
        if kind.several and not isinstance(value, (tuple, list)):
            faults.append(RequestError(f"`{name}` must be several values, got {value!r}."))
        elif kind.several and not value and kind.limits is BUDGET:
            faults.append(BudgetError(f"`{name}` must have at least one value, got none."))
        else:
            faults += filter(None, (_fault(name, item, kind.type, kind.limits) for item in (value if kind.several else [value])))
    if faults:
        raise faults[0] if len(faults) == 1 else RequestError(" ".join(map(str, faults)))


def number(text: str) -> float:
    """Read a number as people type it: 30% is 0.3. A ValueError says that the text is none."""
    # Not divided by 100: 33.3 / 100 is not 0.333.
    value = float(text.removesuffix("%") + "e-2" if text.endswith("%") else text)
    if not math.isfinite(value):
        raise ValueError
    return value


def read_share(name: str, value: Any) -> Any:
    """Return a share in (0, 1]: a number, or one as text, such as '30%'. Any other is an error that names it."""
    if isinstance(value, (str, Decimal)):
        with suppress(ValueError):
            value = number(str(value))
    check_values({name: (value, Budget if name.startswith("budget") else Share)})
    return value


def _fault(name: str, value: Any, kind: Any, limits: Range | None) -> RequestError | None:
    if get_origin(kind) is Literal:
        return None if value in get_args(kind) else UnknownNameError.of(name, str(value), get_args(kind))
    if kind in (int, float):
        error = BudgetError if limits is BUDGET else RequestError
        # In Python, True is a whole number too.
        if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
            return error(f"`{name}` must be a {'whole ' if kind is int else ''}number, got {value!r}.")
        if limits is None or float(value) in limits:
            return None
        # People type 30 where they mean 30 %.
        hint = f" Did you mean {float(value) / 100:g}?" if limits.high == 1 < float(value) <= 100 else ""
        return error(f"`{name}` must be {limits}, got {value}.{hint}")
    names = {bool: "True or False", str: "text"}
    wanted = f"a {kind.__name__}" if isinstance(kind, type) and is_dataclass(kind) else names.get(kind)
    return RequestError(f"`{name}` must be {wanted}, got {value!r}.") if wanted and not isinstance(value, kind) else None


NOTICE = "Research software, not a medical device."
"""On every page, card, picture and file that people may take for a diagnosis."""
USE_NOTICE = "Do not use it to diagnose, triage or treat anyone."
DEFAULT_BUDGET = 0.3
"""The share of the patches that is kept where nobody chooses one."""
HEADLINE_BUDGET = 0.3
"""The budget of headline numbers, or the measured one nearest to it: that of the paper's abstract."""
BUDGETS: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
HEADLINE_BUDGETS: tuple[float, ...] = (0.1, 0.3, 0.5)
SEEDS: tuple[int, ...] = (42, 43, 44)
"""The seeds of the paper; the first one is the default everywhere."""
PAPER_METHODS: tuple[str, ...] = ("no-pruning", "random", "norm", "tome", "attention-entropy", "local-contrast", "lats")
CONTROLS: tuple[str, ...] = ("center", "darkness", "border-contrast", "segmenter", "random", "oracle")
"""In every comparison: what a learned router must beat (places, gray values, the border, a segmenter, chance), and the ceiling."""
PAPER_RECIPE = "lats"
"""The method of the paper, shown next to the model of a run."""
DEFAULT_SELECTOR = "lats"
"""What `mtb train` trains unless told otherwise."""
HEADLINE_METHODS: tuple[str, ...] = ("lats:lesion-first", "lats")
"""Which method of a run becomes the saved model and the headline of its report, the first that the run has."""
DEFAULT_METHODS: tuple[str, ...] = tuple(dict.fromkeys(("lats:lesion-first", *PAPER_METHODS, *CONTROLS)))
"""What `mtb sweep` compares unless told otherwise."""
HEADLINE_SELECTORS: tuple[str, ...] = ("lats", "lats:lesion-first", "center", "random", "evit", "tome", "no-pruning", "oracle")
"""What the study `zoo` combines with every head."""
SIGNALS: tuple[str, ...] = ("attention", "norm", "contrast")
Neighborhood = Literal["raster", "grid4", "grid8"]
Padding = Literal["exclude", "zero"]


@dataclass(frozen=True)
class BackboneConfig(Settings):
    """The frozen backbone, a vision transformer."""

    name: str = "vit_base_patch14_dinov2.lvd142m"
    """Name of a timm vision transformer, hf:owner/name or hf:folder for one of transformers, 'embedded' for the small one in this
    package, or a folder written by tools/distill.py."""
    weights: Path | None = None
    """Weights of the backbone (.safetensors, or .pth with tensors alone). Default: download them from the Hugging Face Hub."""
    image_size: Side = 224
    """Side of the square input image, in pixels."""
    layer: Annotated[int, Range(-1)] = -1
    """Block to take tokens and attention from, counted from 0; -1 is the last."""
    attention: Literal["true", "pseudo"] = "true"
    """Source of the attention. true: the block itself. pseudo: cosine similarity of patches, for blocks without a readable one."""


@dataclass(frozen=True)
class ExtractConfig(Settings):
    """Extraction: from images to a store of tokens."""

    batch_size: Count = 16
    """Images per forward pass; halved automatically if memory runs out."""
    shard_size: Count = 256
    """Images per shard file."""
    dtype: Literal["fp16", "fp32"] = "fp16"
    """Number format of the stored tokens."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward pass; on a GPU, bf16 is faster at nearly the same tokens."""
    views: Literal["none", "flips", "dihedral", "off-center", "augmented"] = "none"
    """Extra views to store with each image and its mask: flipped and rotated copies, crops with the lesion off-center, or drawn
    views of the training images that are flipped, rotated and changed in color."""
    crops: Count = 1
    """With `views="off-center"`: number of crops per training image with a mask; the second and later ones are also rotated or
    flipped. Other images with a mask get one. With `views="augmented"`: number of drawn views per training image."""
    view_seed: Seed = 0
    """Random seed of the drawn views."""
    signals: tuple[str, ...] = ()
    """Signals to store with the tokens, any of attention_entropy, cls_attention, received_attention, value_norm, mean_key, rollout.
    Default: the first two, and those that the store already has. A finished store gains the missing ones; its tokens stay."""
    workers: Parallel = 0
    """Threads that decode images; 0 uses one per core, up to 16."""
    device: str = "auto"
    """Device to run on: auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""
    threads: Parallel = 0
    """CPU threads of the forward pass; 0 uses as many as there are idle cores at the start."""
    jobs: Parallel = 1
    """Processes that share the work; they divide the GPUs of the machine. 0 means one per GPU, or one per core without a GPU."""


TokenFormat = Literal["fp16", "fp32"]
LESIONS = {"mask": "masks", "box": "", "crop": "crops"}
"""What is written of the lesion itself: the column of the table, and the folder of its pictures."""


@dataclass(frozen=True)
class RouteConfig(Settings):
    """How much of images is kept, and what is written of it."""

    budget: Budget | None = None
    """Share of the patches to keep, such as 0.3 or 30%. Default: that of the model, or {DEFAULT_BUDGET}."""
    retention: Share | None = None
    """Instead of a budget: keep this share of the lesion, for a model that `mtb calibrate` has calibrated for it."""
    coverage: Share | None = None
    """With `retention`: the calibrated share of images that keep at least so much. Default: the promise on average."""
    selector: str | None = None
    """Method to use. Default: the model's main method. The model's README.md lists all of them."""
    table: Literal["parquet", "csv"] = "parquet"
    """Format of the table."""
    overlay: bool = False
    """Also draw the kept patches of each image, in overlays/ next to the table."""
    tokens: bool = False
    """Also write the kept tokens, to tokens.safetensors next to the table."""
    tokens_dtype: TokenFormat = "fp16"
    """Number format of the tokens that `tokens` writes."""
    mask: bool = False
    """Also write the lesion as a mask, in masks/; the table names its file."""
    box: bool = False
    """Also write boxes to the table: left, top, right, bottom in pixels, four numbers for each lesion, the largest first."""
    crop: bool = False
    """Also write a crop of the largest lesion, in crops/; the table names its file."""
    batch_size: Count = 16
    """Images per forward pass."""
    workers: Parallel = 2
    """Threads that decode images."""
    shard_size: Natural = 0
    """Images per file of a table in shards (routes/), which a stopped command resumes. 0: one table; 1000 on Ray."""
    jobs: Parallel = 1
    """Processes that share the work, in shards; they divide the GPUs of the machine. 0: one per GPU, or one per core."""

    @property
    def lesions(self) -> tuple[str, ...]:
        return tuple(name for name in LESIONS if getattr(self, name))


@dataclass(frozen=True)
class LATSConfig(Settings):
    """The LATS scorer: an MLP that gives each patch a score."""

    prefix = "lats."

    hidden: Count = 256
    """Width of the hidden layers."""
    layers: Count = 4
    """Number of hidden layers."""
    dropout: Fraction = 0.1
    """Dropout after each hidden layer."""
    signals: tuple[str, ...] = SIGNALS
    """Signals that the scorer sees in addition to the patch embedding: any of attention, norm, contrast."""
    neighborhood: Neighborhood = "raster"
    """Neighbors for the local contrast: 'raster' is the previous and next patch, as in the paper; 'grid4' and 'grid8' are neighbors
    on the 2D grid."""


@dataclass(frozen=True)
class ContextConfig(Settings):
    """The context scorer: a small convolutional network over the token grid."""

    prefix = "context."

    channels: Count = 128
    """Width of the blocks."""
    blocks: Count = 3
    """Number of blocks, each a depthwise convolution and an MLP."""
    kernel: OddSide = 5
    """Side of the convolutions, in patches; odd."""
    expansion: Count = 2
    """Width of the MLP of a block, in multiples of the channels."""
    dropout: Fraction = 0.0
    """Dropout of what a block adds."""
    turns: bool = True
    """Show the blocks the token grid flipped and turned at random during training."""
    smooth: OddSide = 1
    """Smooth the score map of this scorer with an average filter of this size before selection; 1 turns it off."""
    min_steps: Natural = 400
    """Train this scorer for at least this many steps, where `min_steps` asks for more: it learns from all patches of an image."""


@dataclass(frozen=True)
class ScoutConfig(Settings):
    """The scout: a small network that reads the image itself."""

    prefix = "scout."

    image_size: Annotated[int, Range(32, 1024)] = 128
    """Side of the image that the scout reads, in pixels: a multiple of 16."""
    plain: bool = False
    """Train a small segmenter from scratch instead of an encoder that was pretrained on ImageNet."""
    width: Positive = 1.0
    """Number of channels relative to the default network. The pretrained encoder keeps its own."""
    crop: Share = 0.4
    """Smallest side of a random training crop, relative to the image."""
    pale: Annotated[float, Range(0, 1)] = 0.7
    """Share of the training views whose lesion is made paler, half of these red."""


@dataclass(frozen=True)
class RouterConfig(Settings):
    """The router: from scores to kept patches."""

    prefix = "router."

    minimum: Count = 16
    """Keep at least this many patches at any budget."""
    smooth: OddSide = 3
    """Smooth the score map with an average filter of this size before selection; 1 turns it off. The context scorer, which sees
    the neighborhood by itself, has its own setting."""
    padding: Padding = "zero"
    """How the smoothing treats the border: 'zero' pads with zeros, 'exclude' averages only over existing patches."""
    temperature: Positive = 0.5
    """Gumbel temperature of the selection during training."""


@dataclass(frozen=True)
class CurriculumConfig(Settings):
    """The budget curriculum: which budget is used in which epoch of training."""

    prefix = "curriculum."

    kind: Literal["cosine", "fixed"] = "cosine"
    """'cosine' anneals the budget from start to end, 'fixed' keeps it at start."""
    start: Budget = 0.5
    """Budget in the first epoch."""
    end: Budget = 0.25
    """Budget after annealing."""
    epochs: Count = 20
    """Number of epochs over which the budget is annealed."""


@dataclass(frozen=True)
class LossWeights(Settings):
    """Weights of the loss terms."""

    prefix = "losses."

    classification: Weight = 1.0
    """Weight of the cross-entropy of the classification head."""
    budget: Weight = 0.01
    """Weight of |K / N - budget|, which has no gradient and is only logged."""
    diversity: Weight = 0.05
    """Weight of the diversity loss, which penalizes similar score maps for different images."""
    lesion: Weight = 0.1
    """Weight of the lesion loss, the binary cross-entropy between scores and lesion mask; 0 trains without masks."""
    distillation: Weight = 0.1
    """Weight of the distillation loss, the squared distance between scores and class-token attention."""


@dataclass(frozen=True)
class TrainConfig(Settings):
    """One training run of a selector and its head."""

    recipe: Literal["joint", "lesion-first", "scout"] = "joint"
    """'joint' trains scorer and head together, as in the paper; 'lesion-first' trains the scorer on masks, then the head; 'scout'
    trains a small network on images and masks, without a store."""
    epochs: Count = 50
    """Epochs for the scorer, or for scorer and head together with the joint recipe."""
    min_steps: Natural = 0
    """Train the scorer for at least this many steps: small data sets get more epochs, up to five times as many."""
    head_epochs: Count = 30
    """Epochs for heads that are trained on pooled tokens: all baselines, and the second stage of the lesion-first recipe."""
    batch_size: Count = 64
    """Images per training step."""
    patches: Natural = 0
    """With the lesion-first recipe, sample this many patches per image in each step; 0 uses all of them."""
    lr: Positive = 1e-3
    """Initial learning rate of AdamW, with cosine decay to 0. Constant for heads on pooled tokens under the protocol 'paper'."""
    weight_decay: Weight = 1e-5
    """Weight decay of AdamW."""
    clip: Positive = 1.0
    """Maximum gradient norm."""
    patience: Count = 12
    """Stop early after this many epochs without improvement."""
    evaluate_every: Count = 2
    """Compute the selection metric every this many epochs."""
    min_improvement: Weight = 0.002
    """Smallest change of the selection metric that counts as an improvement."""
    selection_budget: Budget = 0.5
    """Budget at which the selection metric is computed."""
    selection_metric: Literal["accuracy", "retention"] = "accuracy"
    """Metric that selects the best epoch; 'retention' is the share of the retention ceiling, averaged over 0.1, 0.3 and 0.5."""
    protocol: Literal["strict", "paper"] = "strict"
    """'strict' selects the epoch on images held out from the training set; heads on pooled tokens keep their last epoch. 'paper'
    selects it on the validation set, also for those heads, which then train at a constant learning rate."""
    selection_fraction: Annotated[float, Range(0, 1, above=True, below=True)] = 0.1
    """Share of the training set that the strict protocol holds out if the manifest has no selection set."""
    class_balance: Literal["none", "loss", "sampler"] = "none"
    """'loss' weights classes by inverse frequency, 'sampler' draws all classes equally often."""
    views: Literal["none", "off-center", "all"] = "none"
    """Also train on views in the store: 'off-center' uses one off-center crop per image, 'all' uses every view in the store."""
    seed: Seed = SEEDS[0]
    """Random seed."""
    device: str = "auto"
    """Device to run on: auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """'bf16' runs scorer and head in bf16 autocast."""
    budgets: tuple[Budget, ...] = BUDGETS
    """Token budgets to evaluate at. Heads that are trained on pooled tokens draw one of them per batch."""
    lats: LATSConfig = field(default_factory=LATSConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    scout: ScoutConfig = field(default_factory=ScoutConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    losses: LossWeights = field(default_factory=LossWeights)
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Dotted names of the settings that the user chose, even where the choice is the default of the preset. Settings that differ
    from the preset are known without it: see `given_settings`."""


@dataclass(frozen=True)
class ServeConfig(Settings):
    """Settings of the server."""

    host: str = "127.0.0.1"
    """Address to listen on. Addresses that other machines can reach need a token."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names that requests may use, such as the public one that a proxy here passes on."""
    port: Annotated[int, Range(0, 65535)] = 8765
    """Port to listen on; 0 picks a free one."""
    token_file: Path | None = None
    """File with the token that clients must send as `Authorization: Bearer TOKEN`. Default: the variable MTB_TOKEN."""
    queue: Natural = 8
    """Number of requests that may wait while one is running; further requests get status 503."""
    max_bytes: Count = 25_000_000
    """Largest size of image and mask together, in bytes."""
    max_pixels: Count = 50_000_000
    """Largest number of pixels of an image or a mask."""
    deadline: Positive = 60.0
    """Seconds that a request may wait for its turn; then it gets status 503."""
    connections: Count = 100
    """Largest number of open connections; requests on further ones get status 503."""
    weights: Path | None = None
    """Weights file of the backbone, if it has moved since the model was saved."""
    device: str = "auto"
    """Device to run on: auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""


PRESETS = {
    "paper": TrainConfig(),
    "lesion-first": TrainConfig(
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
    ),
    "scout": TrainConfig(
        recipe="scout", epochs=11, min_steps=780, batch_size=32, lr=3e-3, weight_decay=0.01, losses=LossWeights(lesion=1.0)
    ),
}


def preset(name: str, **changes: Any) -> TrainConfig:
    """Return a training configuration by name, with changes.

    Args:
        name: 'lesion-first', the default outside `mtb reproduce`, 'paper', or 'scout'.
        **changes: Fields of `TrainConfig` to replace.
    """
    if name not in PRESETS:
        raise UnknownNameError.of("preset", name, PRESETS)
    # Groups of settings do not say which of their fields was chosen; `given_settings` compares these with the preset.
    given = frozenset(key for key, value in changes.items() if not is_dataclass(value))
    return replace(PRESETS[name], **{"given": given, **changes})


def settings_of(config: Any) -> dict[str, Any]:
    """Return every setting by its dotted name, such as 'lats.hidden'."""
    values: dict[str, Any] = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            values |= {f"{entry.name}.{name}": inner for name, inner in settings_of(value).items()}
        elif entry.name != "given":
            values[entry.name] = value
    return values


def with_settings(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with other values, given by dotted names: `{"lats.neighborhood": "raster"}`."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        part, _, last = name.rpartition(".")
        # One `replace` per group: its check sees all new values together.
        parts.setdefault(part, {})[last] = value
    top = parts.pop("", {})
    return replace(config, **top, **{part: replace(getattr(config, part), **inner) for part, inner in parts.items()})


def given_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that the user chose: those that were recorded, and those that differ from the preset of the recipe."""
    usual = settings_of(next(usual for usual in PRESETS.values() if usual.recipe == config.recipe))
    return {name: value for name, value in settings_of(config).items() if name in config.given or value != usual[name]}


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as plain JSON values."""
    return {key: plain(value) for key, value in asdict(config).items() if key != "given"}


def plain(value: Any) -> Any:
    """Return a value as JSON and YAML have it: lists for tuples, text for paths."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def train_config_from_dict(values: dict[str, Any]) -> TrainConfig:
    """Build a training configuration from the values that `to_dict` returned."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inside = {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
        flat |= {name: tuple(inner) if isinstance(inner, list) else inner for name, inner in inside.items()}
    try:
        return with_settings(TrainConfig(), flat)
    except (TypeError, AttributeError, RequestError) as error:
        why = str(error).rstrip(".")
        raise RequestError(f"Not a training configuration of this version: {why}. Train the model again.") from None
