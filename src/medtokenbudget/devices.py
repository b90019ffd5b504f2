"""From a device name to a `torch.device`, and the devices and threads of worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from medtokenbudget.errors import RequestError


def available_devices() -> list[str]:
    """List the devices of this machine, such as `['cpu', 'cuda:0', 'cuda:1']`."""
    names = ["cpu"]
    if torch.cuda.is_available():
        names += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    if torch.xpu.is_available():
        names += [f"xpu:{index}" for index in range(torch.xpu.device_count())]
    return names


def resolve_device(name: str | torch.device) -> torch.device:
    """Turn a device name into a device that this machine has; 'auto' is a CUDA GPU if there is one, and otherwise the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = available_devices()
    advice = f"Available: {', '.join(available)}. Use one of these, or 'auto'."
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(f"'{name}' is not a device name. {advice}") from None
    # Without a number, and for devices that have no numbers, the first one is meant.
    wanted = {device.type, f"{device.type}:0"} if not device.index else {f"{device.type}:{device.index}"}
    if not wanted.intersection(available):
        raise RequestError(f"Device '{name}' is not available on this machine. {advice}")
    return device


def worker_devices(name: str, processes: int = 0) -> list[str]:
    """Name the device of each worker process: 'cuda' means all GPUs, in turn; 0 processes mean one per GPU, or one per core."""
    device = resolve_device(name)
    if device.type == "cuda" and device.index is None:
        gpus = torch.cuda.device_count()
        return [f"cuda:{process % gpus}" for process in range(processes or gpus)]
    return [str(device)] * (processes or (os.cpu_count() or 1 if device.type == "cpu" else 1))


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Run a block with this number of torch threads; 0 changes nothing."""
    before = torch.get_num_threads()
    if number > 0:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
