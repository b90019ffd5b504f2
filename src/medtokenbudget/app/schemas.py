"""The shapes of the service's answers, and the examples of its OpenAPI description.

Its own file because other systems read it: a change here is a change of the interface.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from medtokenbudget.app.service import MAX_BUDGETS


class Health(BaseModel):
    status: str = Field(examples=["ok"])
    model: bool = Field(description="Whether a model is loaded.")


class Fault(BaseModel):
    code: str = Field(description="For programs.", examples=["too_many_bytes"])
    message: str = Field(description="For people: what is wrong and what to do.")


class Error(BaseModel):
    error: Fault


class SelectorInfo(BaseModel):
    name: str = Field(examples=["lats"])
    kind: str = Field(description="'ranker' keeps K patches as they are, 'merger' makes K new tokens.", examples=["ranker"])
    learns: bool
    stochastic: bool
    needs_mask: bool = Field(description="Reads the lesion, so it answers only when a mask is sent.")
    minimum: int = Field(description="Fewest tokens kept at any budget.", examples=[16])


class LimitsInfo(BaseModel):
    max_bytes: int
    max_pixels: int
    max_budgets: int


class ModelInfo(BaseModel):
    version: str
    notice: str
    demo: bool = Field(description="Whether this is the demo's model, trained on drawn images.")
    fingerprint: str = Field(description="One hash of backbone, preprocessing, classes, selectors and all numbers.")
    backbone: str
    classes: list[str] = Field(examples=[["MEL", "NV"]])
    grid: list[int] = Field(description="Rows and columns of patches.", examples=[[16, 16]])
    n: int = Field(description="Number of patches.", examples=[256])
    budgets: list[float] = Field(description="Budgets that every answer has.")
    selectors: list[SelectorInfo]
    limits: LimitsInfo


class SampleInfo(BaseModel):
    id: str = Field(examples=["mel"])
    title: str
    label: str = Field(description="The class it was drawn as.")
    off_center: bool


class SampleList(BaseModel):
    samples: list[SampleInfo]


class ImageInfo(BaseModel):
    width: int
    height: int
    preview: str | None = Field(description="The picture as it was read, as a data address, when asked for.")


class SelectorAnswer(BaseModel):
    name: str
    kind: str
    k: list[int] = Field(description="Tokens kept at each budget.")
    order: list[int] | None = Field(description="Patches from best to worst, in raster numbers; null for mergers.")
    scores: list[float] | None = Field(description="What the patches were ranked by, in raster order; null for mergers.")
    groups: list[list[int]] | None = Field(description="Of mergers: at each budget the token that each patch went to.")
    retention: list[float] | None = Field(description="Kept share of the lesion patches at each budget; null without a lesion.")
    ceiling: list[float] | None = Field(description="The largest retention that K patches can have, at each budget.")
    probabilities: list[list[float]] = Field(description="At each budget, one number a class, from this selector's own head.")


class RouteAnswer(BaseModel):
    model: str = Field(description="Fingerprint of the model.")
    notice: str
    image: ImageInfo
    grid: list[int]
    n: int
    classes: list[str]
    budgets: list[float]
    lesion: list[int] | None = Field(description="Lesion patches in raster numbers; null when no mask was sent.")
    selectors: list[SelectorAnswer]


def faults(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of an operation, for its description."""
    texts = {
        400: "The request cannot be read.",
        401: "The token is missing or wrong.",
        403: "The request comes from a page of another origin.",
        404: "There is no such thing.",
        408: "The request took too long to arrive.",
        413: "Too many bytes or pixels.",
        415: "Not multipart, or a file that is no image.",
        421: "The host name is not this machine's.",
        422: "A field or a file cannot be used; the message says why.",
        503: "The queue is full (see Retry-After), or no model is loaded.",
    }
    return {status: {"model": Error, "description": texts[status]} for status in (*statuses, 401, 403, 421)}


def route_body(selectors: list[str]) -> dict[str, Any]:
    """The multipart body of /v1/route, as OpenAPI describes it."""
    picture = {"type": "string", "format": "binary"}
    fields = {
        "image": {**picture, "description": "JPEG, PNG, TIFF, BMP, WebP, GIF, PPM or JPEG 2000."},
        "mask": {**picture, "description": "The lesion of this image, white on black, of the same aspect ratio."},
        "selectors": {
            "type": "array",
            "items": {"type": "string", **({"enum": selectors} if selectors else {})},
            "minItems": 1,
            "description": "Repeat the field, or part names by commas. Default: all that can answer.",
        },
        "budgets": {
            "type": "array",
            "items": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "minItems": 1,
            "maxItems": MAX_BUDGETS,
            "description": "Budgets beside the ten of 0.1 to 1.0. Repeat the field, or part numbers by commas.",
        },
        "preview": {"type": "boolean", "default": False, "description": "Also return the picture as it was read."},
    }
    schema = {"type": "object", "required": ["image"], "additionalProperties": False, "properties": fields}
    files = {"contentType": "image/png, image/jpeg"}
    example = {"selectors": ["lats"], "budgets": [0.25], "preview": False}
    content = {"schema": schema, "encoding": {"image": files, "mask": files}, "examples": {"one selector": {"value": example}}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": content}}}


ROUTE_EXAMPLE: dict[str, Any] = {
    "model": "9f2c…",
    "notice": "Research software, not a medical device. Its output must not be used to diagnose or to treat.",
    "image": {"width": 600, "height": 450, "preview": None},
    "grid": [2, 2],
    "n": 4,
    "classes": ["MEL", "NV"],
    "budgets": [0.5, 1.0],
    "lesion": [1, 3],
    "selectors": [
        {
            "name": "lats",
            "kind": "ranker",
            "k": [2, 4],
            "order": [3, 1, 0, 2],
            "scores": [0.2, 0.7, 0.1, 0.9],
            "groups": None,
            "retention": [1.0, 1.0],
            "ceiling": [1.0, 1.0],
            "probabilities": [[0.8, 0.2], [0.7, 0.3]],
        }
    ],
}
