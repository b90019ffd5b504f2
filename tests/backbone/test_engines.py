"""Engines: a Ray cluster that loses a node in the middle makes the same bytes as one process."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medtokenbudget.backbone import extract
from medtokenbudget.backbone.engines import Work
from medtokenbudget.backbone.ray_engine import make_shard
from medtokenbudget.cli import main
from medtokenbudget.errors import UnknownNameError, WorkError
from tests.backbone.tiny import CONFIG, contents, tiny_backbone, tiny_manifest

CLUSTER = replace(CONFIG, shard_size=4, batch_size=4, workers=1)


def test_an_unknown_engine_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'local'\? Available: local, ray"):
        extract(tiny_manifest(tmp_path, 1), tmp_path / "store", tiny_backbone(tmp_path / "b"), CONFIG, engine="locale")


def test_a_task_says_when_its_node_does_not_see_the_store(tmp_path: Path) -> None:
    work = Work(tmp_path / "elsewhere", (), tiny_backbone(tmp_path / "b"), {}, CONFIG, "")
    message = make_shard((0, ()), work)
    assert message is not None
    assert "file system that all nodes share" in message


def test_a_task_refuses_other_weights_than_the_driver_has(tmp_path: Path) -> None:
    backbone = tiny_backbone(tmp_path / "b")
    store = extract(tiny_manifest(tmp_path / "images", 2), tmp_path / "store", backbone, CONFIG)
    work = Work(store.path, (), backbone, {**store.config["backbone"], "weights": "other"}, CONFIG, "")
    assert "weights: expected 'other'" in str(make_shard((7, ()), work))


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_makes_the_same_store_as_one_process(tmp_path: Path, ray: Any) -> None:
    from ray.cluster_utils import Cluster

    backbone = tiny_backbone(tmp_path / "backbone", depth=12)
    manifest = tiny_manifest(tmp_path / "images", 200, bad=(2, 133))
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


@pytest.mark.slow
def test_a_shard_that_kills_its_workers_ends_with_a_message_and_the_command_then_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray: Any
) -> None:
    monkeypatch.setattr("medtokenbudget.backbone.ray_engine.RETRIES", 1)
    manifest, backbone = tiny_manifest(tmp_path / "images", 6), tiny_backbone(tmp_path / "backbone")

    def deadly(shard: Any, work: Any) -> Any:
        os._exit(1)

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        monkeypatch.setattr("medtokenbudget.backbone.ray_engine.make_shard", deadly)
        with pytest.raises(WorkError, match="Ray gave up on a shard"):
            extract(manifest, tmp_path / "dead", backbone, CLUSTER, engine="ray")
        monkeypatch.undo()
        local = extract(manifest, tmp_path / "local", backbone, CLUSTER)
        path = manifest.write(tmp_path / "m.parquet")
        config = {
            "shard_size": CLUSTER.shard_size,
            "batch_size": CLUSTER.batch_size,
            "threads": 1,
            "image_size": backbone.image_size,
        }
        options = [text for name, value in config.items() for text in (f"--{name}", str(value))]
        command = ["extract", str(path), "--store", str(tmp_path / "ray"), "--backbone", backbone.name, "--engine", "ray", *options]
        assert main([*command, "--device", "cpu"]) == 0
    finally:
        ray.shutdown()
    assert contents(tmp_path / "ray") == contents(local.path)
