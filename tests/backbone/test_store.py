"""The store: what is read back is what was extracted, fast, and nothing half-written, damaged or foreign is ever read."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medtokenbudget.backbone import Backbone, FeatureStore, extract
from medtokenbudget.backbone.store import MappedField, _BufferPool, _join_large, _join_small, field_path, info, write_field
from medtokenbudget.cli import main
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest, decode_image
from medtokenbudget.errors import RequestError
from medtokenbudget.files import write_sealed
from tests.backbone.tiny import CONFIG, DIM, GRID, OFF_CENTER, contents, tiny_backbone, tiny_manifest
from tests.bad_input.damage import edit_json

Made = tuple[FeatureStore, Manifest, Backbone]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("store")
    config = tiny_backbone(folder / "backbone")
    manifest = tiny_manifest(folder / "images", 11, bad=(5,))
    return extract(manifest, folder / "store", config, CONFIG), manifest, Backbone.load(config)


def test_rows_are_what_the_backbone_says_of_each_image(made: Made) -> None:
    store, manifest, backbone = made
    assert store.grid == GRID
    assert (store.dim, store.classes) == (DIM, ("MEL", "NV"))
    batch = store.read(store.rows(["image-003", "image-000"]))
    for row, image in enumerate((3, 0)):
        pixels = torch.from_numpy(backbone.prepare(decode_image(manifest.image_path(image))))[None]
        alone = backbone(backbone.normalize(pixels))
        for name, tolerance in (("patches", 2e-3), ("cls", 2e-3), ("attention_entropy", 1e-5)):
            torch.testing.assert_close(getattr(batch, name)[row], getattr(alone, name)[0], atol=tolerance, rtol=2e-3)
        gray = pixels[0].numpy() @ np.array([0.299, 0.587, 0.114]) / 255
        means = gray.reshape(GRID[0], 8, GRID[1], 8).mean((1, 3)).reshape(-1)
        np.testing.assert_allclose(batch.luminance[row].numpy(), means, atol=1e-5)


def test_labels_and_masks_come_with_the_tokens(made: Made) -> None:
    store, _, _ = made
    batch = store.read(store.rows(["image-000", "image-001", "image-002", "image-003"]))
    assert batch.label.tolist() == [0, -1, 0, 1]
    assert batch.has_mask.tolist() == [True, False, True, False]
    expected = torch.zeros(GRID, dtype=torch.bool)
    expected[1, 0:2] = True
    assert torch.equal(batch.lesion[0], expected.flatten())
    assert not batch.lesion[1].any()
    batch = store.read(range(len(store)))
    for name in ("label", "lesion", "has_mask"):
        assert torch.equal(getattr(store, name), getattr(batch, name)), name
    assert batch.image_id == tuple(store.ids)


def test_a_failed_image_is_absent_and_listed_with_its_reason(made: Made) -> None:
    store, _, _ = made
    assert len(store) == 10
    assert "image-005" not in store.ids
    [error] = store.errors
    assert (error.image_id, error.view) == ("image-005", "identity")
    assert "not an image" in error.reason
    [line] = (store.path / "errors.jsonl").read_text().splitlines()
    assert json.loads(line) == vars(error)
    with pytest.raises(RequestError, match=r"2 of 3 images are not in the store .*image-005 \(.*not an image.*nobody"):
        store.rows(["image-000", "image-005", "nobody"])
    assert store.rows(["image-005", "image-001"], strict=False).tolist() == store.rows(["image-001"]).tolist()


def test_an_epoch_shows_every_row_once_in_the_order_of_its_seed(made: Made) -> None:
    store, _, _ = made
    rows = store.rows(store.ids)

    def epoch(seed: int | None) -> list[str]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        batches = list(store.batches(rows, 4, generator))
        assert [len(batch) for batch in batches] == [4, 4, 2]
        for batch in batches:
            again = store.read(store.rows(batch.image_id))
            assert torch.equal(batch.patches, again.patches)
            assert torch.equal(batch.label, again.label)
        return [name for batch in batches for name in batch.image_id or ()]

    assert epoch(None) == store.ids
    assert sorted(epoch(1)) == sorted(store.ids)
    assert epoch(1) == epoch(1) != epoch(2)


def test_tokens_come_in_the_number_format_that_is_asked_for_and_can_be_written_to(made: Made) -> None:
    store, _, _ = made
    before = store.read([0, 1])
    for dtype in (torch.float16, torch.float32):
        batch = store.read([0, 1], dtype=dtype)
        assert batch.patches.dtype == dtype
        assert torch.equal(batch.patches.float(), before.patches)
        for value in (batch.patches, batch.cls, batch.luminance):
            value.zero_()
    assert torch.equal(store.read([0, 1]).patches, before.patches)
    assert torch.equal(store.read([0, 1]).luminance, before.luminance)
    assert store.damaged() == []


def test_every_field_is_a_file_that_numpy_reads_and_that_starts_on_a_cache_line(made: Made) -> None:
    store, _, _ = made
    for index, record in store.records.items():
        assert set(record.fields) == {"patches", "cls", "luminance", "attention_entropy", "cls_attention"}
        for name in record.fields:
            array = np.load(field_path(store.path, index, name))
            assert store._map(index, name).rows.data_ptr() % 64 == 0
            assert array.tobytes() == store._map(index, name).rows.numpy().tobytes()
            assert array.shape == (len(record.rows), *record.fields[name].shape)


def pages_in_memory(path: Path) -> np.ndarray:
    """Which pages of a file are in memory, bool [pages]; looking at them brings none in."""
    bytes_of_file = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-len(bytes_of_file) // mmap.PAGESIZE), np.uint8)
    address = ctypes.c_void_p(bytes_of_file.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(bytes_of_file)), ctypes.c_void_p(pages.ctypes.data)) == 0
    return (pages & 1).astype(bool)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at pages of memory as Linux shows them")
@pytest.mark.parametrize("announced", [True, False])
def test_a_row_is_read_without_its_neighbors(tmp_path: Path, announced: bool) -> None:
    """What a store larger than memory depends on: otherwise the kernel reads megabytes around every page that is touched."""
    rows, pages = np.random.default_rng(0).random((64, 65_536), dtype=np.float32), 262_144 // mmap.PAGESIZE
    field, path = write_field(tmp_path, 0, "patches", rows), field_path(tmp_path, 0, "patches")
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(path).any():
        pytest.skip(f"files in {tmp_path} cannot be put out of memory")
    mapped = MappedField(tmp_path, 0, "patches", field)
    if announced:  # it is on its way before it is touched; a busy disk may take its time
        mapped.announce(40)
        tries = 0
        while pages_in_memory(path).sum() < pages and tries < 2000:
            time.sleep(0.005)
            tries += 1
        assert pages_in_memory(path).sum() >= pages
    target = torch.empty(1, 65_536)
    _join_large([mapped], [40], target)
    assert torch.equal(target[0], torch.from_numpy(rows[40]))
    assert pages <= pages_in_memory(path).sum() <= pages + 8


def test_a_batch_that_is_kept_is_never_written_over() -> None:
    pool = _BufferPool()
    first = pool.take((4, 3), torch.float32).fill_(1)
    row = first[2]
    address = first.data_ptr()
    del first
    gc.collect()
    assert pool.take((4, 3), torch.float32).data_ptr() != address
    assert row.tolist() == [1, 1, 1]
    del row
    gc.collect()
    taken = [pool.take((4, 3), torch.float32) for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in taken]


def test_a_reader_who_stops_early_leaves_no_thread_behind(made: Made) -> None:
    store, _, _ = made
    before = threading.active_count()
    for _ in store.batches(range(len(store)), 1):
        break
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.parametrize("shape", [(5, 4, 8), (5, 3, 7), (5, 300, 128)], ids=["wide", "odd", "more than one piece"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_are_joined_to_the_last_bit(tmp_path: Path, shape: tuple[int, ...], dtype: type) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, shape, np.uint16).view(np.float16)
    values[np.isnan(values)] = -0.0
    rows, places = MappedField(tmp_path, 0, "x", write_field(tmp_path, 0, "x", values)), [3, 0, 3]
    assert (rows.wide is None) == bool(shape[1] % 4)
    target = torch.empty(3, *shape[1:], dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
    _join_large([rows] * 3, places, target)
    assert target.numpy().tobytes() == values[places].astype(dtype).tobytes()
    assert _join_small([rows] * 3, places).numpy().tobytes() == values[places].tobytes()


@pytest.mark.parametrize("rows", [[-1], [10], [0, 99]])
def test_a_row_number_that_does_not_exist_is_rejected(made: Made, rows: list[int]) -> None:
    with pytest.raises(RequestError, match=r"Row numbers must be between 0 and 9"):
        made[0].read(rows)


def test_info_says_what_is_inside(store: FeatureStore, manifest: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    FeatureStore.open(store.path, replace(manifest.take(range(3)), name="three"))
    assert main(["store", "info", str(store.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == info(store.path)
    assert (shown["images"], shown["rows"], shown["views"]) == (8, 13, {"identity": 8, "off-center": 5})
    assert {(one["name"], one["images"], one["fits"]) for one in shown["manifests"]} == {("unnamed", 10, True), ("three", 3, True)}
    assert main(["store", "info", str(store.path)]) == 0
    assert "8 images, 13 rows" in capsys.readouterr().out
    assert main(["store", "inform", str(store.path)]) == 2


# Damage --------------------------------------------------------------------------------------------------------------


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _fewer_rows(record: dict[str, Any]) -> None:
    record["rows"] = record["rows"][:-1]
    record["fields"] = {name: [dtype, shape, sums[:-1]] for name, (dtype, shape, sums) in record["fields"].items()}


@pytest.mark.parametrize(
    "damage",
    [
        lambda store: edit_json(store / "shard-00001.json", _fewer_rows),
        lambda store: _rewrite(store / "shard-00001.json", lambda data: data.replace(b"[48", b"[64", 1)),
        lambda store: (store / "shard-00001.json").unlink(),
        lambda store: (store / "patches-00001.npy").unlink(),
        lambda store: _rewrite(store / "cls-00001.npy", lambda data: data[:-1]),
    ],
    ids=["few rows", "other size", "no record", "no patches", "half a field"],
)
def test_a_shard_that_is_not_as_it_was_written_is_never_read_and_made_again(
    backbone: BackboneConfig,
    manifest: Manifest,
    store: FeatureStore,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
) -> None:
    before = contents(store.path)
    damage(store.path)
    with pytest.raises(RequestError, match=r"1 of 4 shards are missing or damaged \(shard-00001.json\).*to resume"):
        FeatureStore.open(store.path, manifest)
    part = FeatureStore.open(store.path, partial=True)
    assert part.missing == [1]
    with pytest.raises(RequestError, match="shards are missing"):
        part.annotated(manifest).rows(["image-004"])
    if (store.path / "shard-00001.json").exists():
        assert main(["store", "info", str(store.path)]) == 1
        assert "-00001." in capsys.readouterr().err
    extract(manifest, store.path, backbone, OFF_CENTER)
    assert contents(store.path) == before


def test_a_damaged_plan_can_be_deleted_and_finished_shards_stay(
    backbone: BackboneConfig, manifest: Manifest, store: FeatureStore
) -> None:
    before = contents(store.path)
    stamps = {file: file.stat().st_mtime_ns for file in store.path.glob("*-0000*")}
    path = store.path / "plan.json"
    path.write_bytes(path.read_bytes().replace(b"identity", b"idents", 1))
    with pytest.raises(RequestError, match=r"plan.json is damaged or was edited.* Delete it and run"):
        FeatureStore.open(store.path)
    path.unlink()
    extract(manifest, store.path, backbone, OFF_CENTER)
    assert contents(store.path) == before
    assert {file: file.stat().st_mtime_ns for file in store.path.glob("*-0000*")} == stamps


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "no store.json"),
        (lambda path: path.mkdir(), "no store.json"),
        (lambda path: (path.mkdir(), (path / "store.json").write_text("{")), "not valid JSON"),
        (lambda path: (path.mkdir(), (path / "store.json").write_text('{"format": 99}')), "format 99"),
        (
            lambda path: (path.mkdir(), write_sealed(path / "store.json", {"format": 2})),
            "store format 2, .*Run `mtb extract",
        ),
    ],
)
def test_what_is_no_store_is_rejected_by_name(tmp_path: Path, prepare: Callable[[Path], object], message: str) -> None:
    prepare(tmp_path / "store")
    with pytest.raises(RequestError, match=message):
        FeatureStore.open(tmp_path / "store")
