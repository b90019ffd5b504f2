"""The signals that a store can hold beside the tokens: name, shape, and how each is computed from the attention of a block.

One registry for extraction, stores and live models. A selector names what it reads in `requires`; nothing else is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from medtokenbudget.backbone.attention import CHUNK, Inputs, mixed, normalized_entropy
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.tokens import SIGNALS, cosine_attention

DEFAULT = ("attention_entropy", "cls_attention")
"""What is computed unless something else is requested: the signals of LATS and of its distillation."""


@dataclass(frozen=True)
class Seen:
    """What the signals of a few images are computed from; T = prefix + N tokens.

    Attributes:
        inputs: Query, key and value of the block.
        weights: [b, T, T] its attention, the mean over heads; empty if no requested signal reads it.
        prefix: Number of tokens before the patches.
        earlier: [b, T, T] rollout of the blocks before, None if there are none or nobody asked.
    """

    inputs: Inputs
    weights: Tensor
    prefix: int
    earlier: Tensor | None = None


@dataclass(frozen=True)
class Signal:
    """One signal.

    Attributes:
        meaning: What it is, for help and tables.
        compute: The values of the patches, [b, N] or [b, N, d].
        reads_weights: Whether it needs the attention weights.
        needs_cls: Whether it needs a class token.
        wide: Whether it is [N, d]; such a signal is stored in the number format of the tokens, the others in fp32.
        pseudo: Whether it also exists for `--attention pseudo`.
    """

    meaning: str
    compute: Callable[[Seen], Tensor]
    reads_weights: bool = True
    needs_cls: bool = False
    wide: bool = False
    pseudo: bool = False


def _entropy(seen: Seen) -> Tensor:
    """The patch weights of a row do not sum to one, because the softmax includes the prefix tokens."""
    return normalized_entropy(seen.weights[:, seen.prefix :, seen.prefix :])


def _rollout(seen: Seen) -> Tensor:
    row = mixed(seen.weights)[:, :1]
    return (row if seen.earlier is None else row @ seen.earlier)[:, 0, seen.prefix :].clone()


def _value_norm(seen: Seen) -> Tensor:
    value = seen.inputs.value[:, :, seen.prefix :]
    return torch.linalg.vector_norm(value.transpose(1, 2).flatten(2), dim=-1)


_TABLE: dict[str, Signal] = {
    "attention_entropy": Signal("focus of the attention of each patch, 1 - H / log N", _entropy, pseudo=True),
    "cls_attention": Signal(
        "attention of the class token to each patch",
        lambda seen: seen.weights[:, 0, seen.prefix :].clone(),
        needs_cls=True,
        pseudo=True,
    ),
    "received_attention": Signal(
        "attention that each patch receives, the mean over the patches",
        lambda seen: seen.weights[:, seen.prefix :, seen.prefix :].mean(1),
        pseudo=True,
    ),
    "value_norm": Signal("L2 norm of the value vector of each patch, all heads together", _value_norm, reads_weights=False),
    "mean_key": Signal(
        "key of each patch, the mean over the heads",
        lambda seen: seen.inputs.key[:, :, seen.prefix :].mean(1),
        reads_weights=False,
        wide=True,
    ),
    "rollout": Signal("attention of the class token rolled out over all blocks up to the chosen one", _rollout, needs_cls=True),
}
REGISTRY: dict[str, Signal] = {name: _TABLE[name] for name in SIGNALS}


def reduce_attention(
    inputs: Inputs, prefix: int, names: Sequence[str] = DEFAULT, earlier: Tensor | None = None
) -> dict[str, Tensor]:
    """The signals `names` of the N patches, from the inputs of the attention of T = prefix + N tokens.

    Args:
        inputs: Query, key and value as the block used them.
        prefix: Number of tokens before the patches.
        names: Signals to compute.
        earlier: [B, T, T] rollout of the blocks before, for `rollout`.

    Returns:
        Tensors [B, N] or [B, N, d] by name.
    """
    if not names:
        return {}
    weighs = any(REGISTRY[name].reads_weights for name in names)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    # Not the length of the query: a traced graph has no fixed number of images.
    rolled: Iterable[Tensor | None] = repeat(None) if earlier is None else earlier.split(CHUNK)
    for part, before in zip(inputs.parts(), rolled):
        seen = Seen(part, part.weights() if weighs else part.query.new_empty(0), prefix, before)
        for name in names:
            found[name].append(REGISTRY[name].compute(seen))
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


def pseudo_signals(patches: Tensor, cls: Tensor | None, names: Sequence[str] = DEFAULT) -> dict[str, Tensor]:
    """The signals `names` from `cosine_attention`, for models whose query and key cannot be captured.

    Rows sum to one here, because there are no prefix tokens among the keys.

    Args:
        patches: Patch tokens [B, N, D].
        cls: Class tokens [B, D], or None.
        names: Signals to compute; those whose registry entry says `pseudo`.
    """
    weights = [cosine_attention(part, part) for part in patches.split(CHUNK)]
    found = {}
    if "attention_entropy" in names:
        found["attention_entropy"] = torch.cat([normalized_entropy(part) for part in weights])
    if "received_attention" in names:
        found["received_attention"] = torch.cat([part.mean(1) for part in weights])
    if "cls_attention" in names and cls is not None:
        found["cls_attention"] = cosine_attention(cls.unsqueeze(1), patches).squeeze(1)
    return found


def check_names(names: Sequence[str]) -> None:
    """Reject names that are not in the registry."""
    for name in names:
        if name not in REGISTRY:
            raise UnknownNameError.of("signal", name, REGISTRY)


def check_available(names: Sequence[str], backbone: str, has_cls: bool, attention: str) -> None:
    """Reject signals that a backbone cannot give, all at once.

    Args:
        names: Requested signals.
        backbone: Its name, for the message.
        has_cls: Whether it has a class token.
        attention: 'true' or 'pseudo', as in `BackboneConfig`.
    """
    check_names(names)
    without_cls = [name for name in names if REGISTRY[name].needs_cls and not has_cls]
    if without_cls:
        raise RequestError(
            f"{', '.join(without_cls)} needs a class token, which the backbone '{backbone}' does not have. "
            "Leave it out of --signals."
        )
    made_up = [name for name in names if attention == "pseudo" and not REGISTRY[name].pseudo]
    if made_up:
        raise RequestError(
            f"{', '.join(made_up)} needs the attention of the backbone itself, but --attention pseudo replaces it. "
            "Leave it out of --signals, or use a backbone with --attention true."
        )
