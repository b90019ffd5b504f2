"""A table in shards: a stopped command goes on, and a Ray cluster that loses a node writes the same rows as one process."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image
from safetensors.numpy import load_file

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.data.synthetic import draw
from medtokenbudget.errors import RequestError, UnknownNameError, WorkError
from medtokenbudget.files import read_json, read_lines
from medtokenbudget.model import MedTokenBudget, batch
from medtokenbudget.model.batch import RouteConfig, route_files
from medtokenbudget.runtime import cpu_threads

CONFIG = RouteConfig(shard_size=3, batch_size=2, workers=1)


@pytest.fixture(scope="module")
def router() -> MedTokenBudget:
    return mtb.load("dermoscopy", device="cpu")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight photos with masks, one of which is damaged."""
    return make_photos(tmp_path, 8, bad=(4,))


def make_photos(root: Path, count: int, bad: tuple[int, ...] = ()) -> Path:
    (root / "photos").mkdir()
    (root / "masks").mkdir()
    drawings = [draw(name, 300 + number, size=120) for number, name in enumerate(("MEL", "NV", "BCC"))]
    for number in range(count):
        drawing = drawings[number % 3]
        Image.fromarray(drawing.image).rotate(number).save(root / "photos" / f"p{number:03d}.png")
        Image.fromarray(drawing.mask).convert("L").rotate(number).save(root / "masks" / f"p{number:03d}.png")
        if number in bad:
            (root / "photos" / f"p{number:03d}.png").write_bytes(b"damaged")
    return root / "photos"


def written(folder: Path) -> dict[str, int]:
    """The files below a folder with the time of their last change."""
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_shards_hold_the_rows_of_one_table(photos: Path, router: MedTokenBudget, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    config = RouteConfig(batch_size=2, tokens=True, overlay=True, mask=True, box=True, crop=True)
    one = route_files(photos, tmp_path / "one", router, masks, config)
    many = route_files(photos, tmp_path / "many", router, masks, replace(config, shard_size=3))
    expected, found = pd.read_parquet(one.table), pd.read_parquet(many.table)
    assert sorted(path.name for path in many.table.glob("part-*")) == [f"part-{number:06d}.parquet" for number in range(3)]
    for name in expected.columns:
        values = expected[name].tolist(), found[name].tolist()
        if name in ("scores", "unfamiliarity"):  # other batches, other rounding
            assert all(a == pytest.approx(b, rel=1e-5, abs=1e-5) for a, b in zip(*values))
        elif name == "kept":
            assert [set(row) for row in values[0]] == [set(row) for row in values[1]]
        else:
            pd.testing.assert_series_equal(expected[name], found[name])
    assert many.retention == one.retention
    assert read_lines(tmp_path / "many" / "errors.jsonl") == read_lines(tmp_path / "one" / "errors.jsonl")
    assert (many.done, many.failed) == (7, 1)
    tokens = [load_file(path)["tokens"] for path in sorted((tmp_path / "many" / "tokens").iterdir())]
    assert [len(part) for part in tokens] == [3, 2, 2]
    assert len(list((tmp_path / "many" / "overlays").iterdir())) == 7
    for file in (*expected["mask"], *expected["crop"]):
        assert (tmp_path / "many" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()
    first, second = (read_json(tmp_path / name / "summary.json") for name in ("one", "many"))
    assert first == second


def test_a_stopped_command_goes_on_where_it_was(
    photos: Path, router: MedTokenBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = route_files(photos, tmp_path / "whole", router, config=CONFIG)
    out, real = tmp_path / "stopped", batch.write_table

    def stopping(model: MedTokenBudget, shard: batch.Shard, *rest: Any) -> batch.Routed:
        if shard.table.stem == "part-000001":
            raise KeyboardInterrupt
        return real(model, shard, *rest)

    monkeypatch.setattr(batch, "write_table", stopping)
    with pytest.raises(KeyboardInterrupt):
        route_files(photos, out, router, config=CONFIG)
    before = written(out / "routes")
    assert "part-000000.parquet" in before
    assert "part-000001.parquet" not in before
    monkeypatch.undo()
    routed = route_files(photos, out, router, config=CONFIG)
    after = written(out / "routes")
    assert {name: after[name] for name in before} == before, "a finished shard was made again"
    pd.testing.assert_frame_equal(pd.read_parquet(routed.table), pd.read_parquet(whole.table))
    assert read_json(out / "summary.json") == read_json(tmp_path / "whole" / "summary.json")


def test_only_what_changed_is_made_again(photos: Path, router: MedTokenBudget, tmp_path: Path) -> None:
    out = tmp_path / "out"
    route_files(photos, out, router, config=CONFIG)
    before = written(out / "routes")
    shutil.copy(photos / "p000.png", photos / "p004.png")  # the damaged one is repaired
    routed = route_files(photos, out, router, config=CONFIG)
    after = written(out / "routes")
    assert {name for name in before if after[name] != before[name]} == {"part-000001.parquet", "_part-000001.json"}
    assert (routed.done, routed.failed) == (8, 0)
    assert not (out / "errors.jsonl").exists()
    # A finished table needs no cluster.
    assert route_files(photos, out, router, config=CONFIG, engine="ray", address="nowhere:1") == routed
    # A torn shard has no record and is made again; so is one whose file is gone.
    (out / "routes" / "_part-000000.json").unlink()
    (out / "routes" / "part-000002.parquet").unlink()
    for number in (6, 7):  # fewer images: the last shard goes
        (photos / f"p{number:03d}.png").unlink()
    assert len(pd.read_parquet(route_files(photos, out, router, config=CONFIG).table)) == 6
    assert {name for name in written(out / "routes") if "part" in name and "2" in name} == set()


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (["--shard-size", "3"], ["--shard-size", "3", "--budget", "0.1"], "budget: expected '0.1', found '0.3'"),
        (["--shard-size", "3"], [], "has a table in shards"),
        ([], ["--shard-size", "3"], "has a table in one file"),
        ([], ["--shard-size", "3", "--table", "csv"], "A table in shards is a Parquet data set"),
    ],
)
def test_requests_that_do_not_fit_what_is_there_are_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], first: list[str], second: list[str], words: str
) -> None:
    out = tmp_path / "out"
    command = ["route", str(photos), "--out", str(out), "--device", "cpu"]
    if first or "one file" in words:
        assert main([*command, *first]) == 0
    assert main([*command, *second]) == 2
    assert words in capsys.readouterr().err


def test_pictures_in_memory_unknown_engines_and_damaged_photos_are_refused(
    router: MedTokenBudget, photos: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="image 0 is not a file"):
        route_files([Image.new("RGB", (40, 40))], tmp_path / "out", router, config=CONFIG)
    with pytest.raises(UnknownNameError, match="Available: local, ray"):
        route_files(photos, tmp_path / "out", router, config=CONFIG, engine="rays")
    for path in photos.iterdir():
        path.write_bytes(b"damaged")
    with pytest.raises(WorkError, match=r"No image could be read \(8 failed\)"):
        route_files(photos, tmp_path / "out", router, config=CONFIG)
    assert len(read_lines(tmp_path / "out" / "errors.jsonl")) == 8


@pytest.mark.slow
def test_several_processes_write_the_same_files_as_one(router: MedTokenBudget, photos: Path, tmp_path: Path) -> None:
    with cpu_threads(1):  # as in the workers: the number of threads changes the last bit
        for name, jobs in (("one", 1), ("two", 2)):
            route_files(photos, tmp_path / name, router, tmp_path / "masks", replace(CONFIG, jobs=jobs))
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.*")} for name in ("one", "two"))
    assert one == two


@pytest.mark.slow
def test_a_shard_that_kills_its_workers_ends_with_a_message_and_the_command_then_goes_on(
    photos: Path,
    router: MedTokenBudget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ray: Any,
) -> None:
    monkeypatch.setattr("medtokenbudget.jobs.RETRIES", 1)
    out = tmp_path / "out"

    def deadly(*arguments: Any) -> Any:
        os._exit(1)

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("medtokenbudget.model.batch._open_model", deadly)
            with pytest.raises(WorkError, match="Ray gave up"):
                route_files(photos, out, router, config=CONFIG, engine="ray")
        assert [path.name for path in (out / "routes").iterdir()] == ["_request.json"], "the model of the workers is left behind"
        options = ["--shard-size", "3", "--batch-size", "2", "--workers", "1", "--device", "cpu"]
        assert main(["route", str(photos), "--out", str(out), "--engine", "ray", *options]) == 0
    finally:
        ray.shutdown()
    local = route_files(photos, tmp_path / "local", router, config=CONFIG)
    pd.testing.assert_frame_equal(pd.read_parquet(out / "routes"), pd.read_parquet(local.table))
    assert json.loads((out / "summary.json").read_text())["images"] == 7
    assert "Routed 7 images" in capsys.readouterr().err
