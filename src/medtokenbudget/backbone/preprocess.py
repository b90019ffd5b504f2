"""What happens to an image before the backbone: one resize of the whole image, then mean and standard deviation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from medtokenbudget.errors import GridError, RequestError, ShapeError

_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
REC601 = (0.299, 0.587, 0.114)
"""Share of red, green and blue in the gray value."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the input of a backbone: its side, mean and std of values in [0, 1], and the filter of the resize."""

    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        if self.interpolation not in _RESAMPLING:
            known = ", ".join(_RESAMPLING)
            raise RequestError(f"Unknown interpolation '{self.interpolation}' of the backbone. Available: {known}.")

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def prepare(self, image: Image.Image) -> np.ndarray:
        """Resize the whole RGB image to uint8 [S, S, 3]. Nothing is cropped, so masks stay aligned."""
        if image.mode != "RGB":
            raise RequestError(f"An image of mode {image.mode} must be converted to RGB first, for example with `decode_image`.")
        size = (self.image_size, self.image_size)
        if image.size != size:
            image = image.resize(size, _RESAMPLING[self.interpolation])
        return np.array(image, dtype=np.uint8)

    def normalize(self, images: Tensor) -> Tensor:
        """Normalize images with mean and standard deviation, from uint8 [B, S, S, 3] to float [B, 3, S, S]."""
        if images.ndim != 4 or images.shape[-1] != 3:
            raise ShapeError(f"Images must be [B, S, S, 3], got {list(images.shape)}.")
        mean, std = self._statistics(images.device)
        pixels = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        return pixels.mul_(1.0 / (255.0 * std)).sub_(mean / std)

    def denormalize(self, images: Tensor) -> Tensor:
        mean, std = self._statistics(images.device)
        return images * std + mean

    def _statistics(self, device: torch.device) -> list[Tensor]:
        return [torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (self.mean, self.std)]


def luminance(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Compute the mean gray value (Rec. 601) of each patch of a grid (h, w): uint8 [B, S, S, 3] to [B, N] in [0, 1]."""
    if images.ndim != 4 or images.shape[-1] != 3:
        raise ShapeError(f"Images must be [B, S, S, 3], got {list(images.shape)}.")
    b, height, width, _ = images.shape
    h, w = grid
    if height % h or width % w:
        raise GridError(f"An image of {height} x {width} pixels cannot be divided into a grid of {h} x {w} patches.")
    cells = images.reshape(b, h, height // h, w, width // w, 3).float().mean(dim=(2, 4))
    return (cells @ torch.tensor(REC601, device=images.device) / 255.0).reshape(b, h * w)
