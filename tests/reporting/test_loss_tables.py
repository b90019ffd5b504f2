"""The table of lost places against counts made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from medtokenbudget.reporting.loss_tables import split
from medtokenbudget.reporting.patch_orders import PatchOrders

# Two images of six patches. The first has three lesion patches (0, 1, 2) and an ambiguous one (3); the second one lesion patch (5).
LESION = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]], bool)
COVERED = np.array([[1.0, 0.8, 0.6, 0.4, 0.1, 0.0], [0.0, 0.0, 0.0, 0.0, 0.2, 0.9]])
# Best first. Of the first image three are kept: 0, then 3 (ambiguous) and 4 (skin) take the places of 1 and 2.
ORDER = np.array([[0, 3, 4, 1, 2, 5], [5, 0, 1, 2, 3, 4]])


def orders(**changes: object) -> PatchOrders:
    made = PatchOrders(["a", "b"], (2, 3), {("x", 1): ORDER}, {}, LESION, np.array([True, True]), COVERED)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_lost_places_are_counted_and_split():
    found = split(orders(), "x", 1, 3)
    assert found["images"] == 2
    assert found["lost"] == pytest.approx(2 / 4)  # of 3 + 1 reachable patches
    assert found["to_ambiguous"] == pytest.approx(1 / 2)
    assert found["core_of_ceiling"] == pytest.approx(2 / 3)  # 0 of (0, 1), and 5
    assert found["hard_images"] == pytest.approx(1 / 2)
    assert found["loss_of_hard"] == 1


def test_places_beyond_the_lesion_are_not_lost():
    found = split(orders(), "x", 1, 5)  # all lesion patches are kept, and two or four others
    assert found["lost"] == 0
    assert found["hard_images"] == 0
    assert math.isnan(found["to_ambiguous"])
    assert math.isnan(found["loss_of_hard"])


def test_with_more_places_than_lesion_patches_only_the_best_ranked_others_took_one():
    # Four are kept (3, 4, 0, 1), the lesion has three: one place is lost, and the ambiguous patch came first.
    found = split(orders(order={("x", 1): np.array([[3, 4, 0, 1, 2, 5], [5, 0, 1, 2, 3, 4]])}), "x", 1, 4)
    assert found["lost"] == pytest.approx(1 / 4)
    assert found["to_ambiguous"] == 1


def test_images_without_a_mask_do_not_count():
    found = split(orders(has_mask=np.array([False, True])), "x", 1, 3)
    assert (found["images"], found["lost"]) == (1, 0)


def test_a_run_that_did_not_record_how_much_is_covered_still_shows_the_images():
    found = split(orders(covered=None), "x", 1, 3)
    assert found["hard_images"] == pytest.approx(1 / 2)
    assert math.isnan(found["core_of_ceiling"])
