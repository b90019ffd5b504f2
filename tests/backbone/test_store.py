"""The store: what is read back is what was extracted, fast, and without what a store larger than memory cannot afford."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from medtokenbudget.backbone import Backbone, FeatureStore, extract
from medtokenbudget.backbone.shards import Row, map_shard, shard_path, write_shard
from medtokenbudget.backbone.store import BufferPool, Fetching, MappedRows, RowChecks, info, join_large, join_small, ordered_map
from medtokenbudget.backbone.views import Geometry
from medtokenbudget.cli import main
from medtokenbudget.data import Manifest, decode_image
from medtokenbudget.errors import MismatchError, RequestError, WorkError
from tests.backbone.tiny import CONFIG, DIM, GRID, tiny_backbone, tiny_manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[FeatureStore, Manifest, Backbone]:
    folder = tmp_path_factory.mktemp("store")
    config = tiny_backbone(folder / "backbone")
    manifest = tiny_manifest(folder / "images", 11, bad=(5,))
    return extract(manifest, folder / "store", config, CONFIG), manifest, Backbone.load(config)


def test_rows_are_what_the_backbone_says_of_each_image(made: tuple[FeatureStore, Manifest, Backbone]) -> None:
    store, manifest, backbone = made
    assert store.grid == GRID
    assert (store.dim, store.classes) == (DIM, ("MEL", "NV"))
    batch = store.read(store.rows(["image-003", "image-000"]))
    for row, image in enumerate((3, 0)):
        pixels = torch.from_numpy(backbone.prepare(decode_image(manifest.image_path(image))))[None]
        alone = backbone(backbone.normalize(pixels))
        torch.testing.assert_close(batch.patches[row], alone.patches[0], atol=2e-3, rtol=2e-3)
        assert batch.cls is not None
        assert alone.cls is not None
        torch.testing.assert_close(batch.cls[row], alone.cls[0], atol=2e-3, rtol=2e-3)
        assert batch.attention_entropy is not None
        assert alone.attention_entropy is not None
        torch.testing.assert_close(batch.attention_entropy[row], alone.attention_entropy[0], atol=1e-5, rtol=1e-4)
        assert batch.luminance is not None
        gray = pixels[0].numpy() @ np.array([0.299, 0.587, 0.114]) / 255
        means = gray.reshape(GRID[0], 8, GRID[1], 8).mean((1, 3)).reshape(-1)
        np.testing.assert_allclose(batch.luminance[row].numpy(), means, atol=1e-5)


def test_labels_and_masks_come_with_the_tokens(made: tuple[FeatureStore, Manifest, Backbone]) -> None:
    store, _, _ = made
    batch = store.read(store.rows(["image-000", "image-001", "image-002", "image-003"]))
    assert batch.label is not None
    assert batch.label.tolist() == [0, -1, 0, 1]
    assert batch.has_mask is not None
    assert batch.has_mask.tolist() == [True, False, True, False]
    assert batch.lesion is not None
    expected = torch.zeros(GRID, dtype=torch.bool)
    expected[1, 0:2] = True
    assert torch.equal(batch.lesion[0], expected.flatten())
    assert not batch.lesion[1].any()


def test_small_fields_of_all_rows_agree_with_reading_them(made: tuple[FeatureStore, Manifest, Backbone]) -> None:
    store, _, _ = made
    batch = store.read(range(len(store)))
    for name in ("label", "lesion", "has_mask", "luminance", "attention_entropy", "cls_attention"):
        assert torch.equal(getattr(store, name), getattr(batch, name)), name
    assert batch.image_id == tuple(store.ids)


def test_a_failed_image_is_absent_and_listed_with_its_reason(made: tuple[FeatureStore, Manifest, Backbone]) -> None:
    store, _, _ = made
    assert len(store) == 10
    assert "image-005" not in store.ids
    [error] = store.errors
    assert (error.image_id, error.view) == ("image-005", "identity")
    assert "not an image" in error.reason
    [line] = (store.path / "errors.jsonl").read_text().splitlines()
    assert json.loads(line) == error.to_json()
    with pytest.raises(RequestError, match=r"2 of 3 images are not in the store .*image-005 \(.*not an image.*nobody"):
        store.rows(["image-000", "image-005", "nobody"])
    assert store.rows(["image-005", "image-001"], strict=False).tolist() == store.rows(["image-001"]).tolist()


def test_an_epoch_shows_every_row_once_in_the_order_of_its_seed(made: tuple[FeatureStore, Manifest, Backbone]) -> None:
    store, _, _ = made
    rows = store.rows(store.ids)

    def epoch(seed: int | None, prefetch: int) -> list[str]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        batches = list(store.batches(rows, 4, generator, prefetch=prefetch))
        assert [len(batch) for batch in batches] == [4, 4, 2]
        for batch in batches:
            assert batch.image_id is not None
            again = store.read(store.rows(batch.image_id))
            assert torch.equal(batch.patches, again.patches)
            assert batch.label is not None
            assert again.label is not None
            assert torch.equal(batch.label, again.label)
        return [name for batch in batches for name in batch.image_id or ()]

    assert epoch(None, 2) == store.ids
    assert sorted(epoch(1, 2)) == sorted(store.ids)
    assert epoch(1, 2) == epoch(1, 0) != epoch(2, 2)


def test_tokens_come_in_the_number_format_that_is_asked_for(made: tuple[FeatureStore, Manifest, Backbone]) -> None:
    store, _, _ = made
    half = store.read([0, 1], dtype=torch.float16)
    assert half.patches.dtype == torch.float16
    assert torch.equal(half.patches.float(), store.read([0, 1]).patches)


def test_shards_are_mapped_not_loaded(made: tuple[FeatureStore, Manifest, Backbone]) -> None:
    store, _, _ = made
    path = store.path / "shard-00000.safetensors"
    arrays = map_shard(path)
    for name, expected in load_file(path).items():
        assert np.array_equal(arrays[name], expected), name
        assert not arrays[name].flags.owndata
        assert not arrays[name].flags.writeable


def pages_in_memory(path: Path) -> np.ndarray:
    """Which pages of a file are in memory, bool [pages]; looking at them brings none in."""
    bytes_of_file = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-len(bytes_of_file) // mmap.PAGESIZE), np.uint8)
    address = ctypes.c_void_p(bytes_of_file.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(bytes_of_file)), ctypes.c_void_p(pages.ctypes.data)) == 0
    return (pages & 1).astype(bool)


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at pages of memory as Linux shows them")


PAGES = 262_144 // mmap.PAGESIZE


def mapped_rows(array: np.ndarray) -> MappedRows:
    return MappedRows(array, RowChecks(Path(), {}, []))


def _row(number: int) -> Row:
    return Row(str(number), "identity", (1, 1), Geometry())


@pytest.fixture
def on_disk(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A shard of 64 rows of 256 KiB, none of it in memory, and the rows."""
    rows = np.random.default_rng(0).random((64, 65_536), dtype=np.float32)
    write_shard(tmp_path, 0, [_row(i) for i in range(64)], {"patches": rows}, [], 1, "")
    path = shard_path(tmp_path, 0)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(path).any():
        pytest.skip(f"files in {tmp_path} cannot be put out of memory")
    return path, rows


@linux
@pytest.mark.parametrize("announced", [True, False])
def test_a_row_is_read_without_its_neighbors(on_disk: tuple[Path, np.ndarray], announced: bool) -> None:
    """What a store larger than memory depends on: otherwise the kernel reads megabytes around every page that is touched."""
    path, rows = on_disk
    mapped = mapped_rows(map_shard(path)["patches"])
    fetching = Fetching()
    fetching.from_disk = announced
    target = torch.empty(1, 65_536)
    with fetching.of([mapped], [40]):
        if announced:  # it is on its way before it is touched; a busy disk may take its time
            tries = 0
            while pages_in_memory(path).sum() < PAGES and tries < 2000:
                time.sleep(0.005)
                tries += 1
            assert pages_in_memory(path).sum() >= PAGES
        join_large([mapped], [40], target)
    assert torch.equal(target[0], torch.from_numpy(rows[40]))
    assert PAGES <= pages_in_memory(path).sum() <= PAGES + 8


@linux
def test_rows_are_announced_while_they_come_from_the_disk_and_no_longer(on_disk: tuple[Path, np.ndarray]) -> None:
    mapped = mapped_rows(map_shard(on_disk[0])["patches"])
    fetching = Fetching()
    seen = []
    for place in (3, 3, 3, 9, 10):
        with fetching.of([mapped], [place]):
            join_large([mapped], [place], torch.empty(1, 65_536))
        seen.append(fetching.from_disk)
    assert seen == [True, False, False, True, True]


def test_an_open_store_keeps_no_file_open(made: tuple[FeatureStore, Manifest, Backbone]) -> None:
    files = Path("/proc/self/fd")
    if not files.is_dir():
        pytest.skip("counts open files in /proc, which this system does not have")
    before = len(list(files.iterdir()))
    store = FeatureStore.open(made[0].path)
    for _ in store.batches(range(len(store)), 2):
        pass
    assert len(list(files.iterdir())) == before


def test_a_batch_that_is_kept_is_never_written_over() -> None:
    pool = BufferPool()
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


def test_a_reader_who_stops_early_leaves_no_thread_behind(made: tuple[FeatureStore, Manifest, Backbone]) -> None:
    store, _, _ = made
    before = threading.active_count()
    for _ in store.batches(range(len(store)), 1, prefetch=2):
        break
    gc.collect()
    assert threading.active_count() == before


def test_an_error_while_reading_ahead_reaches_the_reader_in_its_place() -> None:
    def broken(part: int) -> int:
        if part == 2:
            raise WorkError("the disk is gone")
        return part

    items = ordered_map(broken, range(6), ahead=3, threads=2)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(WorkError, match="disk is gone"):
        next(items)


def test_batches_keep_their_order_however_long_each_takes() -> None:
    waits = {part: threading.Event() for part in range(9)}

    def late(part: int) -> int:
        if part % 2 == 0:  # an even part ends only after the odd one behind it, read by the other thread
            assert waits[min(part + 1, 7)].wait(10)
        waits[part].set()
        return part

    assert list(ordered_map(late, range(9), ahead=2, threads=2)) == list(range(9))


@pytest.mark.parametrize("shape", [(5, 4, 8), (5, 3, 7), (5, 300, 128)], ids=["wide", "odd", "more than one piece"])
@pytest.mark.parametrize("shift", [0, 8], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_are_joined_to_the_last_bit(shape: tuple[int, ...], shift: int, dtype: type) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, shape, np.uint16).view(np.float16)
    values[np.isnan(values)] = -0.0
    memory = bytearray(64 + values.nbytes)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % 16 + shift
    array = np.ndarray(shape, np.float16, buffer=memory, offset=start)
    array[:] = values
    rows, places = mapped_rows(array), [3, 0, 3]
    assert (rows.wide is None) == bool(shift or shape[1] % 4)
    target = torch.empty(3, *shape[1:], dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
    join_large([rows] * 3, places, target)
    assert target.numpy().tobytes() == values[places].astype(dtype).tobytes()
    assert join_small([rows] * 3, places).numpy().tobytes() == values[places].tobytes()


def test_writing_into_a_batch_changes_nothing_else(made: tuple[FeatureStore, Manifest, Backbone]) -> None:
    store, _, _ = made
    before = store.read([0, 1])
    for dtype in (torch.float16, torch.float32):
        batch = store.read([0, 1], dtype=dtype)
        for value in (batch.patches, batch.cls, batch.luminance):
            value.zero_()
    assert torch.equal(store.read([0, 1]).patches, before.patches)
    assert torch.equal(store.read([0, 1]).luminance, before.luminance)
    store.verify()


def test_another_configuration_is_rejected_with_the_difference_shown(made: tuple[FeatureStore, Manifest, Backbone]) -> None:
    store, manifest, backbone = made
    FeatureStore.open(store.path, manifest, expect={"backbone": backbone.fingerprint})
    other = {**backbone.fingerprint, "layer": 0}
    with pytest.raises(MismatchError, match=r"backbone.layer: expected 0, found 1") as caught:
        FeatureStore.open(store.path, expect={"backbone": other, "dtype": "fp32"})
    assert "dtype: expected 'fp32', found 'fp16'" in str(caught.value)
    assert "grid" not in str(caught.value)


@pytest.mark.parametrize("rows", [[-1], [10], [0, 99]])
def test_a_row_number_that_does_not_exist_is_rejected(made: tuple[FeatureStore, Manifest, Backbone], rows: list[int]) -> None:
    with pytest.raises(RequestError, match=r"Row numbers must be between 0 and 9"):
        made[0].read(rows)


def test_all_views_of_an_image_can_be_had_at_once(tmp_path: Path) -> None:
    from dataclasses import replace

    config = replace(CONFIG, views="flips")
    store = extract(tiny_manifest(tmp_path / "images", 4), tmp_path / "store", tiny_backbone(tmp_path / "backbone"), config)
    rows = store.rows(["image-002", "image-003"], view=None)
    assert [(store.ids[row][-1], store.views[row]) for row in rows] == [
        *[("2", view) for view in ("identity", "hflip", "vflip", "rot180")],
        ("3", "identity"),
    ]
    with pytest.raises(RequestError, match="with the view 'hflip': image-003"):
        store.rows(["image-003"], view="hflip")


def test_info_says_what_is_inside(store: FeatureStore, manifest: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    FeatureStore.open(store.path, replace(manifest.take(range(3)), name="three"))
    assert main(["store", "info", str(store.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == info(store.path)
    assert (found["images"], found["rows"], found["views"]) == (8, 13, {"identity": 8, "off-center": 5})
    assert {(one["name"], one["images"], one["fits"]) for one in found["manifests"]} == {("unnamed", 10, True), ("three", 3, True)}
    assert main(["store", "info", str(store.path)]) == 0
    assert "8 images, 13 rows" in capsys.readouterr().out
    assert main(["store", "inform", str(store.path)]) == 2
