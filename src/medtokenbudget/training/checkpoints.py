"""What a checkpoint holds: the tensors of modules and optimizers under names; `tensor_files` writes and reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medtokenbudget.errors import MismatchError
from medtokenbudget.files import dotted, sha256_json

CLOCK = "seconds"
"""What differs between two equal trainings."""


def log_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    """Hash of the rows of a `metrics.jsonl`, without the clock: equal trainings have equal hashes.

    In any order and however often: ablations that run at the same time write the same rows to the log of their training.
    """
    plain = ({name: value for name, value in row.items() if name != CLOCK} for row in rows)
    return sha256_json(sorted({json.dumps(row, sort_keys=True) for row in plain}))


def split_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors called `prefix...`, without the prefix."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def optimizer_tensors(optimizer: torch.optim.Optimizer, prefix: str = "optimizer/") -> dict[str, Tensor]:
    """The optimizer's state as named tensors (`0/exp_avg`, ...)."""
    state = optimizer.state_dict()["state"]
    return {f"{prefix}{index}/{key}": torch.as_tensor(v).clone() for index, entry in state.items() for key, v in entry.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], prefix: str = "optimizer/") -> None:
    """The inverse of `optimizer_tensors`, for an optimizer made over the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in split_prefix(tensors, prefix).items():
        index, key = name.split("/")
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def module_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The parameters of a module under a prefix, copied: a later step does not change them."""
    return {f"{prefix}{name}": tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def require_same(path: Path, what: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Reject a checkpoint that another configuration wrote."""
    if expected != found:
        raise MismatchError.between(
            f"{what} in {path}", dotted(expected), dotted(found), "Use the same options to resume, or another --out to start over."
        )
