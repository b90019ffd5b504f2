"""What routers keep of the lesion, by view and class, how well their masks fit, and their time: all on the same images.

`python -m benchmarks.scouts MANIFEST dermoscopy runs/scout --part val --out scouts.csv`. Views: the original image, the
off-center crop of a store, and a harder one: a square window of 0.7 of the shorter side that shows 90 % of the lesion or more,
0.25 sides or more from its middle. The rows `mean` rank by the mean of the standardized logits of all given models. `low` and
`high` are the 95 % bootstrap interval, over lesions, of the difference to `center`. Time is CPU time on one thread, from the
decoded image to the kept patches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

from benchmarks.measuring import in_turns
from medtokenbudget.backbone import Backbone
from medtokenbudget.backbone.views import OFF_CENTER, TRIES, ViewError, geometry_of, image_seed
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest, decode_image, patch_labels
from medtokenbudget.data.masks import mask_of
from medtokenbudget.metrics import Floats, ratio, reachable
from medtokenbudget.model import MedTokenBudget, load
from medtokenbudget.routing import Ranker, Selector, budget_to_k, create_selector
from medtokenbudget.routing.trainable import ScoredRanker
from medtokenbudget.runs.statistics import resample

BUDGETS, GRID = (0.1, 0.3, 0.5), (16, 16)
CONTROLS = ("center", "border-contrast")
"""On the tokens of the embedded backbone."""
WINDOW, FAR, INSIDE = 0.7, 0.25, 0.9
TIMED = 40
DRAWS = 2_000


def harder(mask: Image.Image, seed: int) -> tuple[int, int, int, int] | None:
    """The window, of 60 drawn, in which the lesion is farthest from the middle; None if that is not far."""
    lesion = np.asarray(mask.convert("L")) > 127
    (height, width), total = lesion.shape, lesion.sum()
    side, best, farthest = round(WINDOW * min(height, width)), None, FAR
    for x, y in np.random.default_rng(seed).random((TRIES, 2)):
        left, top = round(x * (width - side)), round(y * (height - side))
        inside = lesion[top : top + side, left : left + side]
        if not total or inside.sum() < INSIDE * total:
            continue
        rows, columns = np.nonzero(inside)
        distance = float(np.hypot((columns.mean() + 0.5) / side - 0.5, (rows.mean() + 0.5) / side - 0.5))
        if distance >= farthest:
            best, farthest = (left, top, left + side, top + side), distance
    return best


def views(image: Image.Image, mask: Image.Image, name: str) -> Iterator[tuple[str, Image.Image, Image.Image]]:
    """Each view with its mask; an image does not have all of them."""
    yield "original", image, mask
    try:
        geometry = geometry_of(OFF_CENTER, mask, image_seed(0, name))
        yield OFF_CENTER, geometry.of(image), geometry.of(mask)
    except ViewError:
        pass
    if (box := harder(mask, image_seed(0, name))) is not None:
        yield "harder", image.crop(box), mask.crop(box)


def dice(probability: np.ndarray, mask: Image.Image) -> float:
    """Dice of the mask and the lesion map, resized to its pixels and cut at a half."""
    gray = Image.fromarray(probability.astype(np.float32)).resize(mask.size, Image.Resampling.BILINEAR)
    found, lesion = np.asarray(gray) > 0.5, np.asarray(mask.convert("L")) > 127
    return float(2 * (found & lesion).sum() / max(1, found.sum() + lesion.sum()))


@torch.inference_mode()
def measure(models: dict[str, MedTokenBudget], manifest: Manifest) -> Iterator[dict[str, object]]:
    """One record per view of an image with a mask: scores of every ranker [N], lesion patches [N] and Dice of every model."""
    embedded = Backbone.load(BackboneConfig(name="embedded"))
    controls: dict[str, Selector] = {name: create_selector(name) for name in CONTROLS}
    for row, name in enumerate(manifest.ids):
        path = manifest.mask_path(row)
        if path is None:
            continue
        image = decode_image(manifest.image_path(row))
        for view, picture, mask in views(image, mask_of(image.size, path), name):
            found: dict[str, object] = {"view": view, "class": manifest.rows["label"].iloc[row], "lesion id": manifest.groups[row]}
            logits = []
            for of, model in models.items():
                tokens, selector = model.encode(model.backbone.prepare(picture)[None]).float(), model.classifier().selector
                assert isinstance(selector, ScoredRanker)
                found[of] = selector.score(tokens)[0].numpy()
                logits.append(torch.logit(torch.from_numpy(found[of]).double(), 1e-9))
                found[f"dice {of}"] = dice(selector.see(tokens).lesion[0].numpy(), mask)
            tokens = embedded.tokens(embedded.normalize(torch.from_numpy(embedded.prepare(picture))[None]))
            for control, ranker in controls.items():
                assert isinstance(ranker, Ranker)
                found[control] = ranker.score(tokens)[0].numpy()
            if len(models) > 1:
                found["mean"] = torch.stack([(one - one.mean()) / one.std() for one in logits]).mean(0).numpy()
            found["lesion"] = patch_labels(mask, GRID, whole=view == "original")
            yield found


def table(records: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Share of the ceiling by view, group and ranker, in percent. The group `small` is the quarter of the smallest lesions."""
    rows, routers = [], [*CONTROLS, *models, *(["mean"] if len(models) > 1 else [])]
    for view, of_view in records.groupby("view", sort=False):
        size = np.stack(of_view["lesion"]).sum(1)
        groups = {"all": size >= 0, "small": size <= np.quantile(size[size > 0], 0.25)}
        groups |= {str(name): (of_view["class"] == name).to_numpy() for name in sorted(of_view["class"].dropna().unique())}
        for group, member in groups.items():
            of_group = of_view[member]
            lesion = np.stack(of_group["lesion"])
            ks = [budget_to_k(budget, lesion.shape[1]) for budget in BUDGETS]
            best = reachable(lesion.sum(1)[:, None], ks)
            kept = {name: _kept(np.stack(of_group[name]), lesion, ks) for name in routers}
            center = _share(kept["center"], best, of_group["lesion id"])
            for name, patches in kept.items():
                share = _share(patches, best, of_group["lesion id"])
                low, high = np.quantile((share - center)[1:], [0.025, 0.975], axis=0)
                cell: dict[object, object] = {"view": view, "group": group, "n": len(lesion), "router": name}
                for i, budget in enumerate(BUDGETS):
                    cell |= {budget: share[0, i], f"low {budget}": low[i], f"high {budget}": high[i]}
                overlap = of_group[f"dice {name}"].mean() if name in models else np.nan
                rows.append({**cell, "dice": overlap})
    return pd.DataFrame(rows)


def _kept(scores: np.ndarray, lesion: np.ndarray, ks: Sequence[int]) -> np.ndarray:
    """Lesion patches [n, T] among the `ks` [T] patches of the highest scores."""
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(lesion, order, 1).cumsum(1)[:, [k - 1 for k in ks]]


def _share(kept: np.ndarray, best: Floats, lesions: pd.Series) -> Floats:
    """Share of the ceiling [1 + DRAWS, T] in percent: of the images, then of draws of lesions."""
    both = pd.DataFrame(np.hstack([kept, best])).groupby(lesions.to_numpy()).sum().to_numpy(float)
    weights = np.vstack([np.ones((1, len(both))), *resample(len(both), DRAWS, 0)])
    sums = weights @ both
    return 100 * ratio(sums[:, : len(BUDGETS)], sums[:, len(BUDGETS) :])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--part", default="val")
    parser.add_argument("--out", type=Path, default=Path("scouts.csv"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    manifest = Manifest.read(options.manifest).part(options.part)
    models = {name: load(name, device="cpu") for name in options.models}
    found = table(pd.DataFrame(measure(models, manifest)), options.models)
    found.to_csv(options.out, index=False, float_format="%.4f", lineterminator="\n")
    print(found.to_string(index=False, float_format="%.1f"))
    images = [decode_image(manifest.image_path(row)) for row in range(min(TIMED, len(manifest)))]

    def route(model: MedTokenBudget) -> None:
        selector, k = model.classifier().selector, budget_to_k(0.3, GRID[0] * GRID[1])
        for image in images:
            selector.select(model.encode(model.backbone.prepare(image)[None]).float(), k)

    with torch.inference_mode():
        seconds = in_turns({name: partial(route, model) for name, model in models.items()}, 3, time.process_time)
    for name, times in seconds.items():
        print(f"{name}: {1000 * min(times) / len(images):.1f} ms of CPU per image")


if __name__ == "__main__":
    main()
