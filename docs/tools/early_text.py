"""What the page of early routing says: names of its rows, its text and its goals, with numbers as `[table|way|column]`."""

from __future__ import annotations

NAMES = {
    "dense": "dense, all 256 patches",
    "after": "routed after the backbone, 76 of 256 (the paper's way)",
    "after-0.5": "routed after the backbone, 128 of 256",
    "after-center": "control: the 76 patches in the middle, after the backbone",
    "after-masks": "control: the lesion masks choose 76, after the backbone",
    "scout-0.3": "scout, 76 from block 0",
    "scout-0.5": "scout, 128 from block 0",
    "scout-ring": "scout, 51 and a ring of 25 around them, from block 0",
    "inside-2-token": "inside, before block 2, one background token",
    "inside-4-drop": "inside, before block 4, dropped",
    "inside-4-token": "inside, before block 4, one background token",
    "inside-4-local": "inside, before block 4, local background tokens",
    "inside-6-drop": "inside, before block 6, dropped",
    "inside-6-token": "inside, before block 6, one background token",
    "inside-4-own-drop": "inside, before block 4, own scorer, dropped",
    "inside-4-own-token": "inside, before block 4, own scorer, one background token",
    "inside-4-own-local": "inside, before block 4, own scorer, local background tokens",
    "inside-4-evit": "inside, before block 4, by class attention, dropped",
    "inside-4-frequency": "inside, before block 4, by received attention, dropped",
    "inside-4-center": "inside, before block 4, the middle, dropped",
    "zoom-1.2": "zoom, margin 1.2",
    "zoom-1.7": "zoom, margin 1.7",
    "zoom-scout-179": "zoom, then 179 of 256 from block 0",
    "zoom-scout-76": "zoom, then 76 of 256 from block 0",
    "zoom-center": "control: a crop of the zoom's size around the center",
    "tome": "ToMe in every block, down to 76",
    "evit": "EViT at blocks 3 and 6, down to 76",
    "dense-140px": "a smaller dense image, 140 pixels",
    "dense-154px": "a smaller dense image, 154 pixels",
    "dense-308px": "a larger dense image, 308 pixels",
    "embedded": "the embedded backbone alone, dense",
    "embedded-after": "the embedded backbone alone, routed after it",
}
CHOICES = {
    "scout": "the scout",
    "scout-ring": "the scout, with a ring",
    "inside-4-evit": "class attention of block 3",
    "inside-4-frequency": "received attention of block 3",
    "inside-4-center": "the middle of the image",
    "inside-4-own": "a scorer of its own on the tokens of block 3",
}
FAMILIES = {
    "dense": ("dense", "dense-140px", "dense-154px", "dense-308px"),
    "after the backbone": ("after", "after-0.5"),
    "scout": ("scout-0.3", "scout-0.5", "scout-ring"),
    "inside": tuple(name for name in NAMES if name.startswith("inside")),
    "zoom": ("zoom-1.2", "zoom-1.7", "zoom-scout-179", "zoom-scout-76"),
    "zoom on the center": ("zoom-center",),
    "ToMe": ("tome",),
    "EViT": ("evit",),
    "embedded backbone": ("embedded", "embedded-after"),
}
TEXT = """# Early routing: time and quality

What each way of running a backbone on a part of an image costs in time and brings in macro F1: chosen on training images,
confirmed once on validation images.

- **Data**: 1,663 training and 405 validation images of ISIC 2019 (paper split, all with masks). The images have 320 pixels,
  so an input of 448 would be enlarged: larger inputs were not tried. Off-center crops were not judged.
- **Backbone**: the ViT-S/14 of the other pages (a descendant of DINOv2, not the official checkpoint) at 224 pixels, computed
  in bfloat16 (centered mean tokens of the dense pass correlate with those in float32 at 0.9998). The scout is the embedded
  backbone with a LATS router. Budget 0.3, 76 of 256 patches, unless a row says otherwise.
- **Heads**: mean-pooled MLPs, each trained on the very tokens that it reads, on images as they are.
- **Choosing**: three folds of the training side, grouped by lesion, three seeds. The patches of a training image are ranked
  by a scout that has not seen the masks of its fold (on the held-out folds these scouts keep 97.3 to 98.1 % of the ceiling),
  those of a validation image by a scout of all training images. No held-out image was ranked by a scout that had seen its
  mask.
- **Confirming**: once, each way at the block that the inner folds chose (a way that they did not judge: at that of its
  relatives), three seeds, 95 % intervals from 500 draws of the validation images; for differences, the same draws for both
  ways, without a correction for the number of comparisons. An earlier version of this page had shown 346 of these images at
  block 7.
- **Time**: CPU milliseconds per image at the very block that is read, one thread, batches of 16, float32, router included, in
  turns within one run (the median of three rounds), on a machine that was busy with other work. Decoding and resizing are not
  included.

Commit 0574b03, [all numbers](early-routing.csv).

## Which block carries the class

Out-of-fold scores on the training side. "Routed" is the mean of the scout's 76 patches after that block, as in the paper.

<blocks>

All blocks were judged before, with one seed and a scout that had seen the masks of the held-out folds: the last two were the
worst (dense [blocks|dense@10|macro_f1] and [blocks|dense@11|macro_f1], routed [blocks|after@10|macro_f1] and
[blocks|after@11|macro_f1] at blocks 10 and 11, against [blocks|dense@7|macro_f1] and [blocks|after@7|macro_f1] at block 7). So
read this backbone at block 6 or 7, not at its last one.

## Every way, with its competitors

<ways>

*F1*: macro F1; *balanced*: balanced accuracy; the CSV has the differences from the other ways too.

![Time against macro F1 and balanced accuracy](figures/early-routing.svg)

Lines are 95 % intervals, the dashed line joins the ways that no other beats in both time and quality.

What the inner folds say (macro F1, three seeds, spread of the seeds 0.2 to 1.3):

- **Routing after a good block pays**: [inner|after|macro_f1] at block [inner|after|block], against [inner|dense|macro_f1] for
  the dense pass at its own best block [inner|dense|block]. It saves no time.
- **The scout** at block [inner|scout-0.3|block] has [inner|scout-0.3|macro_f1], not below the dense pass; 128 patches instead
  of 76 add nothing ([inner|scout-0.5|macro_f1]).
- **Inside**, before block 4, has [inner|inside-4-drop|macro_f1] at block [inner|inside-4-drop|block]. What becomes of the
  dropped patches makes no difference: at block 7 dropped [inner|inside-4-drop@7|macro_f1], one background token
  [inner|inside-4-token|macro_f1], local ones [inner|inside-4-local|macro_f1]. A ring of context around fewer patches does not
  help either (scout [inner|scout-0.3@7|macro_f1] at block 7, with a ring [inner|scout-ring|macro_f1]).
- **Zoom** ([inner|zoom-1.2|macro_f1]) is no better than a crop of its size around the image center
  ([inner|zoom-center|macro_f1]), and neither is better than the dense pass.
- **The embedded backbone alone**, routed after it, has [inner|embedded-after|macro_f1], dense [inner|embedded|macro_f1]: the
  cheapest competitor is among the best.

What the validation images say:

- **The gain of routing after the block is not confirmed**: [validation|after|macro_f1] against [validation|dense|macro_f1],
  and the lesion masks themselves would give [validation|after-masks|macro_f1]. The 76 patches in the middle of the image give
  [validation|after-center|macro_f1], [validation|after-center|over_after] over the scout's. That is one of many comparisons
  and may be chance, but knowing where the lesion is did not help these heads.
- **Almost nothing differs beyond chance.** Against dense only class attention before block 4
  ([validation|inside-4-evit|over_dense]) and the embedded backbone routed after it ([validation|embedded-after|over_dense])
  do, and both are worse.
- **The scout takes half the time of dense** ([time|scout-0.3|milliseconds] ms at block 6 against [time|dense|milliseconds] at
  block 7; dense at block 6 [time|dense@6|milliseconds]) with no difference in macro F1 beyond chance
  ([validation|scout-0.3|over_dense]). So does an image of 140 pixels in a third of the time ([time|dense-140px|milliseconds]
  ms, [validation|dense-140px|over_dense]; read at block 6, which was not chosen for it), without any router: on these images
  the scout does not pay.
- **Zoom** is as good as a crop around the center ([validation|zoom-1.2|macro_f1] and [validation|zoom-center|macro_f1]), and
  slower than dense.
- **Inside with a scorer of its own** needs no scout: LATS on the tokens of block 3, trained with the masks of the training side.
  It keeps [retention|inside-4-own|of_ceiling] % of the ceiling, as much as the scout, takes
  [time|inside-4-own-drop@6|milliseconds] ms and has [validation|inside-4-own-drop|macro_f1] dropped and
  [validation|inside-4-own-token|macro_f1] with one background token, [validation|inside-4-own-drop|over_dense] and
  [validation|inside-4-own-token|over_dense] over dense. These two rows were added after the others had been seen, with nothing
  chosen. Ranked by the scout, inside pays the scout's time too: [time|inside-4-drop|milliseconds] ms.

## What the choice keeps of the lesion

<retention>

The scout's patches are the same before, inside and after the backbone, so every way that it ranks keeps the same lesion
patches. A scorer on the tokens of block 3 sees the lesion as well as the scout does. The attention of block 3, which needs no
training, keeps fewer lesion patches than the middle of the image does.

## Speed

`mtb bench early-routing --rounds 3`: speed over the dense pass of the same run, random weights, all twelve blocks, router
included, on an otherwise idle machine of two cores (ViT-B/14 at batch 16 and one thread: beside other work). *Scout*: 76
patches from block 0; *inside*: before block 4, one background token; *zoom*: the scout, then the whole grid; *ToMe*: in every
block, down to 76; the *smaller image* is one of about the scout's time.

<speed>

The scout takes 32 ms of CPU time per image, of which its six blocks take 23, the attention signal of the last one 3 and the
scorer 2: nothing in it can be left out without another scout. What remains is what 77 tokens cost.

## Against the goals

<goals>

## The commands

<!-- not run: needs the images and the weights -->
```bash
mtb extract isic.parquet --store embedded --backbone embedded --views off-center
mtb train isic.parquet --store embedded --out runs/scout
python -m benchmarks.early_study folds --manifest isic.parquet --out study
mtb train study/fold0.parquet --store embedded --out study/scout0 --head none --min-steps 400 --epochs 12
mtb train study/fold1.parquet --store embedded --out study/scout1 --head none --min-steps 400 --epochs 12
mtb train study/fold2.parquet --store embedded --out study/scout2 --head none --min-steps 400 --epochs 12
python -m benchmarks.early_study scores --manifest isic.parquet --store embedded --scout runs/scout --out study
python -m benchmarks.early_study pool --manifest isic.parquet --weights vits.safetensors --out study --group dense
python -m benchmarks.early_study pool --manifest isic.parquet --weights vits.safetensors --out study --group dense --part off-center
mtb extract isic.parquet --store block3 --backbone vit_small_patch14_dinov2.lvd142m --weights vits.safetensors --layer 3
mtb train isic.parquet --store block3 --out study/own --head none --min-steps 400 --epochs 12 --lats.signals norm contrast
python -m benchmarks.early_study pool --manifest isic.parquet --weights vits.safetensors --out study --group own --inside study/own
python -m benchmarks.early_study inner --manifest isic.parquet --out study
python -m benchmarks.early_study validation --manifest isic.parquet --out study
python -m benchmarks.early_study time --weights vits.safetensors --scout runs/scout --out study
mtb bench early-routing --threads 1
python docs/tools/early_page.py study bench.txt
```

`pool` once for each group: `dense`, `scout`, `zoom`, `embedded`, `tome`, `small`. The groups `wide` (margin 1.7), `parted`
(zoom, then a part of the crop), `medium` (154 pixels), `large` (308 pixels) and `evit` were not run here.
"""
GOALS = (
    (
        "scout at 0.3, ViT-B/14: 2.5x or more",
        "one thread: [speed|scout|B-1-1] at batch 1, [speed|scout|B-16-1] at batch 16; two threads: [speed|scout|B-1-2] and "
        "[speed|scout|B-16-2]. Reached in batches, just missed at batch 1",
    ),
    (
        "scout at 0.3, ViT-S/14: 1.9x or more",
        "one thread: [speed|scout|S-1-1] at batch 1, [speed|scout|S-16-1] at batch 16; two threads: [speed|scout|S-1-2] and "
        "[speed|scout|S-16-2]. Reached but for batch 1 on two threads. At the blocks that are read, block 6 against dense at "
        "block 7: [ratio|scout-0.3|dense], at the same block [ratio|scout-0.3|dense@6]",
    ),
    (
        "inside, before block 4, at 0.3: 1.7x or more",
        "ViT-S/14, one thread: [speed|inside|S-1-1] at batch 1, [speed|inside|S-16-1] at batch 16; two threads: "
        "[speed|inside|S-1-2] and [speed|inside|S-16-2]. ViT-B/14: [speed|inside|B-1-1], [speed|inside|B-16-1]; "
        "[speed|inside|B-1-2], [speed|inside|B-16-2]. Reached in batches, and at batch 1 with ViT-B/14 on one thread",
    ),
    (
        "inside: macro F1 at most 1 point below routing after the backbone",
        "a scorer of its own, dropped [validation|inside-4-own-drop|over_after], one token "
        "[validation|inside-4-own-token|over_after]; ranked by the scout, dropped "
        "[validation|inside-4-drop|over_after], one token [validation|inside-4-token|over_after], local "
        "[validation|inside-4-local|over_after]",
    ),
    (
        "retention of every early way at most 0.5 points of the ceiling below routing after the backbone",
        "scout, and inside ranked by it: 0.0, the same patches ([retention|scout|of_ceiling] % of the ceiling, 405 "
        "images). Class attention of block 3: [retention|inside-4-evit|of_ceiling] %. Inside by a scorer of its own: "
        "[retention|inside-4-own|of_ceiling] %",
    ),
    (
        "at no more time than dense at 224 pixels, macro F1 2 points above it",
        "no: of the ways that are no slower than dense the inner folds prefer inside (dropped, block 6): "
        "[validation|inside-4-drop|macro_f1] against [validation|dense|macro_f1], "
        "[validation|inside-4-drop|over_dense]. The ring is "
        "highest on validation, [validation|scout-ring|over_dense], but nothing pointed to it before",
    ),
    (
        "at half the time of dense, macro F1 not below it",
        "scout: [validation|scout-0.3|macro_f1] against [validation|dense|macro_f1], difference "
        "[validation|scout-0.3|over_dense], "
        "[ratio|scout-0.3|dense] as fast, [ratio|scout-0.3|dense@6] at the same block",
    ),
    (
        "routed after the best block at least 2 points above dense at the same block",
        "[validation|after|over_dense@6] on validation: not confirmed; on the inner folds +6.3",
    ),
    (
        "ToMe in every block down to the same K, beaten",
        "ToMe: macro F1 [validation|tome|macro_f1], [ratio|tome|dense] as fast as dense; scout "
        "[validation|scout-0.3|macro_f1] and [ratio|scout-0.3|dense], scout over ToMe "
        "in F1 [validation|scout-0.3|over_tome@7]: faster, and not better beyond chance",
    ),
)
