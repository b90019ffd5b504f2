"""Tensors and a JSON state in one safetensors file that carries its own hash, so that a flipped bit is noticed when it is read.

Checkpoints and the heads of a run are such files.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from medtokenbudget.errors import RequestError
from medtokenbudget.files import write_safetensors


def save_tensors(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and a JSON state as one file; equal content gives equal bytes."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())}
    text = json.dumps(state, sort_keys=True)
    # One key only: safetensors writes several in an order that changes from call to call.
    metadata = {"state": json.dumps({"sha256": _digest(plain, text), "state": text}, sort_keys=True)}
    write_safetensors(path, save(plain, metadata))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and JSON state of a file written by `save_tensors`.

    Raises:
        RequestError: The file is missing, damaged, or was written by something else.
    """
    try:
        with safe_open(str(path), framework="pt") as stream:
            metadata = stream.metadata() or {}
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from None
    if "state" not in metadata:
        raise RequestError(f"{path} was not written by MedTokenBudget: its header has no state.")
    try:
        envelope = json.loads(metadata["state"])
        text, expected = envelope["state"], envelope["sha256"]
        state = json.loads(text)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _damaged(path, "its header cannot be read") from None
    if _digest(tensors, text) != expected:
        raise _damaged(path, "its content does not match its hash")
    return tensors, state


def _damaged(path: Path, why: str) -> RequestError:
    return RequestError(f"{path} is damaged or incomplete ({why}). Delete it and run the command again.")


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
