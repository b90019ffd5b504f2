"""ToMe in every block and EViT at three, against the dense pass where they must agree with it."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from benchmarks.competitors import evit_blocks, tome_every_block


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


def test_nothing_merged_or_dropped_is_the_dense_pass(model: VisionTransformer, images: Tensor) -> None:
    dense = model.forward_features(images)[:, 1:]
    torch.testing.assert_close(tome_every_block(model, images, 16, 3), dense, rtol=1e-5, atol=1e-5)
    patches, indices = evit_blocks(model, images, 16, 3, (1, 2))
    torch.testing.assert_close(patches, dense.take_along_dim(indices.unsqueeze(-1), 1), rtol=1e-4, atol=1e-5)


def test_both_end_with_k_tokens(model: VisionTransformer, images: Tensor) -> None:
    assert tome_every_block(model, images, 5, 3).shape == (2, 5, 24)
    patches, indices = evit_blocks(model, images, 5, 3, (1, 2))
    assert patches.shape == (2, 5, 24)
    assert all(len(set(row)) == 5 for row in indices.tolist())


def test_merging_equal_patches_changes_nothing(model: VisionTransformer) -> None:
    """One color everywhere and no positions: all patches are the same token, however many of them are merged."""
    model.pos_embed.zero_()
    images = torch.full((1, 3, 32, 32), 0.3)
    dense = model.forward_features(images)[:, 1:]
    torch.testing.assert_close(tome_every_block(model, images, 3, 3), dense[:, :3], rtol=1e-4, atol=1e-4)
