"""The terms of the report explained for readers who do not know the paper."""

from __future__ import annotations

TERMS: dict[str, str] = {
    "Patch, token": "A square piece of the image, and the vector that the vision transformer computes for it.",
    "Token budget": "The share of patches that may be kept, written β in the paper. Of N patches, K = max(16, ⌊β N⌋) are kept.",
    "Lesion retention": (
        "The share of lesion patches (according to the mask) that were kept, pooled over images as in the paper. At 100% no "
        "lesion patch was lost."
    ),
    "Retention per image": (
        "Retention computed for each image and then averaged, so that small lesions count as much as large ones."
    ),
    "Ceiling": (
        "The highest retention any selector can reach. A lesion that covers 100 patches cannot be kept whole when K is 76."
    ),
    "Share of the ceiling": (
        "Retention divided by the ceiling. At 100% no patch was spent on skin while lesion patches were dropped."
    ),
    "Precision": "The share of kept patches that are lesion.",
    "Enrichment": "Precision divided by the share of lesion patches in the image. Random selection has an enrichment of 1.",
    "Purity": (
        "For methods that merge patches (ToMe): how little the merged tokens mix lesion and skin. Such methods have no retention."
    ),
    "Dominated": "For methods that merge patches: the share of lesion patches in tokens of which more than half is lesion.",
    "Mass": "For methods whose tokens mix all patches: the share of the tokens that comes from lesion patches.",
    "Accuracy": "The share of images that were classified correctly.",
    "Macro F1": "The F1 score of each class, averaged with equal weight for rare and common classes.",
    "Balanced accuracy": "The recall of each class, averaged with equal weight for rare and common classes.",
    "AUROC": "Area under the ROC curve, one class against the rest, averaged over classes.",
    "ECE": "Expected calibration error: the average gap between the model's confidence and its accuracy. Lower is better.",
    "95% interval": (
        "A bootstrap interval over groups of images (images of the same lesion are drawn together). It shows how much a number "
        "depends on which images happen to be in the validation set."
    ),
    "± over seeds": (
        "The standard deviation over repeated training runs. It shows how much a number depends on chance in training."
    ),
    "p, p (Holm)": (
        "The p-value of a paired permutation test between two methods on the same images, and the same after Holm's correction "
        "for multiple comparisons."
    ),
    "Off-center view": (
        "A crop with the lesion away from the image center. It separates methods that find the lesion from methods that keep "
        "the middle of the image."
    ),
    "Lesion-first": (
        "Our training recipe: the scorer learns where the lesion is before the classifier is trained, so that "
        "classification cannot pull it away from the lesion."
    ),
    "—": "Not measured, which is different from zero.",
}
