"""Random numbers: one seeded generator for each purpose and epoch, so that a resumed run needs no saved generator state."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, purpose: str, *steps: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends on nothing but its arguments."""
    text = f"{seed}/{purpose}/{'/'.join(map(str, steps))}"
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
    return torch.Generator(device=device).manual_seed(value)
