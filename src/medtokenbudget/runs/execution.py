"""Where the units of a sweep run: side by side in local processes, or on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from medtokenbudget.config import Parallel, Settings
from medtokenbudget.errors import RequestError
from medtokenbudget.runs.units import Plan, Unit, run_unit
from medtokenbudget.backbone.extract import cpu_threads
from medtokenbudget.progress import progress
from medtokenbudget.workers import process_pool

Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Execution(Settings):
    """How a sweep runs.

    Attributes:
        engine: 'local' processes, or a 'ray' cluster.
        jobs: Units at the same time; 0 means one per core.
        address: Address of a running Ray cluster.
    """

    engine: Engine = "local"
    jobs: Parallel = 0
    address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.engine != "ray":
            raise RequestError("An address is only used with a Ray cluster: choose the engine 'ray', or leave it out.")


def run_units(plan: Plan, units: Sequence[Unit], execution: Execution, jobs: int) -> None:
    """Run units side by side; those that use the training of another wait for it."""
    first = [unit for unit in units if not plan.waits(unit)]
    second = [unit for unit in units if plan.waits(unit)]
    # Units differ in length by orders of magnitude: a rate over them would be no estimate.
    with progress(total=len(units), what="Training", unit="unit", pace=False) as bar:
        for wave in (first, second):
            if execution.engine == "ray":
                from medtokenbudget.runs.ray_sweep import run_on_ray

                run_on_ray(plan, wave, execution.address, bar)
            else:
                _run_local(plan, wave, jobs, bar)


def _run_local(plan: Plan, units: Sequence[Unit], jobs: int, bar: Any) -> None:
    """Processes with one thread each beat one process with many threads here: the tensors of a step are small."""
    threads = 0 if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    if jobs == 1 or len(units) <= 1:
        with cpu_threads(threads):
            for unit in units:
                run_unit(plan, unit, on_epoch=partial(_show_epoch, bar, unit))
                bar.update()
        return
    with process_pool(min(jobs, len(units))) as pool:
        for future in as_completed([pool.submit(run_unit, plan, unit, threads) for unit in units]):
            future.result()
            bar.update()


def _show_epoch(bar: Any, unit: Unit, stage: str, done: int, total: int) -> None:
    bar.set_postfix_str(f"{unit.method} (seed {unit.seed}), {stage} epoch {done}/{total}")
