"""ToMe in every block, against the dense pass where both must agree."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from benchmarks.competitors import tome_every_block


@pytest.fixture
def model() -> VisionTransformer:
    torch.manual_seed(1)
    made = VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=2, num_classes=0, init_values=0.5)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.25)
    return made.eval().requires_grad_(False)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def test_nothing_merged_is_the_dense_pass_and_k_tokens_are_left(model: VisionTransformer, images: Tensor) -> None:
    dense = model.forward_features(images)[:, 1:]
    torch.testing.assert_close(tome_every_block(model, images, 16, 3), dense, rtol=1e-5, atol=1e-5)
    assert tome_every_block(model, images, 5, 3).shape == (2, 5, 24)


def test_merging_equal_patches_changes_nothing(model: VisionTransformer) -> None:
    """One color everywhere and no positions: all patches are the same token, however many of them are merged."""
    model.pos_embed.zero_()
    images = torch.full((1, 3, 32, 32), 0.3)
    dense = model.forward_features(images)[:, 1:]
    torch.testing.assert_close(tome_every_block(model, images, 3, 3), dense[:, :3], rtol=1e-4, atol=1e-4)
