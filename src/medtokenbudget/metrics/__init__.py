"""The definition of every quantity that the package measures: lesion retention, group purity, classification, calibration.

Everything that reports a number calls this package, so that one name means one thing in training, results, report and explorer. All
functions return fractions (enrichment is a ratio of two), and NaN where there is nothing to measure: not measured is not zero.
"""

from medtokenbudget.metrics.calibration import ECE_BINS, calibration_bins, confidence_bins, expected_calibration_error, reliability
from medtokenbudget.metrics.classification import (
    accuracy,
    balanced_accuracy,
    balanced_accuracy_of_counts,
    class_counts,
    correct,
    macro_auroc,
    macro_f1,
    macro_f1_of_counts,
    recall,
)
from medtokenbudget.metrics.merging import group_purity, lesion_dominated, lesion_mass
from medtokenbudget.metrics.ratios import Floats, ratio
from medtokenbudget.metrics.retention import (
    LesionRetention,
    Retention,
    kept_lesion_counts,
    lesion_retention,
    reachable,
    retention_of_counts,
    share_of_ceiling,
)

__all__ = [
    "ECE_BINS",
    "Floats",
    "LesionRetention",
    "Retention",
    "accuracy",
    "balanced_accuracy",
    "balanced_accuracy_of_counts",
    "calibration_bins",
    "class_counts",
    "confidence_bins",
    "correct",
    "expected_calibration_error",
    "group_purity",
    "kept_lesion_counts",
    "lesion_dominated",
    "lesion_mass",
    "lesion_retention",
    "macro_auroc",
    "macro_f1",
    "macro_f1_of_counts",
    "ratio",
    "reachable",
    "recall",
    "reliability",
    "retention_of_counts",
    "share_of_ceiling",
]
