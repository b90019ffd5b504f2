"""Units of a sweep on a Ray cluster: one idempotent task per unit, retried when a node is lost. Needs the extra `ray`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from medtokenbudget.cluster import ray_cluster
from medtokenbudget.errors import WorkError
from medtokenbudget.runs.units import Plan, Unit, run_unit


def run_on_ray(plan: Plan, units: Sequence[Unit], address: str | None, bar: Any) -> None:
    """Run the units on the cluster at `address` (or on one started here); all nodes see the same folders."""
    if not units:
        return
    with ray_cluster(address) as ray:
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0
        task: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=5)(run_unit)
        pending = [task.remote(plan, unit, 1) for unit in units]
        try:
            while pending:
                ready, pending = ray.wait(pending, num_returns=1)
                ray.get(ready)
                bar.update(len(ready))
        except ray.exceptions.RayError as error:
            raise WorkError(f"Ray gave up on a training: {error}. Run the same command again to continue with the rest.") from None
