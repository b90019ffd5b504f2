"""Checkpoints: one safetensors file whose header carries the JSON state, so that both appear at once or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.files import dotted, write_safetensors


def save_tensors(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and a JSON state as one file; equal content gives equal bytes."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())}
    metadata = {"state": json.dumps(state, sort_keys=True)}
    write_safetensors(path, lambda target: save_file(plain, target, metadata=metadata))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON state of a file written by `save_tensors`."""
    try:
        with safe_open(str(path), framework="pt") as stream:
            metadata = stream.metadata() or {}
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{path} is damaged or incomplete ({error}). Delete it and run the command again.") from None
    if "state" not in metadata:
        raise RequestError(f"{path} was not written by MedTokenBudget: its header has no state.")
    return tensors, json.loads(metadata["state"])


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
