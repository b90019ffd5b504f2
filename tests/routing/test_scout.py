"""The scout: what it sees of tokens of pixels, and that its scores depend on the image alone."""

from __future__ import annotations

import numpy as np
import timm
import torch

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.config import BackboneConfig
from medtokenbudget.files import load_tensors
from medtokenbudget.routing.selectors.scout import COMPACT, NEAR, Scout, ScoutNetwork, compact
from medtokenbudget.training.scouting import WEIGHTS


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


def test_what_tells_unfamiliar_images_is_mean_and_deviation_of_the_two_coarsest_levels():
    tokens = Backbone.load(BackboneConfig(name="pixels", image_size=64))(torch.rand(2, 3, 64, 64))
    scout = Scout(tokens.dim).eval()
    with torch.inference_mode():
        seen = scout.see(tokens).features
        coarsest = [level.flatten(2).double().numpy() for level in scout.network.levels(scout.images(tokens))[-2:]]
    mean, deviation = (np.concatenate([getattr(level, name)(2) for level in coarsest], 1) for name in ("mean", "std"))
    assert (seen.patches.shape, seen.grid) == ((2, 1, 2 * (40 + 112)), (1, 1))
    np.testing.assert_allclose(seen.patches[:, 0, :152], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen.patches[:, 0, 152:], deviation, rtol=2e-3, atol=1e-3)


def test_the_encoder_is_efficientnet_lite0_and_its_packaged_weights_give_the_same_features():
    network, start = ScoutNetwork().eval(), load_tensors(WEIGHTS)[0]
    network.load_state_dict({**network.state_dict(), **start})
    reference = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    names = [name for name in reference.state_dict() if not name.endswith("num_batches_tracked")]
    reference.load_state_dict(dict(zip(names, (value.float() for value in _in_order(network, start)))), strict=False)
    images = torch.rand(2, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = [reference.blocks[0](reference.bn1(reference.conv_stem(2 * images - 1)))]
        for stage in (reference.blocks[1], reference.blocks[2], reference.blocks[3:5]):
            wanted.append(stage(wanted[-1]))
        for ours, theirs in zip(network.levels(images), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    assert wanted[-1].std() > 0.5, "of weights that were never trained, hardly anything is left here"


def _in_order(network: ScoutNetwork, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[name] for name in network.state_dict() if name in tensors]


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
