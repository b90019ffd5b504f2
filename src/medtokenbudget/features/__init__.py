"""Images to frozen tokens: the backbone, its attention, the store and the extraction that fills it."""

from medtokenbudget.features.backbone import Backbone
from medtokenbudget.features.preprocess import Preprocessing, luminance

__all__ = ["Backbone", "Preprocessing", "luminance"]
