"""`Routing` and `Prediction`: what a model says about one image. Its own file because table, overlay and service all use them."""

from __future__ import annotations

import base64
import html
import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from medtokenbudget.errors import MedTokenBudgetError, RequestError
from medtokenbudget.model.drawing import draw_overlay
from medtokenbudget.model.guarantee import Guarantee
from medtokenbudget.model.sources import Source, open_mask


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Routing:
    """The patches that a router keeps of one image at one budget.

    In a notebook it is displayed as the image with its kept patches; `repr` is one line.

    Attributes:
        image: Path of the image, or 'image 3' for one that was passed as an object.
        scores: float32 [N], what the patches were ranked by (for LATS after smoothing), in raster order. None for mergers.
        kept: int64 [K], the kept patches, best first. None for mergers, which combine patches instead of keeping them.
        tokens: float32 [K, D], the tokens in the order of `kept`.
        assignment: int64 [N], the output token that each patch went to; -1 for dropped patches.
        budget: Requested share of patches, in (0, 1]; with a guarantee, the share that this image keeps.
        k: Number of tokens K.
        grid: (h, w) of the patches, N = h * w.
        selector: Text of the method, such as 'lats:lesion-first'.
        unfamiliarity: Distance to the training images of the model in units of its limit: above 1 the image is unlike them, and
            its kept patches mean little. None if the model cannot tell.
        lesion: bool [N], lesion patches of the mask, where one was asked for and there is one.
        guarantee: The guarantee that decided how many patches are kept; None for a budget.
        source: Where the picture comes from. A file is opened again only when it is shown; a picture passed as an object is
            referenced, not copied.
    """

    image: str
    scores: np.ndarray | None
    kept: np.ndarray | None
    tokens: np.ndarray
    assignment: np.ndarray
    budget: float
    k: int
    grid: tuple[int, int]
    selector: str
    unfamiliarity: float | None = None
    lesion: np.ndarray | None = None
    guarantee: Guarantee | None = None
    source: Source | None = field(default=None)

    @property
    def unfamiliar(self) -> bool:
        """Whether the image is unlike the training images of the model."""
        return self.unfamiliarity is not None and self.unfamiliarity > 1

    @property
    def kept_lesion(self) -> int | None:
        """Number of lesion patches that are kept; None without a mask and for mergers."""
        return None if self.lesion is None or self.kept is None else int(self.lesion[self.kept].sum())

    @property
    def n_patches(self) -> int:
        """Number of patches N."""
        return self.grid[0] * self.grid[1]

    @property
    def kept_mask(self) -> np.ndarray | None:
        """bool [h, w], True for kept patches; None for mergers."""
        if self.kept is None:
            return None
        mask = np.zeros(self.n_patches, dtype=bool)
        mask[self.kept] = True
        return mask.reshape(self.grid)

    def to_dict(self) -> dict[str, Any]:
        """JSON values of everything except the tokens."""
        return {
            "image": self.image,
            "budget": self.budget,
            "k": self.k,
            "grid": list(self.grid),
            "selector": self.selector,
            "unfamiliarity": self.unfamiliarity,
            "kept": None if self.kept is None else self.kept.tolist(),
            "scores": None if self.scores is None else [float(score) for score in self.scores],
        }

    def overlay(self, mask: Any = None, side: int = 640) -> Image.Image:
        """Draw the image with kept patches clear and dropped ones dimmed.

        Args:
            mask: Lesion mask to outline, as a path, picture or array. By default the mask of the manifest row, if there is one.
            side: Length of the longer side in pixels.

        Returns:
            An RGB picture with a caption line.

        Raises:
            RequestError: If this object does not know its picture, or the file can no longer be read.
        """
        if self.source is None:
            what = type(self).__name__.lower()
            raise RequestError(f"The {what} of {self.image} does not know its picture. Use mtb.overlay(image, {what}).")
        outlined = open_mask(mask if mask is not None else self.source.mask)
        return draw_overlay(self.source.open(), self, outlined, side)

    @property
    def headline(self) -> str:
        """What comes first in the caption of an overlay; nothing where no class is predicted."""
        return ""

    def __repr__(self) -> str:
        share = f"{self.k} tokens from {self.n_patches} patches" if self.kept is None else f"{self.k} of {self.n_patches} patches"
        warning = ["unlike the training images"] if self.unfamiliar else []
        return f"{type(self).__name__}({', '.join([repr(self.image), *self._said(), share, self.selector, *warning])})"

    def _said(self) -> list[str]:
        """What `repr` says between image and patches."""
        return []

    def _repr_png_(self) -> bytes | None:
        """The overlay for notebooks; None, so that the text is shown, if the picture cannot be read."""
        try:
            picture = self.overlay()
        except MedTokenBudgetError:
            return None
        stream = io.BytesIO()
        picture.save(stream, format="PNG")
        return stream.getvalue()

    def _repr_html_(self) -> str | None:
        png = self._repr_png_()
        if png is None:
            return None
        return f'<img alt="{html.escape(repr(self))}" src="data:image/png;base64,{base64.b64encode(png).decode("ascii")}">'


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Prediction(Routing):
    """The prediction for one image at one budget: a routing, and the classes that the head reads from it.

    Attributes:
        probabilities: Class name to probability, in the order of the model's classes.
        label: Class with the highest probability.
    """

    probabilities: dict[str, float]
    label: str

    @property
    def probability(self) -> float:
        """Probability of `label`."""
        return self.probabilities[self.label]

    def to_dict(self) -> dict[str, Any]:
        """JSON values of everything except the tokens."""
        first = {"image": self.image, "label": self.label, "probabilities": self.probabilities}
        return first | super().to_dict()

    @property
    def headline(self) -> str:
        """Class and probability, for the caption of an overlay."""
        return f"{self.label} {self.probability:.0%}   "

    def _said(self) -> list[str]:
        return [f"{self.label} {self.probability:.1%}"]
