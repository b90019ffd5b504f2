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
    "scout-center": "control: the 76 patches in the middle, from block 0",
    "inside-2-token": "inside, before block 2, one background token",
    "inside-4-token": "inside, before block 4, one background token",
    "inside-6-token": "inside, before block 6, one background token",
    "inside-4-own-token": "inside, before block 4, own scorer, one background token",
    "inside-4-evit": "inside, before block 4, by class attention, dropped",
    "inside-4-frequency": "inside, before block 4, by received attention, dropped",
    "inside-4-center": "control: inside, before block 4, the 76 in the middle, dropped",
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
    "evit": "class attention of blocks 3 and 6 (EViT)",
}
FAMILIES = {
    "dense": ("dense", "dense-140px", "dense-154px", "dense-308px"),
    "after the backbone": ("after", "after-0.5"),
    "scout": ("scout-0.3", "scout-0.5", "scout-ring"),
    "inside": tuple(name for name in NAMES if name.startswith("inside") and name != "inside-4-center"),
    "the middle, early": ("scout-center", "inside-4-center"),
    "ToMe": ("tome",),
    "EViT": ("evit",),
    "embedded backbone": ("embedded", "embedded-after"),
}
TEXT = """# Early routing: time and quality

What each way of running a backbone on a part of an image costs in time and brings in macro F1: chosen on training images,
confirmed on validation images.

- **Data**: 1,663 training and 405 validation images of ISIC 2019 (paper split, all with masks). The images have 320 pixels,
  so an input of 448 would be enlarged: larger inputs were not tried. Each of 399 validation images also as an off-center
  crop, where the lesion is not in the middle.
- **Backbone**: the ViT-S/14 of the other pages (a descendant of DINOv2, not the official checkpoint) at 224 pixels, computed
  in bfloat16 (centered mean tokens of the dense pass correlate with those in float32 at 0.9998). The scout is the embedded
  backbone with a LATS router. Budget 0.3, 76 of 256 patches, unless a row says otherwise.
- **Heads**: mean-pooled MLPs, each trained on the very tokens that it reads, on images as they are.
- **Choosing**: three folds of the training side, grouped by lesion, three seeds. The patches of a training image are ranked
  by a scout that has not seen the masks of its fold (on the held-out folds these scouts keep 97.3 to 98.1 % of the ceiling),
  those of a validation image by a scout of all training images; the scorers inside the backbone are divided in the same way.
  No held-out image was ranked by a model that had seen its mask.
- **Confirming**: each way at the block that the inner folds chose, five seeds, 95 % intervals from 500 draws of the validation
  images; for differences, the same draws for both ways, without a correction for the number of comparisons. It is the second
  look at these images: an earlier version of this page showed most rows with three seeds, and the one before it 346 of the
  images at block 7. New are the rows of EViT, received attention, the middle from block 0 and inside, 154 pixels, and everything
  off-center; the scorer inside was judged with three seeds before, with a head that had learned on patches chosen by a scorer
  that knew their masks. What to compare was written down before: each way with dense at its best block, routing after the
  backbone with dense at the same block and with the middle, the scout with ToMe, with the smaller images and with the middle, and
  what was removed with its control.
- **Removed**: a crop around the router's box was measured and was not better, beyond chance, than one of its size around the image
  center (macro F1 59.0 against 59.5; off-center 53.9 against 50.4, +3.5 (-0.3 to +7.1)). Two other backgrounds (dropped patches
  leave no token, or one for each of 4 x 4 regions) differed from one background token by at most 1.4 points on the inner folds,
  within the spread of the seeds (off-center, ranked by the scout, they had 45.7 and 47.5 against 44.0, with intervals that
  overlap). All three were removed. The rows that say "dropped" were measured without a background token.
- **Time**: CPU milliseconds per image at the very block that is read, one thread, batches of 16, float32, router included, in
  turns within one run (the median of three rounds), on a machine that was busy with other work. Decoding and resizing are not
  included.

The speeds: commit 0574b03; the rest: commit b4a7530. [All numbers](early-routing.csv).

## Which block carries the class

Out-of-fold scores on the training side. "Routed" is the mean of the scout's 76 patches after that block, as in the paper.

<blocks>

Dense tokens are best at blocks 7 and 8, routed ones at 5 and 6 ([gain|after@5|after@6] is far below the spread of the seeds), and
the last block is the worst for both. The routed rows below are read at block 6 or 7: the ways that route early were not judged at
block 5. The embedded backbone has six blocks and is best at block [inner|embedded|block] dense ([inner|embedded|macro_f1]) and at
block [inner|embedded-after|block] routed ([inner|embedded-after|macro_f1]; of blocks 3 to 5).

## Every way, with its competitors

<ways>

*F1*: macro F1; *balanced*: balanced accuracy; the CSV has the differences from the other ways too.

![Time against macro F1 and balanced accuracy](figures/early-routing.svg)

Lines are 95 % intervals. The dashed line joins the ways that no other beats in both time and quality, without the controls: the
middle of the image would beat them all here, and fails [off-center](#off-center).

What the inner folds say (macro F1, three seeds; the spread of the seeds is up to 1.5 points, so smaller differences are noise):

- **A part of the patches at a good block is better than all of them**: routed after block [inner|after|block]
  [inner|after|macro_f1], [gain|after|dense@6] over dense at the same block and [gain|after|dense] over dense at its own best.
  It saves no time.
- **But which part hardly matters on these images**: the 76 patches in the middle give [inner|after-center|macro_f1], the lesion
  masks themselves [inner|after-masks|macro_f1]. The lesion is in the middle of most images.
- **Inside, before block 4**, keeps that gain and saves time: [inner|inside-4-own-token|macro_f1] with a scorer of its own,
  [inner|inside-4-token|macro_f1] ranked by the scout, [inner|inside-4-center|macro_f1] for the middle. Class attention
  ([inner|inside-4-evit|macro_f1]) and received attention
  ([inner|inside-4-frequency|macro_f1]) of block 3 choose worse than the middle of the image.
- **The scout** at block [inner|scout-0.3|block] has [inner|scout-0.3|macro_f1], not below the dense pass; 128 patches
  ([inner|scout-0.5|macro_f1]) or a ring ([inner|scout-ring|macro_f1]) add nothing, and the middle from block 0 has
  [inner|scout-center|macro_f1].
- **Competitors**: ToMe [inner|tome|macro_f1], EViT [inner|evit|macro_f1], 154 pixels [inner|dense-154px|macro_f1], 140 pixels
  [inner|dense-140px|macro_f1], the embedded backbone alone, routed after it, [inner|embedded-after|macro_f1]: the cheapest of
  all is among the best.

What the validation images say:

- **The gain of routing after the block is not confirmed**: [validation|after|macro_f1] against [validation|dense@6|macro_f1] for
  dense at the same block, [validation|after|over_dense@6]; the lesion masks themselves would give
  [validation|after-masks|macro_f1].
- **Inside with a scorer of its own** needs no scout and takes [time|inside-4-own-token|milliseconds] ms,
  [ratio|inside-4-own-token|dense]
  as fast as dense: [validation|inside-4-own-token|macro_f1], [validation|inside-4-own-token|over_dense] over dense, and
  [validation|inside-4-own-token|over_after] over routing after the backbone. Ranked by the scout it pays the scout's time too
  ([time|inside-4-token|milliseconds] ms) and has [validation|inside-4-token|macro_f1].
- **The scout takes half the time of dense** ([time|scout-0.3|milliseconds] ms at block 6 against [time|dense|milliseconds] at
  block 7;
  dense at block 6 [time|dense@6|milliseconds]) with no difference in macro F1 beyond chance ([validation|scout-0.3|over_dense]). So
  does an image of 140 pixels in a third of it ([time|dense-140px|milliseconds] ms, [validation|dense-140px|over_dense]).
- **The middle of the image embarrasses every router here**: its 76 patches alone, from block 0, take
  [time|scout-center|milliseconds] ms
  and have [validation|scout-center|macro_f1], [validation|scout-center|over_dense] over dense; after the backbone they are
  [validation|after-center|over_after] above the scout's. On these
  images the lesion is there; off-center, below, it is the other way round.
- **Beyond chance and worse than dense** are EViT ([validation|evit|over_dense]), class attention before block 4
  ([validation|inside-4-evit|over_dense]) and the embedded backbone routed after it ([validation|embedded-after|over_dense]).
  Nothing is better than dense beyond chance. Against ToMe, at about its time, inside with a scorer of its own has
  [validation|inside-4-own-token|over_tome].

## Off-center

The same heads, which learned from images as they are, on crops whose lesion is not in the middle.

<off-center>

- **Everything falls**, dense from [validation|dense|macro_f1] to [off-validation|dense|macro_f1], and **the middle falls most**:
  after
  the backbone to [off-validation|after-center|macro_f1], from block 0 to [off-validation|scout-center|macro_f1] and inside to
  [off-validation|inside-4-center|macro_f1], [off-validation|scout-center|over_dense] and
  [off-validation|inside-4-center|over_dense]
  over dense. So the middle is no router: it only knows where photographers put the lesion.
- **The scout** has [off-validation|scout-0.3|macro_f1], [off-validation|scout-0.3|over_after-center] over the middle after the
  backbone, and does not differ from dense beyond chance ([off-validation|scout-0.3|over_dense]).
- **Inside** falls below dense, ranked by the scout ([off-validation|inside-4-token|over_dense]) and with a scorer
  of its own ([off-validation|inside-4-own-token|over_dense]). That scorer learned from
  images as they are alone and keeps [off-retention|inside-4-own|of_ceiling] % of the ceiling here; the scout, whose training had
  off-center crops too, keeps [off-retention|scout|of_ceiling] %. Extract the store of such a scorer with `--views off-center`.

## What the choice keeps of the lesion

<retention>

The scout's patches are the same before, inside and after the backbone, so every way that it ranks keeps the same lesion
patches. A scorer on the tokens of block 3 sees the lesion as well as the scout does on images as they are. Attention, which
needs no training, keeps fewer lesion patches than the middle of the image does, and more than it off-center.

## Speed

`python -m benchmarks.early_speed --rounds 3`: speed over the dense pass of the same run, random weights, all twelve blocks, router
included, on an otherwise idle machine of two cores (ViT-B/14 at batch 16 and one thread: beside other work). *Scout*: 76
patches from block 0; *inside*: before block 4, one background token; *ToMe*: in every block, down
to 76; the *smaller image* is one of about the scout's time.

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
mtb train study/fold0.parquet --store block3 --out study/own0 --head none --min-steps 400 --epochs 12 --lats.signals norm contrast
mtb train study/fold1.parquet --store block3 --out study/own1 --head none --min-steps 400 --epochs 12 --lats.signals norm contrast
mtb train study/fold2.parquet --store block3 --out study/own2 --head none --min-steps 400 --epochs 12 --lats.signals norm contrast
python -m benchmarks.early_study pool --manifest isic.parquet --weights vits.safetensors --out study --group own --inside study/own
python -m benchmarks.early_study inner --manifest isic.parquet --out study
python -m benchmarks.early_study validation --manifest isic.parquet --out study
python -m benchmarks.early_study time --weights vits.safetensors --scout runs/scout --out study
python -m benchmarks.early_speed --threads 1
python docs/tools/early_page.py study bench.txt
```

`pool` once for each group: `dense`, `scout`, `middle`, `own`, `tome`, `evit`, `small` (140 pixels), `medium` (154 pixels)
and `embedded`; off-center `dense`, `scout`, `middle`, `own`, `tome`, `small` and `medium` with `--blocks 6 7`.
`inner` and `validation` were given the ways of the tables with `--ways`.
The groups `large` (308 pixels) and `fine` (a scout for 448 pixels) were not run here.
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
        "a scorer of its own [validation|inside-4-own-token|over_after]; ranked by the scout "
        "[validation|inside-4-token|over_after]",
    ),
    (
        "retention of every early way at most 0.5 points of the ceiling below routing after the backbone",
        "scout, and inside ranked by it: 0.0, the same patches ([retention|scout|of_ceiling] % of the ceiling, 405 images). Inside "
        "by a scorer of its own: [retention|inside-4-own|of_ceiling] %; off-center [off-retention|inside-4-own|of_ceiling] % "
        "against "
        "[off-retention|scout|of_ceiling] %, missed there",
    ),
    (
        "at no more time than dense at 224 pixels, macro F1 2 points above it",
        "no: of the ways that know the lesion and are no slower than dense the inner folds prefer inside with a scorer of its own "
        "(block 6, [gain|inside-4-own-token|dense] there): [validation|inside-4-own-token|macro_f1] against "
        "[validation|dense|macro_f1], [validation|inside-4-own-token|over_dense]",
    ),
    (
        "at half the time of dense, macro F1 not below it",
        "scout: [validation|scout-0.3|macro_f1] against [validation|dense|macro_f1], difference "
        "[validation|scout-0.3|over_dense], [ratio|scout-0.3|dense] as fast, [ratio|scout-0.3|dense@6] at the same block",
    ),
    (
        "routed after the best block at least 2 points above dense at the same block",
        "[validation|after|over_dense@6] on validation: not confirmed; on the inner folds [gain|after|dense@6], as much as for the "
        "middle of the image ([gain|after-center|dense@6])",
    ),
    (
        "ToMe in every block down to the same K, beaten",
        "ToMe: macro F1 [validation|tome|macro_f1], [ratio|tome|dense] as fast as dense. Scout: "
        "[validation|scout-0.3|macro_f1] and "
        "[ratio|scout-0.3|dense], over ToMe [validation|scout-0.3|over_tome]; inside, own scorer: "
        "[validation|inside-4-own-token|macro_f1] and [ratio|inside-4-own-token|dense], "
        "[validation|inside-4-own-token|over_tome]. Faster, "
        "and not better beyond chance",
    ),
)
