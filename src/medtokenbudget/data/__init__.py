"""Images, labels, masks, groups and splits: the manifest, its sources, and the check of a data set."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from medtokenbudget.data.duplicates import merged_groups
from medtokenbudget.data.images import DecodeError, decode_image, decode_mask
from medtokenbudget.data.manifest import Manifest, ManifestError, SplitRule
from medtokenbudget.data.masks import covered_shares, mask_of, patch_labels, patch_order, prevalence_table, same_aspect
from medtokenbudget.data.readers import csv_manifest, folder_manifest, isic_manifest, kvasir_manifest, open_data
from medtokenbudget.data.splits import apply_split, cut_selection, keep_split, paper_split

if TYPE_CHECKING:
    from medtokenbudget.data.checks import Report, check
    from medtokenbudget.data.synthetic import Drawings, synthetic_manifest

__all__ = [
    "DecodeError",
    "Drawings",
    "Manifest",
    "ManifestError",
    "Report",
    "SplitRule",
    "apply_split",
    "check",
    "covered_shares",
    "csv_manifest",
    "cut_selection",
    "decode_image",
    "decode_mask",
    "folder_manifest",
    "isic_manifest",
    "keep_split",
    "kvasir_manifest",
    "mask_of",
    "merged_groups",
    "open_data",
    "paper_split",
    "patch_labels",
    "patch_order",
    "prevalence_table",
    "same_aspect",
    "synthetic_manifest",
]

# Imported when they are first used: reading images needs neither the checks of a data set nor drawn images.
_LATER = {"Report": "checks", "check": "checks", "Drawings": "synthetic", "synthetic_manifest": "synthetic"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"medtokenbudget.data.{_LATER[name]}"), name)
    raise AttributeError(f"module 'medtokenbudget.data' has no attribute '{name}'")
