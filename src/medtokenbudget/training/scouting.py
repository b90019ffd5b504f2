"""Train a scout from images and masks alone: no store, no labels.

It starts from an encoder that knows ImageNet. Each epoch sees every image once, as a random view: a crop at a random place, turned
and flipped, in other light and color, most lesions made paler, some with dark corners that are no lesions. The weights that are
kept are a moving average of all steps; no epoch is chosen, so no image is held out.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.backbone.backbone import PIXELS, Backbone
from medtokenbudget.backbone.views import OFF_CENTER, geometry_of, image_seed
from medtokenbudget.config import BackboneConfig, TrainConfig, given_settings, to_dict
from medtokenbudget.data import Manifest, decode_image
from medtokenbudget.data.masks import mask_of
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.files import load_tensors, save_tensors, sha256_json
from medtokenbudget.heads.head import RoutedClassifier
from medtokenbudget.routing.selectors.scout import Scout
from medtokenbudget.runtime import ordered_map, progress, resolve_device, say
from medtokenbudget.training.familiarity import Familiarity, Features, fit_familiarity
from medtokenbudget.training.rows import generator

CHECKPOINT = "scout.safetensors"
WEIGHTS = Path(__file__).parent / "lite0" / "weights.safetensors"
"""EfficientNet-Lite0 as ImageNet taught it, where a training starts; `tools/lite0.py` writes it."""
READS = {
    *("recipe", "epochs", "min_steps", "batch_size", "lr", "weight_decay", "clip", "seed", "device", "budgets", "router.minimum"),
    *("scout.image_size", "scout.plain", "scout.width", "scout.crop", "scout.pale"),
}
"""Settings that this recipe reads; any other that is given is refused."""
ENCODER = ("stem.", "stages.")
ENCODER_RATE = 0.1
"""Learning rate of the pretrained encoder, relative to that of the rest. With three times as much, 0.1 to 0.3 points are lost."""
DECAY = 0.995
"""Weight of the past in the moving average of the parameters."""
WARM_UP = 0.2
"""Share of the steps in which the learning rate rises."""
WHOLE = 0.3
"""Share of the views that show the whole image, so that large lesions and borders are seen as at inference."""
MOST_REPEATS = 5
"""`min_steps` gives small data sets at most this many times as many epochs."""
FAMILIAR_RANK, FAMILIAR_LEVEL = 96, 0.975
"""Directions, and share of held-out training images within the limit, of what tells unfamiliar images. Of ten
settings, on half of the training images, these told most polyps and endoscopies."""
OFF_CENTER_SHARE, FURTHEST, WIDEST = 0.4, 1.7, 1.4
"""Share of the views with the lesion near the frame, and how far out of the image (its reflection goes on) and how wide they may
be: a lesion in a corner with much skin around is in no crop of most images."""
CORNERS = 0.1
"""Share of the views with dark corners, which are never lesion. Drawn discs and lines of ink cost off-center lesions."""
_FINER = 1.5
"""Side of the images in memory relative to what the network reads: crops of them are enlarged."""


def train_scout(manifest: Manifest, config: TrainConfig, folder: Path) -> RoutedClassifier:
    """Train a scout on the training images that have a mask; a training that was stopped in `folder` resumes.

    Raises:
        RequestError: A setting that this recipe does not read was given, there is no lesion to learn from, or `folder` has the
            checkpoint of another training.
    """
    check_settings(config)
    identity = sha256_json({"manifest": manifest.hash, "config": {**to_dict(config), "device": None, "budgets": None}})
    device, size = resolve_device(config.device), config.scout.image_size
    backbone = Backbone.load(BackboneConfig(name=PIXELS, image_size=size), device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        scout = Scout.from_config(backbone.dim, config)
    if not config.scout.plain:
        start, _ = load_tensors(WEIGHTS)
        scout.network.load_state_dict({**scout.network.state_dict(), **start})
    scout.to(device).to(memory_format=torch.channels_last)
    network, average = scout.network, {name: value.detach().clone() for name, value in scout.network.state_dict().items()}
    named = list(network.named_parameters())
    encoder, rest = ([value for name, value in named if name.startswith(ENCODER) is inside] for inside in (True, False))
    slow = 1.0 if config.scout.plain else ENCODER_RATE
    groups = [{"params": encoder, "scale": slow}, {"params": rest, "scale": 1.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay)
    done = _resume(folder / CHECKPOINT, identity, scout, average, optimizer)
    rows = _training_rows(manifest)
    if not rows:
        raise RequestError("No training image has a mask, and a scout learns from nothing else. Add masks to the manifest.")
    per_epoch = math.ceil(len(rows) / config.batch_size)
    epochs = min(max(config.epochs, math.ceil(config.min_steps / per_epoch)), MOST_REPEATS * config.epochs)
    if done < epochs:
        images, masks = _read(manifest, rows, round(_FINER * size))
        per_epoch = math.ceil(len(images) / config.batch_size)
    with progress(range(done, epochs), total=epochs, initial=done, what="Training the scout", unit="epoch") as bar:
        for epoch in bar:
            order, losses = torch.randperm(len(images), generator=generator(config.seed, "scout order", epoch)), []
            network.train()
            # Parts of equal size: a batch of one image has no statistics.
            for step, batch in enumerate(order.tensor_split(per_epoch)):
                noise = generator(config.seed, "scout views", epoch, step)
                view, target = random_view(images[batch], masks[batch], config, noise)
                rate = _rate((epoch * per_epoch + step) / (epochs * per_epoch))
                for group in optimizer.param_groups:
                    group["lr"] = config.lr * rate * group["scale"]
                loss = segmentation_loss(scout.fine_logits(backbone.tokens(view.to(device))), target.to(device), 16)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), config.clip)
                optimizer.step()
                losses.append(float(loss.detach()))
                # The average of few steps would be that of the start.
                decay = min(DECAY, (1 + epoch * per_epoch + step) / (10 + epoch * per_epoch + step))
                for name, value in network.state_dict().items():
                    average[name].lerp_(value, 1 - decay)
            bar.set_postfix_str(f"loss {np.mean(losses):.3f}")
            _save(folder / CHECKPOINT, identity, scout, average, optimizer, epoch + 1)
    most = torch.finfo(torch.half).max  # rounded to fp16, so a saved scout is half as large
    network.load_state_dict({name: value.clamp(-most, most).half() for name, value in average.items()})
    return RoutedClassifier(scout.cpu().eval(), None)


@torch.no_grad()
def fit_scout_familiarity(scout: Scout, backbone: Backbone, manifest: Manifest, seed: int) -> Familiarity | None:
    """Fit what tells unfamiliar images on the scout's own features of its training images and of off-center crops of them."""

    def views(row: int) -> list[np.ndarray]:
        mask, shown = manifest.mask_path(row), []
        assert mask is not None
        # An image that cannot be read has no view, and one that its lesion fills has no crop.
        with suppress(RequestError):
            image = decode_image(manifest.image_path(row))
            shown.append(backbone.prepare(image))
            crop = geometry_of(OFF_CENTER, mask_of(image.size, mask), image_seed(seed, manifest.ids[row]))
            shown.append(backbone.prepare(crop.of(image)))
        return shown

    rows, ids, features = _training_rows(manifest), [], []
    decoded = progress(ordered_map(views, rows, 32, 4), total=len(rows), what="Reading again", unit="image")
    for row, shown in zip(rows, decoded):
        for pixels in shown:
            ids.append(manifest.ids[row])
            features.append(scout.see(backbone.tokens(backbone.normalize(torch.from_numpy(pixels)[None]))).features.patches)
    return fit_familiarity(Features(ids, torch.cat(features)), np.arange(len(ids)), seed, FAMILIAR_RANK, FAMILIAR_LEVEL)


def check_settings(config: TrainConfig) -> None:
    """Reject settings that this recipe does not read."""
    idle = {name: value for name, value in given_settings(config).items() if name not in READS}
    if idle:
        given = ", ".join(f"{name} = {value!r}" for name, value in idle.items())
        raise RequestError(f"The recipe 'scout' does not use {given}. Leave {'it' if len(idle) == 1 else 'them'} out.")
    if config.scout.image_size % 16:
        raise RequestError(f"`scout.image_size` must be a multiple of 16, got {config.scout.image_size}.")


def random_view(images: Tensor, masks: Tensor, config: TrainConfig, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one view of each image.

    Args:
        images: uint8 [B, 3, s, s].
        masks: uint8 [B, 1, s, s], 255 for lesion.
        config: Settings of the scout.
        noise: Source of all randomness.

    Returns:
        Images [B, 3, S, S] in [0, 1], and how much of every second pixel is lesion, [B, S / 2, S / 2] in [0, 1].
    """
    b, size = len(images), config.scout.image_size

    def draw(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(b, *shape, generator=noise)

    def normal(scale: float, *shape: int) -> Tensor:
        return scale * torch.randn(b, *shape, generator=noise)

    whole = draw(0, 1) < WHOLE
    away = ~whole & (draw(0, 1) < OFF_CENTER_SHARE)
    low, wide = config.scout.crop, torch.where(away, WIDEST, 1.0)
    side = torch.where(whole, 1.0, low + (wide - low) * draw(0, 1)).unsqueeze(1)
    # Quarter turns of the whole image, any angle of a crop.
    quarter = torch.floor(draw(0, 4)) * (math.pi / 2)
    angle = torch.where(whole, quarter, quarter + draw(-math.pi / 4, math.pi / 4))
    flip = torch.where(draw(0, 1) < 0.5, -1.0, 1.0)
    # The lesion is to come to a place near the frame of the view.
    toward = draw(-1, 1, 2)
    toward = toward / toward.abs().amax(1, keepdim=True).clamp(min=1e-3) * draw(0.5, 1, 1)
    limit = (FURTHEST - side).clamp(min=0)
    place = (_centers(masks) - side * toward).clamp(-limit, limit)
    place = torch.where(away.unsqueeze(1), place, draw(-1, 1, 2) * (1 - side))
    cos, sin, across = side[:, 0] * angle.cos(), side[:, 0] * angle.sin(), flip
    x, y = torch.stack([across * cos, -sin, place[:, 0]], 1), torch.stack([across * sin, cos, place[:, 1]], 1)
    grid = F.affine_grid(torch.stack([x, y], 1), [b, 3, size, size], align_corners=False)
    both = torch.cat([images, masks], 1).float() / 255
    both = F.grid_sample(both, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    view, mask = both[:, :3], both[:, 3:]
    pale = (draw(0, 1) < config.scout.pale).float().view(b, 1, 1, 1)
    skin = (view * (1 - mask)).sum((2, 3), keepdim=True) / (1 - mask).sum((2, 3), keepdim=True).clamp(min=1)
    # Of a lesion that fills the view no skin is known.
    known = ((1 - mask).mean((2, 3), keepdim=True) > 0.1).float()
    contrast = draw(0.15, 1).view(b, 1, 1, 1)
    # Half of these lesions are red: darker than the skin in green and blue more than in red.
    red = (draw(0, 1) < 0.5).float().view(b, 1, 1, 1)
    channels = torch.stack([draw(0, 0.6), draw(0.6, 1.2), draw(0.4, 1.2)], 1).view(b, 3, 1, 1)
    contrast = contrast * (1 - red + red * channels)
    tinted = skin + normal(0.03, 3, 1, 1)
    view = view + pale * known * mask * (1 - contrast) * (tinted - view)
    view, mask = _darken_corners(view, mask, noise)
    light = normal(0.15, 1, 1, 1).exp() * normal(0.06, 3, 1, 1).exp()
    view = (view * light).clamp(1e-4, 1) ** normal(0.15, 1, 1, 1).exp()
    grain = draw(0, 0.03).view(b, 1, 1, 1) * torch.randn(view.shape, generator=noise)
    return (view + grain).clamp(0, 1), F.avg_pool2d(mask, 2).squeeze(1)


def _centers(masks: Tensor) -> Tensor:
    """Return where the middle of each lesion is, (x, y) in [-1, 1]; 0 where there is none."""
    axis = torch.linspace(-1, 1, masks.shape[-1])
    lesion = masks[:, 0].float()
    total = lesion.sum((1, 2)).clamp(min=1)
    return torch.stack([lesion.sum(1) @ axis / total, lesion.sum(2) @ axis / total], 1)


def _darken_corners(view: Tensor, mask: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """Put dark corners on some views. What they cover is no lesion."""
    b, size = len(view), view.shape[-1]

    def draw(low: float, high: float, channels: int = 1) -> Tensor:
        return low + (high - low) * torch.rand(b, channels, 1, 1, generator=noise)

    axis = torch.linspace(-1, 1, size)
    distance = torch.hypot(axis.view(1, 1, 1, size) - draw(-0.5, 0.5), axis.view(1, 1, size, 1) - draw(-0.5, 0.5))
    corner = ((distance - draw(0.9, 1.5)) * draw(4, 30)).clamp(0, 1) * (draw(0, 1) < CORNERS).float()
    return view + corner * (draw(0, 0.12) - view), mask * (1 - corner)


def segmentation_loss(logits: Tensor, target: Tensor, grid: int) -> Tensor:
    """Add cross-entropy and Dice loss on the fine grid [B, f, f] and cross-entropy on the token grid of `grid` x `grid` patches."""
    probability = logits.sigmoid()
    overlap = 2 * (probability * target).sum((1, 2)) + 1
    dice = 1 - overlap / (probability.sum((1, 2)) + target.sum((1, 2)) + 1)
    coarse, labels = (F.adaptive_avg_pool2d(values.unsqueeze(1), grid) for values in (logits, target))
    patches = F.binary_cross_entropy_with_logits(coarse, (labels > 0.5).float())
    return F.binary_cross_entropy_with_logits(logits, target) + dice.mean() + patches


def _training_rows(manifest: Manifest) -> list[int]:
    return [row for row, part in enumerate(manifest.rows["split"]) if part != "val" and manifest.mask_path(row) is not None]


def _rate(share: float) -> float:
    """Return the learning rate after this share of all steps, relative to the highest: up, then down to 0 along a cosine."""
    if share < WARM_UP:
        return 0.04 + 0.96 * share / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))


def _read(manifest: Manifest, rows: list[int], side: int) -> tuple[Tensor, Tensor]:
    """Read images and masks, uint8 [n, 3, side, side] and [n, 1, side, side]; those that cannot be read are left out."""

    def one(row: int) -> tuple[np.ndarray, np.ndarray] | str:
        mask = manifest.mask_path(row)
        assert mask is not None
        try:
            image = decode_image(manifest.image_path(row))
            lesion = mask_of(image.size, mask)
        except RequestError as error:
            return str(error)
        resized = (picture.resize((side, side), Image.Resampling.BILINEAR) for picture in (image, lesion.convert("L")))
        pixels, gray = (np.asarray(picture) for picture in resized)
        return pixels.transpose(2, 0, 1), gray[None]

    parts = list(progress(ordered_map(one, rows, 32, 4), total=len(rows), what="Reading", unit="image"))
    usable = [part for part in parts if not isinstance(part, str)]
    if failed := [part for part in parts if isinstance(part, str)]:
        left_out = f"{len(failed):,} of {len(rows):,} training images are left out"
        say(f"{left_out}, they or their masks cannot be used. The first: {failed[0]}")
    if len(usable) < 2 or not any((gray > 127).any() for _, gray in usable):
        found = "fewer than two images with a mask" if len(usable) < 2 else "no mask with a lesion"
        raise RequestError(f"The training part has {found}, so there is nothing to learn. Check it with `mtb data check`.")
    images, masks = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*usable))
    return images, masks


def _save(path: Path, identity: str, scout: Scout, average: dict[str, Tensor], optimizer: torch.optim.AdamW, epochs: int) -> None:
    tensors = {f"network.{name}": value for name, value in scout.network.state_dict().items()}
    tensors |= {f"average.{name}": value for name, value in average.items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(path, tensors, {"identity": identity, "epochs": epochs})


def _resume(path: Path, identity: str, scout: Scout, average: dict[str, Tensor], optimizer: torch.optim.AdamW) -> int:
    """Restore a training that was stopped, and return how many epochs are done."""
    if not path.exists():
        return 0
    tensors, state = load_tensors(path)
    if state.get("identity") != identity:
        raise MismatchError(f"{path} is of a training with other images or options. Use the same to resume, or another `out`.")
    scout.network.load_state_dict(_part(tensors, "network."))
    for name, value in _part(tensors, "average.").items():
        average[name].copy_(value)
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in _part(tensors, "optimizer.").items():
        number, _, field = name.partition(".")
        moments.setdefault(int(number), {})[field] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return int(state["epochs"])


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
