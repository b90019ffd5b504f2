"""The scout: what it sees of tokens of pixels, and that its scores depend on the image alone."""

from __future__ import annotations

import torch

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.config import BackboneConfig
from medtokenbudget.routing.selectors.scout import Scout


def test_tokens_of_pixels_are_the_pixels_and_the_network_sees_the_image():
    backbone = Backbone.load(BackboneConfig(name="pixels", image_size=64))
    images = torch.rand(2, 3, 64, 64)
    tokens = backbone(images)
    assert tokens.grid == (16, 16)
    # Patch 18 is in row 1 and column 2 of the grid; its patches have 4 x 4 pixels.
    assert torch.equal(tokens.patches[1, 18].view(3, 4, 4), images[1, :, 4:8, 8:12])
    scout, seen = Scout(backbone.dim), []
    scout.network.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    assert scout.fine_logits(tokens).shape == (2, 32, 32)
    assert torch.equal(seen[0], images)


def test_scores_depend_on_the_image_alone_whatever_the_mode():
    tokens = Backbone.load(BackboneConfig(name="pixels", image_size=64))(torch.rand(3, 3, 64, 64))
    scout = Scout(tokens.dim).train()
    together = scout.score(tokens)
    assert scout.network.training
    torch.testing.assert_close(together[1:2], scout.eval().score(tokens.take([1])))
