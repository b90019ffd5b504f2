"""Extraction on a full disk, without memory or permissions, and killed: a message, and nothing lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medtokenbudget import files
from medtokenbudget.backbone import Backbone, extract
from medtokenbudget.backbone.shards import read_sidecar
from medtokenbudget.cli import main
from medtokenbudget.config import BackboneConfig
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.tokens import TokenBatch
from tests.backbone.tiny import CONFIG, contents, ended_process, extract_arguments, tiny_backbone
from tests.bad_input.damage import edit_json


@pytest.mark.slow
def test_a_full_disk_in_the_middle_of_a_shard_is_a_message_and_not_a_loss(
    tmp_path: Path, backbone: BackboneConfig, manifest: Manifest
) -> None:
    path = manifest.write(tmp_path / "m.parquet")
    assert main(extract_arguments(path, tmp_path / "whole", backbone)) == 0
    # Files may grow to 2,000 bytes here, less than a shard: the write itself fails, as on a disk that is full.
    script = """
import resource, signal, sys
from medtokenbudget.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", script, *extract_arguments(path, tmp_path / "store", backbone)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "No space left while writing" in ended.stderr
    assert "shard-00000" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list((tmp_path / "store").glob("*.safetensors"))
    assert main(extract_arguments(path, tmp_path / "store", backbone)) == 0
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")


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
    with pytest.raises(RequestError, match=r"weights.safetensors is damaged: its hash is not the one in config.json"):
        extract(manifest, tmp_path / "half", backbone, CONFIG)
    edit_json(tmp_path / "loud" / "config.json", lambda config: config.update(sha256=files.sha256_file(weights)))
    half = extract(manifest, tmp_path / "half", backbone, CONFIG)
    assert len(half) == 0
    assert sum("not finite in float16" in error.reason for error in half.errors) == 8
    full = extract(manifest, tmp_path / "full", backbone, replace(CONFIG, dtype="fp32"))
    assert len(full) == 8
    full.read(range(8)).require_finite()


_KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from medtokenbudget.backbone import extract
from tests.backbone.tiny import CONFIG, contents, tiny_backbone, tiny_manifest
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
