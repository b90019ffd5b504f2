"""Saved models: the same again, found in a folder, a run or on the hub, and rejected where a file does not fit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import medtokenbudget as mtb
from medtokenbudget.errors import MismatchError, RequestError, UnknownNameError, WorkError
from medtokenbudget.model import MedTokenBudget
from tests.bad_input.damage import edit_json
from tests.hub import serving
from tests.small_model import early_model, small_model


@pytest.fixture
def saved(model: MedTokenBudget, tmp_path: Path) -> Path:
    return model.save_pretrained(tmp_path / "saved")


def test_a_saved_model_is_small_comes_back_the_same_and_is_saved_to_the_same_bytes(
    model: MedTokenBudget, saved: Path, images: list[Path], tmp_path: Path
) -> None:
    assert {path.name for path in saved.iterdir()} == {"config.json", "model.safetensors", "heads.safetensors", "README.md"}
    assert {key.split(".")[0] for key in load_file(saved / "model.safetensors")} == {"selector", "head"}
    assert json.loads((saved / "config.json").read_text())["identity"]["main"] == "lats"
    again = mtb.load(saved)
    assert again.fingerprint == model.fingerprint
    assert again.selectors == model.selectors
    (one,), (other,) = again.predict(images[0]), model.predict(images[0])
    assert one.probabilities == other.probabilities
    assert one.tokens.tobytes() == other.tokens.tobytes()
    again.save_pretrained(tmp_path / "again")
    for path in saved.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_weights_are_found_in_the_folder_or_by_their_hash_where_this_machine_last_saw_them(
    model: MedTokenBudget, saved: Path, images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert str(tmp_path.parent) not in (saved / "config.json").read_text(), "no folder of this machine"
    with pytest.raises(RequestError, match=rf"{model.backbone_fingerprint['weights']}\).* pass its path as `weights`"):
        mtb.load(saved).predict(images[0])
    expected = model.predict(images[0])[0].probabilities
    inside, first, second = saved / "vit-0.safetensors", tmp_path / "1" / "renamed.safetensors", tmp_path / "2.safetensors"
    first.parent.mkdir()
    inside.write_bytes(Path(str(model.backbone_config.weights)).read_bytes())
    assert mtb.load(saved).predict(images[0])[0].probabilities == expected
    first.write_bytes(inside.read_bytes())
    inside.rename(second)
    for path in (first, second):
        assert mtb.load(saved, weights=path).predict(images[0])[0].probabilities == expected
    assert mtb.load(saved).backbone_config.weights == second
    second.unlink()
    assert mtb.load(saved).predict(images[0])[0].probabilities == expected
    first.unlink()
    with pytest.raises(RequestError, match=r"are missing: vit-0\.safetensors"):
        mtb.load(saved).predict(images[0])


def _edit(path: Path, change: str, value: object) -> None:
    def edit(place: dict[str, Any]) -> None:
        *parents, last = change.split(".")
        for key in parents:
            place = place[key]
        place[last] = value

    edit_json(path, edit)


def test_another_backbone_and_files_of_another_model_are_rejected_with_the_difference(
    saved: Path, images: list[Path], tmp_path: Path
) -> None:
    other = small_model(tmp_path / "other-weights", seed=1)
    with pytest.raises(MismatchError, match="weights: expected"):
        mtb.load(saved, weights=other.backbone_config.weights).predict(images[0])
    text = (saved / "config.json").read_text()
    _edit(saved / "config.json", "backbone.layer", 2)
    with pytest.raises(MismatchError, match="layer: expected 5, found 2"):
        mtb.load(saved).predict(images[0])
    (saved / "config.json").write_text(text)
    (saved / "model.safetensors").write_bytes((other.save_pretrained(tmp_path / "other") / "model.safetensors").read_bytes())
    with pytest.raises(MismatchError, match=r"backbone\.weights"):
        mtb.load(saved)


def test_a_model_is_found_in_its_run_and_a_path_that_is_none_is_an_error(
    model: MedTokenBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    # Below a folder, a mistyped path is not taken for a hub id.
    with pytest.raises(UnknownNameError, match=r"Unknown model 'dermatoscopy' \(no folder .*Did you mean 'dermoscopy'\?"):
        mtb.load("dermatoscopy")
    with pytest.raises(RequestError, match="Unknown model 'runs/first'"):
        mtb.load("runs/first")
    Path("runs/first").mkdir()
    Path("runs/first/run.json").write_text("{}")
    with pytest.raises(RequestError, match=r"has no saved model.*Run its command again, or train a model with `mtb train`\."):
        mtb.load("runs/first")
    model.save_pretrained("runs/first/model")
    assert mtb.load("runs/first").fingerprint == model.fingerprint


def test_a_model_that_is_routed_early_is_downloaded_with_its_router(hub_at: Callable[..., None], tmp_path: Path) -> None:
    made = early_model(tmp_path, "scout")
    with serving(made.save_pretrained(tmp_path / "early"), "someone/early") as address:
        hub_at(address)
        found = mtb.load("someone/early", device="cpu")
    assert found.scout.fingerprint == found.early["router"]


def test_a_hub_id_is_downloaded_cached_and_then_needs_no_network(
    saved: Path, hub_at: Callable[..., None], model: MedTokenBudget, tmp_path: Path
) -> None:
    with serving(saved, "someone/router") as address:
        hub_at(address)
        assert mtb.load("someone/router").fingerprint == model.fingerprint
    assert len(list((tmp_path / "cache").rglob("snapshots/*/*"))) == 4
    for offline in (False, True):
        hub_at("http://127.0.0.1:9", offline)
        assert mtb.load("someone/router").fingerprint == model.fingerprint


def test_an_unknown_or_unreachable_hub_id_is_a_clear_error(saved: Path, hub_at: Callable[..., None]) -> None:
    with serving(saved, "someone/router") as address:
        hub_at(address)
        with pytest.raises(RequestError, match="There is no folder someone/nothing, and no model someone/nothing on the hub"):
            mtb.load("someone/nothing")
        (saved / "model.safetensors").unlink()
        with pytest.raises(RequestError, match=r"has no model\.safetensors"):
            mtb.load("someone/router")
    for offline, why in ((False, ""), (True, r" \(HF_HUB_OFFLINE is set\)")):
        hub_at("http://127.0.0.1:9", offline)
        with pytest.raises(WorkError, match=rf"cannot be reached{why}, and someone/else/config.json is not in its cache\. Check"):
            mtb.load("someone/else")


def test_pushing_creates_the_repository_and_uploads_a_portable_folder(
    model: MedTokenBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, object]]] = []

    class Api:
        def create_repo(self, repo_id: str, **options: object) -> str:
            calls.append((repo_id, options))
            return f"https://hub.example/{repo_id}"

        def upload_folder(self, repo_id: str, folder_path: Path, **_: object) -> None:
            config = json.loads((Path(folder_path) / "config.json").read_text())
            calls.append((repo_id, {"files": sorted(os.listdir(folder_path)), "weights": config["backbone"]["weights"]}))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert model.push_to_hub("someone/router") == "https://hub.example/someone/router"
    wanted = ["README.md", "config.json", "heads.safetensors", "model.safetensors"]
    assert calls == [
        ("someone/router", {"private": True, "exist_ok": True}),
        ("someone/router", {"files": wanted, "weights": "vit-0.safetensors"}),
    ]

    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(Api, "create_repo", unreachable)
    with pytest.raises(WorkError, match="no route to host"):
        model.push_to_hub("someone/router")


def test_nothing_in_the_package_unpickles(repository: Path) -> None:
    forbidden = re.compile(
        r"\b(import (pickle|dill|cloudpickle|joblib|marshal|shelve)|from (pickle|dill|cloudpickle|joblib|marshal|shelve)\b"
        r"|torch\.load\(|torch\.save\(|torch\.hub\.load|allow_pickle\s*=\s*True|read_pickle|to_pickle|weights_only\s*=)"
    )
    files = [*(repository / "src").rglob("*.py"), *(repository / "examples").rglob("*.py")]
    assert len(files) > 20
    found = [line.strip() for path in files for line in path.read_text().splitlines() if forbidden.search(line)]
    # The one reader of checkpoints that others publish: tensors alone, and never code.
    assert found == ['state = torch.load(path, map_location="cpu", weights_only=True)']
