"""The list of tables of a report, in the order of the page."""

from __future__ import annotations

from medtokenbudget.reporting import analysis_tables as analysis
from medtokenbudget.reporting import data_tables as data
from medtokenbudget.reporting import external_tables as external
from medtokenbudget.reporting import loss_tables as losses
from medtokenbudget.reporting import study_tables as studies
from medtokenbudget.reporting import sweep_tables as sweeps
from medtokenbudget.reporting.evidence import Evidence
from medtokenbudget.reporting.intervals import Intervals
from medtokenbudget.reporting.table import Table

_MASK_METRICS = ("accuracy", "macro_f1", "balanced_accuracy", "retention", "retention_of_ceiling", "precision", "enrichment")
_OWN_TABLE = {"main", "curriculum", "kvasir", "subset", "center-bias", "recipe"}


def make_tables(evidence: Evidence, intervals: Intervals, named: bool = True) -> list[Table]:
    """Every table that the run has numbers for; unless `named`, images have numbers in place of their names."""
    made = [
        sweeps.main(evidence, intervals),
        sweeps.sweep(evidence, "retention", "retention-sweep", "Lesion retention (%) at all budgets"),
        sweeps.sweep(evidence, "accuracy", "accuracy-sweep", "Accuracy (%) at all budgets"),
        sweeps.sweep(evidence, "macro_f1", "macro-f1-sweep", "Macro F1 (%) at all budgets"),
        sweeps.further_measures(evidence),
        *[studies.by_budget(evidence, s, _metrics(s)) for s in evidence.studies if s not in {*_OWN_TABLE, evidence.study}],
        studies.center_bias(evidence),
        *studies.paired_seeds(evidence),
        studies.curriculum(evidence),
        studies.kvasir(evidence),
        studies.recipe(evidence),
        analysis.strata(evidence, intervals.by_size, "size-strata", "Retention by lesion size", "Lesion size"),
        analysis.strata(evidence, intervals.by_class, "class-strata", "Retention by class", "Class"),
        losses.lost_places(evidence),
        external.own_validation(evidence, intervals),
        external.promises(evidence),
        external.strata(evidence, intervals),
        analysis.worst(evidence, named),
        analysis.significance(evidence, intervals),
        data.beside_paper(evidence),
        data.subset(evidence),
        data.prevalence(evidence),
    ]
    return [table for table in made if table is not None]


def _metrics(study: str) -> tuple[str, ...]:
    return _MASK_METRICS if study == "mask-free" else studies.SHOWN
