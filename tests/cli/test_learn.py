"""`mtb train`, `sweep`, `reproduce` and `demo`, called as a person would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.files import read_json, sha256_file
from medtokenbudget.runs import sweep
from medtokenbudget.runs.run import read_results
from medtokenbudget.runs.studies import Unit
from tests.drawn import Drawn

COMPARED = ("center", "darkness", "border-contrast", "random")
SMALL = ["--epochs", "1", "--head_epochs", "1", "--batch_size", "16", "--device", "cpu"]


def test_train_leaves_a_run_directory_and_a_model_that_loads(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", str(drawn.manifest_path), "--store", str(drawn.store_path), "--out", str(out), *SMALL]) == 0
    for name in ("run.json", "results.csv", "predictions.parquet", "metrics.jsonl", "model/config.json", "model/model.safetensors"):
        assert (out / name).exists(), name
    assert set(read_results(out / "results.csv")["method"]) == {"lats:lesion-first", *COMPARED}
    said = capsys.readouterr().err
    assert "Next: mtb report" in said
    run = read_json(out / "run.json")
    assert run["config"]["recipe"] == "lesion-first"
    assert run["config"]["lats"]["neighborhood"] == "grid8", "an option left alone keeps the value of its preset"
    assert {"manifest", "split", "store"} <= set(run["hashes"])
    assert run["command"].startswith("mtb train manifest.parquet --store tokens --out run "), "as typed, without folders elsewhere"
    assert run["command"].endswith(" ".join(SMALL[-2:]))
    assert "| `random` | 23 (23) |" in (out / "model" / "README.md").read_text(), "the controls are trained after the model"
    model = mtb.load(out / "model", device="cpu")
    assert read_json(out / "model" / "config.json")["backbone"]["weights"] == "vit-0.safetensors"
    assert sha256_file(model.backbone_config.weights) == model.backbone_fingerprint["weights"], "where predict finds them"
    assert model.predict(drawn.manifest.image_path(0))[0].k > 0


def test_the_model_is_saved_before_the_controls_are_trained_and_the_same_command_trains_these(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, trained = tmp_path / "run", []
    command = ["train", str(drawn.manifest_path), "--store", str(drawn.store_path), "--out", str(out), *SMALL]
    run_unit = sweep.run_unit

    def stopped(run: mtb.Run, unit: Unit, *rest: Any, **options: Any) -> Any:
        trained.append(str(unit.method))
        if unit.method.selector == "center":
            raise KeyboardInterrupt
        return run_unit(run, unit, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "run_unit", stopped)
        assert main(command) == 130
    assert trained == ["lats:lesion-first", "center"]
    assert mtb.load(out).predict(drawn.manifest.image_path(0))[0].selector == "lats:lesion-first"
    assert set(mtb.Run(out).results["method"]) == {"lats:lesion-first"}
    assert main(command) == 0
    assert len(set(mtb.Run(out).results["method"])) == 5
    assert len(mtb.load(out).selectors) == 5


def test_controls_are_left_out_on_request(drawn: Drawn, tmp_path: Path) -> None:
    command = ["train", str(drawn.manifest_path), "--store", str(drawn.store_path), "--out", str(tmp_path / "run"), *SMALL]
    assert main([*command, "--controls", "false"]) == 0
    assert set(mtb.Run(tmp_path / "run").results["method"]) == set(mtb.load(tmp_path / "run").selectors) == {"lats:lesion-first"}


def test_a_selector_is_trained_by_name(drawn: Drawn, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", str(drawn.manifest_path), "--store", str(drawn.store_path), "--out", str(out), *SMALL]
    assert main([*arguments, "--selector", "context", "--context.channels", "8", "--context.blocks", "1"]) == 0
    assert set(read_results(out / "results.csv")["method"]) == {"context:lesion-first", *COMPARED}
    assert mtb.load(out / "model", device="cpu").main == "context:lesion-first"


@pytest.mark.slow
def test_sweep_and_reproduce_print_where_the_results_are(drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [str(drawn.manifest_path), "--store", str(drawn.store_path), "--jobs", "1", *SMALL]
    methods = ["--methods", "center", "no-pruning", "--seeds", "1", "2"]
    assert main(["sweep", *common[:-8], *SMALL[2:], "--out", str(tmp_path / "sweep"), *methods]) == 0
    assert len(read_results(tmp_path / "sweep" / "results.csv")) == 2 * 2 * 10 * 2  # methods, seeds, budgets, views
    assert main(["reproduce", *common, "--out", str(tmp_path / "paper"), "--study", "signals"]) == 0
    printed = capsys.readouterr().out
    assert "drawn dermoscopy is not a data set of the paper, so its numbers are not compared with these." in printed
    assert "80.2" not in printed, "the paper's own number says nothing on drawn images"


@pytest.mark.slow
def test_the_demo_tells_the_whole_story_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out), "--n", "48", "--epochs", "1"]) == 0
    for name in ("report.html", "results.csv", "tables", "figures", "model/README.md"):
        assert (out / name).exists(), name
    told = capsys.readouterr()
    assert "lats:lesion-first" in told.out
    assert [line[:6] for line in told.err.splitlines() if " of 3:" in line] == ["1 of 3", "2 of 3", "3 of 3"]
    shares = re.search(r"the router keeps (\d+)%, the center of the image (\d+)%, chance (\d+)%", told.err)
    router, center, chance = (int(share) for share in shares.groups())
    assert router > 85
    assert router > center + 20
    assert router > chance + 20
    pictures = sorted((out / "router" / "routed" / "overlays").iterdir())
    assert len(pictures) == 8
    assert f"Look at {pictures[0]} " in told.err
    samples = out / "router" / "samples"
    routing = mtb.load("dermoscopy").route(samples / "images" / "SYN_000000.jpg", budget=0.3)[0]
    with Image.open(samples / "masks" / "SYN_000000.png") as mask:
        lesion = np.asarray(mask.resize((16, 16), Image.Resampling.BOX)) > 127
    assert routing.kept_mask[lesion].all(), "in the picture that a newcomer sees first the whole lesion is kept"
    assert not routing.unfamiliar
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "The images are drawn: their accuracy says nothing about photographs" in page
    assert not (out / "tables" / "beside-paper.csv").exists()
    model = mtb.load(out / "model")
    image = next((out / "data" / "images").glob("*.jpg"))
    assert len(model.predict([image], budget=0.3)[0].kept) == 76
