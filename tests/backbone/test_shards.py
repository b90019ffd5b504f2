"""The files of a store: nothing that is half-written, damaged or foreign is ever read, and it is made again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.backbone.shards import Row, map_shard, shard_path, write_shard
from medtokenbudget.backbone.views import Geometry
from medtokenbudget.cli import main
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import write_sealed
from tests.backbone.tiny import CONFIG, OFF_CENTER, contents, tiny_backbone, tiny_manifest
from tests.bad_input.damage import edit_json


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return tiny_manifest(tmp_path / "images", 10)


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("field", ["patches", "luminance"])
def test_a_changed_value_is_noticed_when_it_is_read(store: FeatureStore, manifest: Manifest, field: str) -> None:
    path = store.path / "shard-00001.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    damage(path, 8 + length + header[field]["data_offsets"][0] + 5)
    opened = FeatureStore.open(store.path, manifest)
    with pytest.raises(WorkError, match=r"shard-00001.safetensors is damaged. Delete it and run"):
        list(opened.batches(range(len(opened)), 4))
    if field == "luminance":
        with pytest.raises(WorkError, match="is damaged"):
            FeatureStore.open(store.path, manifest).luminance  # noqa: B018


def test_a_damaged_shard_that_was_deleted_is_made_again(backbone: BackboneConfig, manifest: Manifest, store: FeatureStore) -> None:
    before = contents(store.path)
    (store.path / "shard-00001.safetensors").unlink()
    extract(manifest, store.path, backbone, OFF_CENTER)
    assert contents(store.path) == before


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda s: s["backbone"].update(grid=[2, 8]), WorkError, "was changed after they were made"),
        (lambda s: s.update(dtype="fp32"), WorkError, "was changed after they were made"),
        (lambda s: s["backbone"].update(grid=[0, 8]), RequestError, "backbone.grid must be two positive numbers"),
        (lambda s: s["backbone"].update(grid="4x4"), RequestError, "backbone.grid must be list"),
        (lambda s: s.update(backbone=[]), RequestError, "backbone must be dict"),
        (lambda s: s.update(keep=True), RequestError, "keep must be"),
        (lambda s: s.update(format=2), RequestError, r"has store format 2, but this version reads format 4. Run `mtb extract"),
    ],
)
def test_a_changed_store_json_is_noticed(
    store: FeatureStore, manifest: Manifest, change: Callable[[dict[str, Any]], None], error: type[Exception], message: str
) -> None:
    edit_json(store.path / "store.json", change)
    with pytest.raises(error, match=message):
        FeatureStore.open(store.path, manifest)


@pytest.mark.parametrize("count", ["too few", "too many", "no checksum"])
def test_a_sidecar_with_other_rows_than_planned_is_noticed_and_made_again(
    backbone: BackboneConfig, manifest: Manifest, store: FeatureStore, count: str
) -> None:
    before = contents(store.path)

    def change(sidecar: dict[str, Any]) -> None:
        if count == "too few":
            sidecar["rows"], sidecar["checksums"] = sidecar["rows"][:-1], sidecar["checksums"][:-1]
        elif count == "too many":
            sidecar["rows"], sidecar["checksums"] = sidecar["rows"] * 2, sidecar["checksums"] * 2
        else:
            sidecar["checksums"] = []

    edit_json(store.path / "shard-00001.json", change)
    with pytest.raises(RequestError, match="1 of 4 shards are missing"):
        FeatureStore.open(store.path, manifest)
    extract(manifest, store.path, backbone, OFF_CENTER)
    assert contents(store.path) == before


@pytest.mark.parametrize(
    "text", ["[]", '{"0": 3}', '{"x": []}', '{"0": [["a"]]}', '{"0": []}', '{"-1": [["a", "identity"]]}', "[" * 100_000]
)
def test_a_damaged_plan_is_a_message(store: FeatureStore, text: str) -> None:
    (store.path / "plan.json").write_text(text)
    with pytest.raises(RequestError, match=r"plan.json is (damaged|nested too deeply)"):
        FeatureStore.open(store.path)
    if text.startswith("{"):
        write_sealed(store.path / "plan.json", json.loads(text))
        with pytest.raises(RequestError, match=r"plan.json is damaged"):
            FeatureStore.open(store.path)


def test_a_changed_crop_box_or_image_size_is_noticed_and_the_shard_made_again(
    backbone: BackboneConfig, manifest: Manifest, store: FeatureStore, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(store.path)
    path = store.path / "shard-00001.json"
    sidecar = json.loads(path.read_text())
    sidecar["rows"][0][2][0] += 16
    path.write_text(json.dumps(sidecar))
    assert main(["store", "info", str(store.path)]) == 1
    assert "shard-00001.json" in capsys.readouterr().err
    with pytest.raises(RequestError, match=r"1 of 4 shards are missing or damaged \(shard-00001.json\)"):
        FeatureStore.open(store.path, manifest)
    extract(manifest, store.path, backbone, OFF_CENTER)
    assert contents(store.path) == before


def test_a_shard_whose_header_calls_floats_integers_is_damaged(store: FeatureStore, manifest: Manifest) -> None:
    path = store.path / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(WorkError, match=r"shard-00001.safetensors is damaged"):
        FeatureStore.open(store.path, manifest).luminance  # noqa: B018


def test_a_damaged_plan_can_be_deleted_and_finished_shards_stay(
    backbone: BackboneConfig, manifest: Manifest, store: FeatureStore
) -> None:
    before = contents(store.path)
    stamps = {file: file.stat().st_mtime_ns for file in store.path.glob("shard-*")}
    path = store.path / "plan.json"
    path.write_bytes(path.read_bytes().replace(b"identity", b"idents", 1))
    with pytest.raises(RequestError, match=r"plan.json is damaged or was edited.* Delete it and run"):
        FeatureStore.open(store.path)
    path.unlink()
    extract(manifest, store.path, backbone, OFF_CENTER)
    assert contents(store.path) == before
    assert {file: file.stat().st_mtime_ns for file in store.path.glob("shard-*")} == stamps


@pytest.mark.parametrize("damage", ["no sidecar", "no shard", "cut short", "sidecar cut short"])
def test_a_half_shard_is_never_read(tmp_path: Path, damage: str) -> None:
    backbone = tiny_backbone(tmp_path / "backbone")
    manifest = tiny_manifest(tmp_path / "images", 8, masks=False)
    store = extract(manifest, tmp_path / "store", backbone, CONFIG)
    shard, sidecar = store.path / "shard-00001.safetensors", store.path / "shard-00001.json"
    if damage == "no sidecar":
        sidecar.unlink()
    elif damage == "no shard":
        shard.unlink()
    elif damage == "cut short":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        sidecar.write_text(sidecar.read_text()[:40])
    with pytest.raises(RequestError, match=r"1 of 2 shards are missing.*to resume"):
        FeatureStore.open(store.path)
    part = FeatureStore.open(store.path, partial=True)
    assert (part.missing, len(part)) == ([1], 4)
    with pytest.raises(RequestError, match="shards are missing"):
        part.annotated(manifest).rows(["image-007"])


def test_a_changed_byte_is_found_by_verify(tmp_path: Path) -> None:
    store = extract(tiny_manifest(tmp_path / "images", 2), tmp_path / "store", tiny_backbone(tmp_path / "backbone"), CONFIG)
    store.verify()
    shard = store.path / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(WorkError, match=r"Damaged files in .*shard-00000.safetensors"):
        FeatureStore.open(store.path).verify()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "no store.json"),
        (lambda path: path.mkdir(), "no store.json"),
        (lambda path: (path.mkdir(), (path / "store.json").write_text("{")), "not valid JSON"),
        (lambda path: (path.mkdir(), (path / "store.json").write_text('{"format": 99}')), "format 99"),
    ],
)
def test_what_is_no_store_is_rejected_by_name(tmp_path: Path, prepare: Callable[[Path], object], message: str) -> None:
    prepare(tmp_path / "store")
    with pytest.raises(RequestError, match=message):
        FeatureStore.open(tmp_path / "store")


def test_the_largest_tensor_of_a_shard_starts_on_a_cache_line(tmp_path: Path) -> None:
    for count in range(1, 9):
        tensors = {"label": np.arange(count), "patches": np.ones((count, 4, 3), np.float16), "has_mask": np.ones(count, np.uint8)}
        write_shard(tmp_path, count, [Row(str(i), "identity", (1, 1), Geometry()) for i in range(count)], tensors, [], 4, "")
        arrays = map_shard(shard_path(tmp_path, count))
        assert arrays["patches"].ctypes.data % 64 == 0
        for name, expected in load_file(shard_path(tmp_path, count)).items():
            assert np.array_equal(arrays[name], expected), name
