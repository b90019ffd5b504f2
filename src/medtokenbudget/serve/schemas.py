"""Response schemas and examples of the service's OpenAPI description.

Other programs rely on them: a change here is a change of the public API.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field

from medtokenbudget.serve.service import MAX_BUDGETS, NOTICE


class Health(BaseModel):
    status: str = Field(examples=["ok"])
    model: bool = Field(description="Whether a model is loaded.")


class ErrorDetail(BaseModel):
    code: str = Field(description="Stable identifier for programs.", examples=["too_many_bytes"])
    message: str = Field(description="What is wrong and what to do about it.")


class Error(BaseModel):
    error: ErrorDetail


class SelectorInfo(BaseModel):
    name: str = Field(description="Name in requests and results.", examples=["lats:lesion-first"])
    title: str = Field(description="Name to display.", examples=["LATS lesion-first"])
    about: str = Field(description="What the method does, in one sentence.")
    kind: str = Field(description="'ranker' and 'sampler' keep K patches, 'merger' makes K new tokens.", examples=["ranker"])
    learns: bool = Field(description="Whether the selector itself was trained, not only its head.")
    stochastic: bool = Field(description="Whether the selector draws at random (always with the same seed here).")
    needs_mask: bool = Field(description="Whether the method needs the lesion mask.")
    minimum: int = Field(description="Smallest number of tokens kept, at any budget.", examples=[16])


class LimitsInfo(BaseModel):
    max_bytes: int
    max_pixels: int
    max_budgets: int


class RouteInfo(BaseModel):
    way: str = Field(description="'scout' before the first block, 'inside' before `block`.", examples=["scout"])
    budget: float = Field(description="Share of the patches that is kept.")
    k: int = Field(description="Number of these patches.")
    block: int | None = Field(None, description="First block that runs on the kept patches alone.")


class ModelInfo(BaseModel):
    version: str
    notice: str
    demo: bool = Field(description="Whether this is the demo model, which was trained on synthetic images.")
    name: str = Field(description="What `mtb.load` takes; MODEL for a folder, which stays private.", examples=["dermoscopy"])
    fingerprint: str = Field(description="Hash of the backbone, preprocessing, classes, methods and weights.")
    backbone: str
    classes: list[str] = Field(description="Empty for a router without a head.", examples=[["MEL", "NV"]])
    grid: list[int] = Field(description="Rows and columns of patches.", examples=[[16, 16]])
    n: int = Field(description="Number of patches.", examples=[256])
    budgets: list[float] = Field(description="The ten standard budgets, or the only one of a model that is routed early.")
    route: RouteInfo | None = Field(description="How the backbone is routed early; null if it runs on all patches.")
    main: str = Field(description="Name of the main method of the model.", examples=["lats:lesion-first"])
    selectors: list[SelectorInfo] = Field(description="The methods of the model, the main one first.")
    limits: LimitsInfo


class SampleInfo(BaseModel):
    id: str = Field(examples=["mel"])
    title: str = Field(description="Name to display.")
    label: str | None = Field(description="Class of the drawing; null if the model does not have this class.")
    off_center: bool = Field(description="Whether the lesion is away from the image center.")


class SampleList(BaseModel):
    samples: list[SampleInfo]


class ImageInfo(BaseModel):
    width: int
    height: int
    preview: str | None = Field(description="The decoded image as a data URL; null unless requested.")


class PromiseAnswer(BaseModel):
    retention: float = Field(description="Share of the lesion that is promised for images like the calibration images.")
    coverage: float | None = Field(description="Share of the images that keep so much; null if it is kept on average.")
    k: int = Field(description="Patches of this image that keep the promise: the first k of `order`.")
    probabilities: list[float] | None = Field(description="Class probabilities from these patches; null if the model has no head.")


class LesionMap(BaseModel):
    grid: list[int] = Field(description="Rows and columns.")
    values: list[float] = Field(description="Lesion probability of each cell, in raster order.")


class SelectorAnswer(BaseModel):
    name: str
    kind: str
    k: list[int] = Field(description="Tokens kept at each budget.")
    order: list[int] | None = Field(
        description="Patch indices from best to worst, in raster order; only the kept ones if routed early; null for mergers."
    )
    scores: list[float] | None = Field(description="Score of each patch, in raster order; null for mergers and if routed early.")
    groups: list[list[int]] | None = Field(description="Mergers only: at each budget, the output token of each patch.")
    retention: list[float] | None = Field(description="Share of lesion patches kept at each budget; null without a lesion.")
    ceiling: list[float] | None = Field(description="Highest retention possible with K patches, at each budget.")
    retention_of_ceiling: list[float] | None = Field(description="Retention divided by the ceiling, at each budget.")
    promises: list[PromiseAnswer] = Field(
        description="What was calibrated for this method; with `retention`, what was asked for of it."
    )
    probabilities: list[list[float]] | None = Field(
        description="Class probabilities at each budget, from this method's own head; null if the model has no head."
    )
    lesion_map: LesionMap | None = Field(
        description="Lesion probability; where it is above 0.5, enlarged to the image, is the lesion. Null if the method has none."
    )


class RouteAnswer(BaseModel):
    model: str = Field(description="Fingerprint of the model.")
    notice: str
    image: ImageInfo
    grid: list[int]
    n: int
    classes: list[str]
    budgets: list[float]
    lesion: list[int] | None = Field(description="Indices of the lesion patches; null if no mask was sent.")
    unfamiliarity: float | None = Field(
        description="Distance to the training images in units of its limit: above 1 the image is unlike them, and what is kept "
        "of it means little. Null if the model cannot tell."
    )
    selectors: list[SelectorAnswer]


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of the error responses of an operation."""
    texts = {
        400: "The request is malformed, or its host name does not belong to this machine.",
        401: "The token is missing or wrong.",
        403: "The request comes from a page of another origin.",
        404: "Not found.",
        413: "The image or mask has too many bytes or pixels.",
        415: "The request is not multipart/form-data, or a file is not an image.",
        422: "A field or file cannot be used; the message says why.",
        503: "The queue is full, or the request has waited too long; see Retry-After.",
    }
    return {status: {"model": Error, "description": texts[status]} for status in (*statuses, 400, 401, 403)}


def route_description(selectors: list[str], promises: list[float]) -> dict[str, Any]:
    """Return the OpenAPI description of /v1/route: its multipart body, with methods and promises of the model, and its answers."""
    described = yaml.safe_load(Path(__file__).with_name("route.yaml").read_text(encoding="utf-8"))
    content, fields = described["content"], described["content"]["schema"]["properties"]
    fields["budgets"]["maxItems"] = MAX_BUDGETS
    fields["selectors"]["items"] |= {"enum": selectors} if selectors else {}
    fields["retention"]["items"]["enum"] = promises
    if not promises:
        del fields["retention"]
    example = {**described["example"], "notice": NOTICE}
    responses: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"example": example}}}}
    responses |= errors(413, 415, 422, 503)
    responses[503]["headers"] = described["headers"]
    request = {"requestBody": {"required": True, "content": {"multipart/form-data": content}}}
    return {"responses": responses, "openapi_extra": request}
