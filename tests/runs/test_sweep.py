"""The sweep on drawn images: same bytes again, killed or damaged runs, failures that do not spread, every kind of selector."""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import medtokenbudget as mtb
from medtokenbudget.api import save_model
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone.backbone import located
from medtokenbudget.cli import main
from medtokenbudget.config import BUDGETS, BackboneConfig
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.files import read_json, read_lines
from medtokenbudget.heads import head as heads
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.routing import Ranker, register_selector
from medtokenbudget.routing import base as selectors
from medtokenbudget.runs import Execution, Method, RunInfo, sweep
from medtokenbudget.runs.run import read_results
from medtokenbudget.runs.sweep import UNIT_FILES, Plan, Unit, load_unit, run_unit
from tests import processes
from tests.conftest import REPOSITORY
from tests.drawn import Drawn, quick

# By its full name: the package has a function of the same name.
sweep_module = importlib.import_module("medtokenbudget.runs.sweep")
FILES = ("results.csv", "predictions.parquet", "routing.safetensors", "run.json")


def _sweep(drawn: Drawn, out: Path, **options: object) -> pd.DataFrame:
    execution = {name: options.pop(name) for name in ("jobs", "engine") if name in options}
    methods = options.get("methods", ("lats:lesion-first", "random", "center", "tome"))
    defaults = {"methods": methods, "config": quick("lesion-first", *methods)}  # type: ignore[misc]
    how = Execution(**{"jobs": 1, **execution})  # type: ignore[arg-type]
    return sweep(drawn.manifest_path, drawn.store_path, out, **{**defaults, **options}, execution=how)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_second_run_writes_the_same_bytes_and_a_repeated_call_does_no_work(drawn: Drawn, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    first = _sweep(drawn, tmp_path / "a")
    _sweep(drawn, tmp_path / "b")
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "units").rglob("unit.json")}
    assert _sweep(drawn, tmp_path / "a").equals(first)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert set(first["budget"]) == set(BUDGETS)


@pytest.mark.slow
def test_a_selector_that_is_trained_without_its_head_is_trained_once_for_all_heads(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    ticks = itertools.count()
    # No two epochs take equally long by this clock, so equal seconds mean the same epoch.
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks) ** 2))
    _sweep(drawn, tmp_path / "all", methods=("lats+abmil:lesion-first", "lats+linear:lesion-first", "lats:lesion-first"))
    _sweep(drawn, tmp_path / "alone", methods=("lats+abmil:lesion-first",))
    unit = Path("units", "lats+abmil~lesion-first-42")
    for name in ("checkpoint.safetensors", *UNIT_FILES):
        assert (tmp_path / "all" / unit / name).read_bytes() == (tmp_path / "alone" / unit / name).read_bytes(), name
    rows = {folder.name: _selector_rows(folder) for folder in (tmp_path / "all" / "units").iterdir()}
    shared = rows["lats~lesion-first-42"]
    assert len(shared) == 2
    assert all(found == shared for found in rows.values()), "the seconds of an epoch are the same only if it ran once"
    assert _selector_rows(tmp_path / "alone" / unit) != shared


def _selector_rows(unit: Path) -> list[dict[str, Any]]:
    return [row for row in read_lines(unit / "metrics.jsonl") if row["stage"] == "selector"]


@pytest.mark.slow
def test_two_processes_write_the_same_bytes_as_one(drawn: Drawn, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    _sweep(drawn, tmp_path / "one", methods=("random", "center"))
    _sweep(drawn, tmp_path / "two", methods=("random", "center"), jobs=2)
    assert (tmp_path / "one" / "predictions.parquet").read_bytes() == (tmp_path / "two" / "predictions.parquet").read_bytes()


@pytest.mark.parametrize(("jobs", "threads"), [(2, 4), (0, 4), (1, 3)])
def test_the_last_unit_of_a_resumed_run_has_the_threads_of_the_others(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, threads: int
) -> None:
    """Another number of threads changes the last bit of a training."""
    seen = []

    def look(plan: Plan, unit: Unit, *options: object) -> str:
        seen.append(torch.get_num_threads())
        return run_unit(plan, unit)

    monkeypatch.setattr(sweep_module, "run_unit", look)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        _sweep(drawn, tmp_path, methods=("center",))
        seen.clear()
        _sweep(drawn, tmp_path, methods=("center", "no-pruning"), jobs=jobs)
        assert (seen, torch.get_num_threads()) == ([threads], 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_ray_cluster_writes_the_same_bytes_as_local_processes(drawn: Drawn, tmp_path: Path, ray: Any) -> None:
    torch.set_num_threads(1)
    methods = ("center", "no-pruning")
    _sweep(drawn, tmp_path / "local", methods=methods)
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
        _sweep(drawn, tmp_path / "ray", methods=methods, engine="ray")
    finally:
        ray.shutdown()
    assert (tmp_path / "ray" / "results.csv").read_bytes() == (tmp_path / "local" / "results.csv").read_bytes()


def test_a_selector_that_fails_does_not_stop_the_others_and_the_same_command_tries_it_again(drawn: Drawn, tmp_path: Path) -> None:
    broken = True

    @register_selector("moody")
    class Moody(Ranker):
        def score(self, tokens, generator=None):  # type: ignore[no-untyped-def]
            if broken:
                raise RuntimeError("not today")
            return tokens.patches.norm(dim=-1)

    try:
        results = _sweep(drawn, tmp_path, methods=("center", "moody"))
        assert set(results["method"]) == {"center"}
        assert "not today" in read_json(tmp_path / "units" / "moody-42" / "unit.json")["error"]
        center = (tmp_path / "units" / "center-42" / "unit.json").stat().st_mtime_ns
        broken = False
        again = _sweep(drawn, tmp_path, methods=("center", "moody"))
        assert set(again["method"]) == {"center", "moody"}
        assert (tmp_path / "units" / "center-42" / "unit.json").stat().st_mtime_ns == center
    finally:
        selectors.SELECTORS.unregister("moody")


def test_an_unknown_method_is_refused_before_any_work(drawn: Drawn, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'center'"):
        _sweep(drawn, tmp_path, methods=("centre",))


# Sweeps that are killed or damaged


HEADS = ["--head-epochs", "1", "--batch-size", "16", "--device", "cpu"]


LATS = ["--epochs", "1", "--lats.hidden", "16", "--lats.layers", "1"]


def command(drawn: Drawn, out: Path, *more: object) -> list[str]:
    small = [*HEADS, *(LATS if any(str(word).startswith("lats") for word in more) else ())]
    return [str(word) for word in ("sweep", drawn.manifest_path, "--store", drawn.store_path, "--out", out, *small, *more)]


def descendants(pid: int) -> set[int]:
    """The processes that a process started, and those that they started."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found: set[int] = set()
    while True:
        more = {child for child, parent in parents.items() if parent in {pid, *found}} - found
        if not more:
            return found
        found |= more


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
        left = {pid for pid in workers if os.path.exists(f"/proc/{pid}") and "Z" not in _state(pid)}
        if not left:
            break
        time.sleep(0.1)
    assert not left
    units = len(list((tmp_path / "run").glob("units/*/unit.json")))
    time.sleep(1)
    assert len(list((tmp_path / "run").glob("units/*/unit.json"))) == units < 40


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.slow
def test_a_sweep_with_a_failed_unit_exits_with_1_and_lists_it(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @register_selector("broken")
    class Broken(Ranker):
        def score(self, tokens, generator=None):  # type: ignore[no-untyped-def]
            raise RuntimeError("not today")

    try:
        assert main(command(drawn, tmp_path, "--jobs", 1, "--methods", "center", "broken")) == 1
    finally:
        selectors.SELECTORS.unregister("broken")
    said = capsys.readouterr().err
    assert "1 of 2 trainings failed: broken (seed 42)." in said
    assert "not today" in said
    assert set(read_results(tmp_path / "results.csv")["method"]) == {"center"}


@pytest.fixture(scope="module")
def whole(drawn: Drawn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole")
    assert main(command(drawn, out, "--jobs", 1, "--methods", "lats:lesion-first", "center")) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("units/center-42/head.safetensors", False),
        ("units/center-42/predictions.parquet", True),
        ("units/center-42/routing.safetensors", True),
        ("units/center-42/images.json", True),
        ("units/center-42/unit.json", True),
        ("units/lats~lesion-first-42/head.safetensors", False),
        ("results.csv", False),
        ("predictions.parquet", False),
        ("routing.safetensors", True),
    ],
)
def test_a_damaged_file_of_a_finished_run_is_made_again(
    drawn: Drawn, whole: Path, capsys: pytest.CaptureFixture[str], name: str, cut: bool
) -> None:
    results, model, expected = ((whole / n).read_bytes() for n in ("results.csv", "model/heads.safetensors", name))
    damage(whole / name, cut)
    assert main(command(drawn, whole, "--jobs", 1, "--methods", "lats:lesion-first", "center")) == 0
    assert (whole / name).read_bytes() == expected
    assert (whole / "results.csv").read_bytes() == results
    assert (whole / "model/heads.safetensors").read_bytes() == model
    if name.startswith("units") and "unit.json" not in name:
        assert f"{name} is missing or damaged" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head.safetensors", "checkpoint.safetensors"])
def test_a_flipped_bit_is_not_published(whole: Path, name: str) -> None:
    path = whole / "units" / "lats~lesion-first-42" / name
    before = path.read_bytes()
    damage(path, cut=False)
    try:
        with pytest.raises(RequestError, match=f"{name} is damaged"):
            load_unit(RunInfo.read(whole), Unit(Method.parse("lats:lesion-first"), 42), 64)
    finally:
        path.write_bytes(before)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [True, False])
def test_damaged_pooled_tokens_are_made_again(drawn: Drawn, whole: Path, cut: bool) -> None:
    (pooled,) = (whole / "pooled").glob("center-*.npy")
    expected, head = pooled.read_bytes(), (whole / "units/center-42/head.safetensors").read_bytes()
    damage(pooled, cut)
    (whole / "units/center-42/unit.json").unlink()
    assert main(command(drawn, whole, "--jobs", 1, "--methods", "lats:lesion-first", "center")) == 0
    assert pooled.read_bytes() == expected
    assert (whole / "units/center-42/head.safetensors").read_bytes() == head


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
def run(drawn: Drawn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoo")
    methods = (*SOFT, *HARD, *KEPT)
    sweep(
        drawn.manifest_path,
        drawn.store_path,
        out,
        methods=methods,
        budgets=(0.3, 0.5),
        seeds=(42,),
        config=quick("paper", *methods),
        execution=Execution(jobs=1),
    )
    return out


@pytest.mark.slow
def test_every_method_is_measured_by_what_it_can_lose(run: Path) -> None:
    results = read_results(run / "results.csv")
    for methods, measured in (
        (SOFT, {"lesion_mass"}),
        (HARD, {"purity", "lesion_dominated"}),
        (KEPT, {"retention", "precision"}),
    ):
        rows = results[results["method"].isin(methods)]
        assert set(rows["method"]) == set(methods)
        for name in ("lesion_mass", "purity", "lesion_dominated", "retention", "precision"):
            assert rows[name].notna().all() if name in measured else rows[name].isna().all(), name
    assert results["accuracy"].notna().all()


@pytest.mark.slow
def test_a_model_computes_the_signals_that_its_selectors_read(run: Path, drawn: Drawn) -> None:
    info = RunInfo.read(run)
    store, manifest = drawn.store, drawn.manifest
    loaded = {name: load_unit(info, Unit(Method.parse(name), 42), store.dim) for name in ("rollout", "tome:keys", "ats")}
    used = store.config["backbone"]
    config = located(BackboneConfig(used["name"], Path(store.config["weights"]), used["image_size"]), used["weights"])
    settings = info.methods["rollout"].train_config
    model = MedTokenBudget(config, store.config["backbone"], info.classes, loaded, settings, main="rollout", device="cpu")
    assert set(model.signals) == {"attention_entropy", "cls_attention", "rollout", "mean_key", "value_norm"}
    image = manifest.image_path(0)
    row = store.rows([manifest.ids[0]])
    kept = model.classifier("rollout").selector.order(store.read(row, signals=("rollout",)))
    assert sorted(model.predict(image, 0.3, "rollout")[0].kept.tolist()) == sorted(kept[0, : model.k(0.3, "rollout")].tolist())
    assert model.predict(image, 0.3, "tome:keys")[0].k == model.k(0.3, "tome:keys")
    model.save_pretrained(run / "saved")
    again = mtb.load(run / "saved", device="cpu")
    assert again.classifier("tome:keys").selector.compare == "keys"
    assert again.predict(image, 0.3, "ats")[0].label == model.predict(image, 0.3, "ats")[0].label


@pytest.mark.slow
def test_a_finished_unit_is_loaded_with_its_trained_selector(run: Path, drawn: Drawn) -> None:
    info = RunInfo.read(run)
    for method in ("cropr:mask-free", "tc-ssa"):
        classifier = load_unit(info, Unit(Method.parse(method), 42), drawn.store.dim)
        assert classifier is not None
        batch = next(iter(drawn.store.batches(range(4), 4)))
        assert classifier(batch, 0.5).shape == (4, len(info.classes))


@pytest.mark.slow
def test_the_report_of_such_a_run_is_written(run: Path) -> None:
    mtb.report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "TokenLearner" in page
    assert "Cropr" in page


PAGES = [REPOSITORY / "docs" / "how-to" / name for name in ("learned-selector.md", "head.md")]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(selectors.SELECTORS, "_classes", dict(selectors.SELECTORS._classes))
    monkeypatch.setattr(heads.HEADS, "_classes", dict(heads.HEADS._classes))
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(r"(?<!-->\n)```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.slow
def test_a_learned_selector_of_60_lines_runs_through_sweep_and_report(blocks: list[str], drawn: Drawn, tmp_path: Path) -> None:
    assert len(blocks[0].splitlines()) <= 65
    exec(blocks[0], {"__name__": "their_module"})
    methods = ("linear-scorer", "linear-scorer:mask-free", "linear-scorer:lesion-first", "center")
    paths = drawn.manifest_path, drawn.store_path, tmp_path / "run"
    sweep(*paths, methods=methods, budgets=(0.3,), seeds=(42,), config=quick("paper", *methods), execution=Execution(jobs=1))
    results = read_results(tmp_path / "run" / "results.csv")
    assert set(results["method"]) == set(methods)
    assert results["retention"].notna().all()
    mtb.report(tmp_path / "run")
    assert "linear-scorer:lesion-first" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_head_that_reads_tokens_runs_through_sweep_and_report(blocks: list[str], drawn: Drawn, tmp_path: Path) -> None:
    exec(blocks[1], {"__name__": "their_module"})
    out = tmp_path / "run"
    sweep(
        drawn.manifest_path,
        drawn.store_path,
        out,
        methods=("lats", "lats:lesion-first", "random", "tome", "query-pool+clam-mb"),
        budgets=(0.3,),
        seeds=(42,),
        config=quick("paper", "lats", "random"),
        execution=Execution(jobs=1),
        heads=("max-pool",),
    )
    results = read_results(out / "results.csv")
    expected = {"lats+max-pool", "lats+max-pool:lesion-first", "random+max-pool", "tome+max-pool", "query-pool+clam-mb"}
    assert set(results["method"]) == expected
    assert results["accuracy"].notna().all()
    mtb.report(out)
    assert "max-pool" in (out / "report.html").read_text(encoding="utf-8")
    # The saved model reads tokens too.
    folder = save_model(out)
    assert folder is not None
    batch = next(iter(drawn.store.batches(range(4), 4)))
    assert mtb.load(folder).classify(batch, (0.3, 0.5), "tome+max-pool").shape == (4, 2, len(drawn.manifest.classes))


def test_a_run_opens_its_manifest_and_its_store_once(drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    read, open_store = Manifest.read.__func__, FeatureStore.open.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Manifest, "read", classmethod(lambda cls, path: opened.append("manifest") or read(cls, path)))
    monkeypatch.setattr(
        FeatureStore,
        "open",
        classmethod(lambda cls, path, *more, **named: opened.append("store") or open_store(cls, path, *more, **named)),
    )
    common = (drawn.manifest_path, drawn.store_path, tmp_path)
    sweep(*common, methods=["center", "norm", "tome"], config=quick("paper", "center"), execution=Execution(jobs=1))
    assert sorted(opened) == ["manifest", "store"]


def test_a_manifest_in_memory_is_kept_with_the_run(drawn: Drawn, tmp_path: Path) -> None:
    manifest = drawn.manifest.take(range(60))
    sweep(manifest, drawn.store, tmp_path, methods=["center"], config=quick("paper", "center"), execution=Execution(jobs=1))
    info = RunInfo.read(tmp_path)
    assert (info.manifest, Manifest.read(info.manifest_path).hash) == ("manifest.parquet", manifest.hash)


def test_a_resumed_sweep_hashes_each_file_of_a_finished_unit_once(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sweep(drawn, tmp_path, methods=("center",))
    hashed: Counter[str] = Counter()
    content_hash = sweep_module.content_hash

    def count(path: Path) -> str:
        hashed[path.name] += path.parent.name == "center-42"
        return str(content_hash(path))

    monkeypatch.setattr(sweep_module, "content_hash", count)
    _sweep(drawn, tmp_path, methods=("center", "norm"))
    assert set(UNIT_FILES) < set(hashed)
    assert set(hashed.values()) == {1}


def test_a_worker_opens_manifest_and_store_once_however_many_jobs_it_gets(drawn: Drawn) -> None:
    sent = pickle.dumps(sweep_module.Sources.of(drawn.manifest_path, drawn.store_path))
    assert pickle.loads(sent) is pickle.loads(sent)
    assert len(sent) < 1000, "paths, not tables"


def test_heads_behind_one_selector_and_ablations_of_one_training_are_one_job(drawn: Drawn, tmp_path: Path) -> None:
    plan = Plan(sweep_module.Sources.of(drawn.manifest_path, drawn.store_path), tmp_path, quick("paper", "lats"))
    texts = ("lats+abmil:lesion-first", "lats:lesion-first", "lats", "lats+linear", "lats:no-norm", "center", "center+linear")
    units = [Unit(Method.parse(text), seed) for seed in (42, 43) for text in texts]
    jobs = [[str(unit.method) for unit in job.units] for job in plan.trainings(units) if job.first.seed == 42]
    assert jobs == [
        ["lats+abmil:lesion-first", "lats:lesion-first"],
        ["lats", "lats:no-norm"],
        ["lats+linear"],
        ["center"],
        ["center+linear"],
    ]
    assert all(unit.seed == job.first.seed for job in plan.trainings(units) for unit in job.units)
    (left,) = plan.trainings(units[:2], done={units[0]})
    assert (left.first, left.units) == (units[0], (units[1],)), "the other head uses the selector that is trained already"
