"""What can be refused before anything is trained or written: a request that cannot end well, or that would spoil what is there.

Its own file because hours of work and an earlier run depend on it, and every kind of run goes through it.
"""

from __future__ import annotations

from collections.abc import Sequence

from medtokenbudget.config import SIGNALS, TrainConfig, to_dict
from medtokenbudget.data import Manifest
from medtokenbudget.data.manifest import listed
from medtokenbudget.devices import resolve_device
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.experiments.units import Plan, Unit
from medtokenbudget.features import FeatureStore
from medtokenbudget.files import dotted, read_json
from medtokenbudget.routing.lats import ordered_signals
from medtokenbudget.training.parts import check_fits


def check_config(config: TrainConfig) -> None:
    """Refuse settings that no training can be made with, all at once."""
    faults = [
        f"{name} must be 1 or more, got {getattr(config, name)}"
        for name in ("epochs", "head_epochs", "batch_size", "evaluate_every")
        if getattr(config, name) < 1
    ]
    wrong = [budget for budget in (*config.budgets, config.selection_budget) if not 0 < budget <= 1]
    if wrong or not config.budgets:
        faults.append(f"budgets are shares of the patches in (0, 1], got {listed(wrong) or 'none'}")
    if config.recipe == "lesion-first" and config.losses.lesion <= 0:
        faults.append(
            "the recipe 'lesion-first' learns from the lesion alone: losses.lesion must be above 0, or take --preset paper"
        )
    if faults:
        raise RequestError("; ".join(faults) + ".")
    ordered_signals(config.lats.signals, SIGNALS)
    resolve_device(config.device)


def check_data(manifest: Manifest, store: FeatureStore) -> None:
    """Refuse data that nothing can be trained on."""
    if store.config["keep"] != "patches":
        raise RequestError(f"{store.path} holds routed tokens only; a training needs a store of all patches. Extract one.")
    labelled = manifest.part("train").rows["label"].notna().sum()
    if not labelled:
        raise RequestError(
            "no training image of the manifest has a label. Put the images into a folder for each class, or use a CSV."
        )
    check_fits(manifest, store)


def check_run(plan: Plan, units: Sequence[Unit]) -> None:
    """Refuse to write over results that were made with other options, or to drop some that are there."""
    info = read_json(plan.out / "run.json") if (plan.out / "run.json").exists() else {}
    dropped = sorted(set(info.get("units", ())) - {unit.name for unit in units})
    if dropped:
        raise RequestError(
            f"{plan.out} holds results of {listed(dropped)}, which this command leaves out. Name them too, or use another --out."
        )
    for unit in units:
        path = plan.folder(unit) / "unit.json"
        state = read_json(path) if path.exists() else {}
        if state.get("status") == "done" and state.get("identity") != plan.identity(unit):
            wanted, found = dotted(to_dict(plan.config)), dotted(info.get("config", {}))
            advice = "Use the same options to go on, or another --out."
            if not info or wanted == found:
                raise MismatchError(
                    f"{unit.method} with seed {unit.seed} in {plan.out} was made from other data or options. {advice}"
                )
            raise MismatchError.between(f"the run in {plan.out}", wanted, {name: found.get(name) for name in wanted}, advice)
