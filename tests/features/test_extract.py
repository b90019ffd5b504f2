"""Extraction: the same bytes whatever happens on the way, and every failure with its reason."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
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
from medtokenbudget.cli import main
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest, decode_image, decode_mask
from medtokenbudget.errors import MismatchError, RequestError, WorkError
from medtokenbudget.features import Backbone, FeatureStore, extract, views
from medtokenbudget.features.pipeline import to_device
from medtokenbudget.features.shards import read_sidecar
from medtokenbudget.tokens import Selection, TokenBatch
from tests.features.tiny import CONFIG, GRID, contents, tiny_backbone, tiny_manifest
from tests.small_model import draw_images, small_model


@pytest.fixture
def backbone(tmp_path: Path) -> BackboneConfig:
    return tiny_backbone(tmp_path / "backbone")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return tiny_manifest(tmp_path / "images", 10, bad=(1, 5))


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


@pytest.mark.slow
def test_a_full_disk_in_the_middle_of_a_shard_is_a_message_and_not_a_loss(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest
) -> None:
    path = manifest.write(tmp_path / "m.parquet")
    assert _command(path, tmp_path / "whole", backbone) == 0
    # Files may grow to 2,000 bytes here, less than a shard: the write itself fails, as on a disk that is full.
    script = """
import resource, signal, sys
from medtokenbudget.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", script, *_arguments(path, tmp_path / "store", backbone)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "No space left while writing" in ended.stderr
    assert "shard-00000" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list((tmp_path / "store").glob("*.safetensors"))
    assert _command(path, tmp_path / "store", backbone) == 0
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")


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


def test_finishing_a_store_leaves_the_temporary_files_of_running_writers_and_other_machines(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest
) -> None:
    running = tmp_path / f".shard-00009.safetensors.{files._machine()}-{os.getppid()}-abc.part"
    elsewhere = tmp_path / ".shard-00009.safetensors.0123abcd-1-abc.part"
    ended = tmp_path / f".shard-00009.safetensors.{files._machine()}-{ended_process()}-abc.part"
    for path in (running, elsewhere, ended):
        path.write_bytes(b"half")
    store = extract(manifest, tmp_path, backbone, CONFIG)
    assert not store.missing
    assert sorted(tmp_path.glob(".*.part")) == sorted([running, elsewhere])


def ended_process() -> int:
    """The id of a process that has just ended."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"dtype": "fp32"}, "dtype: expected 'fp32', found 'fp16'"),
        ({"view_seed": 1}, "view_seed: expected 1, found 0"),
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


def test_a_full_disk_is_a_clear_message_and_loses_nothing(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = extract(manifest, tmp_path / "whole", backbone, CONFIG)
    real = os.replace

    def full(source: Any, target: Any) -> None:
        if "shard-00001.safetensors" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(WorkError, match=r"No space left while writing .*shard-00001.*to continue"):
        extract(manifest, tmp_path / "store", backbone, CONFIG)
    monkeypatch.undo()
    assert not list((tmp_path / "store").glob(".*.part"))
    assert read_sidecar(tmp_path / "store", 0) is not None
    again = extract(manifest, tmp_path / "store", backbone, CONFIG)
    assert contents(again.path) == contents(whole.path)


def test_a_store_where_nothing_can_be_written_is_a_clear_message(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="is a file"):
        extract(manifest, tmp_path / "file", backbone, CONFIG)
    with pytest.raises(WorkError, match="Cannot write"):
        extract(manifest, tmp_path / "file" / "store", backbone, CONFIG)


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
    sidecar = read_sidecar(scarce.path, 0)
    assert sidecar is not None
    assert sidecar.batch_size == 1  # six good images in the first shard: 6, 3, 1
    monkeypatch.setattr(Backbone, "__call__", _memory_for(0, Backbone.__call__))
    with pytest.raises(WorkError, match="Not enough memory on cpu for a batch of one"):
        extract(manifest, tmp_path / "none", backbone, config)


def test_tokens_that_overflow_the_stored_format_are_errors_not_infinities(tmp_path: Path, manifest: Manifest) -> None:
    backbone = tiny_backbone(tmp_path / "loud")
    weights = tmp_path / "loud" / "weights.safetensors"
    state = load_file(weights)
    state["norm.weight"] = state["norm.weight"] * 1e6
    save_file(state, weights)
    half = extract(manifest, tmp_path / "half", backbone, CONFIG)
    assert len(half) == 0
    assert sum("not finite in float16" in error.reason for error in half.errors) == 8
    full = extract(manifest, tmp_path / "full", backbone, replace(CONFIG, dtype="fp32"))
    assert len(full) == 8
    full.read(range(8)).require_finite()


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


def _strongest(tokens: TokenBatch) -> Selection:
    indices = tokens.patches.norm(dim=2).topk(5).indices
    kept = torch.zeros(tokens.patches.shape[:2], dtype=torch.bool).scatter_(1, indices, True)
    chosen = torch.gather(tokens.patches, 1, indices[:, :, None].expand(-1, -1, tokens.dim))
    return Selection(chosen, torch.ones(indices.shape), torch.full(kept.shape, -1), kept, indices)


def test_only_routed_tokens_can_be_kept(tmp_path: Path, backbone: BackboneConfig, manifest: Manifest) -> None:
    whole = extract(manifest, tmp_path / "whole", backbone, CONFIG)
    routed = extract(manifest, tmp_path / "routed", backbone, CONFIG, route=_strongest, route_fingerprint={"budget": 0.3})
    assert routed.ids == whole.ids
    selection = routed.read_routed([3, 0])
    patches = whole.read([3, 0]).patches
    assert selection.indices is not None
    assert tuple(selection.tokens.shape) == (2, 5, whole.dim)
    assert torch.equal(selection.tokens, torch.gather(patches, 1, selection.indices[:, :, None].expand(-1, -1, whole.dim)))
    assert selection.kept is not None
    assert selection.kept.sum(1).tolist() == [5, 5]
    assert torch.equal(selection.assignment.gather(1, selection.indices), torch.arange(5).expand(2, 5))
    assert torch.equal(routed.luminance, whole.luminance)
    assert "patches" not in load_file(routed.path / "shard-00000.safetensors")
    with pytest.raises(RequestError, match="Use `read_routed`"):
        routed.read([0])
    with pytest.raises(RequestError, match="Use `read`"):
        whole.read_routed([0])
    with pytest.raises(MismatchError, match="keep"):
        extract(manifest, routed.path, backbone, CONFIG)
    with pytest.raises(RequestError, match="must be used together"):
        extract(manifest, tmp_path / "x", backbone, CONFIG, route=_strongest)
    other = {"budget": 0.3, "backbone": {"weights": "other"}}
    with pytest.raises(MismatchError, match=r"weights: expected 'other'.*\n.*use that one"):
        extract(manifest, tmp_path / "x", backbone, CONFIG, route=_strongest, route_fingerprint=other)


@pytest.mark.parametrize(("device", "message"), [("gpu", "not a device"), ("cuda:97", "not available")])
def test_a_device_that_is_not_there_is_rejected(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest, device: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        extract(manifest, tmp_path / "store", backbone, replace(CONFIG, device=device))


def _arguments(manifest: Path, store: Path, backbone: BackboneConfig, *more: str) -> list[str]:
    settings = ["--image_size", "32", "--shard_size", "4", "--batch_size", "3", "--device", "cpu"]
    return ["extract", str(manifest), "--store", str(store), "--backbone", backbone.name, *settings, *more]


def _command(manifest: Path, store: Path, backbone: BackboneConfig, *more: str) -> int:
    return main(_arguments(manifest, store, backbone, *more))


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


def test_the_command_keeps_what_a_saved_model_routes(tmp_path: Path) -> None:
    model = small_model(tmp_path / "backbone")
    model.save_pretrained(tmp_path / "model")
    images = draw_images(tmp_path / "images", 5)
    records = [{"image_id": path.stem, "image": str(path), "split": "train"} for path in images]
    manifest = Manifest.from_records(records, ()).write(tmp_path / "m.parquet")
    seen_by = ["--backbone", "test_vit", "--weights", str(model.backbone_config.weights), "--image_size", "160", "--device", "cpu"]
    whole = ["extract", str(manifest), "--store", str(tmp_path / "whole"), *seen_by]
    assert main(whole) == 0
    routed = ["extract", str(manifest), "--store", str(tmp_path / "routed"), *seen_by]
    assert main([*routed, "--keep", "routed", "--model", str(tmp_path / "model"), "--budget", "0.3"]) == 0
    kept = FeatureStore.open(tmp_path / "routed").read_routed(range(5))
    assert kept.indices is not None
    expected = model.classifier().selector.select_budget(FeatureStore.open(tmp_path / "whole").read(range(5)), 0.3)
    assert expected.indices is not None
    assert kept.indices.shape == (5, 30)
    # The store keeps half precision, the router saw the tokens before: a tie may fall the other way, no more.
    same = [len(set(a) & set(b)) for a, b in zip(kept.indices.tolist(), expected.indices.tolist())]
    assert min(same) >= 28


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--crops", "0"], "crops must be 1 or more"),
        (["--crops", "3"], "--crops 3 needs --views off-center, but the views are 'none'."),
        (["--crops", "2", "--views", "flips"], "--crops 2 needs --views off-center, but the views are 'flips'."),
        (["--workers", "-1"], "--workers must be 0 (one thread per core) or more"),
        (["--shards", "3"], "I/N"),
        (["--shards", "4/2"], "4/2 does not exist"),
        (["--address", "auto"], "Add --engine ray"),
        (["--keep", "routed"], "must be used together"),
        (["--budget", "0.3"], "must be used together"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors do not exist"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(
    tmp_path: Path,
    backbone: BackboneConfig,
    manifest: Manifest,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    path = manifest.write(tmp_path / "m.parquet")
    assert _command(path, tmp_path / "store", backbone, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_off_center_views_without_any_mask_are_rejected_before_the_backbone_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("medtokenbudget.features.backbone.Backbone.load", lambda *_: pytest.fail("the backbone was loaded"))
    unmasked = replace(tiny_manifest(tmp_path / "images", 2, masks=False), name="Clinic A").write(tmp_path / "m.parquet")
    code = main(["extract", str(unmasked), "--store", str(tmp_path / "store"), "--backbone", "embedded", "--views", "off-center"])
    assert code == 2
    assert "no image of 'Clinic A' has a mask. Add masks to the manifest, or drop --views off-center." in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


_KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from medtokenbudget.features import extract
from tests.features.tiny import CONFIG, contents, tiny_backbone, tiny_manifest
from tests.small_model import draw_images, small_model
from dataclasses import replace

folder = Path(sys.argv[1])
backbone = tiny_backbone(folder / "backbone")
manifest = tiny_manifest(folder / "images", 120, bad=(3, 40))
config = replace(CONFIG, shard_size=2, batch_size=2)
start = time.monotonic()
extract(manifest, folder / "whole", backbone, config)
of_one_shard = min((time.monotonic() - start) / 60, 0.03)  # not longer, should the machine have been busy just now
whole = contents(folder / "whole")
start = time.monotonic()
extract(manifest, folder / "whole", backbone, config)
of_the_start = (time.monotonic() - start) / 4  # the rest is opening the finished store

store, seen, killed = folder / "store", set(), 0
random.seed(0)
while killed < 12:
    # One to three further shards, or none: then the kill falls into the start. And then at any moment of making the next one.
    goal = len(list(store.glob("shard-*.json"))) + random.randint(0, 3)
    child = os.fork()
    if child == 0:
        extract(manifest, store, backbone, config)
        os._exit(0)
    time.sleep(random.uniform(0, of_the_start))
    while len(list(store.glob("shard-*.json"))) < goal and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    time.sleep(random.uniform(0, of_one_shard))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        sys.exit(f"the extraction was over after {killed} kills: nothing left to interrupt")
    killed += 1
    found = contents(store) if store.exists() else {}
    assert seen <= set(found), "a published file is gone"
    assert all(whole[name] == data for name, data in found.items()), "a published file differs"
    seen = set(found)
print(killed, len(seen), len(whole))
extract(manifest, store, backbone, config)
assert contents(store) == whole
assert not list(store.glob(".*")), "leftovers"
"""


@pytest.mark.slow
def test_twelve_kills_lose_and_change_nothing(tmp_path: Path, repository: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _KILLER, str(tmp_path)], cwd=repository, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    killed, published, files = (int(value) for value in done.stdout.split())
    assert killed == 12
    assert 10 < published < files
