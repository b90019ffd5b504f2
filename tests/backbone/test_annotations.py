"""Everyday changes of a data set: only what depends on changed pixels is computed again, and annotations follow the manifest."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest, decode_mask, patch_labels
from medtokenbudget.errors import RequestError, WorkError
from tests.backbone.tiny import CONFIG, GRID, OFF_CENTER, contents, lesion_mask, tiny_manifest


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return tiny_manifest(tmp_path / "images", 10)


@pytest.fixture
def store(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> FeatureStore:
    return extract(manifest, tmp_path / "store", backbone, OFF_CENTER)


def fresh(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> FeatureStore:
    return extract(manifest, tmp_path / "fresh", backbone, OFF_CENTER)


def same(one: FeatureStore, other: FeatureStore) -> None:
    """Both show the same rows with the same annotations, and tokens that differ by rounding at most."""
    assert (one.ids, one.views, one.classes) == (other.ids, other.views, other.classes)
    for name in ("label", "lesion", "has_mask"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    left, right = one.read(range(len(one))), other.read(range(len(other)))
    torch.testing.assert_close(left.patches, right.patches, atol=2e-3, rtol=2e-3)


def test_another_label_split_group_or_name_extracts_nothing(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, store: FeatureStore
) -> None:
    before = contents(store.path)
    changed = replace(manifest, classes=("NV", "MEL", "BCC"), name="Clinic A").with_columns(
        label=["BCC"] * 10, split=["val"] * 5 + ["train"] * 5, group=["g"] * 10
    )
    again = extract(changed, store.path, backbone, OFF_CENTER)
    assert contents(store.path) == before
    assert again.label.tolist() == [2] * len(again)
    same(again, fresh(tmp_path, backbone, changed))
    assert FeatureStore.open(store.path, manifest).label.tolist() == store.label.tolist(), "the old manifest still fits"


def test_another_mask_extracts_nothing_and_crops_keep_their_box(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, store: FeatureStore
) -> None:
    before = contents(store.path)
    path = manifest.mask_path(2)
    lesion_mask().transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)
    again = extract(manifest, store.path, backbone, OFF_CENTER)
    assert contents(store.path) == before
    [row] = again.rows(["image-002"])
    expected = np.zeros(GRID, bool)
    expected[1, 2:4] = True
    assert np.array_equal(again.lesion[row].numpy().reshape(GRID), expected)
    [crop] = again.rows(["image-002"], view="off-center")
    geometry = again.stored[int(again.annotation.tokens[crop])].geometry
    assert np.array_equal(again.lesion[crop].numpy(), patch_labels(geometry.of(decode_mask(path)), GRID))
    assert again.identity != store.identity
    others = [i for i, name in enumerate(store.ids) if name != "image-002"]
    assert torch.equal(again.lesion[others], store.lesion[others])


def test_without_masks_or_with_masks_from_elsewhere_one_store_serves(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, store: FeatureStore
) -> None:
    before = contents(store.path)
    plain = manifest.with_columns(mask=[None] * 10)
    again = extract(plain, store.path, backbone, CONFIG)
    assert set(again.views) == {"identity"}, "a crop around a mask is not shown where there is no mask"
    assert not again.has_mask.any()
    other = tmp_path / "other.png"
    Image.new("L", (48, 40), 255).save(other)
    full = manifest.with_columns(mask=[str(other)] * 10)
    opened = FeatureStore.open(store.path, full)
    assert opened.lesion.all()
    assert opened.has_mask.all()
    assert contents(store.path) == before


def test_new_images_are_appended_and_the_old_shards_stay(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> None:
    small = extract(manifest.take(range(0, 10, 2)), tmp_path / "store", backbone, OFF_CENTER)
    before = contents(small.path)
    grown = extract(manifest, small.path, backbone, OFF_CENTER)
    after = contents(small.path)
    shards = [name for name in before if name.startswith("shard")]
    assert all(after[name] == before[name] for name in shards)
    assert len(grown.stored) == len(small.stored) + 5
    assert grown.ids == [name for i, name in enumerate(manifest.ids) for _ in range(2 if i % 2 == 0 else 1)]
    same(grown, fresh(tmp_path, backbone, manifest))
    same(FeatureStore.open(small.path, manifest.take(range(0, 10, 2))), small)
    views = extract(manifest, small.path, backbone, replace(CONFIG, views="flips"))
    assert len(views.rows(["image-000"], view=None)) == 5, "further views are added too"
    with pytest.raises(RequestError, match="with the view 'hflip': image-003"):
        views.rows(["image-003"], view="hflip")


def test_moved_and_renamed_images_are_found(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, store: FeatureStore
) -> None:
    before = contents(store.path)
    (tmp_path / "images").rename(tmp_path / "moved")
    records = []
    for i, row in enumerate(manifest.rows.to_dict("records")):
        file = tmp_path / "moved" / Path(str(row["image"])).name
        file.rename(file.with_name(f"renamed-{i}.png"))
        mask = None if row["mask"] is None else str(tmp_path / "moved" / Path(str(row["mask"])).name)
        records.append({**row, "image_id": f"new-{i}", "image": str(file.with_name(f"renamed-{i}.png")), "mask": mask})
    moved = Manifest.from_records(records, manifest.classes)
    again = extract(moved, store.path, backbone, OFF_CENTER)
    assert contents(store.path) == before
    assert again.ids[0] == "new-0"
    assert torch.equal(again.lesion, store.lesion)


def test_a_changed_file_is_extracted_again_and_nothing_else(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, store: FeatureStore
) -> None:
    before = contents(store.path)
    Image.new("RGB", (48, 40), "brown").save(manifest.image_path(3))
    again = extract(manifest, store.path, backbone, OFF_CENTER)
    assert len(again.stored) == len(store.stored) + 1
    assert all(contents(store.path)[name] == data for name, data in before.items() if "-0000" in name)
    same(again, fresh(tmp_path, backbone, manifest))


def test_images_with_the_same_content_share_their_tokens_and_keep_their_labels(tmp_path: Path, backbone: BackboneConfig) -> None:
    manifest = tiny_manifest(tmp_path / "images", 4)
    shutil.copy(manifest.image_path(0), manifest.image_path(3))
    store = extract(manifest, tmp_path / "store", backbone, CONFIG)
    assert len(store.stored) == 3
    assert store.ids == manifest.ids
    assert store.label.tolist() == [0, -1, 0, 1]
    batch = store.read([0, 3])
    assert torch.equal(batch.patches[0], batch.patches[1])


def test_images_that_are_gone_can_still_be_trained_on(store: FeatureStore, manifest: Manifest, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "images")
    same(FeatureStore.open(store.path, manifest), store)
    shutil.copytree(store.path, tmp_path / "elsewhere" / "store")
    (tmp_path / "elsewhere" / "store" / "cache" / "files.json").unlink()
    same(FeatureStore.open(tmp_path / "elsewhere" / "store", manifest), store)


def test_what_failed_is_tried_again_when_it_can_succeed(tmp_path: Path, backbone: BackboneConfig) -> None:
    manifest = tiny_manifest(tmp_path / "images", 6, bad=(1,))
    good = manifest.image_path(3).read_bytes()
    manifest.image_path(3).unlink()
    full, mask = Image.new("L", (48, 40), 255), manifest.mask_path(2)
    full.save(mask)  # a lesion that fills the image has no off-center crop
    other_frame = manifest.mask_path(4)
    Image.new("L", (80, 30), 255).save(other_frame)
    store = extract(manifest, tmp_path / "store", backbone, OFF_CENTER)
    reasons = {(error.image_id, error.view): error.reason for error in store.errors}
    failed = {("image-001", "identity"), ("image-002", "off-center"), ("image-003", "identity")}
    assert set(reasons) == failed | {("image-004", "identity"), ("image-004", "off-center")}
    assert "has 80 x 30 pixels, the image 48 x 40." in reasons["image-004", "identity"]
    before = contents(store.path)
    extract(manifest, store.path, backbone, OFF_CENTER)
    assert contents(store.path) == before, "nothing is added as long as nothing can be read"
    Image.new("RGB", (48, 40), "red").save(manifest.image_path(1))
    manifest.image_path(3).write_bytes(good)
    for file in (mask, other_frame):
        lesion_mask().save(file)
    again = extract(manifest, store.path, backbone, OFF_CENTER)
    assert again.errors == []
    assert (store.path / "errors.jsonl").read_text() == ""
    same(again, fresh(tmp_path, backbone, manifest))


def test_a_view_that_failed_for_a_mask_is_no_error_of_a_manifest_without_that_mask(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest
) -> None:
    empty = tmp_path / "empty.png"
    Image.new("L", (48, 40), 0).save(empty)
    masked = extract(manifest.with_columns(mask=[str(empty)] * 10), tmp_path / "store", backbone, OFF_CENTER)
    assert {(error.view, "mask is empty" in error.reason) for error in masked.errors} == {("off-center", True)}
    plain = extract(manifest.with_columns(mask=[None] * 10), masked.path, backbone, CONFIG)
    assert (len(plain), plain.errors) == (10, [])


def test_an_image_that_changed_since_is_noticed(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> None:
    store = extract(manifest, tmp_path / "store", backbone, CONFIG)
    store.verify(manifest)
    Image.new("RGB", (48, 40), "brown").save(manifest.image_path(3))
    with pytest.raises(WorkError, match=r"1 of 10 images have changed since .*: image-003. Run the same"):
        store.verify(manifest)
    again = FeatureStore.open(store.path, manifest)
    with pytest.raises(RequestError, match=r"1 of 1 images are not in the store .*image-003.* Run `mtb extract"):
        again.rows(["image-003"])
