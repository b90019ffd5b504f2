"""The sweep on drawn images: same bytes again, killed or damaged runs, failures that do not spread, every kind of selector."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.config import BUDGETS, BackboneConfig, TrainConfig, train_config_from_dict
from medtokenbudget.errors import MismatchError, UnknownNameError
from medtokenbudget.files import read_json, read_lines
from medtokenbudget.heads import head as heads
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.model.saved import located
from medtokenbudget.routing import Ranker, register_selector
from medtokenbudget.routing import base as selectors
from medtokenbudget.runs import Method, Run, sweep
from medtokenbudget.runs.run import read_results
from medtokenbudget.runs.studies import Unit
from medtokenbudget.runs.sweep import UNIT_FILES, load_unit, run_unit, trainings
from tests import processes
from tests.conftest import REPOSITORY
from tests.drawn import Drawn, quick

FILES = ("results.csv", "predictions.parquet", "routing.safetensors", "run.json")


def run_sweep(drawn: Drawn, out: Path, *methods: str, config: TrainConfig | None = None, **options: Any) -> Run:
    settings = config or quick("lesion-first", *methods)
    return mtb.sweep(drawn.manifest_path, drawn.store_path, out, methods, config=settings, **{"jobs": 1, **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_a_second_run_writes_the_same_bytes_and_a_repeated_call_does_no_work(drawn: Drawn, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    methods = ("lats:lesion-first", "random", "center", "tome")
    first = run_sweep(drawn, tmp_path / "a", *methods)
    run_sweep(drawn, tmp_path / "b", *methods)
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "units").rglob("unit.json")}
    assert run_sweep(drawn, tmp_path / "a", *methods).results.equals(first.results)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert set(first.results["budget"]) == set(BUDGETS)


@pytest.mark.slow
def test_the_model_of_a_training_is_saved_from_memory_as_it_would_be_from_its_units(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    arguments = drawn.manifest_path, drawn.store_path, tmp_path / "run", quick("lesion-first")
    with monkeypatch.context() as patch:
        patch.setattr("medtokenbudget.runs.sweep.load_unit", lambda *_: pytest.fail("a unit was read back"))
        trained = mtb.train(*arguments)
    model, tables = contents(tmp_path / "run" / "model"), [(tmp_path / "run" / name).read_bytes() for name in FILES]
    again = mtb.train(*arguments)
    assert contents(tmp_path / "run" / "model") == model
    assert [(tmp_path / "run" / name).read_bytes() for name in FILES] == tables
    assert (again.main, again.units, again.methods) == (trained.main, trained.units, trained.methods)
    run_sweep(drawn, tmp_path / "sweep", "lats:lesion-first", "center", "random")
    for name in (path for path in contents(tmp_path / "sweep" / "units") if not path.endswith(("unit.json", ".jsonl", ".lock"))):
        assert (tmp_path / "run" / "units" / name).read_bytes() == (tmp_path / "sweep" / "units" / name).read_bytes(), name


@pytest.mark.slow
def test_a_selector_that_is_trained_without_its_head_is_trained_once_for_all_heads(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    ticks = itertools.count()
    # No two epochs take equally long by this clock, so equal seconds mean the same epoch.
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks) ** 2))
    run_sweep(drawn, tmp_path / "all", "lats+linear:lesion-first")
    run_sweep(drawn, tmp_path / "all", "lats+linear:lesion-first", "lats+abmil:lesion-first", "lats:lesion-first")
    run_sweep(drawn, tmp_path / "alone", "lats+abmil:lesion-first")
    unit = Path("units", "lats+abmil~lesion-first-42")
    for name in ("checkpoint.safetensors", *UNIT_FILES):
        assert (tmp_path / "all" / unit / name).read_bytes() == (tmp_path / "alone" / unit / name).read_bytes(), name
    rows = [selector_rows(folder) for folder in (tmp_path / "all" / "units").iterdir()]
    assert len(rows[0]) == 2
    assert rows == [rows[0]] * 3, "the seconds of an epoch are the same only if it ran once"
    assert selector_rows(tmp_path / "alone" / unit) != rows[0]


def selector_rows(unit: Path) -> list[dict[str, Any]]:
    return [row for row in read_lines(unit / "metrics.jsonl") if row["stage"] == "selector"]


@pytest.mark.slow
def test_two_processes_and_a_ray_cluster_write_the_same_bytes_as_one_process(drawn: Drawn, tmp_path: Path, ray: Any) -> None:
    torch.set_num_threads(1)
    run_sweep(drawn, tmp_path / "one", "random", "center")
    run_sweep(drawn, tmp_path / "two", "random", "center", jobs=2)
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
        run_sweep(drawn, tmp_path / "ray", "random", "center", jobs=0, engine="ray")
    finally:
        ray.shutdown()
    for name in ("two", "ray"):
        assert (tmp_path / name / "predictions.parquet").read_bytes() == (tmp_path / "one" / "predictions.parquet").read_bytes()


@pytest.mark.parametrize(("jobs", "threads"), [(2, 4), (0, 4), (1, 3)])
def test_the_last_unit_of_a_resumed_run_has_the_threads_of_the_others(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, threads: int
) -> None:
    """Another number of threads changes the last bit of a training."""
    seen = []

    def look(run: Run, unit: Unit, *options: object) -> object:
        seen.append(torch.get_num_threads())
        return run_unit(run, unit)

    run_sweep(drawn, tmp_path, "center")
    monkeypatch.setattr(sweep, "run_unit", look)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run_sweep(drawn, tmp_path, "center", "no-pruning", jobs=jobs)
        assert (seen, torch.get_num_threads()) == ([threads], 3)
    finally:
        torch.set_num_threads(before)


@contextmanager
def moody_selector() -> Iterator[dict[str, bool]]:
    """A selector that fails as long as its mood is bad."""
    mood = {"bad": True}

    @register_selector("moody")
    class Moody(Ranker):
        def score(self, tokens, generator=None):
            if mood["bad"]:
                raise RuntimeError("not today")
            return tokens.patches.norm(dim=-1)

    try:
        yield mood
    finally:
        selectors.SELECTORS.unregister("moody")


def test_a_selector_that_fails_does_not_stop_the_others_and_the_same_command_tries_it_again(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(drawn, tmp_path, "--jobs", 1, "--methods", "center", "moody")
    with moody_selector() as mood:
        assert main(words) == 1
        message = capsys.readouterr().err
        assert "1 of 2 trainings failed: moody (seed 42)." in message
        assert "not today" in message
        assert set(read_results(tmp_path / "results.csv")["method"]) == {"center"}
        assert "not today" in read_json(tmp_path / "units" / "moody-42" / "unit.json")["error"]
        center = (tmp_path / "units" / "center-42" / "unit.json").stat().st_mtime_ns
        mood["bad"] = False
        assert main(words) == 0
        assert set(read_results(tmp_path / "results.csv")["method"]) == {"center", "moody"}
        assert (tmp_path / "units" / "center-42" / "unit.json").stat().st_mtime_ns == center


def test_an_unknown_method_and_units_of_another_version_are_refused_before_any_work(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'center'"):
        run_sweep(drawn, tmp_path, "centre", config=quick("paper", "center"))
    run_sweep(drawn, tmp_path, "center")
    monkeypatch.setattr(sweep, "TRAINING_VERSION", 2)
    with pytest.raises(MismatchError, match=r"center with seed 42 .* another version of\sthe training"):
        run_sweep(drawn, tmp_path, "center")


# Sweeps that are killed or damaged

SMALL = ["--head-epochs", "1", "--batch-size", "16", "--device", "cpu"]
LATS = ["--epochs", "1", "--lats.hidden", "16", "--lats.layers", "1"]


def command(drawn: Drawn, out: Path, *more: object) -> list[str]:
    small = [*SMALL, *(LATS if any(str(word).startswith("lats") for word in more) else ())]
    return [str(word) for word in ("sweep", drawn.manifest_path, "--store", drawn.store_path, "--out", out, *small, *more)]


def descendants(pid: int) -> set[int]:
    """The processes that a process started, and those that they started."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {pid}


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks at processes in /proc")
def test_the_workers_of_a_killed_sweep_end_with_it(drawn: Drawn, tmp_path: Path) -> None:
    methods = ["--methods", "random", "center", "--seeds", *range(20)]
    running = processes.Running(command(drawn, tmp_path / "run", "--jobs", 2, *methods), tmp_path / "log")
    while running.process.is_alive() and not list((tmp_path / "run").glob("units/*/unit.json")):
        time.sleep(0.05)
    workers = descendants(running.pid)
    assert len(workers) >= 2
    running.kill()
    running.wait()
    for _ in range(200):
        if not any(map(is_running, workers)):
            break
        time.sleep(0.1)
    assert not any(map(is_running, workers))
    assert len(list((tmp_path / "run").glob("units/*/unit.json"))) < 40


@pytest.fixture(scope="module")
def whole(drawn: Drawn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole")
    assert main(command(drawn, out, "--jobs", 1, "--methods", "lats:lesion-first", "center")) == 0
    return out


CENTER, OURS = "units/center-42/", "units/lats~lesion-first-42/"


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [
        {f"{CENTER}head.safetensors": False, f"{OURS}head.safetensors": False, "results.csv": False},
        {f"{CENTER}predictions.parquet": True, "predictions.parquet": False},
        {f"{CENTER}routing.safetensors": True, "routing.safetensors": True},
        {f"{CENTER}images.json": True, f"{OURS}unit.json": True},
        {f"{CENTER}unit.json": True, "pooled": False},
        {f"{CENTER}unit.json": False, "pooled": True},
    ],
)
def test_damaged_files_of_a_finished_run_are_made_again(
    drawn: Drawn, whole: Path, capsys: pytest.CaptureFixture[str], cut: dict[str, bool]
) -> None:
    (pooled,) = (whole / "pooled").glob("center-*.npy")
    damaged = {pooled if name == "pooled" else whole / name: cut_off for name, cut_off in cut.items()}
    expected = {path: path.read_bytes() for path in (*damaged, whole / "results.csv", whole / "model/heads.safetensors")}
    for path, cut_off in damaged.items():
        damage(path, cut_off)
    assert main(command(drawn, whole, "--jobs", 1, "--methods", "lats:lesion-first", "center")) == 0
    assert all(path.read_bytes() == data for path, data in expected.items())
    message = capsys.readouterr().err
    for name in cut:
        assert not name.startswith("units") or "unit.json" in name or f"{name} is missing or damaged" in message


def damage(path: Path, cut: bool) -> None:
    """Cut a file in half, or flip one bit near its end."""
    data = bytearray(path.read_bytes())
    if not cut:
        data[-3] ^= 1
    path.write_bytes(data[: len(data) // 2] if cut else data)


# Every kind of selector

SOFT = ("tokenlearner", "tc-ssa", "query-pool:lesion-first")
HARD = ("evit", "frequency", "tome:keys", "dynamicvit-package:lesion-first")
KEPT = ("ats", "rollout", "cropr:mask-free", "dynamicvit", "sparselearn:lesion-first", "relevance", "gradcam-norm1", "box-prior")


@pytest.fixture(scope="module")
def zoo(drawn: Drawn, tmp_path_factory: pytest.TempPathFactory) -> Run:
    methods, out = (*SOFT, *HARD, *KEPT), tmp_path_factory.mktemp("zoo")
    return run_sweep(drawn, out, *methods, budgets=(0.3, 0.5), seeds=(42,), config=quick("paper", *methods))


@pytest.mark.slow
def test_every_method_is_measured_by_what_it_can_lose_and_shown_in_a_report(zoo: Run) -> None:
    for methods, measured in (
        (SOFT, {"lesion_mass"}),
        (HARD, {"purity", "lesion_dominated"}),
        (KEPT, {"retention", "precision"}),
    ):
        rows = zoo.results[zoo.results["method"].isin(methods)]
        assert set(rows["method"]) == set(methods)
        for name in ("lesion_mass", "purity", "lesion_dominated", "retention", "precision"):
            assert rows[name].notna().all() if name in measured else rows[name].isna().all(), name
    assert zoo.results["accuracy"].notna().all()
    page = zoo.report(pictures=False).read_text(encoding="utf-8")
    assert "TokenLearner" in page
    assert "Cropr" in page


@pytest.mark.slow
def test_a_model_computes_the_signals_that_its_selectors_read(zoo: Run, drawn: Drawn) -> None:
    store, manifest = drawn.store, drawn.manifest
    loaded = {name: load_unit(zoo, Unit(Method.parse(name), 42)) for name in ("rollout", "tome:keys", "ats")}
    for learned in ("cropr:mask-free", "tc-ssa"):
        assert load_unit(zoo, Unit(Method.parse(learned), 42))(store.read(range(4)), 0.5).shape == (4, len(zoo.classes))
    used = store.config["backbone"]
    config = located(BackboneConfig(used["name"], Path(store.config["weights"]), used["image_size"]), used["weights"])
    settings = train_config_from_dict(zoo.methods["rollout"]["config"])
    model = MedTokenBudget(config, store.config["backbone"], zoo.classes, loaded, settings, main="rollout", device="cpu")
    assert set(model.signals) == {"attention_entropy", "cls_attention", "rollout", "mean_key", "value_norm"}
    image = manifest.image_path(0)
    kept = model.classifier("rollout").selector.order(store.read(store.rows([manifest.ids[0]]), signals=("rollout",)))
    assert sorted(model.predict(image, 0.3, "rollout")[0].kept.tolist()) == sorted(kept[0, : model.k(0.3, "rollout")].tolist())
    assert model.predict(image, 0.3, "tome:keys")[0].k == model.k(0.3, "tome:keys")
    again = mtb.load(model.save_pretrained(zoo.path / "saved"), device="cpu")
    assert again.classifier("tome:keys").selector.compare == "keys"
    assert again.predict(image, 0.3, "ats")[0].label == model.predict(image, 0.3, "ats")[0].label


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The code of the page on selectors and heads of your own; what it registers is forgotten afterwards."""
    monkeypatch.setattr(selectors.SELECTORS, "_classes", dict(selectors.SELECTORS._classes))
    monkeypatch.setattr(heads.HEADS, "_classes", dict(heads.HEADS._classes))
    text = (REPOSITORY / "docs" / "selectors.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(from __future__.*?)```", text, flags=re.DOTALL)


@pytest.mark.slow
def test_a_learned_selector_of_60_lines_runs_through_sweep_and_report(blocks: list[str], drawn: Drawn, tmp_path: Path) -> None:
    assert len(blocks[0].splitlines()) <= 65
    exec(blocks[0], {"__name__": "their_module"})
    methods = ("linear-scorer", "linear-scorer:mask-free", "linear-scorer:lesion-first", "center")
    run = run_sweep(drawn, tmp_path, *methods, budgets=(0.3,), seeds=(42,), config=quick("paper", *methods))
    assert set(run.results["method"]) == set(methods)
    assert run.results["retention"].notna().all()
    assert "linear-scorer:lesion-first" in run.report(pictures=False).read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_head_that_reads_tokens_runs_through_sweep_report_and_model(blocks: list[str], drawn: Drawn, tmp_path: Path) -> None:
    exec(blocks[1], {"__name__": "their_module"})
    methods = ("lats", "lats:lesion-first", "random", "tome", "query-pool+clam-mb")
    config = quick("paper", "lats", "random")
    run = run_sweep(drawn, tmp_path, *methods, budgets=(0.3,), seeds=(42,), config=config, heads=("max-pool",))
    expected = {"lats+max-pool", "lats+max-pool:lesion-first", "random+max-pool", "tome+max-pool", "query-pool+clam-mb"}
    assert set(run.results["method"]) == expected
    assert run.results["accuracy"].notna().all()
    assert "max-pool" in run.report(pictures=False).read_text(encoding="utf-8")
    batch = next(iter(drawn.store.batches(range(4), 4)))
    assert run.model.classify(batch, (0.3, 0.5), "tome+max-pool").shape == (4, 2, len(drawn.manifest.classes))


# What is opened, and what is one job


def test_a_manifest_in_memory_is_kept_with_the_run(drawn: Drawn, tmp_path: Path) -> None:
    manifest = drawn.manifest.take(range(60))
    mtb.sweep(manifest, drawn.store, tmp_path, ["center"], config=quick("paper", "center"), jobs=1)
    run = Run(tmp_path)
    assert (run.manifest_path, run.manifest.hash) == ((tmp_path / "manifest.parquet").resolve(), manifest.hash)


def test_a_worker_opens_manifest_and_store_once_however_many_jobs_it_gets(drawn: Drawn, tmp_path: Path) -> None:
    sent = pickle.dumps(Run.begin(tmp_path, drawn.manifest_path, drawn.store_path, quick("paper", "center")))
    assert pickle.loads(sent) is pickle.loads(sent)
    assert len(sent) < 2000, "paths and settings, not tables"


def test_heads_behind_one_selector_and_ablations_of_one_training_are_one_job(drawn: Drawn, tmp_path: Path) -> None:
    run = Run.begin(tmp_path, drawn.manifest_path, drawn.store_path, quick("paper", "lats"))
    texts = ("lats+abmil:lesion-first", "lats:lesion-first", "lats", "lats+linear", "lats:no-norm", "center", "center+linear")
    units = [Unit(Method.parse(text), seed) for seed in (42, 43) for text in texts]
    jobs = trainings(run, units)
    assert [[str(unit.method) for unit in job] for job in jobs if job[0].seed == 42] == [
        ["lats+abmil:lesion-first", "lats:lesion-first"],
        ["lats", "lats:no-norm"],
        ["lats+linear"],
        ["center"],
        ["center+linear"],
    ]
    assert all(unit.seed == job[0].seed for job in jobs for unit in job)
