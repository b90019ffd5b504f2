"""What makes an image hard: each rule finds what was drawn, and gives the numbers of its formula."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from medtokenbudget.data import Manifest, strata
from medtokenbudget.data.drawing import Canvas, field_of_view, hair
from medtokenbudget.data.strata import Appearance, column_strata, measure, stratum_order
from medtokenbudget.data.synthetic import draw
from medtokenbudget.errors import RequestError, UnknownNameError

SIZE = 128


def skin(color: tuple[float, float, float] = (0.86, 0.68, 0.58)) -> np.ndarray:
    """Plain skin [H, W, 3] with a little noise."""
    noise = np.random.default_rng(0).normal(0, 0.01, (SIZE, SIZE, 1))
    return (np.full((SIZE, SIZE, 3), color) + noise).astype(np.float32)


def drawn_on(picture: np.ndarray, change: object) -> np.ndarray:
    """The picture after an artifact, which works on channels first."""
    return np.moveaxis(change(np.moveaxis(picture, 2, 0)), 0, 2).clip(0, 1)


EVERYWHERE = np.ones((SIZE, SIZE), bool)


def test_hair_is_found_and_more_hair_is_more() -> None:
    canvas, rng = Canvas(SIZE), np.random.default_rng(1)
    none, some, dense = (drawn_on(skin(), lambda p, n=n: hair(p, canvas, rng, "dark", n)) if n else skin() for n in (0, 6, 40))
    shares = [strata.thin_structures(picture).mean() for picture in (none, some, dense)]
    assert shares[0] == 0
    assert 0.005 < shares[1] < shares[2]
    assert shares[2] > 0.03
    # A dark disc is neither thin nor long.
    y, x = np.mgrid[:SIZE, :SIZE]
    disc = np.where(((y - 64) ** 2 + (x - 64) ** 2 < 30**2)[..., None], 0.2, skin())
    assert strata.thin_structures(disc.astype(np.float32)).mean() < 0.005


@pytest.mark.parametrize(("kind", "dark"), [("circle", 4), ("full", 0)])
def test_dark_corners_are_those_of_a_round_field_of_view(kind: str, dark: int) -> None:
    light = field_of_view(Canvas(SIZE), np.random.default_rng(3), kind)
    assert strata.dark_corners(skin() * light[..., None]) == dark


@pytest.mark.parametrize("color", [(0.93, 0.80, 0.72), (0.75, 0.56, 0.44), (0.42, 0.28, 0.20)])
def test_the_typology_angle_is_that_of_the_formula(color: tuple[float, float, float]) -> None:
    # CIELAB by the textbook, pixel by pixel.
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in color]
    y = 0.2126729 * linear[0] + 0.7151522 * linear[1] + 0.0721750 * linear[2]
    z = (0.0193339 * linear[0] + 0.1191920 * linear[1] + 0.9503041 * linear[2]) / 1.08883
    lightness, b = 116 * y ** (1 / 3) - 16, 200 * (y ** (1 / 3) - z ** (1 / 3))
    expected = np.degrees(np.arctan((lightness - 50) / b))
    plain = np.full((SIZE, SIZE, 3), color, np.float32)
    assert strata.skin_tone(plain, EVERYWHERE) == pytest.approx(expected, abs=0.05)


def test_the_lesion_does_not_count_for_the_skin_tone() -> None:
    lesion = np.zeros((SIZE, SIZE), bool)
    lesion[40:90, 40:90] = True
    spotted = np.where(lesion[..., None], 0.15, skin()).astype(np.float32)
    around = strata.around(lesion)
    assert not (around & lesion).any()
    assert strata.skin_tone(spotted, around) == pytest.approx(strata.skin_tone(skin(), around), abs=0.5)


def test_position_is_the_distance_of_the_centroid_in_diagonals() -> None:
    lesion = np.zeros((101, 101), bool)
    lesion[45:56, 45:56] = True
    assert strata.position(lesion) == 0
    moved = np.roll(lesion, 20, axis=1)
    assert strata.position(moved) == pytest.approx(20 / np.hypot(101, 101))


def test_strata_follow_the_edges_and_what_needs_a_mask_is_not_measured_without_one() -> None:
    assert list(Appearance(position=0.2, ita=30.0, hair=0.01, dark_corners=2).strata().values()) == [
        "far off-center",
        "intermediate",
        "some",
        "dark corners",
    ]
    assert Appearance(0.0, 55.1, 0.0, 1).strata()["skin tone"] == "very light"
    assert Appearance(0.0, -31.0, 0.04, 1).strata()["dark corners"] == "no dark corners"
    drawing = draw("MEL", 3, size=96)
    image = Image.fromarray(drawing.image)
    bare, masked = measure(image, None), measure(image, Image.fromarray(drawing.mask))
    assert np.isnan(bare.position)
    assert bare.strata()["skin tone"] is None
    assert masked.strata()["position"] in strata.STRATA["position"]
    assert set(masked.strata()) == set(strata.STRATA) == set(strata.METHODS)


def test_the_frames_of_drawings_are_recognized() -> None:
    right = []
    for seed in range(24):
        drawing = draw("NV", seed, size=96)
        corners = measure(Image.fromarray(drawing.image), Image.fromarray(drawing.mask)).dark_corners >= 2
        right.append(corners == (drawing.traits["field"] != "full"))
    assert np.mean(right) >= 0.9


def manifest_with(**columns: list[str | None]) -> Manifest:
    """A manifest with one row per value."""
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    return Manifest.from_records([{"image_id": f"i{number}", "image": "i.png", **row} for number, row in enumerate(rows)], [])


def test_the_values_of_a_column_are_its_strata_and_many_numbers_are_cut_into_quarters() -> None:
    ages: list[str | None] = [str(age) for age in np.random.default_rng(0).permutation(100)]
    ages[7] = None
    manifest = manifest_with(site=["back", None, "10", "9"] * 25, age=ages)
    strata = column_strata(manifest, ["age", "site"])
    assert list(strata) == ["age (column)", "site (column)"]
    assert strata["site (column)"][:4] == ["back", None, "10", "9"]
    assert stratum_order("site (column)", ["back", "10", "9"]) == ["9", "10", "back"]
    assert strata["age (column)"][7] is None
    known = pd.Series([float(age) for age in ages if age is not None])
    quarters = pd.Series([text for text in strata["age (column)"] if text is not None])
    expected = pd.qcut(known, 4, labels=False)
    assert quarters.str.extract(r"quarter (\d)")[0].astype(int).tolist() == (expected + 1).tolist()
    for number, values in known.groupby(expected):
        assert set(quarters[expected == number]) == {f"quarter {number + 1}, {values.min():g} to {values.max():g}"}


def test_a_column_that_gives_no_strata_is_refused() -> None:
    manifest = manifest_with(name=[f"person {i}" for i in range(20)])
    with pytest.raises(UnknownNameError, match=r"Unknown column 'nam' of the manifest.*Did you mean 'name'"):
        column_strata(manifest, ["nam"])
    with pytest.raises(RequestError, match="20 different values"):
        column_strata(manifest, ["name"])
