"""Every selector of the package in one model that the service answers for: what the explorer can show."""

from __future__ import annotations

from pathlib import Path

import httpx

from medtokenbudget.routing import selector_class
from medtokenbudget.routing.base import SELECTORS
from medtokenbudget.serve.service import Service
from tests.serve.server import mask, picture, running_here
from tests.small_model import small_model

NAMES = tuple(name for name, kind in SELECTORS._classes.items() if kind.__module__.startswith("medtokenbudget."))


def test_the_explorer_shows_every_selector_with_its_name_and_what_it_did(tmp_path: Path) -> None:
    model = small_model(tmp_path / "backbone", baselines=tuple(name for name in NAMES if name != "lats"))
    with running_here(Service(model)) as server:
        files = {"image": ("image", picture()), "mask": ("mask", mask())}
        answer = httpx.post(f"{server.url}/v1/route", files=files, timeout=120)
        assert answer.status_code == 200, answer.text
    rows, at = {row["name"]: row for row in answer.json()["selectors"]}, answer.json()["budgets"].index(0.3)
    assert set(rows) == set(NAMES)
    for name, row in rows.items():
        assert row["k"][at] == (100 if name == "no-pruning" else 30), name
        assert abs(sum(row["probabilities"][at]) - 1) < 1e-4, name
        merges = selector_class(name).kind not in ("ranker", "sampler")
        assert (row["retention"] is None) == merges, name
        if selector_class(name).kind == "sampler":
            lesion, groups = answer.json()["lesion"], row["groups"][at]
            assert row["retention"][at] == round(sum(groups[patch] >= 0 for patch in lesion) / len(lesion), 6)
