"""Makes the router for dermoscopy that comes with the package, a scout trained from public-domain masks.

    python docs/make_router.py ISIC FURTHER MASKS --out runs/router

ISIC is the folder of ISIC 2019 with its masks; FURTHER and MASKS are further images of the ISIC 2017 and 2018 challenges and their
lesion masks. The scout learns from these and from the ISIC 2018 task 1 masks of the training side. Promises are calibrated on the
ISIC 2018 masks of the validation side and written to the model with the card.

The validation images, with every mask there is, are only measured. The result is `OUT/dermoscopy`, the folder
`src/medtokenbudget/model/dermoscopy` of the package; docs/training.md has its figures. With OMP_NUM_THREADS=1 and the versions in
its card, `config.json` and `model.safetensors` are the same bytes; other threads or machines may change the last bit.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

import medtokenbudget as mtb
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.config import preset
from medtokenbudget.data import Manifest, folder_manifest, isic_manifest, merged_groups
from medtokenbudget.data.readers import METADATA, read_lesions
from medtokenbudget.routing.conformal import group_mean, lesion_kept
from medtokenbudget.runs.evaluate import patch_scores
from medtokenbudget.runtime import say

PROMISES = (0.9, 0.95, 0.98)
CARD = """### Where the masks come from

Training started from the first stages of EfficientNet-Lite0 (Google, Apache-2.0), which learned the classes of ImageNet. All
images and masks that it learned from then, and that the statistics that tell unfamiliar images are of, are in the public domain:
{real} images of ISIC 2018 task 1 and {further} further images of the ISIC 2017 and 2018 challenges, with their masks.
Images that show a lesion of the validation images or of the HAM10000 images (same lesion_id, or a duplicate) were left out. The
results below also use masks of HAM10000 (CC-BY-NC), for evaluation only.

- made again by: `python docs/make_router.py ISIC FURTHER MASKS --seed {seed}`, with ISIC 2019, the further images and
  their masks in the three folders

### Promises

`--retention 0.9`, `0.95` and `0.98` were calibrated on {n} validation images with masks of ISIC 2018 task 1 ({groups} lesions),
which the router has not seen. They are promises about images like these, on average. On {m} validation images with masks of
HAM10000 ({other} lesions), which are larger and of more classes, it keeps what the table says; where that is less than promised,
calibrate on your own masks (`mtb calibrate MANIFEST --model dermoscopy --retention 0.95 --out DIR`).

| promised | patches in calibration | kept on HAM10000 | patches there |
| --- | --- | --- | --- |
{table}

"""


def main(isic: Path, images: Path, masks: Path, out: Path, seed: int = 42) -> Path:
    """Return the folder of the router."""
    lesions, further = read_lesions(isic / METADATA), folder_manifest(images, masks)
    further = further.with_columns(group=[lesions.get(name, name) for name in further.ids])
    real, further = without_leaks(isic_manifest(isic, "by-id"), public_masks(isic), further)
    manifest = joined(real, further, "Public-domain masks").write(out / "masks.parquet")
    mtb.train(manifest, None, out / "run", preset("scout", seed=seed, device="cpu"))
    return package(isic, out, len(real.part("train")), len(further), seed)


def public_masks(isic: Path) -> Manifest:
    """Training images that have a mask of ISIC 2018, and every validation image."""
    public, everything = isic_manifest(isic, "by-id", ["isic2018"]), isic_manifest(isic, "by-id")
    use = public.rows[(public.rows["split"] == "train") & public.rows["mask"].notna()]
    rows = pd.concat([use, everything.rows[everything.rows["split"] == "val"]], ignore_index=True)
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


def joined(real: Manifest, further: Manifest, name: str) -> Manifest:
    """Both, with absolute paths."""
    parts = []
    for manifest in (real, further):
        rows = manifest.rows.copy()
        rows["image"] = [str(manifest.image_path(i).resolve()) for i in range(len(manifest))]
        rows["mask"] = [None if (mask := manifest.mask_path(i)) is None else str(mask.resolve()) for i in range(len(manifest))]
        parts.append(rows)
    known = set(parts[0]["image_id"])
    parts[1] = parts[1][~parts[1]["image_id"].isin(known)]
    return replace(real, rows=pd.concat(parts, ignore_index=True), root=None, name=name)


def package(isic: Path, out: Path, real: int, further: int, seed: int) -> Path:
    """The router with its promises and a card that says what went in, in `out/dermoscopy`."""
    model, tokens = mtb.load(out / "run" / "model", device="cpu"), out / "run" / "tokens"
    public, everything = (isic_manifest(isic, "by-id", sources).part("val").without_labels() for sources in (["isic2018"], None))
    has_mask = public.rows["mask"].notna().to_numpy()
    own, other = public.take(np.flatnonzero(has_mask)), everything.take(np.flatnonzero(~has_mask))
    found = [mtb.calibrate(model, own, promised, store=tokens, part="all") for promised in PROMISES]
    store = FeatureStore.open(tokens, other)
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
        real=real,
        further=f"{further:,}",
        seed=seed,
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
    parser.add_argument("further", type=Path)
    parser.add_argument("masks", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/router"))
    parser.add_argument("--seed", type=int, default=42)
    given = parser.parse_args()
    print(main(given.isic, given.further, given.masks, given.out, given.seed))
