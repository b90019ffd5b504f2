"""What a running sweep shows: the epochs inside the running units, and an estimate of the time left that says what it rests on.

Units differ in length by orders of magnitude, so counting them would be no estimate. Each unit reports its epochs in a small file;
finished units tell how long others of their kind take.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from medtokenbudget.config import TrainConfig
from medtokenbudget.experiments.units import Plan, Unit
from medtokenbudget.progress import progress
from medtokenbudget.routing import selector_class
from medtokenbudget.training.pooled import OnEpoch

FILE = "progress.json"
INTERVAL = 1.0
"""Seconds between two looks at the running units."""
_STAGES = {"lesion-first": ("selector", "head"), "joint": ("selector",)}


@dataclass(frozen=True)
class Pace:
    """How far one running unit is.

    Attributes:
        share: Part of its epochs that is done, over all its stages.
        seconds: Time since it started.
        text: Where it is, such as 'lats epoch 12/50'.
    """

    share: float
    seconds: float
    text: str


def reporter(plan: Plan, unit: Unit) -> OnEpoch:
    """A callback for the trainer that keeps the unit's progress file up to date."""
    folder, started = plan.folder(unit), time.time()
    stages = list(stages_of(unit, plan.unit_config(unit)))

    def report(stage: str, done: int, total: int) -> None:
        if not (folder / FILE).exists():  # a selector that is there already leaves only its head to train
            del stages[: stages.index(stage)]
        state = {"stage": stage, "done": done, "total": total, "started": started, "stages": stages}
        folder.mkdir(parents=True, exist_ok=True)
        # Not worth an fsync: the file is only looked at while the unit runs.
        temporary = folder / f".{FILE}.{os.getpid()}"
        temporary.write_text(json.dumps(state), encoding="utf-8")
        os.replace(temporary, folder / FILE)

    return report


def forget(plan: Plan, units: Sequence[Unit]) -> None:
    """Remove the progress files, also those of units that were killed."""
    for unit in units:
        for path in (plan.folder(unit) / FILE, *plan.folder(unit).glob(f".{FILE}.*")):
            path.unlink(missing_ok=True)


def stages_of(unit: Unit, config: TrainConfig) -> tuple[str, ...]:
    """The stages that a unit trains in."""
    return _STAGES[config.recipe] if unit.method.learned else ("head",)


def kind_of(unit: Unit, config: TrainConfig) -> tuple[Any, ...]:
    """Units of one kind take about equally long."""
    if unit.method.ablation is not None:
        return ("ablation",)
    if unit.method.learned:
        return (unit.method.selector, unit.method.head, config.recipe, config.epochs, config.views, config.patches)
    return ("head", unit.method.head, selector_class(unit.method.selector).stochastic, config.head_epochs, config.views)


def read_pace(folder: Path, name: str, now: float) -> Pace | None:
    """The progress of a unit that is running, or None if it has not finished an epoch yet."""
    try:
        state = json.loads((folder / FILE).read_text(encoding="utf-8"))
        stages, stage = state["stages"], state["stage"]
        part = state["done"] / state["total"]
        # The head's epochs are much shorter than the selector's, so a head that comes second counts for little.
        weights = [1.0 if index == 0 else 0.1 for index in range(len(stages))]
        share = sum(weights[: stages.index(stage)]) + weights[stages.index(stage)] * part
        text = f"{name} {'head ' if stage == 'head' and len(stages) > 1 else ''}epoch {state['done']}/{state['total']}"
        return Pace(share / sum(weights), max(0.0, now - state["started"]), text)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def time_left(
    waiting: Sequence[tuple[Any, ...]],
    running: Sequence[tuple[tuple[Any, ...], Pace | None]],
    finished: dict[tuple[Any, ...], list[float]],
    jobs: int,
) -> tuple[float, int]:
    """Seconds that are left, and the number of units about whose length nothing is known yet.

    Args:
        waiting: Kinds of the units that have not started.
        running: Kinds and progress of the units that run.
        finished: Kind to the seconds that finished units took.
        jobs: Units at the same time.
    """
    usual = {kind: sum(seconds) / len(seconds) for kind, seconds in finished.items()}
    for kind, pace in running:
        if kind not in usual and pace is not None and pace.share > 0:
            usual[kind] = pace.seconds / pace.share
    left, unknown = [], 0
    for kind, pace in running:
        if pace is not None and pace.share > 0:
            left.append(pace.seconds / pace.share - pace.seconds)
        elif kind in usual:
            left.append(usual[kind])
        else:
            unknown += 1
    left += [usual[kind] for kind in waiting if kind in usual]
    unknown += sum(kind not in usual for kind in waiting)
    return max(sum(left) / max(1, jobs), max(left, default=0.0)), unknown


class Watch:
    """The progress bar of a sweep."""

    def __init__(self, plan: Plan, units: Sequence[Unit], jobs: int) -> None:
        self.plan, self.jobs = plan, jobs
        self.kinds = {unit: kind_of(unit, plan.unit_config(unit)) for unit in units}
        self.waiting, self.running = list(units), dict[Unit, float]()
        self.finished: dict[tuple[Any, ...], list[float]] = {}
        self.bar = progress(total=len(units), what="Training", unit="unit", pace=False)
        for unit in units:
            (plan.folder(unit) / FILE).unlink(missing_ok=True)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def start(self, unit: Unit) -> None:
        """A unit starts in this process."""
        self.waiting.remove(unit)
        self.running[unit] = time.time()
        self.refresh()

    def finish(self, unit: Unit) -> None:
        """A unit is done, wherever it ran."""
        started = self.running.pop(unit, None)
        if unit in self.waiting:
            self.waiting.remove(unit)
        pace = read_pace(self.plan.folder(unit), unit.name, time.time())
        if started is not None or pace is not None:
            seconds = pace.seconds if pace is not None else time.time() - (started or time.time())
            self.finished.setdefault(self.kinds[unit], []).append(seconds)
        (self.plan.folder(unit) / FILE).unlink(missing_ok=True)
        self.bar.update()
        self.refresh()

    def refresh(self) -> None:
        """Look at the running units and show where they are."""
        now = time.time()
        for unit in [u for u in self.waiting if (self.plan.folder(u) / FILE).exists()]:
            self.waiting.remove(unit)
            self.running[unit] = now
        paces = {unit: read_pace(self.plan.folder(unit), _name(unit), now) for unit in self.running}
        running = [(self.kinds[unit], pace) for unit, pace in paces.items()]
        seconds, unknown = time_left([self.kinds[unit] for unit in self.waiting], running, self.finished, self.jobs)
        parts = [pace.text for pace in paces.values() if pace is not None]
        parts.append(_left(seconds, unknown))
        with contextlib.suppress(ValueError):  # a bar that is closed already
            self.bar.set_postfix_str(", ".join(part for part in parts if part))


def _name(unit: Unit) -> str:
    return f"{unit.method} (seed {unit.seed})"


def _left(seconds: float, unknown: int) -> str:
    """The estimate in words; nothing is said while nothing is known."""
    if seconds <= 0:
        return ""
    about = tqdm.format_interval(seconds)
    if unknown:
        return f"at least {about} left ({unknown} unit{'s' if unknown > 1 else ''} not timed yet)"
    return f"about {about} left"
