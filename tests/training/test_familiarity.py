"""Which images a model calls unlike its training images: the distance itself, its limit, and real and drawn pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import medtokenbudget as mtb
from medtokenbudget.errors import RequestError
from medtokenbudget.tokens import TokenBatch
from medtokenbudget.training.familiarity import Familiarity, fit_familiarity, statistics
from tests import unlike
from tests.drawn import Drawn
from tests.small_model import small_model


def batch(n: int, seed: int = 0) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    return TokenBatch(torch.randn(n, 16, 5, generator=generator), (4, 4))


def test_the_distance_is_that_of_mahalanobis_under_the_written_covariance() -> None:
    values = statistics(batch(40))
    fitted = Familiarity(5, rank=3)._fit(values)
    found = fitted.distance(values).double().numpy()
    # Independently: the covariance of probabilistic PCA, inverted as a matrix.
    x = values.double().numpy()
    variance, directions = np.linalg.eigh(np.cov(x, rowvar=False))
    variance, directions = variance[::-1].copy(), directions[:, ::-1]
    variance[3:] = variance[3:].mean()
    covariance = directions @ np.diag(variance) @ directions.T
    offset = x - x.mean(0)
    wanted = np.sqrt(np.einsum("ni,ij,nj->n", offset, np.linalg.inv(covariance), offset))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_the_limit_holds_out_images_and_does_not_depend_on_their_order(drawn: Drawn) -> None:
    rows = drawn.store.rows(drawn.manifest.ids)
    fitted = fit_familiarity(drawn.store, rows)
    assert fitted is not None
    own = torch.cat([fitted(tokens) for tokens in drawn.store.batches(rows, 32)])
    # Held-out images are farther away than those that were fitted, so on the latter fewer than one in a hundred are beyond.
    assert (own > 1).float().mean() <= 0.01
    assert own.max() > 0.3
    again = fit_familiarity(drawn.store, rows)
    assert again is not None
    assert torch.equal(again.limit, fitted.limit)
    assert fit_familiarity(drawn.store, rows[:19]) is None, "too few images for any distance"


def test_a_model_without_it_says_nothing_and_a_damaged_one_is_rejected(tmp_path: Path) -> None:
    model = small_model(tmp_path / "weights", ("center",))
    path = unlike.write(tmp_path / "pictures", unlike.street, 1)[0]
    assert model.route(path)[0].unfamiliarity is None
    assert not model.route(path)[0].unfamiliar
    plain = model.fingerprint
    model.familiarity = Familiarity(model.dim, 4)
    assert model.fingerprint != plain, "it is part of the model"
    saved = model.save_pretrained(tmp_path / "saved")
    again = mtb.load(saved, device="cpu").use_backbone(model.backbone)
    assert again.fingerprint == model.fingerprint
    assert again.route(path)[0].unfamiliarity == model.route(path)[0].unfamiliarity
    model.familiarity.center[0] = float("nan")
    model.save_pretrained(saved)
    with pytest.raises(RequestError, match=r"does not fit 'familiarity': center contains NaN"):
        mtb.load(saved)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [unlike.street, unlike.ultrasound, unlike.noise])
def test_drawn_pictures_of_other_things_are_flagged(draw: unlike.Draw) -> None:
    flagged = [routing.unfamiliar for routing in mtb.route([draw(seed) for seed in range(20)])]
    assert np.mean(flagged) >= 0.9
