"""Where the units of a sweep run: side by side in local processes, or on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import Literal

from medtokenbudget.config import Parallel, Settings
from medtokenbudget.errors import RequestError
from medtokenbudget.experiments.units import Plan, Unit, run_unit
from medtokenbudget.experiments.watching import INTERVAL, Watch, reporter
from medtokenbudget.features.pipeline import cpu_threads
from medtokenbudget.training.pooled import OnEpoch
from medtokenbudget.workers import process_pool

Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Execution(Settings):
    """How a sweep runs.

    Attributes:
        engine: 'local' processes, or a 'ray' cluster.
        jobs: Units at the same time; 0 means one per core.
        only: 'failed' runs just the units that failed before.
        address: Address of a running Ray cluster.
    """

    engine: Engine = "local"
    jobs: Parallel = 0
    only: Literal["all", "failed"] = "all"
    address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.engine != "ray":
            raise RequestError("An address is only used with a Ray cluster: choose the engine 'ray', or leave it out.")


def run_units(plan: Plan, units: Sequence[Unit], execution: Execution, jobs: int) -> None:
    """Run units side by side; those that use the training of another wait for it."""
    first = [unit for unit in units if not plan.waits(unit)]
    second = [unit for unit in units if plan.waits(unit)]
    with Watch(plan, units, jobs) as watch:
        for wave in (first, second):
            if execution.engine == "ray":
                from medtokenbudget.experiments.ray_sweep import run_on_ray

                run_on_ray(plan, wave, execution.address, watch)
            else:
                _run_local(plan, wave, jobs, watch)


def run_reported(plan: Plan, unit: Unit, threads: int = 0) -> str:
    """`run_unit` in a worker: its epochs go to a file that the parent process watches."""
    return run_unit(plan, unit, threads, reporter(plan, unit))


def _run_local(plan: Plan, units: Sequence[Unit], jobs: int, watch: Watch) -> None:
    """Processes with one thread each beat one process with many threads here: the tensors of a step are small."""
    threads = 0 if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    if jobs == 1 or len(units) <= 1:
        with cpu_threads(threads):
            for unit in units:
                watch.start(unit)
                report = reporter(plan, unit)

                def on_epoch(stage: str, done: int, total: int, report: OnEpoch = report) -> None:
                    report(stage, done, total)
                    watch.refresh()

                run_unit(plan, unit, on_epoch=on_epoch)
                watch.finish(unit)
        return
    with process_pool(min(jobs, len(units))) as pool:
        futures = {pool.submit(run_reported, plan, unit, threads): unit for unit in units}
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=INTERVAL, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
                watch.finish(futures[future])
            watch.refresh()
