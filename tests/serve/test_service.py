"""The answers of the service without HTTP: they agree with the model, for every selector of the package and every request."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medtokenbudget.config import BUDGETS, NOTICE, ServeConfig
from medtokenbudget.data import patch_labels
from medtokenbudget.errors import RequestError
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.model.looks import look
from medtokenbudget.routing import selector_class
from medtokenbudget.routing.base import SELECTORS
from medtokenbudget.serve.samples import SAMPLES, offers, sample_files
from medtokenbudget.serve.server import find_service
from medtokenbudget.serve.service import Question, Service, retention
from medtokenbudget.tokens import SEGMENTATION
from tests.serve.server import mask, picture
from tests.small_model import small_model

NAMES = tuple(
    name
    for name, kind in SELECTORS._classes.items()
    if kind.__module__.startswith("medtokenbudget.") and SEGMENTATION not in kind.requires  # which only a store has
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MedTokenBudget:
    """Every selector of the package: what the explorer can show."""
    return small_model(tmp_path_factory.mktemp("service"), baselines=tuple(name for name in NAMES if name != "lats"))


@pytest.fixture(scope="module")
def service(model: MedTokenBudget) -> Service:
    return Service(model)


def test_the_model_describes_itself(service: Service, model: MedTokenBudget) -> None:
    info = service.describe()
    assert info["classes"] == list(model.classes)
    assert (info["main"], info["grid"], info["budgets"]) == ("lats", [10, 10], list(BUDGETS))
    assert info["fingerprint"] == model.fingerprint
    assert NOTICE in info["notice"]
    assert {row["name"]: row["title"] for row in info["selectors"]} == {name: look(name).title for name in model.selectors}
    assert all(row["about"].endswith(".") for row in info["selectors"])


def test_an_answer_agrees_with_predict_at_every_budget_and_selector(service: Service, model: MedTokenBudget) -> None:
    image = picture()
    answer = service.answer(Question(image, budgets=(0.25, 0.07)))
    assert answer["budgets"] == sorted([0.07, 0.25, *BUDGETS])
    assert {row["name"] for row in answer["selectors"]} == {
        n for n in NAMES if "lesion" not in model.classifier(n).selector.requires
    }
    for row in answer["selectors"]:
        for budget in (0.07, 0.3, 1.0):
            at = answer["budgets"].index(budget)
            (expected,) = model.predict(image, budget, row["name"])
            assert row["k"][at] == expected.k == (100 if row["name"] == "no-pruning" else max(8, round(100 * budget)))
            np.testing.assert_allclose(row["probabilities"][at], list(expected.probabilities.values()), atol=2e-6)
            if row["kind"] == "ranker":
                assert row["order"][: expected.k] == expected.kept.tolist()
                assert row["groups"] is None
                np.testing.assert_allclose(row["scores"], expected.scores, rtol=1e-5)
            else:
                assert row["order"] is None
                assert row["groups"][at] == expected.assignment.tolist()
    # At the full budget all rankers pool the same patches: what differs is the head alone.
    full = [tuple(row["probabilities"][-1]) for row in answer["selectors"]]
    assert len(set(full)) == len(full)


def test_retention_and_ceiling_are_counted_from_the_mask(service: Service) -> None:
    answer = service.answer(Question(picture(), mask()))
    lesion = set(np.flatnonzero(patch_labels(Image.open(io.BytesIO(mask())), (10, 10))).tolist())
    assert set(answer["lesion"]) == lesion
    rows = {row["name"]: row for row in answer["selectors"]}
    assert set(rows) == set(NAMES)
    for name, row in rows.items():
        if selector_class(name).kind == "merger":
            assert row["retention"] is None, name
            continue
        for at, k in enumerate(row["k"]):
            kept = row["order"][:k] if row["groups"] is None else np.flatnonzero(np.array(row["groups"][at]) >= 0).tolist()
            assert row["retention"][at] == pytest.approx(len(lesion & set(kept)) / len(lesion), abs=1e-6), name
            assert row["ceiling"][at] == pytest.approx(min(k, len(lesion)) / len(lesion), abs=1e-6), name
    assert rows["oracle"]["retention"] == rows["oracle"]["ceiling"]
    # Without a lesion patch there is no retention, rather than one of zero.
    empty = io.BytesIO()
    Image.new("L", (120, 90)).save(empty, format="PNG")
    answer = service.answer(Question(picture(), empty.getvalue(), selectors=("lats",)))
    assert (answer["lesion"], answer["selectors"][0]["retention"]) == ([], None)
    # By hand: lesion patches 1 and 3; patch 3 is kept first, then two others, then 1.
    assert retention([[3], [3, 0], [3, 0, 2], [3, 0, 2, 1]], np.array([False, True, False, True]), [1, 2, 3, 4]) == {
        "retention": [0.5, 0.5, 0.5, 1.0],
        "ceiling": [0.5, 1.0, 1.0, 1.0],
        "retention_of_ceiling": [1.0, 0.5, 0.5, 1.0],
    }


def test_the_same_question_gives_the_same_answer_and_the_preview_is_the_image(service: Service) -> None:
    first, second = (service.answer(Question(picture(), selectors=("random", "lats"), preview=True)) for _ in range(2))
    assert first == second
    assert [row["name"] for row in first["selectors"]] == ["random", "lats"]
    assert first["image"]["preview"].startswith("data:image/jpeg;base64,")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"selectors": "latz"}, "Did you mean 'lats'?"),
        ({"retention": "0.95"}, "not calibrated for 95% of the lesion"),
        ({"retention": "most"}, "A promised retention must be a number"),
        ({"retention": "1.5"}, "`retention` must be above 0 and at most 1"),
    ],
)
def test_a_wrong_field_is_rejected_with_the_reason(service: Service, fields: dict[str, str], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        service.answer(Question.from_form({"image": picture()}, {name: [value] for name, value in fields.items()}))


def test_samples_are_pictures_with_masks_and_keep_their_class_only_if_the_model_has_it() -> None:
    rows = {row["id"]: row for row in offers(["MEL", "NV", "BCC"])}
    assert [row["label"] for row in rows.values()] == ["MEL", "NV", "BCC", "MEL", None, None, None, None]
    assert (rows["vasc-off-center"]["title"], rows["mel-off-center"]["title"]) == ("Lesion 2, off-center", "MEL, off-center")
    assert all(row["label"] is None for row in offers(["polyp", "normal"]))
    name = next(iter(SAMPLES))
    image, lesion = (Image.open(io.BytesIO(data)) for data in sample_files(name))
    assert image.size == lesion.size
    assert lesion.getextrema() == (0, 255)


def test_the_router_of_the_package_is_the_default_and_the_demo_model_is_known_by_its_place(
    model: MedTokenBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    service = find_service(None, ServeConfig(device="cpu"))
    assert "comes with the package" in capsys.readouterr().err
    assert service.describe()["classes"] == []
    assert not service.demo
    folder = model.save_pretrained(tmp_path / "saved")
    assert not find_service(str(folder), ServeConfig(device="cpu")).demo
    shutil.move(folder, tmp_path / "runs" / "demo" / "model")
    assert find_service("runs/demo", ServeConfig(device="cpu")).describe()["demo"] is True
