"""The sweep: methods x seeds as independent units, collected into one run directory.

A second call resumes: finished units are kept, units that failed run again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from medtokenbudget.config import BUDGETS, DEFAULT_METHODS, Seed, TrainConfig, check_values, given_settings, preset
from medtokenbudget.data import Manifest
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.runs import preflight
from medtokenbudget.runs.collect import collect
from medtokenbudget.runs.execution import Execution, run_units
from medtokenbudget.runs.methods import Method, with_heads
from medtokenbudget.runs.run import RunInfo
from medtokenbudget.runs.sources import Sources
from medtokenbudget.runs.units import Plan, Unit, read_state, status
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.locks import exclusive
from medtokenbudget.progress import say


@dataclass(frozen=True)
class Study:
    """A named set of cells: every method with every seed, at the given budgets.

    Attributes:
        off_center: Also evaluate on the off-center crops of the validation images.
    """

    name: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (42,)
    budgets: tuple[float, ...] = BUDGETS
    off_center: bool = True

    def units(self) -> list[Unit]:
        """Every method with every seed."""
        return [Unit(Method.parse(method), seed) for seed in self.seeds for method in self.methods]


def sweep(
    manifest: Manifest | Path | str,
    store: FeatureStore | Path | str,
    out: Path | str,
    methods: Sequence[str] | None = None,
    budgets: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    config: TrainConfig | None = None,
    execution: Execution | None = None,
    heads: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Train and evaluate every method with every seed.

    Args:
        methods: Texts such as 'lats:lesion-first' or 'center'. Default: every method of the paper, our recipe and the controls,
            without those that need masks where no image has one.
        budgets: Shares of the patches to keep. Default: those of `config`.
        seeds: Every method is trained once per seed. Default: that of `config`.
        heads: Heads to combine every method with; a method that names its head, such as 'center+linear', keeps it.

    Returns:
        The tidy results, also written to `out/results.csv`.
    """
    sources = Sources.of(manifest, store, out)
    usual: Sequence[str] = DEFAULT_METHODS
    config = config or preset("lesion-first")
    seeds = (config.seed,) if seeds is None else tuple(seeds)
    check_values({"seeds": (seeds, tuple[Seed, ...])})
    if sources.store.fixed_budget is not None:
        usual = (preflight.READS_ROUTED,)
        if budgets is None and "budgets" not in given_settings(config):
            budgets = (sources.store.fixed_budget,)
    if budgets is not None:
        if tuple(budgets) != tuple(given_settings(config).get("budgets", budgets)):
            raise RequestError("The budgets were given twice, in config and as an argument. Leave out one of them.")
        config = replace(config, budgets=tuple(budgets))
    chosen = preflight.that_fit(sources, usual, config) if methods is None else tuple(methods)
    chosen = with_heads(chosen, heads)
    return run_studies([Study("sweep", chosen, seeds, tuple(config.budgets))], sources, out, config, execution)


def run_studies(
    studies: Sequence[Study],
    sources: Sources,
    out: Path | str,
    config: TrainConfig,
    execution: Execution | None = None,
    required: Sequence[str] = (),
    own: Collection[str] = (),
) -> pd.DataFrame:
    """Run the units that the studies need, each once, and collect their predictions under the studies' names.

    Args:
        required: Methods without which the run is worthless: if one of them fails, the whole run fails.
        own: Settings of `config` that the caller chose, not the user: they may go unused.

    Returns:
        The tidy results, also written to `out/results.csv`.
    """
    execution, out = execution or Execution(), Path(out).resolve()
    units = unique_units(studies)
    resolve_device(config.device)
    for method in dict.fromkeys(unit.method for unit in units if unit.method.learned):
        preflight.check_config(method.config(config))
    preflight.check_data(sources.manifest, sources.store)
    preflight.check_needs(sources, units, config)
    preflight.check_given(studies, sources, config, own)
    plan = Plan(sources.manifest_path, sources.store_path, out, config, sources.manifest.name)
    preflight.check_run(plan, units, sources)
    with exclusive(out):
        # Again under the lock: another process may have finished meanwhile.
        preflight.check_run(plan, units, sources)
        sources.ensure_written()
        return _run(plan, studies, units, execution, required)


def _run(
    plan: Plan, studies: Sequence[Study], units: Sequence[Unit], execution: Execution, required: Sequence[str]
) -> pd.DataFrame:
    todo = [unit for unit in units if status(plan, unit) != "done"]
    # Counted over the whole run, not over what is left of it: the number of threads of a unit follows from the number of jobs and
    # changes the last bit of a training. A resumed run must end in the same bytes as one that never stopped.
    jobs = min(execution.jobs or os.cpu_count() or 1, len(units))
    run_units(plan, todo, execution, jobs)
    failed = [unit for unit in units if status(plan, unit) != "done"]
    for unit in failed:
        path = plan.folder(unit) / "unit.json"
        reason = read_state(path.parent).get("error", "it was made with other options.") if path.exists() else "it was not run."
        if str(unit.method) in required:
            raise WorkError(reason)
        say(f"No results for {unit.method} with seed {unit.seed}: {reason}")
    if len(failed) == len(units):
        raise WorkError("No method of the sweep finished; the reasons are above. Run the same command to try again.")
    return collect(plan, studies, units)


def require_complete(info: RunInfo) -> None:
    """Raise a WorkError that lists the units without results; those of the other units are in the run directory."""
    wanted = [(Method.parse(text), seed) for study in info.studies for seed in study["seeds"] for text in study["methods"]]
    failed = [f"{method} (seed {seed})" for method, seed in dict.fromkeys(wanted) if Unit(method, seed).name not in info.units]
    if failed:
        raise WorkError(
            f"{len(failed)} of {len(set(wanted))} trainings failed: {', '.join(failed)}. The reasons are above and in "
            f"{info.path / 'units'}. The other results are in {info.path}. Run the same command again to retry."
        )


def unique_units(studies: Iterable[Study]) -> list[Unit]:
    """Every unit once, trainings before the ablations that use them; names are checked here, before hours of work."""
    units: list[Unit] = []
    for study in studies:
        for unit in study.units():
            for needed in (unit.owner, unit):
                if needed not in units:
                    units.append(needed)
    return units
