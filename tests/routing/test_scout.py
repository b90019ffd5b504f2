"""The scout: what it sees of tokens of pixels, and that its scores depend on the image alone."""

from __future__ import annotations

import numpy as np
import torch

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.config import BackboneConfig
from medtokenbudget.routing.selectors.scout import COMPACT, NEAR, Scout, compact


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


def test_a_glance_adds_what_the_embedded_backbone_sees_of_the_small_image():
    glance = Backbone.load(BackboneConfig(name="glance", image_size=128))
    images = torch.rand(2, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    tokens = glance(images)
    assert (tokens.grid, glance.dim, tokens.patches.shape[2]) == ((16, 16), 3 * 64 + 2 * 192, 3 * 64 + 2 * 192)
    small = torch.nn.functional.interpolate(images, (126, 126), mode="bilinear")
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    blocks = [Backbone.load(BackboneConfig(name="embedded", image_size=126, layer=layer)) for layer in (3, 5)]
    seen = torch.cat([block((small - mean) / std).patches for block in blocks], 2).transpose(1, 2).unflatten(2, (9, 9))
    wanted = torch.nn.functional.interpolate(seen, (16, 16), mode="bilinear").flatten(2).transpose(1, 2)
    torch.testing.assert_close(tokens.patches[:, :, 192:], wanted, rtol=1e-3, atol=1e-3)
    scout, given = Scout(glance.dim, side=8), []
    scout.network.register_forward_pre_hook(lambda _, args: given.extend(args))
    with torch.inference_mode():
        assert scout.fine_logits(tokens).shape == (2, 64, 64)
    assert torch.equal(given[0], images)
    assert torch.equal(given[1].flatten(2).transpose(1, 2), tokens.patches[:, :, 192:])


def test_what_tells_unfamiliar_images_is_mean_and_deviation_of_the_last_block():
    glance = Backbone.load(BackboneConfig(name="glance", image_size=128))
    tokens = glance(torch.rand(2, 3, 128, 128, generator=torch.Generator().manual_seed(3)))
    with torch.inference_mode():
        seen = Scout(glance.dim, side=8).see(tokens).features
    last = tokens.patches[:, :, -192:].numpy()
    assert (seen.patches.shape, seen.grid) == ((2, 1, 384), (1, 1))
    np.testing.assert_allclose(seen.patches[:, 0, :192], last.mean(1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen.patches[:, 0, 192:], last.std(1), rtol=1e-3, atol=1e-3)


def test_scores_depend_on_the_image_alone_whatever_the_mode():
    tokens = Backbone.load(BackboneConfig(name="pixels", image_size=64))(torch.rand(3, 3, 64, 64))
    scout = Scout(tokens.dim).train()
    together = scout.score(tokens)
    assert scout.network.training
    torch.testing.assert_close(together[1:2], scout.eval().score(tokens.take([1])))


def test_where_nothing_is_a_lesion_the_middle_comes_first_and_a_clear_lesion_draws_its_surroundings():
    nothing = compact(torch.full((1, 15, 15), -8.0))[0]
    assert nothing.argmax() == 15 * 15 // 2
    torch.testing.assert_close(nothing, nothing.flip(0))
    torch.testing.assert_close(nothing, nothing.T)
    logits = torch.full((1, 16, 16), -8.0)
    logits[0, 2:5, 2:5] = 8.0
    order = compact(logits)[0].flatten().argsort(descending=True)
    rows, columns = order // 16, order % 16
    assert set(order[:9].tolist()) == {16 * row + column for row in (2, 3, 4) for column in (2, 3, 4)}
    assert ((rows[9:25] - 3) ** 2 + (columns[9:25] - 3) ** 2).max() <= 10, "the patches around the lesion are next"
    assert (rows[-1], columns[-1]) == (15, 15), "the far corner is last"


def test_compact_moves_with_the_lesion_and_is_its_formula():
    logits = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(compact(logits.flip(2)), compact(logits).flip(2))
    p = torch.sigmoid(logits[0]).tolist()
    cells = [(i, j) for i in range(6) for j in range(6)]

    def mean(field: list[list[float]], at: tuple[int, int]) -> float:
        inside = [field[i][j] for i, j in cells if abs(i - at[0]) <= 2 and abs(j - at[1]) <= 2]
        return sum(inside) / len(inside)

    once = [[mean(p, (i, j)) for j in range(6)] for i in range(6)]
    x = [-1 + 2 * i / 5 for i in range(6)]
    total = sum(p[i][j] for i, j in cells)
    middle = [sum(p[cell[0]][cell[1]] * x[cell[axis]] for cell in cells) / total for axis in (0, 1)]
    expected = [
        float(logits[0, i, j]) + NEAR * mean(once, (i, j)) - COMPACT * ((x[i] - middle[0]) ** 2 + (x[j] - middle[1]) ** 2)
        for i, j in cells
    ]
    torch.testing.assert_close(compact(logits)[0].flatten(), torch.tensor(expected))
