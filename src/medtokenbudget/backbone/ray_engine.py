"""Extraction on a Ray cluster: one idempotent task per shard, retried if its node dies.

The store must be on a file system that all nodes share, and images and weights on paths that all nodes can read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from medtokenbudget.backbone import plan
from medtokenbudget.backbone.adding import Addition, add_signals
from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.engines import Work
from medtokenbudget.backbone.pipeline import Shard, cpu_threads, fill
from medtokenbudget.backbone.shards import read_sidecar
from medtokenbudget.config import BackboneConfig
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import MedTokenBudgetError, WorkError, first_line
from medtokenbudget.jobs import node, not_shared, ray_cluster, stopped

RETRIES = 10
"""Per shard; an image that kills every worker must not keep a cluster busy forever."""


def run(work: Work, advance: Callable[[int], Any]) -> None:
    """Compute the shards of `work` as Ray tasks; each uses a GPU if the cluster has any."""
    with ray_cluster(work.address) as ray:
        _run_tasks(ray, work, advance)


def _run_tasks(ray: Any, work: Work, advance: Callable[[int], Any]) -> None:
    gpus = 1 if ray.cluster_resources().get("GPU") and work.config.device != "cpu" else 0
    options = {
        "num_gpus": gpus,
        "num_cpus": max(1, work.config.threads),
        # A task that dies with its node or worker is retried; an error that it raises is not.
        "max_retries": RETRIES,
        "retry_exceptions": False,
    }
    task = ray.remote(**options)(make_shard)
    # A node runs one task per core or GPU, so each task decodes with few threads.
    config = replace(work.config, workers=work.config.workers or max(2, work.config.threads))
    rest = ray.put(replace(work, shards=(), additions=(), config=config, address=None))
    rows = {task.remote(shard, rest): len(shard[1]) for shard in work.shards}
    rows |= {task.remote(addition, rest): addition.rows for addition in work.additions}
    waiting = list(rows)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        try:
            failure = ray.get(done[0])
        except ray.exceptions.RayError as error:
            raise WorkError(f"Ray gave up on a shard: {first_line(error)}. Run the same command again to resume.") from None
        if failure is not None:
            for other in waiting:
                ray.cancel(other, force=True)
            raise stopped(failure)
        advance(rows[done[0]])


def make_shard(shard: Shard | Addition, work: Work) -> str | None:
    """The Ray task: compute one shard unless it exists, or add signals to one. Returns None, or an error message."""
    try:
        if not isinstance(shard, Addition) and read_sidecar(work.store, shard[0], [item.key for item in shard[1]]) is not None:
            return None
        if not (work.store / "store.json").exists():
            return not_shared(work.store)
        with cpu_threads(work.config.threads):
            backbone = _backbone(work.backbone, resolve_device(work.config.device))
            plan.check(
                f"The backbone on node {node()}", work.fingerprint, backbone.fingerprint, "Use the same weights on all nodes."
            )
            if isinstance(shard, Addition):
                add_signals(work.store, shard, backbone, work.config)
            else:
                fill(work.store, [shard], backbone, work.config, work.settings, signals=work.signals)
    except MedTokenBudgetError as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def _backbone(config: BackboneConfig, device: torch.device) -> Backbone:
    """Load the backbone once per worker process, which computes many shards."""
    return Backbone.load(config, device)
