"""`mtb route`, `mtb.route` and the router in the package: tables, tokens, pictures, retention, and what cannot be read."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from safetensors.numpy import load_file

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.data.synthetic import draw
from medtokenbudget.errors import RequestError
from medtokenbudget.files import read_json, read_lines
from medtokenbudget.model import MedTokenBudget, Routing
from medtokenbudget.model.batch import RouteConfig, route_files
from medtokenbudget.model.overlays import LESION_EDGE
from medtokenbudget.model.saved import SHIPPED
from medtokenbudget.training.familiarity import Familiarity
from tests.small_model import small_model

BUDGET = 0.3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six drawn lesions with their masks, one of them off the center."""
    folder = tmp_path_factory.mktemp("route")
    for name in ("photos", "masks"):
        (folder / name).mkdir()
    for number in range(6):
        drawing = draw(("MEL", "NV", "BCC")[number % 3], 500 + number, size=160, off_center=number == 5)
        Image.fromarray(drawing.image).save(folder / "photos" / f"p{number}.jpg", quality=92)
        Image.fromarray(drawing.mask).convert("L").save(folder / "masks" / f"p{number}_segmentation.png")
    return folder


@pytest.fixture(scope="module")
def router() -> MedTokenBudget:
    return mtb.load("dermoscopy", device="cpu")


def test_the_router_of_the_package_is_small_portable_and_has_no_head(router: MedTokenBudget) -> None:
    folder = SHIPPED["dermoscopy"]
    assert not router.has_head
    assert router.backbone_fingerprint["name"] == "pixels"
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) <= 2_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["backbone"]["weights"] is None
    for path in (folder / "config.json", folder / "README.md"):
        assert not [word for word in path.read_text().split() if word.strip("\"'`,").startswith(("/", "~"))], f"a path in {path}"
    assert "not a medical device" in router.card


def test_the_name_means_the_package_and_a_folder_of_that_name_is_loaded_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: MedTokenBudget
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dermoscopy").mkdir()
    assert mtb.load("dermoscopy", device="cpu").fingerprint == router.fingerprint
    with pytest.raises(RequestError, match="not a saved model"):
        mtb.load("./dermoscopy")
    with pytest.raises(RequestError, match=r"Did you mean 'dermoscopy'"):
        mtb.load("dermatoscopy")


def test_stored_tokens_are_routed_as_the_images_are_without_running_the_backbone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, store, model = tmp_path / "m.parquet", tmp_path / "tokens", small_model(tmp_path, baselines=())
    model.familiarity = Familiarity(model.dim, rank=2)
    mtb.data.folder_manifest(root / "photos", root / "masks").write(manifest)
    mtb.extract(manifest, store, model.backbone_config, dtype="fp32", threads=1)
    common = f"route {manifest} --model {model.save_pretrained(tmp_path / 'model')} --device cpu --box --out".split()
    assert main([*common, str(tmp_path / "images")]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(MedTokenBudget, "encode", lambda *_: pytest.fail("the backbone ran"))
        assert main([*common, str(tmp_path / "stored"), "--store", str(store)]) == 0
    one, other = (pd.read_parquet(tmp_path / name / "routes.parquet") for name in ("images", "stored"))
    for name in one.columns:
        if name in ("kept", "scores", "box"):
            for mine, theirs in zip(one[name], other[name]):
                np.testing.assert_allclose(mine, theirs, atol=1e-5, err_msg=name)
        elif name == "unfamiliarity":
            np.testing.assert_allclose(one[name], other[name], atol=1e-4)
        else:
            assert one[name].tolist() == other[name].tolist(), name
    for wrong in (["route", str(root / "photos")], ["route", str(manifest), "--shard-size", "2"]):
        assert main([*wrong, "--store", str(store), "--out", str(tmp_path / "wrong")]) == 2
    said = capsys.readouterr().err
    assert "With --store, pass one manifest (.parquet) as the images" in said
    assert "With --store, masks come from the manifest, and one process writes one table." in said


def test_the_table_holds_what_the_router_says_and_what_it_kept_of_the_lesion(
    root: Path, router: MedTokenBudget, tmp_path: Path
) -> None:
    out = tmp_path / "routed"
    command = ["route", str(root / "photos"), "--masks", str(root / "masks"), "--out", str(out), "--device", "cpu"]
    assert main([*command, "--tokens", "--overlay"]) == 0
    table = pd.read_parquet(out / "routes.parquet")
    wanted = mtb.route(root / "photos", BUDGET, router)
    tokens = load_file(out / "tokens.safetensors")
    assert table["image"].tolist() == [routing.image for routing in wanted]
    manifest = tmp_path / "photos.parquet"
    assert main(["data", "folder", str(root / "photos"), "--out", str(manifest)]) == 0
    assert table["image_id"].tolist() == mtb.Manifest.read(manifest).ids
    for number, (row, routing) in enumerate(zip(table.itertuples(), wanted)):
        assert row.kept.tolist() == routing.kept.tolist() == tokens["indices"][number].tolist()
        np.testing.assert_allclose(row.scores, routing.scores, atol=1e-6)
        assert (row.k, row.n_patches, row.budget) == (76, 256, BUDGET)
        assert row.unfamiliarity == pytest.approx(routing.unfamiliarity, rel=1e-5)
        assert row.unfamiliar == routing.unfamiliar
        # By hand: the mask at 16 x 16, more than half covered.
        mask = Image.open(root / "masks" / f"p{number}_segmentation.png").resize((16, 16), Image.Resampling.BILINEAR)
        lesion = np.flatnonzero(np.asarray(mask, float).reshape(-1) > 127.5)
        assert (row.lesion, row.kept_lesion) == (len(lesion), len(set(lesion) & set(routing.kept.tolist())))
    assert len(list((out / "overlays").glob("*.png"))) == 6
    retention = read_json(out / "summary.json")["retention"]
    assert retention["router"]["pooled"] == pytest.approx(table["kept_lesion"].sum() / table["lesion"].sum())
    assert retention["random"]["pooled"] == pytest.approx(76 / 256)
    assert retention["router"]["n"] == 6


def test_the_router_of_the_package_keeps_promises_out_of_the_box(root: Path, router: MedTokenBudget, tmp_path: Path) -> None:
    assert [(one.retention, one.coverage) for one in router.guarantees] == [(0.9, None), (0.95, None), (0.98, None)]
    counts = []
    for promise in router.guarantees:
        out, retention = tmp_path / f"{promise.retention}", f"{promise.retention}"
        assert main(["route", str(root / "photos"), "--retention", retention, "--out", str(out), "--device", "cpu"]) == 0
        table = pd.read_parquet(out / "routes.parquet")
        # By hand: patches while what is left of the squared scores is not below the threshold, and never fewer than the least.
        squares = [np.sort(np.square(row))[::-1] for row in table["scores"]]
        left = [1 - np.cumsum(row) / row.sum() + row / row.sum() for row in squares]
        expected = [max(16, int((row >= promise.threshold).sum())) for row in left]
        assert table["k"].tolist() == expected
        assert read_json(out / "summary.json")["guarantee"]["retention"] == promise.retention
        counts.append(expected)
    assert len(set(counts[1])) > 1, "a small lesion takes fewer patches than a large one"
    assert (np.array(counts[0]) <= counts[1]).all()
    assert (np.array(counts[1]) <= counts[2]).all()
    assert "calibrated on 138 validation images" in router.card


def test_csv_holds_the_same_and_replaces_the_other_table_and_old_tokens(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "routed"
    first = route_files(root / "photos", out, config=RouteConfig(tokens=True))
    before = pd.read_parquet(first.table)
    assert main(["route", str(root / "photos"), "--out", str(out), "--table", "csv"]) == 0
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith(".")) == ["routes.csv", "summary.json"]
    with open(out / "routes.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row, line in zip(before.itertuples(), rows):
        assert [int(value) for value in line["kept"].split()] == row.kept.tolist()
        assert np.array(line["scores"].split(), np.float32).tolist() == row.scores.tolist()
        assert line["unfamiliar"] == str(row.unfamiliar).lower()
        assert line["lesion"] == ""
    assert read_json(out / "summary.json")["retention"] is None


def test_bad_files_are_listed_and_a_bad_mask_costs_only_its_measurement(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, masks, out = tmp_path / "photos", tmp_path / "masks", tmp_path / "routed"
    shutil.copytree(root / "photos", photos)
    shutil.copytree(root / "masks", masks)
    (photos / "broken.jpg").write_bytes(b"no picture")
    (masks / "p1_segmentation.png").write_bytes(b"no mask")
    Image.new("L", (50, 200)).save(masks / "p2_segmentation.png")
    assert main(["route", str(photos), str(tmp_path / "absent.png"), "--masks", str(masks), "--out", str(out)]) == 0
    assert f"2 of 8 images have no mask in {masks}, such as" in capsys.readouterr().err
    table = pd.read_parquet(out / "routes.parquet")
    assert len(table) == 6
    assert table["lesion"].isna().tolist() == [False, True, True, False, False, False]
    reasons = {Path(row["image"]).name: row["reason"] for row in read_lines(out / "errors.jsonl")}
    assert set(reasons) == {"broken.jpg", "p1.jpg", "p2.jpg", "absent.png"}
    assert "aspect ratio" in reasons["p2.jpg"]
    summary = read_json(out / "summary.json")
    assert (summary["failed"], summary["retention"]["router"]["n"]) == (2, 4)


def spoiled(root: Path, folder: Path, count: int, factor: float) -> Path:
    """The masks, the first `count` of them darker."""
    shutil.copytree(root / "masks", folder)
    for path in sorted(folder.iterdir())[:count]:
        Image.fromarray((np.asarray(Image.open(path)) * factor).astype(np.uint8)).save(path)
    return folder


@pytest.mark.parametrize("more", [[], ["--shard-size", "2"]], ids=["one table", "shards"])
def test_masks_of_zeros_and_ones_are_named_on_the_screen_and_fail_the_command_if_all_are(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    for count, code in ((2, 0), (6, 1)):
        masks, out = spoiled(root, tmp_path / f"masks-{count}", count, 1 / 255), tmp_path / f"routed-{count}"
        assert main(["route", str(root / "photos"), "--masks", str(masks), "--out", str(out), *more]) == code
        said = capsys.readouterr()
        first = f"The first: {masks / 'p0_segmentation.png'} has only the values 0 and 1, so no pixel counts as lesion. "
        assert f"{first}Multiply its values by 255." in said.err
        assert "nan" not in said.out
        summary = read_json(out / "summary.json")
        assert (summary["images"], summary["masks_failed"]) == (6, count)
        if code:
            assert "Retention cannot be measured with these masks: 6 cannot be used." in said.err
            assert summary["retention"] is None
        else:
            assert f"2 of 6 masks cannot be used; {out / 'errors.jsonl'} lists them." in said.err
            assert summary["retention"]["router"]["n"] == 4


def test_masks_without_any_lesion_are_said_instead_of_a_table_of_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masks = spoiled(root, tmp_path / "masks", 6, 0)
    assert main(["route", str(root / "photos"), "--masks", str(masks), "--out", str(tmp_path / "a")]) == 1
    said = capsys.readouterr()
    assert "Retention cannot be measured with these masks: 6 have no lesion patch on the grid." in said.err
    assert route_files(mtb.data.folder_manifest(root / "photos", root / "masks"), tmp_path / "c").retention["center"].n == 6
    manifest = mtb.data.folder_manifest(root / "photos", masks).write(tmp_path / "m.parquet")
    assert main(["route", str(manifest), "--out", str(tmp_path / "b")]) == 0, "no measurement was asked for"
    said = capsys.readouterr()
    assert "6 have no lesion patch on the grid" in said.err
    assert "nan" not in said.out


def test_a_routing_shows_itself_and_warns_of_what_the_router_does_not_know(router: MedTokenBudget, root: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8))
    known, scene = mtb.route([root / "photos" / "p0.jpg", noise], model=router)
    assert isinstance(known, Routing)
    assert not known.unfamiliar
    assert scene.unfamiliar
    assert "unlike the training images" in repr(scene)
    assert "unlike" not in repr(known)
    assert known._repr_html_().startswith("<img alt=")
    plain, warned = known.overlay(), scene.overlay()
    assert warned.getpixel((warned.width - 2, 2)) == LESION_EDGE, "a band above the picture"
    assert plain.getpixel((plain.width - 2, 2)) != LESION_EDGE
    assert scene.to_dict()["unfamiliarity"] > 1
