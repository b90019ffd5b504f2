"""The sweep: methods x seeds as independent units, collected into one run directory.

A unit is one method with one seed, trained and evaluated at every budget on every view of the validation images. It is idempotent:
it writes its folder `units/METHOD-SEED` and records in `unit.json` that it is done, or why it failed. A second call resumes:
finished units are kept, units that failed run again.
"""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open
from safetensors.numpy import save

from medtokenbudget import files
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.views import OFF_CENTER
from medtokenbudget.config import HEADLINE_METHODS, TrainConfig, to_dict, train_config_from_dict
from medtokenbudget.data import Manifest
from medtokenbudget.data.manifest import listed
from medtokenbudget.errors import MedTokenBudgetError, MismatchError, RequestError, WorkError
from medtokenbudget.files import exclusive, load_tensors, save_tensors
from medtokenbudget.heads import create_head
from medtokenbudget.heads.head import RoutedClassifier
from medtokenbudget.jobs import Advance, Execution, run_units
from medtokenbudget.routing import LearnedSelector, Selector, create_selector, selector_class
from medtokenbudget.runs import preflight
from medtokenbudget.runs.method import Method
from medtokenbudget.runs.run import (
    AS_IS,
    FILE,
    METRICS,
    OF_IMAGES,
    PREDICTIONS,
    ROUTING,
    Run,
    content_hash,
    read_predictions,
    routing_name,
    write_predictions,
    write_tables,
)
from medtokenbudget.runs.studies import Study, Unit
from medtokenbudget.runtime import cpu_threads, progress, say
from medtokenbudget.training.pooled import pool_and_judge, probabilities, with_masks
from medtokenbudget.training.rows import TrainingRows
from medtokenbudget.training.trainer import CHECKPOINT, TRAINING_VERSION, OnEpoch, module_tensors, split_prefix, train

UNIT, HEAD, IMAGES = "unit.json", "head.safetensors", "images.json"
UNIT_FILES = (HEAD, IMAGES, PREDICTIONS, ROUTING)
"""What a finished unit leaves in its folder. `unit.json` has their hashes, and those of checkpoint and metrics if it trained."""


def run_studies(
    run: Run, studies: Sequence[Study], execution: Execution | None = None, chosen_for_user: Collection[str] = ()
) -> None:
    """Run the units that the studies need, each once, and collect their predictions under the studies' names.

    Settings in `chosen_for_user` are the caller's choice: they may go unused.
    """
    with begun(run, studies, chosen_for_user) as (units, done):
        _run_units(run, units, done, execution or Execution())
        collect(run, studies, [unit for unit in units if unit in done])


@contextmanager
def begun(run: Run, studies: Sequence[Study], chosen_for_user: Collection[str] = ()) -> Iterator[tuple[list[Unit], set[Unit]]]:
    """Check a request and lock its run directory; yield all units of the studies, and those that are done already."""
    preflight.check(run, studies, chosen_for_user)
    # Every unit once, trainings before the ablations that use them.
    wanted = (unit for study in studies for unit in study.units())
    units = list(dict.fromkeys(unit for one in wanted for unit in (Unit(one.method.trained_as, one.seed), one)))
    with exclusive(run.path):
        _check_same_options(run, units)
        if run.in_memory:
            run.manifest.write(run.manifest_path)  # worker processes read it there
        yield units, {unit for unit in units if is_done(run, unit)}


def _check_same_options(run: Run, units: Sequence[Unit]) -> None:
    """Reject a run directory whose results were made with other options, or with units that this command leaves out."""
    earlier = Run(run.path) if (run.path / FILE).exists() else None
    dropped = sorted(set(earlier.units if earlier else ()) - {unit.name for unit in units})
    if dropped:
        raise RequestError(
            f"{run.path} contains results of {listed(dropped)}, which this command leaves out. Add them, or use another `out`."
        )
    # Failed units do not count: they run again, and may do so with other options.
    for unit in units:
        state = _read_state(folder_of(run, unit))
        if state.get("status") == "done" and state.get("identity") != identity(run, unit):
            advice = "Use the same options to resume, or another `out`."
            expected, recorded = files.dotted(to_dict(run.config)), files.dotted(earlier.settings if earlier else {})
            if not earlier or expected == recorded:
                raise MismatchError(
                    f"{unit.method} with seed {unit.seed} in {run.path} was made with other data, options or another version of "
                    f"the training. {advice}"
                )
            recorded = {name: recorded.get(name) for name in expected}
            raise MismatchError.between(f"The run in {run.path}", expected, recorded, advice)


def trainings(run: Run, units: Iterable[Unit]) -> list[list[Unit]]:
    """Group units that share one selector: heads behind a selector that is trained without them, or ablations of it."""
    groups: dict[Unit, list[Unit]] = {}
    for unit in units:
        method = unit.method.trained_as
        if method.learned and config_of(run, unit).recipe != "joint":
            method = replace(method, head="")  # the selector does not depend on the head
        groups.setdefault(Unit(method, unit.seed), []).append(unit)
    return list(groups.values())


def _run_units(run: Run, units: Sequence[Unit], done: set[Unit], execution: Execution) -> None:
    jobs = [group for group in trainings(run, units) if not done.issuperset(group)]
    # Counted over the whole run, not over what is left of it: the number of threads of a unit follows from the number of processes
    # and changes the last bit of a training. A resumed run must end in the same bytes as one that never stopped.
    cores = os.cpu_count() or 1
    processes = min(execution.jobs or cores, len(units))
    # Processes with one thread each beat one process with many threads here: the tensors of a step are small.
    threads = 1 if execution.engine == "ray" else 0 if processes == 1 else max(1, cores // processes)
    processes = min(processes, max(1, len(jobs)))
    with training_bar(len(units) - len(done)) as bar:
        here = bar if execution.engine == "local" and processes == 1 else None  # a bar cannot be sent to another process
        make = partial(run_trainings, run, frozenset(done), threads, here)
        for finished in run_units(jobs, make, execution, processes=processes, device=run.config.device):
            done |= {unit for unit, is_finished in finished.items() if is_finished}
            bar.update(len(finished))
    say_failed(run, units, done)
    if not done:
        raise WorkError("No method of the sweep finished; the reasons are above. Run the same command to try again.")


def training_bar(units: int) -> Any:
    """Return a progress bar. Units differ in length by orders of magnitude: a rate over them would be no estimate."""
    return progress(total=units, what="Training", unit="unit", pace=False)


def show_epochs(bar: Any, unit: Unit) -> OnEpoch:
    return lambda stage, done, total: bar.set_postfix_str(f"{unit.method} (seed {unit.seed}), {stage} epoch {done}/{total}")


def say_failed(run: Run, units: Sequence[Unit], done: Collection[Unit]) -> None:
    for unit in units:
        if unit not in done:
            say(f"No results for {unit.method} with seed {unit.seed}: {failure(run, unit)}")


def failure(run: Run, unit: Unit) -> str:
    return str(_read_state(folder_of(run, unit)).get("error", "it was not run."))


def require_complete(run: Run) -> None:
    """Raise a WorkError that lists the units without results; those of the other units are in the run directory."""
    wanted = [(Method.parse(text), seed) for study in run.studies for seed in study["seeds"] for text in study["methods"]]
    failed = [f"{method} (seed {seed})" for method, seed in dict.fromkeys(wanted) if Unit(method, seed).name not in run.units]
    if failed:
        raise WorkError(
            f"{len(failed)} of {len(set(wanted))} trainings failed: {', '.join(failed)}. The reasons are above and in "
            f"{run.path / 'units'}. The other results are in {run.path}. Run the same command again to retry."
        )


def folder_of(run: Run, unit: Unit) -> Path:
    return run.path / "units" / unit.name


def config_of(run: Run, unit: Unit) -> TrainConfig:
    return unit.method.config(replace(run.config, seed=unit.seed))


def identity(run: Run, unit: Unit) -> str:
    """Hash everything that decides the result of a unit."""
    settings = to_dict(config_of(run, unit))
    del settings["device"]  # a run may move to another machine
    data = [run.manifest.name, run.manifest.hash, run.store.identity]
    return files.sha256_json([TRAINING_VERSION, settings, str(unit.method), *data])


def is_done(run: Run, unit: Unit) -> bool:
    """Tell whether a unit is finished; one of another configuration, or with a damaged file, is not."""
    folder = folder_of(run, unit)
    state = _read_state(folder)
    if state.get("identity") != identity(run, unit) or state.get("status") != "done":
        return False
    hashes = state.get("files", {})
    for path in (folder / name for name in dict.fromkeys((*UNIT_FILES, *hashes))):
        if not path.is_file() or content_hash(path) != hashes.get(path.name):
            say(f"{path} is missing or damaged; {unit.method} with seed {unit.seed} runs again.")
            return False
    return True


def _read_state(folder: Path) -> dict[str, Any]:
    """Read `unit.json`; one that is missing or damaged counts as empty, so that the unit runs again."""
    try:
        return files.read_sealed(folder / UNIT, "")
    except RequestError:
        return {}


def run_trainings(
    run: Run, done: Collection[Unit], threads: int, bar: Any, _state: None, groups: Sequence[Sequence[Unit]], _advance: Advance
) -> Iterator[dict[Unit, bool]]:
    """Run the units that are not done of each training, one after another, and tell which of them finished."""
    for group in groups:
        finished = {}
        with cpu_threads(threads):
            for unit in group:
                if unit not in done:
                    on_epoch = None if bar is None else show_epochs(bar, unit)
                    finished[unit] = run_unit(run, unit, group[0], on_epoch) is not None
        yield finished


def run_unit(run: Run, unit: Unit, first: Unit | None = None, on_epoch: OnEpoch | None = None) -> RoutedClassifier | None:
    """Train and evaluate one unit; a failure is recorded with its reason and gives None: the other units still run.

    The folder of the unit `first` has the selector of this one, trained or under way.
    """
    method, folder, config = unit.method, folder_of(run, unit), config_of(run, unit)
    state: dict[str, Any] = {"method": str(method), "seed": unit.seed, "identity": identity(run, unit)}
    classifier = None
    try:
        rows = TrainingRows.of(run.manifest, run.store, config)
        # An ablation uses the folder of its training, where it finds a finished checkpoint.
        trained_in = folder_of(run, Unit(method.trained_as, unit.seed))
        selector: str | Selector = method.selector
        if not method.learned:
            selector = create_selector(method.selector, minimum=config.router.minimum, **method.options)
        # In the joint recipe the classification moves the selector too, so nothing can be shared.
        elif first is not None and config.recipe != "joint":
            _copy_training(folder_of(run, first), trained_in)
        classifier = train(run.store, rows, config, selector, method.head, trained_in, run.path / "pooled", on_epoch)
        if isinstance(classifier.selector, LearnedSelector):
            classifier.selector.ablate(method.ablation)
        _evaluate(run, unit, classifier, rows)
        written = [*UNIT_FILES, *(name for name in (CHECKPOINT, METRICS) if (folder / name).is_file())]
        state |= {"status": "done", "files": {name: content_hash(folder / name) for name in written}}
    except MedTokenBudgetError as error:
        state |= {"status": "failed", "error": str(error)}
    except MemoryError:
        state |= {"status": "failed", "error": "Out of memory. Run the same command again with fewer `jobs`."}
    except Exception as error:  # a third-party selector may raise anything; the other units still run
        state |= {"status": "failed", "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    # Last: a unit that was killed before has no state, or an old one, and runs again.
    files.write_sealed(folder / UNIT, state)
    return classifier if state["status"] == "done" else None


def _copy_training(source: Path, folder: Path) -> None:
    """Begin with the selector of another unit: under lesion-first it is trained without the head."""
    if (folder / CHECKPOINT).exists() or not (source / CHECKPOINT).exists():
        return
    for name in (METRICS, CHECKPOINT):  # the checkpoint last: without it the training starts anew
        if (source / name).exists():
            with files.atomic_write(folder / name) as temporary:
                shutil.copyfile(source / name, temporary)


def _evaluate(run: Run, unit: Unit, classifier: RoutedClassifier, rows: TrainingRows) -> None:
    folder, config, head = folder_of(run, unit), config_of(run, unit), classifier.head
    save_tensors(folder / HEAD, {} if head is None else module_tensors(head, "head."), {"method": str(unit.method)})
    views = {AS_IS: rows.validation, OFF_CENTER: rows.off_center}
    frames, routing, images = evaluate_views(
        classifier, str(unit.method), unit.seed, run.store, run.manifest, views, config.budgets
    )
    write_predictions(folder / PREDICTIONS, pd.concat(frames, ignore_index=True).assign(study=""), run.manifest.classes)
    files.write_json(folder / IMAGES, images)
    tensors = {f"{view}|{name}": value for view, of_view in routing.items() for name, value in of_view.items()}
    files.write_bytes(folder / ROUTING, save(tensors))


@torch.no_grad()
def evaluate_views(
    classifier: RoutedClassifier,
    method: str,
    seed: int,
    store: FeatureStore,
    manifest: Manifest,
    views: Mapping[str, np.ndarray],
    budgets: Sequence[float],
) -> tuple[list[pd.DataFrame], dict[str, dict[str, np.ndarray]], dict[str, list[str]]]:
    """Evaluate a method on rows of a store, given by view, at every budget.

    Returns the columns of `predictions.parquet` but the study, class -1 without a head, and by view patch orders and scores with
    the lesion patches, and the images that were read. A selector that looks at masks (the oracle) reads only images with one.
    """
    selector, head = classifier.selector, classifier.head
    frames: list[pd.DataFrame] = []
    routing: dict[str, dict[str, np.ndarray]] = {}
    images: dict[str, list[str]] = {}
    for view, of_view in views.items():
        rows = with_masks(store, of_view, selector)
        if not len(rows):
            continue
        pooled, evidence = pool_and_judge(store, rows, selector, budgets, seed)
        probability, label = np.zeros((len(rows), len(budgets), 0), np.float32), np.full(len(rows), -1)
        predicted = np.full(probability.shape[:2], -1)
        if head is not None:
            probability = probabilities(head, store, rows, selector, budgets, seed, pooled)
            predicted, label = probability.argmax(-1), store.label.numpy()[rows]
        images[view] = [store.ids[row] for row in rows]
        known = known_columns(store, rows, manifest) | {"view": view, "method": method, "seed": seed, "label": label}
        for index, budget in enumerate(budgets):
            kept = {
                "budget": budget,
                "k": evidence.k[index],
                "predicted": predicted[:, index],
                "probabilities": list(probability[:, index].astype(np.float32)),
                "kept_lesion": evidence.kept_lesion[:, index],
                "purity": evidence.purity[:, index],
                "lesion_dominated": evidence.dominated[:, index],
                "lesion_mass": evidence.mass[:, index],
            }
            frames.append(pd.DataFrame(known | kept))
        ranked = {"order": evidence.order, "scores": evidence.scores}
        routing[view] = lesion_patches(store, rows)
        routing[view] |= {name: value for name, value in ranked.items() if value is not None}
    return frames, routing, images


def known_columns(store: FeatureStore, rows: np.ndarray, manifest: Manifest) -> dict[str, Any]:
    """Return the columns of `predictions.parquet` that do not depend on the method."""
    names, masked = [store.ids[row] for row in rows], store.has_mask.numpy()[rows]
    return {
        "dataset": manifest.name,
        "n_patches": store.n,
        "image_id": names,
        "group": manifest.rows.set_index("image_id")["group"].reindex(names).to_numpy(),
        "lesion": np.where(masked, store.lesion.numpy()[rows].sum(1).astype(float), np.nan),
    }


def lesion_patches(store: FeatureStore, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: getattr(store, name).numpy()[rows].astype(np.uint8) for name in OF_IMAGES}


def load_unit(run: Run, unit: Unit) -> RoutedClassifier:
    """Load selector and head (none without class labels) of a finished unit that is not an ablation."""
    folder, entry = run.path / "units" / unit.name, run.methods[str(unit.method)]
    config, kind = train_config_from_dict(entry["config"]), selector_class(entry["selector"])
    dim, classes = run.backbone["dim"], len(run.classes)
    selector: Selector
    if issubclass(kind, LearnedSelector):
        selector = kind.from_config(dim, config, classes)
        selector.load_state_dict(split_prefix(load_tensors(folder / CHECKPOINT)[0], "best/selector."))
    else:
        selector = create_selector(entry["selector"], minimum=config.router.minimum, **unit.method.options)
    head = create_head(entry["head"], dim, classes) if classes else None
    if head is not None:
        head.load_state_dict(split_prefix(load_tensors(folder / HEAD)[0], "head."))
    return RoutedClassifier(selector, head).eval()


def collect(run: Run, studies: Sequence[Study], done: Sequence[Unit]) -> None:
    """Write the files of the run from its finished units."""
    frames = {unit: read_predictions(folder_of(run, unit) / PREDICTIONS)[0] for unit in done}
    parts = []
    for study in studies:
        for unit in study.units():
            if unit in frames:
                frame = frames[unit]
                # A unit is trained and evaluated once for all studies; each takes its budgets and views of it.
                wanted = frame["budget"].isin(study.budgets) & (study.off_center | (frame["view"] == AS_IS))
                parts.append(frame[wanted].assign(study=study.name))
    routing, images = _collect_routing(run, done)
    write_tables(run.path, pd.concat(parts, ignore_index=True), run.manifest.classes, routing, images, run.store.grid)
    epochs = []
    for unit in done:
        about = {"unit": unit.name, "method": str(unit.method), "seed": unit.seed}
        log = folder_of(run, unit) / METRICS
        epochs += [about | row for row in (files.read_lines(log) if log.exists() else ())]
    files.write_lines(run.path / METRICS, epochs)
    methods = {}
    for method in (unit.method for unit in done):
        about = {name: getattr(method, name) for name in ("selector", "head", "variant", "learned")}
        about |= {} if run.manifest.classes else {"head": "none"}
        methods[str(method)] = about | {"config": to_dict(method.config(run.config))}
    run.finish(
        methods=methods,
        main=_main_method(done, run.store.fixed_budget is not None),
        studies=[{name: getattr(study, name) for name in ("name", "methods", "seeds", "budgets")} for study in studies],
        units=[unit.name for unit in done],
        seeds=sorted({unit.seed for unit in done}),
        hashes={"manifest": run.manifest.hash, "split": run.manifest.split_hash, "store": run.store.identity},
    )


def _collect_routing(run: Run, done: Sequence[Unit]) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Return patch orders and scores of all units, and the images of each view: those of the first unit that saw all of them."""
    images: dict[Unit, dict[str, list[str]]] = {unit: files.read_json(folder_of(run, unit) / IMAGES) for unit in done}
    ids: dict[str, list[str]] = {}
    for by_view in images.values():
        for view, names in by_view.items():
            if len(names) > len(ids.get(view, [])):
                ids[view] = names
    tensors: dict[str, np.ndarray] = {}
    for unit, by_view in images.items():
        with safe_open(str(folder_of(run, unit) / ROUTING), framework="numpy") as stream:
            for key in stream.keys():  # noqa: SIM118
                view, name = key.split("|")
                if by_view[view] == ids[view]:
                    tensors.setdefault(routing_name(view, name, str(unit.method), unit.seed), stream.get_tensor(key))
    return tensors, ids


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
