"""Extraction: the same bytes whatever happens on the way, and every failure with its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from medtokenbudget import files
from medtokenbudget.backbone import Backbone, FeatureStore, extract, views
from medtokenbudget.backbone.pipeline import to_device
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest, decode_image, decode_mask
from medtokenbudget.errors import MismatchError, RequestError, WorkError
from tests.backbone.tiny import CONFIG, GRID, contents, ended_process, tiny_manifest


@pytest.mark.parametrize("bad", [(4, 5, 6, 7), (0, 1, 2, 3), tuple(range(10))], ids=["middle", "first", "all"])
def test_a_shard_of_nothing_but_bad_images_is_a_shard_without_rows(
    tmp_path: Path, backbone: BackboneConfig, bad: tuple[int, ...]
) -> None:
    manifest = tiny_manifest(tmp_path / "images", 10, bad=bad)
    store = extract(manifest, tmp_path / "store", backbone, replace(CONFIG, shard_size=4))
    assert (len(store), len(store.errors), store.missing) == (10 - len(bad), len(bad), [])
    again = extract(manifest, tmp_path / "store", backbone, replace(CONFIG, shard_size=4))
    assert again.ids == [name for i, name in enumerate(manifest.ids) if i not in bad]
    if again.ids:
        rows = list(again.batches(range(len(again)), 3))
        assert sum(len(batch) for batch in rows) == len(again)
        assert again.label.shape == (len(again),)


def test_a_mask_that_cannot_lie_on_its_image_is_an_error_of_that_image(tmp_path: Path, backbone: BackboneConfig) -> None:
    manifest = tiny_manifest(tmp_path / "images", 4)
    Image.new("L", (80, 30), 255).save(tmp_path / "images" / "image-002-mask.png")
    store = extract(manifest, tmp_path / "store", backbone, CONFIG)
    assert [error.image_id for error in store.errors] == ["image-002"]
    assert "has 80 x 30 pixels, the image 48 x 40." in store.errors[0].reason


def test_an_image_that_changed_since_is_noticed(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> None:
    store = extract(manifest, tmp_path / "store", backbone, CONFIG)
    store.verify(manifest)
    Image.new("RGB", (48, 40), "brown").save(manifest.image_path(3))
    with pytest.raises(WorkError, match=r"1 of 10 images have changed since .*: image-003. Run the same"):
        store.verify(manifest)
    again = FeatureStore.open(store.path, manifest)
    with pytest.raises(RequestError, match=r"1 of 1 images are not in the store .*image-003.* Run `mtb extract"):
        again.rows(["image-003"])


def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> None:
    one = extract(manifest, tmp_path / "one", backbone, replace(CONFIG, workers=1))
    four = extract(manifest, tmp_path / "four", backbone, replace(CONFIG, workers=4))
    assert contents(one.path) == contents(four.path)
    assert len(one) == 8


def test_a_second_run_makes_only_what_is_missing(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> None:
    store = extract(manifest, tmp_path / "store", backbone, CONFIG)
    before = contents(store.path)
    kept = store.path / "shard-00000.safetensors"
    written = kept.stat().st_mtime_ns
    (store.path / "shard-00001.json").unlink()
    (store.path / f".shard-00001.safetensors.{files._machine()}-{ended_process()}-abc.part").write_bytes(b"half")
    extract(manifest, tmp_path / "store", backbone, CONFIG)
    assert contents(store.path) == before
    assert kept.stat().st_mtime_ns == written
    assert not list(store.path.glob(".*"))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"dtype": "fp32"}, "dtype: expected 'fp32', found 'fp16'"),
        ({"views": "off-center", "view_seed": 1}, "view_seed: expected 1, found 0"),
        ({"precision": "bf16"}, "precision: expected 'bf16', found 'fp32'"),
        ({"batch_size": 2}, "batch_size: expected 2, found 3"),
    ],
)
def test_a_store_begun_with_other_settings_is_rejected(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, change: dict[str, Any], shown: str
) -> None:
    store = extract(manifest, tmp_path / "store", backbone, CONFIG)
    before = contents(store.path)
    with pytest.raises(MismatchError, match=shown):
        extract(manifest, store.path, backbone, replace(CONFIG, **change))
    assert contents(store.path) == before


def test_a_store_with_another_scale_of_pseudo_attention_is_rejected(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest
) -> None:
    pseudo = replace(backbone, attention="pseudo")
    store = extract(manifest, tmp_path / "store", pseudo, CONFIG)
    assert store.config["backbone"]["pseudo_temperature"] == 0.1
    assert "pseudo_temperature" not in Backbone.load(backbone).fingerprint
    # As stores were made before the scale was part of their identity: with the softmax of the cosines themselves.
    settings = files.read_sealed(store.path / "store.json", "")
    del settings["backbone"]["pseudo_temperature"]
    files.write_sealed(store.path / "store.json", settings)
    with pytest.raises(MismatchError, match="pseudo_temperature"):
        extract(manifest, store.path, pseudo, CONFIG)


def test_a_store_of_another_backbone_is_rejected(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> None:
    extract(manifest, tmp_path / "store", backbone, CONFIG)
    with pytest.raises(MismatchError, match=r"backbone\.layer: expected 0, found 1"):
        extract(manifest, tmp_path / "store", replace(backbone, layer=0), CONFIG)


def test_a_job_array_makes_the_same_store_in_any_order(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> None:
    whole = extract(manifest, tmp_path / "whole", backbone, CONFIG)
    first = extract(manifest, tmp_path / "jobs", backbone, CONFIG, shards=(1, 2))
    assert first.missing == [0, 2]
    last = extract(manifest, tmp_path / "jobs", backbone, CONFIG, shards=(0, 2))
    assert last.missing == []
    assert contents(whole.path) == contents(last.path)
    with pytest.raises(RequestError, match="2/2 does not exist"):
        extract(manifest, tmp_path / "jobs", backbone, CONFIG, shards=(2, 2))


def test_views_are_rows_of_their_own_with_their_masks_turned_alike(tmp_path: Path, backbone: BackboneConfig) -> None:
    manifest = tiny_manifest(tmp_path / "images", 1)
    store = extract(manifest, tmp_path / "store", backbone, replace(CONFIG, views="dihedral"))
    assert store.views == list(views.SETS["dihedral"])
    grid = np.zeros(GRID, bool)
    grid[1, 0:2] = True
    turned = {
        "identity": grid,
        "hflip": grid[:, ::-1],
        "vflip": grid[::-1],
        "rot180": grid[::-1, ::-1],
        "rot90": np.rot90(grid),
        "rot270": np.rot90(grid, 3),
        "transpose": grid.T,
        "transverse": grid[::-1, ::-1].T,
    }
    for view, expected in turned.items():
        [row] = store.rows(["image-000"], view=view)
        assert np.array_equal(store.lesion[row].numpy().reshape(GRID), expected), view
    # The luminance is of the pixels, the lesion of the mask: both must have turned the same way.
    upright = store.luminance[store.rows(["image-000"])[0]].numpy().reshape(GRID)
    flipped = store.luminance[store.rows(["image-000"], view="hflip")[0]].numpy().reshape(GRID)
    np.testing.assert_allclose(flipped, upright[:, ::-1], atol=5e-3)


def test_off_center_rows_exist_for_masked_images_of_every_part(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest
) -> None:
    store = extract(manifest, tmp_path / "store", backbone, replace(CONFIG, views="off-center"))
    cropped = [name for name, view in zip(store.ids, store.views) if view == "off-center"]
    assert cropped == [f"image-00{i}" for i in (0, 2, 4, 6, 8)]
    mask, image = decode_mask(manifest.mask_path(0)), decode_image(manifest.image_path(0))  # type: ignore[arg-type]
    seen, _ = views.apply(image, mask, "off-center", views.image_seed(0, "image-000"))
    loaded = Backbone.load(backbone)
    alone = loaded(loaded.normalize(torch.from_numpy(loaded.prepare(seen))[None]))
    stored = store.read(store.rows(["image-000"], view="off-center"))
    torch.testing.assert_close(stored.patches, alone.patches, atol=2e-3, rtol=2e-3)


def test_off_center_crops_of_real_masks_move_the_lesion_as_far_as_measured(shared: Path) -> None:
    """PAPER_FACTS: on crops of real images the center of the lesion is 0.29 image widths off."""
    masks = sorted((shared / "data/isic/ISIC2018_Task1_Training_GroundTruth").glob("*.png"))[:80]
    distances = []
    for path in masks:
        mask = decode_mask(path)
        try:
            _, seen = views.apply(mask, mask, "off-center", views.image_seed(0, path.stem))
        except views.ViewError:
            continue
        ys, xs = np.nonzero(np.asarray(seen) > 127)
        distances.append(np.hypot((xs.mean() + 0.5) / seen.width - 0.5, (ys.mean() + 0.5) / seen.height - 0.5))  # type: ignore[union-attr]
    assert len(distances) > 60
    assert 0.24 < np.mean(distances) < 0.34


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.1), ("fp16", 0.02)])
def test_a_lower_precision_gives_nearly_the_same_tokens_and_signals(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, precision: Any, tolerance: float
) -> None:
    exact = extract(manifest, tmp_path / "exact", backbone, replace(CONFIG, dtype="fp32"))
    rough = extract(manifest, tmp_path / "rough", backbone, replace(CONFIG, dtype="fp32", precision=precision))
    left, right = exact.read(range(8)), rough.read(range(8))
    assert not torch.equal(left.patches, right.patches), "the forward pass ran in another precision"
    torch.testing.assert_close(right.patches, left.patches, atol=tolerance, rtol=tolerance)
    for name in ("attention_entropy", "cls_attention"):
        torch.testing.assert_close(getattr(right, name), getattr(left, name), atol=0.02, rtol=0.02)
    assert torch.equal(left.luminance, right.luminance)  # type: ignore[arg-type]


def test_pixels_go_to_a_gpu_from_pinned_memory_without_waiting() -> None:
    calls: list[Any] = []

    class Pixels:
        def pin_memory(self) -> Pixels:
            calls.append("pinned")
            return self

        def to(self, device: torch.device, non_blocking: bool = False) -> Pixels:
            calls.append((device.type, non_blocking))
            return self

    to_device(Pixels(), torch.device("cuda"))  # type: ignore[arg-type]
    to_device(Pixels(), torch.device("cpu"))  # type: ignore[arg-type]
    assert calls == ["pinned", ("cuda", True), ("cpu", False)]
