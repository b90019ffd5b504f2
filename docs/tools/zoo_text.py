"""The text of `zoo.md`. Numbers in it are `[backbone|method|view|metric]`, tables are `<backbone>` and `<heads>`."""

TEXT = """# Every selector

Selectors of the literature on the same tokens, each with a head of its own that is trained in the same way. They are in their
post-backbone form: [what differs from the publications](../selectors.md#what-differs-from-the-publications).

- **Data**: 1,663 training and 405 validation images of ISIC 2019 (paper split, all with masks), and one off-center crop of each
  (399 in validation).
- **Backbones**: the embedded one (6 blocks, 256 patches of 192 numbers) and the ViT-S/14 of the other pages (12 blocks, 384
  numbers), with all six signals.
- **Training**: the paper's protocol and head; the head sees the budgets 0.1, 0.3 and 0.5 (the study itself: ten). Selectors
  that do not learn have a head that trains for 30 epochs, of which the last was kept when this was measured (the protocol now
  keeps the best); those that learn train together with it for 10 epochs (`--epochs 10
  --curriculum.epochs 4`) instead of 50. `lats:lesion-first` follows its own preset: the strict protocol, and off-center crops
  in training, which no other row has seen; on the ViT-S/14 without its minimum of 1,000 steps.
- **Seeds**: <seeds> (42, then 43 and 44). The column `seeds` of the CSV says it for each row.
- **Commands**: `mtb sweep isic.parquet --store stores/embedded --out runs/zoo --preset paper --protocol paper --budgets 0.1 0.3
  0.5 --methods ...`, commits 63ed5a4 to 0c92c8b. `mtb reproduce --study zoo` is all of it with every seed,
  <trainings> trainings of up to 50 epochs. `context` is compared on [a page of its own](scorer.md).

At budget 0.3, numbers in percent; [zoo.csv](zoo.csv) has the other budgets, macro F1 off-center and all intervals:

<embedded>

*Kept*: lesion patches kept as a share of what K patches can hold. In italics, for what merges: the share of the lesion in
tokens that are mostly lesion, or the attention on the lesion of tokens that are mixtures of all patches. *Off*: off-center
crops. *±*: half of the 95 % interval, bootstrap over lesions. *F1*: macro, in parentheses its deviation between seeds. *Size*:
trained parameters of selector and head. *ms*: CPU time of selecting from one image, batches of 16 on one thread.

![Macro F1 over the share of the ceiling, as they are and off-center](figures/zoo.svg)

What it says, and what it does not:

- **No training-free ranking finds the lesion.** The class token's attention keeps [embedded|class-attention|as-is|kept] % of
  the ceiling, its rollout [embedded|rollout|as-is|kept], ATS [embedded|ats|as-is|kept], because it is made to sample less
  attended places too. Two controls without any model keep more: darkness [embedded|darkness|as-is|kept] and center
  [embedded|center|as-is|kept]. Off-center, where the center falls to [embedded|center|off-center|kept], attention is above it
  ([embedded|class-attention|off-center|kept], rollout [embedded|rollout|off-center|kept]) and still below darkness
  ([embedded|darkness|off-center|kept]).
- **Selectors that learn through their choice come close without masks, attributions do not.** DynamicViT keeps
  [embedded|dynamicvit:mask-free|as-is|kept] % (off-center [embedded|dynamicvit:mask-free|off-center|kept]), SparseLearn
  [embedded|sparselearn:mask-free|as-is|kept] ([embedded|sparselearn:mask-free|off-center|kept]), Cropr
  [embedded|cropr:mask-free|as-is|kept] ([embedded|cropr:mask-free|off-center|kept]), the attention of ABMIL
  [embedded|abmil-attention:mask-free|as-is|kept] ([embedded|abmil-attention:mask-free|off-center|kept]), LATS
  [embedded|lats:mask-free|as-is|kept] ([embedded|lats:mask-free|off-center|kept]). What the gradient of a probe points at is
  far less: gradient x token [embedded|grad-token:mask-free|as-is|kept], relevance [embedded|relevance:mask-free|as-is|kept],
  Grad-CAM at norm1 [embedded|gradcam-norm1:mask-free|as-is|kept] (Random [embedded|random|as-is|kept]), which deviates by
  [embedded|gradcam-norm1:mask-free|as-is|retention_of_ceiling_spread] points between seeds.
- **With masks** DynamicViT ([embedded|dynamicvit|as-is|kept], off-center [embedded|dynamicvit|off-center|kept]), SparseLearn
  ([embedded|sparselearn|as-is|kept], [embedded|sparselearn|off-center|kept]), LATS ([embedded|lats|as-is|kept],
  [embedded|lats|off-center|kept]) and Cropr ([embedded|cropr|as-is|kept], [embedded|cropr|off-center|kept]) are within a few
  points of one another as they are; off-center LATS keeps the most of them. `lats:lesion-first` keeps
  [embedded|lats:lesion-first|as-is|kept] ([embedded|lats:lesion-first|off-center|kept]), but off-center it is the only one that
  trained on such crops.
- **Mergers** that join similar tokens keep the lesion together without knowing of it: ATC [embedded|atc|as-is|kept] % of it is
  in tokens that are mostly lesion, DPC-KNN [embedded|dpc-knn|as-is|kept], ToMe [embedded|tome|as-is|kept], and off-center more
  ([embedded|atc|off-center|kept], [embedded|dpc-knn|off-center|kept], [embedded|tome|off-center|kept]). EViT's one fused token
  takes much of it in ([embedded|evit|as-is|kept]). Comparing the keys of the block instead of the tokens keeps the lesion less
  apart in ToMe, PiToMe and ATC ([embedded|tome:keys|as-is|kept], [embedded|pitome:keys|as-is|kept],
  [embedded|atc:keys|as-is|kept]) and gave better heads on average of three seeds: macro F1 [embedded|tome:keys|as-is|macro_f1],
  [embedded|pitome:keys|as-is|macro_f1] and [embedded|atc:keys|as-is|macro_f1] instead of [embedded|tome|as-is|macro_f1],
  [embedded|pitome|as-is|macro_f1] and [embedded|atc|as-is|macro_f1].
- **Keeping the lesion is not accuracy.** Over the [embedded|rankers|as-is|count] methods that keep patches the rank correlation
  of what is kept and macro F1 is [embedded|rankers|as-is|macro_f1], off-center [embedded|rankers|off-center|macro_f1]. The
  oracle has an accuracy of [embedded|oracle|as-is|accuracy] % and Random, with [embedded|random|as-is|kept] % of the ceiling,
  [embedded|random|as-is|accuracy]: tokens of this backbone's last block know their surroundings. The center has one of the
  highest macro F1 ([embedded|center|as-is|macro_f1]) and loses the most off-center (balanced accuracy from
  [embedded|center|as-is|balanced_accuracy] to [embedded|center|off-center|balanced_accuracy]): its head learned centered
  lesions. Mixtures of all patches (query pool, TokenLearner) have the best heads among what learns.
- **Three rows are artifacts of the paper's rule for the epoch.** `sparselearn`, `abmil-attention` and `cropr` with masks keep
  the lesion, but the rule, best validation accuracy at budget 0.5, chose early epochs of theirs
  ([embedded|sparselearn|as-is|epochs]; [embedded|abmil-attention|as-is|epochs]; [embedded|cropr|as-is|epochs]), when the head
  only knew the common classes: macro F1 [embedded|sparselearn|as-is|macro_f1], [embedded|abmil-attention|as-is|macro_f1] and
  [embedded|cropr|as-is|macro_f1]. So the accuracies of learned selectors, whose heads had 10 epochs beside them, are not to be
  compared with those of the training-free ones (30 epochs).
- What a selector keeps hardly depends on the seed where it learns through its choice (LATS deviates by
  [embedded|lats|as-is|retention_of_ceiling_spread] points, DynamicViT by
  [embedded|dynamicvit|as-is|retention_of_ceiling_spread], Cropr by [embedded|cropr|as-is|retention_of_ceiling_spread]); its
  head does.
- Accuracy intervals are four to five points to either side, those of balanced accuracy four to eight, and seeds deviate in
  macro F1 by up to [embedded|untrained|as-is|macro_f1_spread] without training and by up to
  [embedded|learned|as-is|macro_f1_spread] with it. Rows that are closer than that cannot be told apart here.

## ViT-S/14

One seed, trained as above. Learned selectors and their heads have had 10 epochs on twice as many numbers per patch: their
accuracy is below that of the training-free rows (30 epochs), so read what they keep.

<vit-small>

- This backbone was fine-tuned for saliency, and its signals know more of the lesion: attention entropy keeps
  [vit-small|attention-entropy|as-is|kept] %, the norm [vit-small|norm|as-is|kept], class attention
  [vit-small|class-attention|as-is|kept] ([embedded|attention-entropy|as-is|kept], [embedded|norm|as-is|kept] and
  [embedded|class-attention|as-is|kept] on the embedded one). All are still below the center as they are, and below darkness
  off-center.
- **With masks** what learns through its choice is where it was: LATS keeps [vit-small|lats|as-is|kept] (off-center
  [vit-small|lats|off-center|kept]), Cropr [vit-small|cropr|as-is|kept] ([vit-small|cropr|off-center|kept]), SparseLearn
  [vit-small|sparselearn|as-is|kept] ([vit-small|sparselearn|off-center|kept]), DynamicViT
  [vit-small|dynamicvit|as-is|kept] ([vit-small|dynamicvit|off-center|kept]), `lats:lesion-first`
  [vit-small|lats:lesion-first|as-is|kept] ([vit-small|lats:lesion-first|off-center|kept]).
- **Without masks** the same five are above attributions, LATS by little as they are: Cropr [vit-small|cropr:mask-free|as-is|kept]
  ([vit-small|cropr:mask-free|off-center|kept]), the attention of ABMIL [vit-small|abmil-attention:mask-free|as-is|kept]
  ([vit-small|abmil-attention:mask-free|off-center|kept]), DynamicViT [vit-small|dynamicvit:mask-free|as-is|kept]
  ([vit-small|dynamicvit:mask-free|off-center|kept]), SparseLearn [vit-small|sparselearn:mask-free|as-is|kept]
  ([vit-small|sparselearn:mask-free|off-center|kept]) and LATS [vit-small|lats:mask-free|as-is|kept]
  ([vit-small|lats:mask-free|off-center|kept]) against gradient x token ([vit-small|grad-token:mask-free|as-is|kept]), Grad-CAM
  at norm1 ([vit-small|gradcam-norm1:mask-free|as-is|kept]) and relevance ([vit-small|relevance:mask-free|as-is|kept]; Random
  [vit-small|random|as-is|kept]).
- Mergers keep the lesion together as before (ATC [vit-small|atc|as-is|kept] %); comparing keys makes no difference here (ATC
  [vit-small|atc:keys|as-is|kept], ToMe [vit-small|tome:keys|as-is|kept] instead of [vit-small|tome|as-is|kept]).
- Off-center the heads of selectors that do not learn are at a balanced accuracy of about 40 %, whatever is kept, the oracle's
  too ([vit-small|oracle|off-center|balanced_accuracy]): there the head is the limit, not the selection.

## Other heads

Balanced accuracy at budget 0.3, as they are / off-center, embedded backbone, seed 42. All heads, the MLP too, trained for 8
epochs instead of 30, TransMIL for 3; LATS together with its head for 10, with TransMIL for 3; LATS lesion-first without its
minimum of 1,000 steps, its heads on off-center crops too. So these numbers are to be compared with one another only
([zoo-heads.csv](zoo-heads.csv)):

<heads>

- **No head makes up for the selection, and none undoes the center.** Of the rows that saw no crops the center is first or close
  to it behind most heads as they are ([heads|center|as-is|balanced_accuracy] behind the MLP,
  [heads|center+attentive-probe|as-is|balanced_accuracy] behind the attentive probe), and it loses the most off-center
  ([heads|center|off-center|balanced_accuracy], [heads|center+attentive-probe|off-center|balanced_accuracy]). CLAM with a branch
  for each class is the exception ([heads|center+clam-mb|as-is|balanced_accuracy] with the center,
  [heads|evit+clam-mb|as-is|balanced_accuracy] with EViT).
- **Off-center what follows the lesion is ahead behind ABMIL and CLAM**, though not behind the attentive probe: behind ABMIL the
  oracle ([heads|oracle+abmil|off-center|balanced_accuracy]) and LATS ([heads|lats+abmil|off-center|balanced_accuracy]) are
  above all that learned without crops, behind CLAM with one branch ([heads|oracle+clam-sb|off-center|balanced_accuracy],
  [heads|lats+clam-sb|off-center|balanced_accuracy]) and with one for each class
  ([heads|oracle+clam-mb|off-center|balanced_accuracy], [heads|lats+clam-mb|off-center|balanced_accuracy]) too.
- **LATS lesion-first is first off-center behind every head that it has**, and as they are behind all but the MLP
  ([heads|lats:lesion-first|as-is|balanced_accuracy]). Its heads saw each image and a crop of it, so crops and twice as many
  steps: how much of it is the selection, this table does not say.
- **The attentive probe learns fastest** of those that read tokens; the linear probe, with the same few steps, is far from
  trained. So this table says which heads learn fast on 1,663 images, not which is best in the end.
- Left out for time: `transmil` with `lats:lesion-first`.
"""
