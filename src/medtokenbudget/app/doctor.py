"""Checks what is installed and available on this machine. Changes nothing, and works without a network."""

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
    "dicom": ("pydicom",),
}
NEEDED = ("torch", "torchvision", "timm", "numpy", "pandas", "pyarrow", "pillow", "scikit-learn", "safetensors", "huggingface_hub")
ENOUGH_DISK = 10 * 1024**3
"""In bytes. ISIC 2019 takes 10 GB: 25,331 images x 256 patches x 768 features in fp16."""


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was checked.
        state: 'ok', 'note' (optional or worth knowing) or 'missing' (the package does not work without it).
        found: What was found.
        advice: What to do about it, unless all is well.
    """

    name: str
    state: State
    found: str
    advice: str = ""


def examine(folder: Path | None = None, timeout: float = 2.0) -> list[Check]:
    """Run all checks.

    Args:
        folder: Where results will be written; default: the current directory.
        timeout: Seconds to wait for the Hugging Face Hub.
    """
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
    """Return whether everything required is present."""
    return all(check.state != "missing" for check in checks)


def as_dicts(checks: list[Check]) -> list[dict[str, str]]:
    """Return the checks as JSON values."""
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
        return Check("gpu", "note", "unknown, because torch is not installed", "pip install torch")
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        memory = torch.cuda.get_device_properties(0).total_memory / 1024**3
        return Check("gpu", "ok", f"{', '.join(names)}, {memory:.0f} GB")
    if torch.backends.mps.is_available():
        return Check("gpu", "ok", "Apple GPU; use it with --device mps")
    return Check(
        "gpu", "note", "none, everything runs on the CPU", "Extraction is slow on a CPU. `mtb extract` can be stopped and resumed."
    )


def _embedded() -> Check:
    spec = importlib.util.find_spec("medtokenbudget.features")
    places = [
        Path(place) / "embedded" / "weights.safetensors" for place in (spec.submodule_search_locations if spec else None) or ()
    ]
    present = [place for place in places if place.is_file()]
    if present:
        return Check("embedded backbone", "ok", f"{present[0].stat().st_size / 1024**2:.1f} MB, no download needed")
    return Check(
        "embedded backbone", "missing", "not in this installation", "Reinstall medtokenbudget: the installation is incomplete."
    )


def _hub(timeout: float) -> Check:
    """Whether the hub, where timm downloads weights from, can be reached."""
    advice = "Use --backbone embedded, or --backbone NAME --weights FILE with a safetensors file that you downloaded elsewhere."
    if _version("huggingface_hub") is None:
        return Check("hub weights", "note", "huggingface_hub is not installed", advice)
    from huggingface_hub import constants

    reason = hub.unreachable(timeout)
    if reason is None:
        return Check("hub weights", "ok", f"{constants.ENDPOINT} can be reached")
    if reason == hub.OFFLINE:
        return Check("hub weights", "note", reason, "Only cached models, --backbone embedded and --weights FILE work offline.")
    return Check("hub weights", "note", f"{constants.ENDPOINT} cannot be reached ({reason})", advice)


def _extra(name: str) -> Check:
    missing = [package for package in EXTRAS[name] if _version(package) is None]
    if missing:
        return Check(f"extra {name}", "note", f"not installed: {', '.join(missing)}", f"pip install 'medtokenbudget[{name}]'")
    return Check(f"extra {name}", "ok", ", ".join(f"{package} {_version(package)}" for package in EXTRAS[name]))


def _memory() -> Check:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return Check("memory", "note", "unknown on this system")
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3
    if size < 4:
        return Check("memory", "note", f"{size:.1f} GB", "Use a small --batch-size.")
    return Check("memory", "ok", f"{size:.1f} GB")


def _disk(folder: Path) -> Check:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{free / 1024**3:.1f} GB free at {folder}"
    if free < ENOUGH_DISK:
        return Check("disk", "note", found, "A store takes about 0.4 MB per image (ViT-B, fp16).")
    return Check("disk", "ok", found)
