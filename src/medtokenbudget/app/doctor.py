"""What this machine has and lacks, and what to do about it. Nothing here changes anything or needs the network to answer."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from medtokenbudget import hub

State = Literal["ok", "note", "missing"]

EXTRAS: dict[str, tuple[str, ...]] = {
    "serve": ("fastapi", "uvicorn", "python-multipart"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "ray": ("ray",),
}
NEEDED = ("torch", "torchvision", "timm", "numpy", "pandas", "pyarrow", "pillow", "scikit-learn", "safetensors", "huggingface_hub")
ENOUGH_DISK = 10 * 1024**3
"""Bytes: 25,331 images x 256 patches x 768 numbers in fp16 are 10 GB."""


@dataclass(frozen=True)
class Check:
    """One line of the examination; `advice` says what to do where something is missing."""

    name: str
    state: State
    found: str
    advice: str = ""


def examine(folder: Path | None = None, timeout: float = 2.0) -> list[Check]:
    """All checks; `folder` is where results would be written."""
    return [
        _python(),
        *(_package(name) for name in NEEDED),
        _gpu(),
        _embedded(),
        _hub(timeout),
        *(_extra(name) for name in EXTRAS),
        _memory(),
        _disk(folder or Path.cwd()),
    ]


def healthy(checks: list[Check]) -> bool:
    """Whether everything that the package cannot do without is there."""
    return all(check.state != "missing" for check in checks)


def as_dicts(checks: list[Check]) -> list[dict[str, str]]:
    return [asdict(check) for check in checks]


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Check("python", "ok", found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str) -> Check:
    version = _version(name)
    if version is None:
        return Check(name, "missing", "not installed", f"pip install {name}")
    return Check(name, "ok", version)


def _gpu() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("gpu", "note", "unknown without torch", "pip install torch")
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        memory = torch.cuda.get_device_properties(0).total_memory / 1024**3
        return Check("gpu", "ok", f"{', '.join(names)}, {memory:.0f} GB")
    if torch.backends.mps.is_available():
        return Check("gpu", "ok", "Apple GPU; choose it with --device mps")
    return Check(
        "gpu", "note", "none: everything runs on the CPU", "Extraction is the slow part; `mtb extract` goes on after a stop."
    )


def _embedded() -> Check:
    spec = importlib.util.find_spec("medtokenbudget.features")
    places = [
        Path(place) / "embedded" / "weights.safetensors" for place in (spec.submodule_search_locations if spec else None) or ()
    ]
    present = [place for place in places if place.is_file()]
    if present:
        return Check("embedded backbone", "ok", f"{present[0].stat().st_size / 1024**2:.1f} MB, works offline")
    return Check(
        "embedded backbone", "missing", "not in this installation", "Install medtokenbudget again: the wheel is incomplete."
    )


def _hub(timeout: float) -> Check:
    """Whether the host that timm's weights come from answers."""
    advice = "Use --backbone embedded, or --backbone NAME --weights FILE with a safetensors file fetched elsewhere."
    if _version("huggingface_hub") is None:
        return Check("hub weights", "note", "huggingface_hub is not installed", advice)
    from huggingface_hub import constants

    reason = hub.unreachable(timeout)
    if reason is None:
        return Check("hub weights", "ok", f"{constants.ENDPOINT} answers")
    if reason == hub.OFFLINE:
        return Check("hub weights", "note", reason, "Only models in the cache, 'embedded' and --weights FILE work.")
    return Check("hub weights", "note", f"{constants.ENDPOINT} cannot be reached ({reason})", advice)


def _extra(name: str) -> Check:
    missing = [package for package in EXTRAS[name] if _version(package) is None]
    if missing:
        return Check(f"extra {name}", "note", f"without {', '.join(missing)}", f"pip install 'medtokenbudget[{name}]'")
    return Check(f"extra {name}", "ok", ", ".join(f"{package} {_version(package)}" for package in EXTRAS[name]))


def _memory() -> Check:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return Check("memory", "note", "unknown on this system")
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3
    if size < 4:
        return Check("memory", "note", f"{size:.1f} GB", "Use a small --batch_size.")
    return Check("memory", "ok", f"{size:.1f} GB")


def _disk(folder: Path) -> Check:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{free / 1024**3:.1f} GB free at {folder}"
    if free < ENOUGH_DISK:
        return Check("disk", "note", found, "A store takes about 0.4 MB per image at ViT-B in fp16; put it on a larger disk.")
    return Check("disk", "ok", found)
