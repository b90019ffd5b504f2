"""Extraction: the same bytes whatever happens on the way, every failure with its reason, and nothing lost."""

from __future__ import annotations

import shutil
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
from PIL import Image
from safetensors.torch import load_file, save_file

from medtokenbudget import files
from medtokenbudget.backbone import Backbone, FeatureStore, extract, views
from medtokenbudget.backbone.attention import DEFAULT
from medtokenbudget.backbone.backbone import Preprocessing
from medtokenbudget.backbone.extract import PatchScorer, add_segmentation, open_backbone
from medtokenbudget.backbone.store import Record, write_field
from medtokenbudget.cli import main
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest, decode_image, decode_mask, folder_manifest
from medtokenbudget.errors import MismatchError, MissingSignalError, RequestError, WorkError
from medtokenbudget.runtime import progress
from medtokenbudget.tokens import SIGNALS, TokenBatch
from tests.backbone.tiny import (
    CONFIG,
    GRID,
    OFF_CENTER,
    PATCH,
    SIZE,
    contents,
    ended_process,
    extract_arguments,
    tiny_backbone,
    tiny_manifest,
)
from tests.bad_input.damage import edit_json


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


@pytest.mark.parametrize(
    "change", [{"workers": 4}, pytest.param({"jobs": 2}, marks=pytest.mark.slow)], ids=["threads", "processes"]
)
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, change: dict[str, Any]
) -> None:
    one = extract(manifest, tmp_path / "one", backbone, replace(CONFIG, workers=1))
    many = extract(manifest, tmp_path / "many", backbone, replace(CONFIG, **change))
    assert contents(one.path) == contents(many.path)
    assert len(one) == 8


def test_a_store_inside_the_folder_of_the_images_is_refused(tmp_path: Path, backbone: BackboneConfig) -> None:
    listed = tiny_manifest(tmp_path / "photos" / "MEL", 2, masks=False)
    manifest = folder_manifest(tmp_path / "photos")
    for inside in ("photos", "photos/store", "photos/MEL/store"):
        with pytest.raises(RequestError, match="would be inside the folder of the images"):
            extract(manifest, tmp_path / inside, backbone, CONFIG)
    assert {path.name for path in (tmp_path / "photos").rglob("*")} == {"MEL", "image-000.png", "image-001.png"}
    extract(manifest, tmp_path / "photos-store", backbone, CONFIG)  # the same beginning is another folder
    extract(listed, tmp_path / "photos" / "store", backbone, CONFIG)  # a list says itself which files are images


def test_the_forward_pass_takes_the_idle_cores_and_threads_that_are_given_win(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    real = Backbone.tokens
    monkeypatch.setattr(Backbone, "tokens", lambda *given: used.append(torch.get_num_threads()) or real(*given))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)), raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for load, threads, expected in ((0.2, 0, 4), (2.6, 0, 1), (9.0, 0, 1), (9.0, 3, 3)):
            monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
            extract(manifest, tmp_path / f"{load}-{threads}", backbone, replace(CONFIG, threads=threads))
            assert set(used) == {expected}
            used.clear()
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_second_run_makes_only_what_is_missing(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> None:
    store = extract(manifest, tmp_path / "store", backbone, CONFIG)
    before = contents(store.path)
    kept = store.path / "patches-00000.npy"
    written = kept.stat().st_mtime_ns
    (store.path / "shard-00001.json").unlink()
    (store.path / f".patches-00001.npy.{files._machine()}-{ended_process()}-abc.part").write_bytes(b"half")
    extract(manifest, tmp_path / "store", backbone, CONFIG)
    assert contents(store.path) == before
    assert kept.stat().st_mtime_ns == written
    assert not list(store.path.glob(".*"))


@pytest.mark.parametrize(
    ("of_backbone", "change", "shown"),
    [
        (False, {"dtype": "fp32"}, "dtype: expected 'fp32', found 'fp16'"),
        (False, {"view_seed": 1}, "view_seed: expected 1, found 0"),
        (False, {"precision": "bf16"}, "precision: expected 'bf16', found 'fp32'"),
        (False, {"batch_size": 2}, "batch_size: expected 2, found 3"),
        (True, {"layer": 0}, r"backbone\.layer: expected 0, found 1"),
        (True, {"attention": "pseudo"}, r"backbone\.pseudo_temperature: expected 0.1, found None"),
    ],
)
def test_a_store_begun_with_other_settings_is_rejected(
    backbone: BackboneConfig, manifest: Manifest, store: FeatureStore, of_backbone: bool, change: dict[str, Any], shown: str
) -> None:
    before = contents(store.path)
    view, config = (replace(backbone, **change), OFF_CENTER) if of_backbone else (backbone, replace(OFF_CENTER, **change))
    with pytest.raises(MismatchError, match=shown):
        extract(manifest, store.path, view, config)
    assert contents(store.path) == before


def test_a_job_array_makes_the_same_store_in_any_order(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[int] = []
    real = progress
    monkeypatch.setattr(sys.modules[extract.__module__], "progress", lambda **named: totals.append(named["total"]) or real(**named))
    whole = extract(manifest, tmp_path / "whole", backbone, CONFIG)
    first = extract(manifest, tmp_path / "jobs", backbone, CONFIG, shards=(1, 2))
    assert first.missing == [0, 2]
    assert totals == [9, 4], "a job counts its own images"  # the two bad ones have the same content
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
    batch = store.read([*store.rows(["image-000"]), *store.rows(["image-000"], view="hflip")])
    upright, flipped = batch.luminance.numpy().reshape(2, *GRID)
    np.testing.assert_allclose(flipped, upright[:, ::-1], atol=5e-3)


def test_off_center_rows_exist_for_masked_images_of_every_part(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest
) -> None:
    store = extract(manifest, tmp_path / "store", backbone, replace(CONFIG, views="off-center"))
    cropped = [name for name, view in zip(store.ids, store.views) if view == "off-center"]
    assert cropped == [f"image-00{i}" for i in (0, 2, 4, 6, 8)]
    mask, image = decode_mask(manifest.mask_path(0)), decode_image(manifest.image_path(0))
    seen = views.geometry_of("off-center", mask, views.image_seed(0, "image-000")).of(image)
    loaded = Backbone.load(backbone)
    alone = loaded(loaded.normalize(torch.from_numpy(loaded.prepare(seen))[None]))
    stored = store.read(store.rows(["image-000"], view="off-center"))
    torch.testing.assert_close(stored.patches, alone.patches, atol=2e-3, rtol=2e-3)


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
    assert torch.equal(left.luminance, right.luminance)


def _command(manifest: Path, store: Path, backbone: BackboneConfig, *more: str) -> int:
    return main(extract_arguments(manifest, store, backbone, *more))


def test_the_command_extracts_says_what_failed_and_what_is_next(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest.write(tmp_path / "m.parquet")
    assert _command(path, tmp_path / "store", backbone, "--shards", "2/2") == 2
    assert not (tmp_path / "store").exists()
    assert _command(path, tmp_path / "store", backbone, "--shards", "0/2") == 0
    assert "1 of 3 shards are missing" in capsys.readouterr().out
    assert _command(path, tmp_path / "store", backbone, "--verify") == 0
    out = capsys.readouterr().out
    assert "Skipped 2 of 10 rows; " in out
    assert f"mtb train {path} --store {tmp_path / 'store'}" in out
    assert len(FeatureStore.open(tmp_path / "store")) == 8


def test_a_store_that_every_image_was_left_out_of_is_a_failure(
    tmp_path: Path, backbone: BackboneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    records = [{"image_id": "broken", "image": str(tmp_path / "broken.png"), "split": "train"}]
    path = Manifest.from_records(records, ()).write(tmp_path / "m.parquet")
    assert _command(path, tmp_path / "store", backbone) == 1
    said = capsys.readouterr()
    assert f"{tmp_path / 'store'} has no rows: every image was skipped. The first reason: " in said.err
    assert "Next:" not in said.out


def test_off_center_views_without_any_mask_are_rejected_before_the_backbone_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("medtokenbudget.backbone.backbone.Backbone.load", lambda *_: pytest.fail("the backbone was loaded"))
    unmasked = replace(tiny_manifest(tmp_path / "images", 2, masks=False), name="Clinic A").write(tmp_path / "m.parquet")
    code = main(["extract", str(unmasked), "--store", str(tmp_path / "store"), "--backbone", "embedded", "--views", "off-center"])
    assert code == 2
    assert "no image of 'Clinic A' has a mask. Add masks to the manifest, or choose other views." in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def _memory_for(limit: int, real: Callable[..., TokenBatch]) -> Callable[..., TokenBatch]:
    def call(self: Backbone, images: torch.Tensor, signals: tuple[str, ...] | None = None) -> TokenBatch:
        if len(images) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, images, signals)

    return call


def test_out_of_memory_halves_the_batch_and_goes_on(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, shard_size=8, batch_size=8)
    plenty = extract(manifest, tmp_path / "plenty", backbone, config)
    monkeypatch.setattr(Backbone, "__call__", _memory_for(2, Backbone.__call__))
    scarce = extract(manifest, tmp_path / "scarce", backbone, config)
    assert scarce.ids == plenty.ids
    torch.testing.assert_close(scarce.read(range(8)).patches, plenty.read(range(8)).patches, atol=2e-3, rtol=2e-3)
    record = Record.read(scarce.path, 0)
    assert record.batch_size == 1  # six good images in the first shard: 6, 3, 1
    monkeypatch.setattr(Backbone, "__call__", _memory_for(0, Backbone.__call__))
    with pytest.raises(WorkError, match="Not enough memory on cpu for a batch of one"):
        extract(manifest, tmp_path / "none", backbone, config)


def test_tokens_that_overflow_the_stored_format_are_errors_not_infinities(tmp_path: Path, manifest: Manifest) -> None:
    backbone = tiny_backbone(tmp_path / "loud")
    weights = tmp_path / "loud" / "weights.safetensors"
    state = load_file(weights)
    state["norm.weight"] = state["norm.weight"] * 1e6
    save_file(state, weights)
    with pytest.raises(RequestError, match=r"weights.safetensors is damaged: its hash is not the one in config.json"):
        extract(manifest, tmp_path / "half", backbone, CONFIG)
    edit_json(tmp_path / "loud" / "config.json", lambda config: config.update(sha256=files.sha256_file(weights)))
    half = extract(manifest, tmp_path / "half", backbone, CONFIG)
    assert len(half) == 0
    assert sum("not finite in float16" in error.reason for error in half.errors) == 8
    full = extract(manifest, tmp_path / "full", backbone, replace(CONFIG, dtype="fp32"))
    assert len(full) == 8
    full.read(range(8)).require_finite()


# Signals that a store gains -------------------------------------------------------------------------------------------

EXTRA = ("received_attention", "value_norm", "mean_key", "rollout")
ALL = replace(CONFIG, signals=EXTRA, views="off-center")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return tiny_manifest(tmp_path_factory.mktemp("whole"), 10)


@pytest.fixture(scope="module")
def plain_store(tmp_path_factory: pytest.TempPathFactory, backbone: BackboneConfig, whole: Manifest) -> Path:
    return extract(whole, tmp_path_factory.mktemp("plain") / "store", backbone, replace(ALL, signals=())).path


@pytest.fixture
def plain(tmp_path: Path, plain_store: Path) -> Path:
    """A store of every image without the further signals."""
    shutil.copytree(plain_store, tmp_path / "plain")
    return tmp_path / "plain"


def test_signals_added_later_are_those_of_the_first_pass_and_leave_every_other_file(
    tmp_path: Path, backbone: BackboneConfig, whole: Manifest, plain: Path
) -> None:
    before = {name: data for name, data in contents(plain).items() if not name.startswith("shard")}
    at_once = extract(whole, tmp_path / "at-once", backbone, replace(ALL, signals=(*DEFAULT, *EXTRA)))
    later = extract(whole, plain, backbone, ALL)
    after = contents(plain)
    assert {name: after[name] for name in before} == before
    assert later.signals == at_once.signals == SIGNALS
    assert later.identity == at_once.identity
    rows = range(len(later))
    one, two = (found.read(rows, signals=EXTRA) for found in (later, at_once))
    for name in EXTRA:
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert after == contents(tmp_path / "at-once")
    later.verify(whole)


def test_only_what_is_asked_for_is_computed_and_read(tmp_path: Path, backbone: BackboneConfig, whole: Manifest) -> None:
    store = extract(whole, tmp_path / "store", backbone, replace(CONFIG, signals=("value_norm",)))
    assert store.signals == ("value_norm",)
    assert store.read([0]).value_norm is None
    assert store.read([0], signals=("value_norm", "lesion")).value_norm.shape == (1, 16)
    assert store.read([0]).attention_entropy is None
    with pytest.raises(MissingSignalError, match=r"no rollout for 10 of 10 rows.*with `signals` rollout"):
        next(iter(store.batches([0], 1, signals=("rollout", "value_norm"))))
    grown = extract(whole, tmp_path / "store", backbone, replace(CONFIG, signals=("attention_entropy",)))
    assert grown.signals == ("attention_entropy", "value_norm")
    more = extract(tiny_manifest(tmp_path / "more", 12), grown.path, backbone, CONFIG)
    assert (len(more), more.signals) == (12, grown.signals), "new images get the signals that the store has"
    assert grown.read([0]).attention_entropy is not None


def test_images_of_another_manifest_can_be_added_later(backbone: BackboneConfig, whole: Manifest, plain: Path) -> None:
    half = whole.take(range(5))
    config = replace(ALL, signals=("rollout",))
    assert extract(half, plain, backbone, config).has("rollout")
    opened = FeatureStore.open(plain, whole)
    with pytest.raises(MissingSignalError, match=r"rollout for \d+ of"):
        opened.require_signals(("rollout",))
    first = FeatureStore.open(plain, half).read([0], signals=("rollout",)).rollout
    assert extract(whole, plain, backbone, config).has("rollout")
    assert torch.equal(FeatureStore.open(plain, half).read([0], signals=("rollout",)).rollout, first)


def test_an_interrupted_addition_resumes(
    monkeypatch: pytest.MonkeyPatch, backbone: BackboneConfig, whole: Manifest, plain: Path
) -> None:
    real, fields = write_field, []

    def stop(*arguments: Any) -> Any:
        fields.append(arguments[2])
        if len(fields) == 6:  # in the second shard
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr("medtokenbudget.backbone.store.write_field", stop)
    with pytest.raises(KeyboardInterrupt):
        extract(whole, plain, backbone, ALL)
    monkeypatch.undo()
    assert not FeatureStore.open(plain, whole).has("rollout")
    done = {path: path.stat().st_mtime_ns for path in plain.glob("*-00000.*")}
    assert extract(whole, plain, backbone, ALL).signals == SIGNALS
    assert {path: path.stat().st_mtime_ns for path in done} == done


def test_tokens_of_another_origin_gain_no_signals(
    monkeypatch: pytest.MonkeyPatch, backbone: BackboneConfig, whole: Manifest, plain: Path
) -> None:
    monkeypatch.setattr(Preprocessing, "prepare", lambda self, image: np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(WorkError, match="are not those that the backbone gives now"):
        extract(whole, plain, backbone, ALL)


def test_the_command_adds_signals_and_says_which_a_store_has(
    tmp_path: Path, backbone: BackboneConfig, whole: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    whole.write(tmp_path / "m.parquet")
    assert _command(tmp_path / "m.parquet", tmp_path / "s", backbone) == 0
    assert _command(tmp_path / "m.parquet", tmp_path / "s", backbone, "--signals", "rollout", "value_norm") == 0
    assert main(["store", "info", str(tmp_path / "s")]) == 0
    assert "signals    attention_entropy, cls_attention, value_norm, rollout" in capsys.readouterr().out
    assert _command(tmp_path / "m.parquet", tmp_path / "s", backbone, "--signals", "valuenorm") == 2
    assert "Did you mean 'value_norm'?" in capsys.readouterr().err


# Clusters -------------------------------------------------------------------------------------------------------------

CLUSTER = replace(CONFIG, shard_size=4, batch_size=4, workers=1)


def test_a_worker_refuses_another_file_system_or_other_weights_than_the_driver_has(
    tmp_path: Path, backbone: BackboneConfig, store: FeatureStore
) -> None:
    with pytest.raises(WorkError, match="file system that all nodes share"):
        open_backbone(tmp_path / "elsewhere", backbone, {}, "cpu")
    with pytest.raises(MismatchError, match="weights: expected 'other'"):
        open_backbone(store.path, backbone, {**store.config["backbone"], "weights": "other"}, "cpu")


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_makes_the_same_store_as_one_process(tmp_path: Path, ray: Any) -> None:
    from ray.cluster_utils import Cluster

    backbone = tiny_backbone(tmp_path / "backbone", depth=12)
    manifest = tiny_manifest(tmp_path / "images", 120, bad=(2, 113))
    local = extract(manifest, tmp_path / "local", backbone, CLUSTER)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    lost: dict[str, Any] = {}
    try:
        second = cluster.add_node(num_cpus=1)

        def kill_a_node() -> None:
            store = tmp_path / "cluster"
            while len(list(store.glob("shard-*.json"))) < 5:
                time.sleep(0.02)
            lost["published"] = len(list(store.glob("shard-*.json")))
            cluster.remove_node(second, allow_graceful=False)

        killer = threading.Thread(target=kill_a_node, daemon=True)
        killer.start()
        store = extract(manifest, tmp_path / "cluster", backbone, CLUSTER, engine="ray", address=cluster.address)
        killer.join(timeout=60)
    finally:
        if ray.is_initialized():
            ray.shutdown()
        cluster.shutdown()
    assert 5 <= lost["published"] < len(manifest) // 4, "the node must die in the middle"
    assert store.missing == []
    assert contents(tmp_path / "cluster") == contents(local.path)


def test_a_segmenter_scores_every_view_and_leaves_the_tokens(tmp_path: Path, backbone: BackboneConfig, whole: Manifest) -> None:
    half = whole.take(range(5))
    store = extract(half, tmp_path / "store", backbone, replace(CONFIG, views="off-center"))
    before, reader = contents(store.path), Backbone.load(backbone)

    def green(pixels: torch.Tensor) -> torch.Tensor:
        return pixels[..., 1].float().unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).mean((3, 4)).flatten(1)

    segmenter = PatchScorer(reader, green, "one")
    add_segmentation(store, half, segmenter, CONFIG)
    grown = FeatureStore.open(store.path, half)
    after = contents(store.path)
    assert {name: data for name, data in after.items() if name in before and not name.startswith("shard")} == {
        name: data for name, data in before.items() if not name.startswith("shard")
    }
    assert (grown.identity, grown.signals) == (store.identity, (*DEFAULT, "segmentation"))
    assert {"identity", "off-center"} == set(grown.views)
    scores = grown.read(range(len(grown)), signals=("segmentation",)).segmentation
    for row, stored in enumerate(grown.stored):
        image = Image.open(half.image_path(half.ids.index(grown.ids[row]))).convert("RGB")
        seen = reader.prepare(stored.geometry.of(image))[..., 1].astype(float)
        by_hand = [seen[y : y + PATCH, x : x + PATCH].mean() for y in range(0, SIZE, PATCH) for x in range(0, SIZE, PATCH)]
        np.testing.assert_allclose(scores[row], by_hand, rtol=1e-5)
    more = extract(whole, store.path, backbone, replace(CONFIG, views="off-center"))
    with pytest.raises(MissingSignalError, match=r"no segmentation for .* again with `segmenter`"):
        more.require_signals(("segmentation",))
    add_segmentation(more, whole, segmenter, CONFIG)
    assert FeatureStore.open(store.path, whole).has("segmentation")
    with pytest.raises(MismatchError, match=r"segmenter: expected 'two', found 'one'"):
        add_segmentation(more, whole, replace(segmenter, fingerprint="two"), CONFIG)
