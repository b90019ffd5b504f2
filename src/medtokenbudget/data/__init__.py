"""Images, labels, masks, groups and splits: the manifest, its sources, and the check that finds what is wrong with it."""

from __future__ import annotations

from medtokenbudget.data.decode import MAX_PIXELS, DecodeError, decode_image, decode_mask
from medtokenbudget.data.folder import folder_manifest
from medtokenbudget.data.manifest import SPLITS, Manifest, ManifestError
from medtokenbudget.data.masks import patch_labels, prevalence_table
from medtokenbudget.data.splits import apply_split, cut_selection, paper_split
from medtokenbudget.data.synthetic import Drawings, synthetic_manifest

__all__ = [
    "MAX_PIXELS",
    "SPLITS",
    "DecodeError",
    "Drawings",
    "Manifest",
    "ManifestError",
    "apply_split",
    "cut_selection",
    "decode_image",
    "decode_mask",
    "folder_manifest",
    "paper_split",
    "patch_labels",
    "prevalence_table",
    "synthetic_manifest",
]
