"""The drawn data set: the same request is the same bytes, and work that was done is not done again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from medtokenbudget.data import Drawings, Manifest, decode_image, decode_mask, synthetic_manifest
from medtokenbudget.errors import RequestError

REQUEST = Drawings(n=12, seed=3, size=64)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_images_masks_and_manifest_belong_together(tmp_path: Path) -> None:
    manifest = Manifest.read(synthetic_manifest(tmp_path / "drawn", REQUEST, select=0.2))
    assert manifest.ids == [f"SYN_{k:06d}" for k in range(12)]
    assert set(manifest.rows["label"]) <= set(manifest.classes)
    assert set(manifest.rows["split"]) == {"train", "select", "val"}
    for index in range(len(manifest)):
        mask_path = manifest.mask_path(index)
        assert mask_path is not None
        mask = np.asarray(decode_mask(mask_path))
        assert decode_image(manifest.image_path(index)).size == (64, 64)
        assert set(np.unique(mask)) == {0, 255}


@pytest.mark.slow
def test_the_same_request_is_the_same_bytes_whatever_the_workers(tmp_path: Path) -> None:
    synthetic_manifest(tmp_path / "a", REQUEST)
    synthetic_manifest(tmp_path / "b", REQUEST, workers=2)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    synthetic_manifest(tmp_path / "c", Drawings(n=12, seed=4, size=64))
    assert content(tmp_path / "a")["images/SYN_000000.jpg"] != content(tmp_path / "c")["images/SYN_000000.jpg"]


def test_an_interrupted_drawing_goes_on(tmp_path: Path) -> None:
    synthetic_manifest(tmp_path / "a", REQUEST)
    whole = content(tmp_path / "a")
    kept = tmp_path / "a" / "images" / "SYN_000001.jpg"
    before = kept.stat().st_mtime_ns
    for gone in ("images/SYN_000002.jpg", "masks/SYN_000005.png", "manifest.parquet"):
        (tmp_path / "a" / gone).unlink()
    synthetic_manifest(tmp_path / "a", REQUEST)
    assert content(tmp_path / "a") == whole
    assert kept.stat().st_mtime_ns == before


def test_a_named_manifest_has_its_files_in_a_folder_of_its_name(tmp_path: Path) -> None:
    path = synthetic_manifest(tmp_path / "x.parquet", REQUEST)
    assert path == tmp_path / "x.parquet"
    assert Manifest.read(path).image_path(0) == tmp_path / "x" / "images" / "SYN_000000.jpg"


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_a_few_images_are_a_data_set_too(tmp_path: Path, n: int) -> None:
    manifest = Manifest.read(synthetic_manifest(tmp_path / "few.parquet", Drawings(n=n, size=64)))
    assert len(manifest) == n
    assert set(manifest.rows["split"]) == ({"train"} if n < 5 else {"train", "val"})


def test_two_requests_do_not_mix_in_one_folder(tmp_path: Path) -> None:
    synthetic_manifest(tmp_path, REQUEST)
    with pytest.raises(RequestError, match="seed: expected 9, found 3"):
        synthetic_manifest(tmp_path, Drawings(n=12, seed=9, size=64))


@pytest.mark.parametrize(
    ("values", "message"), [({"n": 0}, "^n must"), ({"n": 1, "size": 8}, "^size must"), ({"n": 1, "seed": -1}, "^seed must")]
)
def test_an_impossible_request_is_rejected(values: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Drawings(**values)
