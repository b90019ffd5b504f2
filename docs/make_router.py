"""Makes a router for dermoscopy from public-domain masks, and from masks that a first router draws for further images.

    python docs/make_router.py ISIC UNLABELLED --masks MASKS --out runs/router

ISIC is the folder of `mtb data isic`, UNLABELLED a folder of further public-domain dermoscopic images (ISIC 2017 and 2018). Three
steps:

1. Teachers learn from the ISIC 2018 task 1 masks of the training side.
2. They draw a mask for each further image: where the mean of their scores is above a half.
3. The router learns from both. Its epoch is chosen on real masks that were held out of both trainings.

4. Promises are calibrated on the ISIC 2018 masks of the validation side, and written to the model with the card.

The validation images, with every mask there is, are only measured. The result is `OUT/dermoscopy`, the folder
`src/medtokenbudget/model/dermoscopy` of the package; docs/results/scorer.md has its figures.

With MASKS, the folder of the lesion masks of the further images, a scout is trained from these and the ISIC 2018 task 1 masks too,
with the same images left out: `OUT/scout/model`; docs/training.md has its figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

import medtokenbudget as mtb
from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.config import BackboneConfig, ExtractConfig, LATSConfig, preset
from medtokenbudget.data import Manifest, cut_selection, folder_manifest, isic_manifest, merged_groups
from medtokenbudget.data.readers import METADATA, read_lesions
from medtokenbudget.routing import Ranker
from medtokenbudget.routing.conformal import group_mean, lesion_kept
from medtokenbudget.runs.evaluate import patch_scores
from medtokenbudget.runtime import say

BACKBONE, VIEWS = BackboneConfig(name="embedded"), ExtractConfig(views="off-center")
TEACHERS = ("lats",)
"""Scorers of the teachers; each has a seed of its own. With several, the mean of their scores draws."""
HIDDEN = 192
"""Narrower than the default of 256, so that the weights and what the router knows of its training images stay below 1 MB."""
PROMISES = (0.9, 0.95, 0.98)
CARD = """### Where the masks come from

All images and masks that went into the weights and into the statistics that tell unfamiliar images are in the public domain:
{real} images of ISIC 2018 task 1 with the masks of that challenge ({select} more to choose the epoch on), and {drawn} of {further}
further images of the ISIC 2017 and 2018 challenges, whose masks were drawn by a router that had learned from the first {real}.
Images that show a lesion of the validation images or of the HAM10000 images (same lesion_id, or a duplicate) were left out. The
results below also use masks of HAM10000 (CC-BY-NC), for evaluation only.

- made again by: `{command}`, with ISIC 2019 and the further images in the two folders

### Promises

`--retention 0.9`, `0.95` and `0.98` were calibrated on {n} validation images with masks of ISIC 2018 task 1 ({groups} lesions),
which the router has not seen. They are promises about images like these, on average. On {m} validation images with masks of
HAM10000 ({other} lesions), which are larger and of more classes, it keeps what the table says; where that is less than promised,
calibrate on your own masks (`mtb calibrate dermoscopy MANIFEST --retention 0.95 --out DIR`).

| promised | patches in calibration | kept on HAM10000 | patches there |
| --- | --- | --- | --- |
{table}

"""
FEWEST, MOST = 4, 230
"""A drawn mask with fewer or more lesion patches of 256 is not used."""


def main(isic: Path, unlabelled: Path, out: Path, seed: int = 42, masks: Path | None = None) -> Path:
    """Return the folder of the router; with masks of the further images, train a scout first."""
    lesions, further = read_lesions(isic / METADATA), folder_manifest(unlabelled, None)
    further = further.with_columns(group=[lesions.get(name, name) for name in further.ids])
    real, further = without_leaks(isic_manifest(isic, "by-id"), public_masks(isic), further)
    if masks is not None:
        train_scout(real, further, masks, out, seed)
    teachers = [train(real, out / "tokens", out / f"teacher-{name}-{seed + i}", name, seed + i) for i, name in enumerate(TEACHERS)]
    drawn = draw_masks(teachers, further, out)
    train(joined(real, drawn), out / "tokens", out / "run", "lats", seed)
    counts = (len(real.part("train")), len(real.part("select")), len(drawn), len(further))
    return package(isic, out, counts, f"python docs/make_router.py ISIC UNLABELLED --seed {seed}")


def public_masks(isic: Path) -> Manifest:
    """Training images that have a mask of ISIC 2018, a tenth of them to choose the epoch on, and every validation image."""
    public = isic_manifest(isic, "by-id", ["isic2018"])
    everything = isic_manifest(isic, "by-id")
    use = public.rows[(public.rows["split"] == "train") & public.rows["mask"].notna()]
    training = cut_selection(replace(public, rows=use), 0.1, seed=42)
    rows = pd.concat([training.rows, everything.rows[everything.rows["split"] == "val"]], ignore_index=True)
    return replace(everything, rows=rows, name="ISIC 2018 task 1").without_labels()


def without_leaks(everything: Manifest, real: Manifest, further: Manifest) -> tuple[Manifest, Manifest]:
    """Both without training images that show the lesion of an image that the router is measured on.

    These are the validation images, and those whose masks are not used. The same lesion: the same `lesion_id`, or a picture that
    `mtb data check` calls a duplicate.
    """
    learned = real.rows["image_id"][real.rows["split"] != "val"]
    groups, _ = merged_groups(joined(everything, further, everything.name))
    names = [*everything.ids, *further.ids]
    group_of = dict(zip(names, groups))
    measured = {group_of[name] for name in everything.ids if name not in set(learned)}
    leaks = {name for name in (*learned, *further.ids) if group_of[name] in measured}
    say(f"{len(leaks)} training images show a lesion that the router is measured on. They are left out.")
    return tuple(  # type: ignore[return-value]
        manifest.take([i for i, name in enumerate(manifest.ids) if name not in leaks]) for manifest in (real, further)
    )


def train(manifest: Manifest, store: Path, out: Path, name: str, seed: int) -> Ranker:
    """Extract what is missing in the store, train without a head, and return the trained scorer."""
    config = preset("lesion-first", seed=seed, lats=LATSConfig(hidden=HIDDEN, neighborhood="grid8"))
    path = manifest.write(out.with_suffix(".parquet"))
    extract(manifest, store, BACKBONE, VIEWS)
    run = mtb.train(path, store, out, config, selector=name, head="none")
    selector = run.model.classifier().selector
    assert isinstance(selector, Ranker)
    return selector


def train_scout(real: Manifest, further: Manifest, masks: Path, out: Path, seed: int) -> Path:
    """Train a scout from the masks of ISIC 2018 task 1 and those of the further images."""
    public = folder_manifest(further.image_path(0).parent, masks)
    kept = set(further.ids)
    public = public.take([i for i, name in enumerate(public.ids) if name in kept])
    path = joined(real, public, "Public-domain masks").write(out / "scout.parquet")
    mtb.train(path, None, out / "scout", preset("scout", seed=seed, device="cpu"))
    return out / "scout" / "model"


@torch.no_grad()
def draw_masks(teachers: Sequence[Ranker], further: Manifest, out: Path) -> Manifest:
    """Masks of the images in `further` that the teachers find a lesion in, written to `out/masks`, and their manifest."""
    further = further.with_columns(split=["train"] * len(further))
    extract(further, out / "tokens", BACKBONE, ExtractConfig())
    store = FeatureStore.open(out / "tokens", further)
    rows = np.asarray(store.rows(further.ids))
    masks: dict[str, str] = {}
    (out / "masks").mkdir(exist_ok=True)
    for batch in store.batches(rows, 64):
        scores = torch.stack([teacher.score(batch.float()) for teacher in teachers]).mean(0)
        for name, values in zip(batch.image_id or (), scores.unflatten(1, store.grid)):
            if FEWEST <= int((values > 0.5).sum()) <= MOST:
                path = out / "masks" / f"{name}.png"
                gray = Image.fromarray((255 * values).round().byte().numpy())
                width, height = Image.open(further.image_path(further.ids.index(name))).size
                gray.resize((width, height), Image.Resampling.BILINEAR).point(lambda value: 255 * (value > 127)).save(path)
                masks[name] = str(path.resolve())
    kept = [i for i, name in enumerate(further.ids) if name in masks]
    return further.take(kept).with_columns(mask=[masks[further.ids[i]] for i in kept])


def joined(real: Manifest, drawn: Manifest, name: str = "ISIC 2018 task 1 and drawn masks") -> Manifest:
    """Both, with absolute paths."""
    parts = []
    for manifest in (real, drawn):
        rows = manifest.rows.copy()
        rows["image"] = [str(manifest.image_path(i).resolve()) for i in range(len(manifest))]
        rows["mask"] = [None if (mask := manifest.mask_path(i)) is None else str(mask.resolve()) for i in range(len(manifest))]
        parts.append(rows)
    known = set(parts[0]["image_id"])
    parts[1] = parts[1][~parts[1]["image_id"].isin(known)]
    return replace(real, rows=pd.concat(parts, ignore_index=True), root=None, name=name)


def package(isic: Path, out: Path, counts: tuple[int, int, int, int], command: str) -> Path:
    """The router with its promises and a card that says what went in, in `out/dermoscopy`."""
    model = mtb.load(out / "run" / "model", device="cpu")
    public, everything = (isic_manifest(isic, "by-id", sources).part("val").without_labels() for sources in (["isic2018"], None))
    has_mask = public.rows["mask"].notna().to_numpy()
    own, other = public.take(np.flatnonzero(has_mask)), everything.take(np.flatnonzero(~has_mask))
    found = [mtb.calibrate(model, own, promised, store=out / "tokens", part="all") for promised in PROMISES]
    store = FeatureStore.open(out / "tokens", other)
    rows, groups = store.rows(other.ids), np.array(other.groups)
    lesion = store.lesion.numpy()[rows]
    seen = lesion.any(1)
    scores, lesion, names = patch_scores(store, rows[seen], model.classifier().selector), lesion[seen], groups[seen].tolist()
    table = []
    for one in found:
        patches = one.counts(scores)
        kept = group_mean(lesion_kept(scores, lesion, patches), names)
        table.append(f"| {one.retention:.0%} | {one.tokens:.0f} | {kept:.1%} | {group_mean(patches, names):.0f} |")
    text = CARD.format(
        real=counts[0],
        select=counts[1],
        drawn=f"{counts[2]:,}",
        further=f"{counts[3]:,}",
        command=command,
        n=found[0].images,
        groups=found[0].groups,
        m=len(names),
        other=len(set(names)),
        table="\n".join(table),
    )
    before, mark, after = model.card.partition("## Results on the validation part")
    model.card = before + text + mark + after
    model.save_pretrained(out / "dermoscopy")
    return out / "dermoscopy"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("isic", type=Path)
    parser.add_argument("unlabelled", type=Path)
    parser.add_argument("--masks", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/router"))
    parser.add_argument("--seed", type=int, default=42)
    given = parser.parse_args()
    print(main(given.isic, given.unlabelled, given.out, given.seed, given.masks))
