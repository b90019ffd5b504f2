"""Which images a model calls unlike its training images: the distance itself, its limit, and real pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.errors import RequestError
from medtokenbudget.tokens import TokenBatch
from medtokenbudget.training.familiarity import Familiarity, Features, Gaussian, add_moments, fit_familiarity, moments_of
from tests.drawn import Drawn
from tests.small_model import draw_images, small_model


def batch(n: int, seed: int = 0) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    return TokenBatch(torch.randn(n, 16, 5, generator=generator), (4, 4))


def test_the_distance_is_that_of_mahalanobis_under_the_written_covariance() -> None:
    values = batch(40).patches[:, 0]
    # In two parts: moments add up.
    fitted = Gaussian(5, rank=3).fit(add_moments([moments_of(values[:15]), moments_of(values[15:])]))
    found = fitted(values).double().numpy()
    # Independently: the covariance of probabilistic PCA, inverted as a matrix.
    x = values.double().numpy()
    variance, directions = np.linalg.eigh(np.cov(x, rowvar=False))
    variance, directions = variance[::-1].copy(), directions[:, ::-1]
    variance[3:] = variance[3:].mean()
    covariance = directions @ np.diag(variance) @ directions.T
    offset = x - x.mean(0)
    wanted = np.sqrt(np.einsum("ni,ij,nj->n", offset, np.linalg.inv(covariance), offset))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_an_image_is_judged_by_its_class_token_and_its_strangest_patches() -> None:
    tokens = replace(batch(3), cls=torch.zeros(3, 5))
    tokens.patches[1, 0] += 100
    familiarity = Familiarity(5, rank=2)
    image, patch = familiarity.distances(tokens).T
    np.testing.assert_allclose(image, 0, atol=1e-6)
    # Of 16 patches a tenth is two: the second strangest. By the unit covariance its distance is its length.
    np.testing.assert_allclose(patch, tokens.patches.norm(dim=-1).sort(1).values[:, -2], rtol=1e-4)
    alone = familiarity.distances(batch(3))[:, 0]
    np.testing.assert_allclose(alone, batch(3).patches.mean(1).norm(dim=-1), rtol=1e-4)


def test_the_limit_holds_out_images_and_does_not_depend_on_their_order(drawn: Drawn) -> None:
    rows = drawn.store.rows(drawn.manifest.ids)
    fitted = fit_familiarity(drawn.store, rows)
    own = torch.cat([fitted(tokens) for tokens in drawn.store.batches(rows, 32)])
    # Held-out images are farther away than those that were fitted, so on the latter fewer than one in a hundred are beyond.
    assert (own > 1).float().mean() <= 0.01
    assert own.max() > 0.3
    again = fit_familiarity(drawn.store, rows)
    assert torch.equal(again.limit, fitted.limit)
    assert fit_familiarity(drawn.store, rows[:19]) is None, "too few images for any distance"


def test_a_model_without_it_says_nothing_and_a_damaged_one_is_rejected(tmp_path: Path) -> None:
    model = small_model(tmp_path / "weights", ("center",))
    (path,) = draw_images(tmp_path / "pictures", 1)
    assert model.route(path)[0].unfamiliarity is None
    assert not model.route(path)[0].unfamiliar
    plain = model.fingerprint
    model.familiarity = Familiarity(model.dim, 4)
    assert model.fingerprint != plain, "it is part of the model"
    saved = model.save_pretrained(tmp_path / "saved")
    again = mtb.load(saved, device="cpu").use_backbone(model.backbone)
    assert again.fingerprint == model.fingerprint
    assert again.route(path)[0].unfamiliarity == model.route(path)[0].unfamiliarity
    model.familiarity.image.center[0] = float("nan")
    model.save_pretrained(saved)
    with pytest.raises(RequestError, match=r"does not fit 'familiarity': image\.center contains NaN"):
        mtb.load(saved)


@pytest.mark.slow
def test_noise_is_flagged_and_the_command_counts_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 256, 256, 3), dtype=np.uint8)
    assert np.mean([routing.unfamiliar for routing in mtb.route(noise)]) >= 0.9
    for number in range(3):
        Image.fromarray(noise[number]).save(tmp_path / f"{number}.png")
    assert main(["route", str(tmp_path), "--out", str(tmp_path / "routed"), "--device", "cpu"]) == 0
    assert "3 of 3 images are unlike the training images of this model" in capsys.readouterr().err


def test_features_in_memory_are_fitted_by_image_and_the_limit_is_a_quantile_of_held_out_ones() -> None:
    values = torch.randn(200, 1, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 3.0, 0.5])
    ids = [f"image {number // 2}" for number in range(200)]
    found = fit_familiarity(Features(ids, values), np.arange(200), rank=4, level=0.9)
    plain = values[:, 0].double().numpy()
    offset = plain - plain.mean(0)
    distance = np.sqrt(np.einsum("nd,de,ne->n", offset, np.linalg.inv(np.cov(plain.T)), offset))
    unfamiliarity = found(TokenBatch(values, (1, 1))).numpy()
    np.testing.assert_allclose(unfamiliarity / unfamiliarity[0], distance / distance[0], rtol=1e-4)
    assert 0.05 <= (unfamiliarity > 1).mean() <= 0.15
    assert fit_familiarity(Features(ids[:30], values[:30]), np.arange(30)) is None, "15 images are too few"


@pytest.mark.slow
def test_most_real_endoscopy_is_flagged_and_real_dermoscopy_is_not(shared: Path) -> None:
    endoscopy = sorted((shared / "data" / "kvasir-dataset-v2").rglob("*.jpg"))[::8]
    # Validation images with masks that went into no part of the router.
    validation = mtb.data.isic_manifest(shared / "data" / "isic").part("val")
    dermoscopy = [validation.image_path(row) for row in range(0, len(validation), 5)]
    assert len(endoscopy) >= 30
    assert len(dermoscopy) >= 60
    assert np.mean([routing.unfamiliar for routing in mtb.route(endoscopy)]) >= 0.85
    assert np.mean([routing.unfamiliar for routing in mtb.route(dermoscopy)]) <= 0.02
