"""The words of the report explained, for readers who do not know the paper."""

from __future__ import annotations

TERMS: dict[str, str] = {
    "Patch, token": "A square piece of the image, and the vector that the vision transformer makes of it.",
    "Token budget (β)": "The share of patches that may be kept. K = max(16, ⌊β N⌋) of N patches stay.",
    "Lesion retention": "Of all patches that the lesion mask marks, the share that was kept; summed over images, as "
    "in the paper. 100 % means that no lesion patch was lost.",
    "Retention per image": "The same for each image first, then averaged: small lesions count as much as large ones.",
    "Ceiling": "What no selector can exceed: a lesion of 100 patches cannot survive whole when only 76 may be kept.",
    "Share of the ceiling": "Retention divided by the ceiling. 100 % means that no patch was wasted on skin while lesion was left.",
    "Precision": "Of the kept patches, the share that is lesion.",
    "Enrichment": "Precision divided by the share of lesion patches in the image; 1 is a random choice.",
    "Purity": "For ToMe, which merges: how little its merged tokens mix lesion and skin. It has no retention.",
    "Accuracy": "Share of images whose class was named correctly.",
    "Macro F1": "F1 of each class, averaged without weights: rare classes count as much as common ones.",
    "Balanced accuracy": "Recall of each class, averaged without weights.",
    "ECE": "Expected calibration error: how far confidence and accuracy lie apart, on average.",
    "95 % interval": "Bootstrap over groups (images of one lesion are drawn together). It says how much the number "
    "depends on which images happen to be in the validation part.",
    "± over seeds": "Standard deviation over repeated trainings. It says how much the number depends on the luck of training.",
    "p, Holm": "Paired permutation test between two methods on the same images; Holm's correction accounts for testing many pairs.",
    "Off-center view": "A crop in which the lesion is not in the middle. It tells a router that sees the lesion from one that only "
    "guesses the center.",
    "—": "Not measured. This is not zero.",
}
