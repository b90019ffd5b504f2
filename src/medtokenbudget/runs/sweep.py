"""The sweep: methods x seeds as independent units, collected into one run directory.

A unit is one method with one seed, trained and evaluated at every budget on every view of the validation images. It is idempotent:
it writes its folder `units/METHOD-SEED` and records in `unit.json` that it is done, or why it failed. A second call resumes:
finished units are kept, units that failed run again.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from safetensors import safe_open
from safetensors.numpy import save

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.extract import cpu_threads
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import (
    BUDGETS,
    HEADLINE_METHODS,
    SEEDS,
    Seed,
    TrainConfig,
    check_values,
    given_settings,
    preset,
    to_dict,
)
from medtokenbudget.data import Manifest
from medtokenbudget.data.manifest import listed
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import MedTokenBudgetError, MismatchError, RequestError, WorkError
from medtokenbudget.files import (
    dotted,
    read_json,
    read_lines,
    read_sealed,
    sha256_json,
    write_json,
    write_lines,
    write_safetensors,
    write_sealed,
)
from medtokenbudget.heads import Head, create_head
from medtokenbudget.jobs import Execution, run_jobs
from medtokenbudget.locks import exclusive
from medtokenbudget.progress import progress, say
from medtokenbudget.routing import LearnedSelector, Selector, create_selector, default_methods, selector_class
from medtokenbudget.runs import preflight
from medtokenbudget.runs.evaluate import evaluate_rows
from medtokenbudget.runs.method import Method, with_heads
from medtokenbudget.runs.run import (
    AS_IS,
    FILE,
    METRICS,
    PREDICTIONS,
    ROUTING,
    MethodInfo,
    RunInfo,
    content_hash,
    read_predictions,
    routing_name,
    write_predictions,
    write_tables,
)
from medtokenbudget.tensor_files import load_tensors, save_tensors
from medtokenbudget.training.classifier import RoutedClassifier
from medtokenbudget.training.pooled import OnEpoch, PooledHead, epoch_judge, pool_to_file
from medtokenbudget.training.rows import Parts, make_parts
from medtokenbudget.training.trainer import module_tensors, split_prefix, train_selector

UNIT, HEAD, IMAGES, CHECKPOINT = "unit.json", "head.safetensors", "images.json", "checkpoint.safetensors"
UNIT_FILES = (HEAD, IMAGES, PREDICTIONS, ROUTING)
"""What a finished unit leaves in its folder. `unit.json` has their hashes, and those of checkpoint and metrics if it trained."""

# What a sweep is made of ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """A manifest and the token store of its images. Sent to another process, it is its paths, and opened there once."""

    manifest: Manifest
    store: FeatureStore
    manifest_path: Path
    in_memory: bool = False

    @classmethod
    def of(cls, manifest: Manifest | Path | str, store: FeatureStore | Path | str, out: Path | str = ".") -> Sources:
        """Open what paths stand for; a manifest that is only in memory belongs into the run directory `out`."""
        in_memory = isinstance(manifest, Manifest)
        opened = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
        path = Path(out) / "manifest.parquet" if isinstance(manifest, Manifest) else Path(manifest)
        tokens = store.annotated(opened) if isinstance(store, FeatureStore) else FeatureStore.open(Path(store).resolve(), opened)
        return cls(opened, tokens, path.resolve(), in_memory)

    def ensure_written(self) -> None:
        """Write a manifest that is only in memory to its path, where worker processes read it."""
        if self.in_memory:
            self.manifest.write(self.manifest_path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_once, (self.manifest_path, self.store.path.resolve(), self.manifest.hash, self.store.identity)


@lru_cache(maxsize=1)
def _open_once(manifest: Path, store: Path, *content: str) -> Sources:
    """Open the files of a sweep in a worker process. Their content is part of the key: a worker may outlive a sweep."""
    return Sources.of(manifest, store)


@dataclass(frozen=True)
class Unit:
    """A method and a seed."""

    method: Method
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the unit's folder."""
        return f"{str(self.method).replace(':', '~')}-{self.seed}"


@dataclass(frozen=True)
class Training:
    """Units that share one selector, run by one job: heads behind a selector that is trained without them, or ablations of it.

    Attributes:
        first: The unit that trains the selector; the others use its checkpoint.
        units: Those that are to run.
    """

    first: Unit
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class Study:
    """A named set of cells: every method with every seed, at the given budgets; and how a report shows it.

    Attributes:
        off_center: Also evaluate on the off-center crops of the validation images.
        title: Heading of its table; empty for a sweep of the user's own.
        section: Id of the section of the report that it belongs to.
        form: Shape of its table. 'budgets': mean and deviation over seeds, one row per budget and method; 'sweep': accuracy, one
            column per budget; 'special': a table that the report makes for this study alone.
        tables: Names of the tables that are made from it, in the order of the report.
        metrics: Further columns of its table, beside those that every table of this form has.
    """

    name: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (SEEDS[0],)
    budgets: tuple[float, ...] = BUDGETS
    off_center: bool = True
    title: str = ""
    section: str = "studies"
    form: Literal["budgets", "sweep", "special"] = "budgets"
    tables: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Some controls are also methods of the paper.
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))

    def units(self) -> list[Unit]:
        """Return every method with every seed."""
        return [Unit(Method.parse(method), seed) for seed in self.seeds for method in self.methods]


@dataclass(frozen=True)
class Plan:
    """What every unit of a run shares."""

    sources: Sources
    out: Path
    config: TrainConfig

    def folder(self, unit: Unit) -> Path:
        """Return where the unit keeps its files."""
        return self.out / "units" / unit.name

    def unit_config(self, unit: Unit) -> TrainConfig:
        """Return the training settings of the unit."""
        return unit.method.config(replace(self.config, seed=unit.seed))

    def identity(self, unit: Unit) -> str:
        """Hash everything that decides the unit's result."""
        config = to_dict(self.unit_config(unit))
        config.pop("device")
        manifest, store = self.sources.manifest, self.sources.store
        return sha256_json([config, str(unit.method), manifest.name, manifest.hash, store.identity])

    def trainings(self, units: Iterable[Unit], done: Collection[Unit] = ()) -> list[Training]:
        """Group the units that are not done by the selector that they train or use."""
        groups: dict[Unit, list[Unit]] = {}
        for unit in units:
            method = unit.method.trained_as
            if method.learned and self.unit_config(unit).recipe != "joint":
                method = replace(method, head="")  # the selector does not depend on the head
            groups.setdefault(Unit(method, unit.seed), []).append(unit)
        jobs = [Training(group[0], tuple(unit for unit in group if unit not in done)) for group in groups.values()]
        return [job for job in jobs if job.units]


# Sweep and run -------------------------------------------------------------------------------------------------------


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
    usual: Sequence[str] = default_methods()
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
    chosen = preflight.supported_methods(sources, usual, config) if methods is None else tuple(methods)
    study = Study("sweep", with_heads(chosen, heads), seeds, tuple(config.budgets))
    return run_studies([study], sources, out, config, execution)


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
    units = _unique_units(studies)
    resolve_device(config.device)
    for method in dict.fromkeys(unit.method for unit in units if unit.method.learned):
        preflight.check_config(method.config(config))
    preflight.check_data(sources.manifest, sources.store)
    preflight.check_needs(sources, units, config)
    preflight.check_given(studies, sources, config, own)
    plan = Plan(sources, Path(out).resolve(), config)
    with exclusive(plan.out):
        _check_same_options(plan, units)
        sources.ensure_written()
        done = _run(plan, units, execution or Execution(), required)
        return _collect(plan, studies, done)


def _unique_units(studies: Iterable[Study]) -> list[Unit]:
    """Return every unit once, trainings before the ablations that use them; names are checked here, before hours of work."""
    units: dict[Unit, None] = {}
    for study in studies:
        for unit in study.units():
            units |= {Unit(unit.method.trained_as, unit.seed): None, unit: None}
    return list(units)


def _check_same_options(plan: Plan, units: Sequence[Unit]) -> None:
    """Reject a run directory whose results were made with other options, or with units that this command leaves out."""
    info = RunInfo.read(plan.out) if (plan.out / FILE).exists() else None
    dropped = sorted(set(info.units if info else ()) - {unit.name for unit in units})
    if dropped:
        raise RequestError(
            f"{plan.out} contains results of {listed(dropped)}, which this command leaves out. Add them, or use another --out."
        )
    for unit in units:
        state = _read_state(plan.folder(unit))
        if state.get("status") == "done" and state.get("identity") != plan.identity(unit):
            advice = "Use the same options to resume, or another --out."
            expected, recorded = dotted(to_dict(plan.config)), dotted(info.config if info else {})
            if not info or expected == recorded:
                raise MismatchError(
                    f"{unit.method} with seed {unit.seed} in {plan.out} was made with other data or options. {advice}"
                )
            recorded = {name: recorded.get(name) for name in expected}
            raise MismatchError.between(f"The run in {plan.out}", expected, recorded, advice)


def _run(plan: Plan, units: Sequence[Unit], execution: Execution, required: Sequence[str]) -> list[Unit]:
    """Run the units that are not done, side by side, and return those that are done then."""
    done = {unit for unit in units if status(plan, unit) == "done"}
    trainings = plan.trainings(units, done)
    # Counted over the whole run, not over what is left of it: the number of threads of a unit follows from the number of processes
    # and changes the last bit of a training. A resumed run must end in the same bytes as one that never stopped.
    cores = os.cpu_count() or 1
    processes = min(execution.jobs or cores, len(units))
    # Processes with one thread each beat one process with many threads here: the tensors of a step are small.
    threads = 1 if execution.engine == "ray" else 0 if processes == 1 else max(1, cores // processes)
    processes = min(processes, max(1, len(trainings)))
    # Units differ in length by orders of magnitude: a rate over them would be no estimate.
    with progress(total=len(units) - len(done), what="Training", unit="unit", pace=False) as bar:
        here = bar if execution.engine == "local" and processes == 1 else None  # a bar cannot be sent to another process
        work = partial(run_training, plan, threads=threads, bar=here)
        for states in run_jobs(work, trainings, execution, processes):
            done |= {unit for unit, state in states.items() if state == "done"}
            bar.update(len(states))
    failed = [unit for unit in units if unit not in done]
    for unit in failed:
        reason = _read_state(plan.folder(unit)).get("error", "it was not run.")
        if str(unit.method) in required:
            raise WorkError(reason)
        say(f"No results for {unit.method} with seed {unit.seed}: {reason}")
    if not done:
        raise WorkError("No method of the sweep finished; the reasons are above. Run the same command to try again.")
    return [unit for unit in units if unit in done]


def require_complete(info: RunInfo) -> None:
    """Raise a WorkError that lists the units without results; those of the other units are in the run directory."""
    wanted = [(Method.parse(text), seed) for study in info.studies for seed in study["seeds"] for text in study["methods"]]
    failed = [f"{method} (seed {seed})" for method, seed in dict.fromkeys(wanted) if Unit(method, seed).name not in info.units]
    if failed:
        raise WorkError(
            f"{len(failed)} of {len(set(wanted))} trainings failed: {', '.join(failed)}. The reasons are above and in "
            f"{info.path / 'units'}. The other results are in {info.path}. Run the same command again to retry."
        )


# One unit ------------------------------------------------------------------------------------------------------------


def status(plan: Plan, unit: Unit) -> str:
    """Return 'done', 'failed' or 'missing'; a unit of another configuration, or with a damaged file, counts as missing."""
    folder = plan.folder(unit)
    state = _read_state(folder)
    if state.get("identity") != plan.identity(unit):
        return "missing"
    hashes = state.get("files", {})
    if state.get("status") == "done":
        for path in (folder / name for name in dict.fromkeys((*UNIT_FILES, *hashes))):
            if not path.is_file() or content_hash(path) != hashes.get(path.name):
                say(f"{path} is missing or damaged; {unit.method} with seed {unit.seed} runs again.")
                return "missing"
    return str(state.get("status", "missing"))


def _read_state(folder: Path) -> dict[str, Any]:
    """Read `unit.json`; one that is missing or damaged counts as empty, so that the unit runs again."""
    try:
        return read_sealed(folder / UNIT, "")
    except RequestError:
        return {}


def run_training(plan: Plan, training: Training, threads: int = 0, bar: Any = None) -> dict[Unit, str]:
    """Run the units of one training one after another, and return the status of each."""
    states = {}
    with cpu_threads(threads):
        for unit in training.units:
            on_epoch = None if bar is None else partial(_show_epoch, bar, unit)
            states[unit] = run_unit(plan, unit, training.first, on_epoch)
    return states


def _show_epoch(bar: Any, unit: Unit, stage: str, done: int, total: int) -> None:
    bar.set_postfix_str(f"{unit.method} (seed {unit.seed}), {stage} epoch {done}/{total}")


def run_unit(plan: Plan, unit: Unit, first: Unit | None = None, on_epoch: OnEpoch | None = None) -> str:
    """Run one unit unless it is done; a failure is recorded with its reason and does not stop the other units.

    Args:
        first: The unit whose folder may hold a trained selector for this one.
    """
    if status(plan, unit) == "done":  # a cluster repeats the jobs of a lost node
        return "done"
    folder = plan.folder(unit)
    state: dict[str, Any] = {"method": str(unit.method), "seed": unit.seed, "identity": plan.identity(unit)}
    try:
        _train_and_evaluate(plan, unit, first or unit, on_epoch)
        written = [*UNIT_FILES, *(name for name in (CHECKPOINT, METRICS) if (folder / name).is_file())]
        state |= {"status": "done", "files": {name: content_hash(folder / name) for name in written}}
    except MedTokenBudgetError as error:
        state |= {"status": "failed", "error": str(error)}
    except MemoryError:
        state |= {"status": "failed", "error": "Out of memory. Run the same command again with fewer --jobs."}
    except Exception as error:  # a third-party selector may raise anything; the other units still run
        state |= {"status": "failed", "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    write_sealed(folder / UNIT, state)
    return str(state["status"])


def _train_and_evaluate(plan: Plan, unit: Unit, first: Unit, on_epoch: OnEpoch | None) -> None:
    manifest, store, config = plan.sources.manifest, plan.sources.store, plan.unit_config(unit)
    method, folder = unit.method, plan.folder(unit)
    selector: Selector
    if method.learned:
        # An ablation uses the folder of its training; a finished checkpoint there is taken as it is.
        trained_in = plan.folder(Unit(method.trained_as, unit.seed))
        names = method.selector, method.head
        trained = train_selector(manifest, store, trained_in, config, *names, on_epoch, plan.folder(first))
        selector, head, parts = trained.selector.ablate(method.ablation), trained.head, trained.parts
    else:
        parts = make_parts(manifest, store, config)
        selector = create_selector(method.selector, minimum=config.router.minimum, **method.options)
        head = _train_head(plan, unit, selector, parts, on_epoch) if manifest.classes else None
    save_tensors(folder / HEAD, {} if head is None else module_tensors(head, "head."), {"method": str(method)})
    frames: list[pd.DataFrame] = []
    tensors: dict[str, np.ndarray] = {}
    ids: dict[str, list[str]] = {}
    for view, rows in {AS_IS: parts.validation, OFF_CENTER: parts.off_center}.items():
        if "has_mask" in selector.requires:
            rows = rows[store.has_mask.numpy()[rows]]
        if not len(rows):
            continue
        frame, routing = evaluate_rows(rows, store, selector, head, config.budgets, config.seed, manifest)
        frames.append(frame.assign(study="", dataset=manifest.name, view=view, method=str(method), seed=unit.seed))
        tensors |= {f"{view}|{name}": value for name, value in routing.items()}
        ids[view] = [store.ids[row] for row in rows]
    write_predictions(folder / PREDICTIONS, pd.concat(frames, ignore_index=True), manifest.classes)
    write_json(folder / IMAGES, ids)
    write_safetensors(folder / ROUTING, save(tensors))


def _train_head(plan: Plan, unit: Unit, selector: Selector, parts: Parts, on_epoch: OnEpoch | None) -> Head:
    """Train the head of a selector that does not learn, on the tokens that it keeps at all budgets."""
    store, config = plan.sources.store, plan.unit_config(unit)
    judge = epoch_judge(store, parts.select, selector, config)
    trainer = PooledHead(unit.method.head, store.dim, len(plan.sources.manifest.classes), config, on_epoch, judge)
    rows = parts.head
    if "has_mask" in selector.requires:
        rows = rows[store.has_mask.numpy()[rows]]
    label = store.label.numpy()[rows]
    if selector.stochastic or trainer.head.reads == "tokens":
        history = trainer.train_on_store(store, rows, label, selector, config.budgets)
    else:
        # One file for all heads and seeds: what such a selector keeps depends on neither.
        key = sha256_json([store.identity, selector.name, selector.options(), rows.tolist(), list(config.budgets)])[:16]
        pooled = pool_to_file(plan.out / "pooled" / f"{selector.name}-{key}.npy", store, rows, selector, config.budgets)
        history = trainer.train_on_file(pooled, label)
    write_lines(plan.folder(unit) / METRICS, history)
    return trainer.head


def load_unit(info: RunInfo, unit: Unit, dim: int) -> RoutedClassifier | None:
    """Load selector and head (none without class labels) of a finished unit; None for an ablation, which has no training."""
    if unit.method.ablation is not None:
        return None
    folder, method = info.path / "units" / unit.name, info.methods[str(unit.method)]
    config, kind = method.train_config, selector_class(method.selector)
    selector: Selector
    if issubclass(kind, LearnedSelector):
        tensors, _ = load_tensors(folder / CHECKPOINT)
        selector = kind.from_config(dim, config, len(info.classes))
        selector.load_state_dict(split_prefix(tensors, "best/selector."))
    else:
        selector = create_selector(method.selector, minimum=config.router.minimum, **unit.method.options)
    if not info.classes:
        return RoutedClassifier(selector, None).eval()
    head = create_head(method.head, dim, len(info.classes))
    head.load_state_dict(split_prefix(load_tensors(folder / HEAD)[0], "head."))
    return RoutedClassifier(selector, head).eval()


# From finished units to the files of a run ---------------------------------------------------------------------------


def _collect(plan: Plan, studies: Sequence[Study], done: Sequence[Unit]) -> pd.DataFrame:
    """Write the files of the run from its finished units and return the tidy results."""
    frames = {unit: read_predictions(plan.folder(unit) / PREDICTIONS)[0] for unit in done}
    parts = []
    for study in studies:
        for unit in study.units():
            if unit in frames:
                frame = frames[unit]
                wanted = frame["budget"].isin(study.budgets) & (study.off_center | (frame["view"] == AS_IS))
                parts.append(frame[wanted].assign(study=study.name))
    classes, grid = plan.sources.manifest.classes, plan.sources.store.grid
    results = write_tables(plan.out, pd.concat(parts, ignore_index=True), classes, *_collect_routing(plan, done), grid)
    write_lines(
        plan.out / METRICS,
        [
            {"unit": unit.name, "method": str(unit.method), "seed": unit.seed, **row}
            for unit in done
            if (plan.folder(unit) / METRICS).exists()
            for row in read_lines(plan.folder(unit) / METRICS)
        ],
    )
    _describe(plan, studies, done).write()
    return results


def _collect_routing(plan: Plan, done: Sequence[Unit]) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Return patch orders and scores of all units, and the images of each view: those of the first unit that saw all of them."""
    images: dict[Unit, dict[str, list[str]]] = {unit: read_json(plan.folder(unit) / IMAGES) for unit in done}
    ids: dict[str, list[str]] = {}
    for by_view in images.values():
        for view, names in by_view.items():
            if len(names) > len(ids.get(view, [])):
                ids[view] = names
    tensors: dict[str, np.ndarray] = {}
    for unit, by_view in images.items():
        with safe_open(str(plan.folder(unit) / ROUTING), framework="numpy") as stream:
            for key in stream.keys():  # noqa: SIM118
                view, name = key.split("|")
                if by_view[view] == ids[view]:
                    tensors.setdefault(routing_name(view, name, str(unit.method), unit.seed), stream.get_tensor(key))
    return tensors, ids


def _describe(plan: Plan, studies: Sequence[Study], done: Sequence[Unit]) -> RunInfo:
    manifest, store = plan.sources.manifest, plan.sources.store
    methods = {}
    for method in (unit.method for unit in done):
        head = method.head if manifest.classes else "none"
        settings = to_dict(method.config(plan.config))
        methods[str(method)] = MethodInfo(method.selector, head, method.variant, method.learned, settings)
    return RunInfo.of(
        plan.out,
        manifest,
        plan.sources.manifest_path,
        store,
        config=to_dict(plan.config),
        methods=methods,
        main=_main_method(done, store.fixed_budget is not None),
        studies=tuple(
            {"name": study.name, "methods": list(study.methods), "seeds": list(study.seeds), "budgets": list(study.budgets)}
            for study in studies
        ),
        units=tuple(unit.name for unit in done),
        seeds=tuple(sorted({unit.seed for unit in done})),
        hashes={"manifest": manifest.hash, "split": manifest.split_hash, "store": store.identity},
    )


def _main_method(done: Sequence[Unit], routed: bool) -> str | None:
    """Return the method that becomes the saved model: the preferred recipe if the run has it, else the first learned selector.

    On tokens that were routed before or inside the backbone it is the method that reads them all: no selector is left to learn.
    """
    seed = min(unit.seed for unit in done)
    methods = [unit.method for unit in done if unit.seed == seed]
    if routed:
        return str(methods[0])
    learned = [str(method) for method in methods if method.learned and method.ablation is None]
    return next((name for name in (*HEADLINE_METHODS, *learned) if name in learned), None)
