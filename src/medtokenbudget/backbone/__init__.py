"""From images to frozen tokens: the backbone, its attention, the store, and the extraction that fills it."""

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.extract import extract
from medtokenbudget.backbone.store import FeatureStore

__all__ = ["Backbone", "FeatureStore", "extract"]
