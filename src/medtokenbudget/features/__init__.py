"""From images to frozen tokens: the backbone, its attention, the store, and the extraction that fills it."""

from medtokenbudget.features.backbone import Backbone
from medtokenbudget.features.extract import extract
from medtokenbudget.features.preprocess import Preprocessing, luminance
from medtokenbudget.features.store import FeatureStore

__all__ = ["Backbone", "FeatureStore", "Preprocessing", "extract", "luminance"]
