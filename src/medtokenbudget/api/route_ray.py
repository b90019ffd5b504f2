"""Routing on a Ray cluster: Ray Data maps the shards over workers that hold one model each, on a GPU where there is one.

The folder of the results must be on a file system that all nodes share, and images and weights on paths that all nodes can read.
A node that is lost takes the shards it was working on with it; these are given out again, the finished ones are not.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medtokenbudget.api.route_shards import Shard, ShardWork, make_shard
from medtokenbudget.errors import MedTokenBudgetError, WorkError, first_line
from medtokenbudget.jobs import not_shared, ray_cluster, stopped
from medtokenbudget.model import MedTokenBudget, Source, load

RETRIES = 10
"""How often workers may die before the command gives up; an image that kills every worker must not keep a cluster busy forever."""


class Worker:
    """Holds a model and makes shards. One for each GPU, or for each core of a cluster without GPUs.

    Args:
        work: What is asked for, and the folder of the model.
    """

    def __init__(self, work: ShardWork) -> None:
        torch.set_num_threads(1)
        self.work, self.model = work, None
        if work.model.is_dir():
            self.model = load(work.model, device=work.device)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The shards of a batch; `failure` is empty, or says why a shard could not be made."""
        found = [self.make(_unpacked(text)) for text in batch["shard"]]
        return {"index": batch["index"], "failure": np.array(found, dtype=object)}

    def make(self, shard: Shard) -> str:
        """Make a shard unless it exists. Returns an error message, or nothing."""
        try:
            if self.model is None:
                return not_shared(self.work.folder)
            if not self.work.finished(shard):
                make_shard(self.model, shard, self.work)
        except MedTokenBudgetError as error:
            return str(error)
        return ""


def run(
    model: MedTokenBudget, shards: Sequence[Shard], work: ShardWork, advance: Callable[[int], Any], address: str | None
) -> None:
    """Make the shards on a cluster, or on this machine if there is no address."""
    model.save_pretrained(work.model)  # a file, not an object: the backbone is loaded by each worker and compared
    try:
        with ray_cluster(address) as ray:
            _make(ray, {shard.index: shard for shard in shards}, work, advance)
    finally:
        shutil.rmtree(work.model, ignore_errors=True)


def _make(ray: Any, missing: dict[int, Shard], work: ShardWork, advance: Callable[[int], Any]) -> None:
    """Give out the missing shards, and again those that died with their worker."""
    last = ""
    for _ in range(RETRIES + 1):
        if not missing:
            return
        try:
            for index in _pass(ray, list(missing.values()), work):
                advance(len(missing.pop(index).sources))
        except ray.exceptions.RayError as error:
            last = first_line(error)
        for index in [index for index, shard in missing.items() if work.finished(shard)]:
            advance(len(missing.pop(index).sources))
    if missing:
        raise WorkError(f"Ray gave up on shard {min(missing)}: {last}. Run the same command again to resume.")


def _pass(ray: Any, shards: Sequence[Shard], work: ShardWork) -> Iterator[int]:
    """Give every shard to a worker once, and yield the finished ones. A worker that dies ends the pass with an error of Ray."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    found = ray.cluster_resources()
    gpus = int(found.get("GPU", 0)) if work.device != "cpu" else 0
    most = max(1, min(len(shards), gpus or int(found.get("CPU", 1))))
    rows = [{"index": shard.index, "shard": _packed(shard)} for shard in shards]
    answers = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        Worker,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
        fn_constructor_args=(work,),
        num_gpus=1 if gpus else 0,
        num_cpus=1,
        # Not restarted by Ray: an actor of a lost node would wait for a place that the others hold until they are finished.
        max_restarts=0,
        max_task_retries=0,
    )
    for answer in answers.iter_rows():
        if answer["failure"]:
            raise stopped(answer["failure"])
        yield int(answer["index"])


def _packed(shard: Shard) -> str:
    files = [[source.name, str(source.value), None if source.mask is None else str(source.mask)] for source in shard.sources]
    return json.dumps([shard.index, shard.first, files, shard.key])


def _unpacked(text: str) -> Shard:
    index, first, files, key = json.loads(text)
    sources = tuple(Source(name, Path(path), None if mask is None else Path(mask)) for name, path, mask in files)
    return Shard(index, first, sources, key)
