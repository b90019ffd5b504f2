"""One matrix over every registered selector: what all of them promise. What is particular to one is in the file of its name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medtokenbudget.config import BUDGETS, CONTROLS, PAPER_METHODS, TrainConfig
from medtokenbudget.errors import BudgetError, CountError, MissingSignalError, NonFiniteError
from medtokenbudget.routing import Ranker, TokenBatch, budget_to_k, create_selector, list_selectors
from medtokenbudget.runs.method import Method
from tests.conftest import REPOSITORY
from tests.routing.batches import seeded, selector_of, tokens_of

NAMES = list_selectors()
LEARNED = [name for name in NAMES if selector_of(name).learns]
# Those that look at each patch alone: shuffled patches give the same patches, shuffled.
EQUIVARIANT = ["attention-entropy", "class-attention", "darkness", "norm"]


def shuffled(tokens: TokenBatch, order: torch.Tensor) -> TokenBatch:
    fields = ("patches", "attention_entropy", "cls_attention", "luminance")
    return replace(tokens, **{name: getattr(tokens, name)[:, order] for name in fields})


def test_the_papers_seven_and_the_controls_are_there():
    assert set(PAPER_METHODS) | set(CONTROLS) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grid", [(5, 7), (1, 20)])
def test_exactly_k_tokens_at_every_budget(name, grid):
    tokens = tokens_of(2, grid)
    selector = selector_of(name)
    for budget in BUDGETS:
        k = tokens.n if name == "no-pruning" else budget_to_k(budget, tokens.n)
        selection = selector.select_budget(tokens, budget, seeded())
        assert selector.count(budget, tokens.n) == selection.k == k
        assert selection.tokens.shape == (2, k, tokens.dim)
        if selection.attention is not None:
            assert selection.attention.shape == (2, k, tokens.n)
            torch.testing.assert_close(selection.attention.sum(2), torch.ones(2, k))
            torch.testing.assert_close(selection.attention @ tokens.patches, selection.tokens)
            assert int(selection.assignment.min()) >= 0
            assert int(selection.assignment.max()) < k
            continue
        for row in range(2):
            groups = selection.assignment[row]
            assert sorted(groups[groups >= 0].unique().tolist()) == list(range(k))
        if selection.kept is not None:
            assert selection.kept.sum(1).tolist() == [k, k]
            gathered = torch.take_along_dim(tokens.patches, selection.indices.unsqueeze(-1), 1)
            assert torch.equal(selection.tokens, gathered)


@pytest.mark.parametrize("name", NAMES)
def test_plain_tensors_give_the_selection_of_their_batch(name):
    batch = tokens_of(2, (6, 6))
    selector = selector_of(name)
    signals = {field: getattr(batch, field) for field in selector.requires if field != "has_mask"}
    expected = selector.select(batch, 24, seeded())
    plain = selector(batch.patches, k=24, generator=seeded(), **signals, cls=batch.cls)
    with_class = selector(torch.cat([batch.cls[:, None], batch.patches], 1), k=24, prefix=1, generator=seeded(), **signals)
    for found in (plain, with_class):
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.assignment, expected.assignment)
        assert (found.scores is None) == (not isinstance(selector, Ranker))
    for budget in (0.5, "50%", "0.5"):
        assert selector(batch.patches, budget, generator=seeded(), **signals, cls=batch.cls).k == selector.count(0.5, 36)
    if name == "no-pruning" or signals.get("lesion") is not None:
        return
    wide = selector(batch.patches[:, :20], k=9, grid=(4, 5), generator=seeded(), **{key: v[:, :20] for key, v in signals.items()})
    assert wide.k == 9


def test_gradients_flow_to_the_kept_tokens_of_plain_tensors_alone():
    tokens = torch.rand(2, 17, 8, requires_grad=True)
    selection = create_selector("norm", minimum=1)(tokens, "25%", prefix=1)
    selection.tokens.sum().backward()
    assert torch.equal(tokens.grad[:, 1:].any(2), selection.kept)
    assert not tokens.grad[:, 0].any()
    assert not selection.scores.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_the_generator_decides_for_stochastic_selectors_alone(name):
    tokens, selector = tokens_of(), selector_of(name)
    first, again, other = (selector.select(tokens, 9, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.assignment, again.assignment)
    assert torch.equal(first.assignment, other.assignment) != selector.stochastic


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_selected_alike_alone_and_in_a_batch(name):
    tokens = tokens_of()
    selector = selector_of(name)
    if selector.stochastic:
        pytest.skip("draws one number after the other")
    together = selector.select(tokens, 9).assignment
    for row in range(len(tokens)):
        assert torch.equal(selector.select(tokens.take([row]), 9).assignment[0], together[row])


@pytest.mark.parametrize("name", EQUIVARIANT)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 999))
def test_shuffled_patches_give_the_shuffled_selection(name, seed):
    tokens = tokens_of()
    order = torch.randperm(tokens.n, generator=seeded(seed))
    kept, again = (selector_of(name).select(batch, 9).kept for batch in (tokens, shuffled(tokens, order)))
    assert torch.equal(again, kept[:, order])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_patches_stay_half_precision_and_pool_in_fp32(name, dtype):
    tokens = replace(tokens_of(), patches=tokens_of().patches.to(dtype))
    selection = selector_of(name).select(tokens, 9, seeded())
    assert selection.tokens.dtype == dtype
    assert selection.pooled().dtype == torch.float32
    full = selector_of(name).select(tokens.float(), 9, seeded())
    torch.testing.assert_close(selection.pooled(), full.pooled(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_all_budgets_at_once_equal_one_at_a_time_and_those_of_a_ranker_are_nested(name):
    tokens = tokens_of(2, (8, 9))
    selector = selector_of(name)
    budgets = [*BUDGETS, 0.3, 0.01]
    together = selector.pooled(tokens, budgets, seeded())
    assert together.shape == (2, len(budgets), tokens.dim)
    # A merger or a shuffled draw consumes the generator, so each budget starts from its own.
    singly = torch.stack([selector.select_budget(tokens, budget, seeded()).pooled() for budget in budgets], 1)
    torch.testing.assert_close(together, singly, atol=1e-5, rtol=1e-5)
    if selector.kind != "ranker":
        return
    smaller, larger = (selector.select(tokens, k, seeded()).kept for k in (6, 20))
    assert bool((smaller <= larger).all())


@pytest.mark.parametrize("name", LEARNED)
def test_a_gradient_reaches_every_parameter(name):
    selector, tokens = selector_of(name), replace(tokens_of(), label=torch.tensor([0, 1, 1]))
    step = selector.training_pass(tokens, 1.0 if selector.kind == "merger" else 0.5, TrainConfig(), seeded())
    loss = sum(step.weights.get(name, 1.0) * term for name, term in step.terms.items())
    (loss + (step.pooled * torch.rand(step.pooled.shape, generator=seeded())).sum()).backward()
    used = tokens.n  # of the slots of a soft merger
    for parameter_name, parameter in selector.named_parameters():
        if parameter.numel() > 1:
            assert bool(parameter.grad[:used].abs().sum() > 0), parameter_name


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("variant", ["", "mask-free", "lesion-first"])
def test_every_learned_selector_trains_with_and_without_masks(name, variant):
    config = Method(name, variant=variant).config(TrainConfig())
    tokens, selector = replace(tokens_of(), label=torch.tensor([0, 1, 1])), selector_of(name)
    step = selector.training_pass(tokens, 0.5, config, seeded(), route=variant != "lesion-first")
    assert (step.pooled is None) == (variant == "lesion-first")
    assert "lesion" in step.terms
    assert step.terms["lesion"].requires_grad == (variant != "mask-free")
    assert step.weights["lesion"] == {"": 0.1, "mask-free": 0.0, "lesion-first": 1.0}[variant]
    unmasked = replace(tokens, lesion=torch.zeros_like(tokens.lesion), has_mask=torch.zeros(3, dtype=torch.bool))
    without = selector.training_pass(unmasked, 0.5, config, seeded(), route=variant != "lesion-first")
    assert without.terms["lesion"].item() == 0


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_selector_learns_the_lesion_from_masks(name):
    tokens = tokens_of(6, (4, 4), 16)
    patches = tokens.patches + 4.0 * tokens.lesion.unsqueeze(-1) * torch.linspace(-1, 1, 16)
    tokens, config = replace(tokens, patches=patches), Method(name, variant="lesion-first").config(TrainConfig())
    config = replace(config, patches=0)
    torch.manual_seed(0)
    selector = selector_of(name, 16)
    optimizer = torch.optim.AdamW(selector.parameters(), lr=1e-2)
    losses = []
    for _ in range(100):
        step = selector.training_pass(tokens, 0.5, config, seeded(), route=False)
        loss = sum(step.weights.get(key, 1.0) * term for key, term in step.terms.items())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(step.terms["lesion"].item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_selector_is_built_again_from_its_options(name):
    selector = selector_of(name)
    again = create_selector(name, dim=32, **selector.options())
    again.load_state_dict(selector.state_dict())
    tokens = tokens_of()
    assert torch.equal(selector.eval().select(tokens, 9).tokens, again.eval().select(tokens, 9).tokens)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_one_clear_error(name):
    tokens, selector = tokens_of(), selector_of(name)
    for k in (0, 36, -3):
        with pytest.raises(CountError, match="Cannot keep"):
            selector.select(tokens, k, seeded())
    for budget in (0, 1.2):
        with pytest.raises(BudgetError):
            selector.select_budget(tokens, budget, seeded())
    for bad in (float("nan"), float("inf")):
        patches = tokens.patches.clone()
        patches[1, 3, 2] = bad
        with pytest.raises(NonFiniteError, match="image-1"):
            selector.select(replace(tokens, patches=patches), 9, seeded())
    for field in selector.requires:
        with pytest.raises(MissingSignalError, match=field):
            selector.select(replace(tokens, **{field: None}), 9)
        if getattr(tokens, field).is_floating_point():
            values = getattr(tokens, field).clone()
            values[2, 4] = float("nan")
            with pytest.raises(NonFiniteError, match=f"{field} of image-2"):
                selector.select(replace(tokens, **{field: values}), 9)


def test_the_minimum_can_be_set():
    assert create_selector("norm", minimum=3).select_budget(tokens_of(), 0.01).k == 3
    with pytest.raises(CountError):
        create_selector("norm", minimum=0)


def test_a_ranker_that_gives_the_wrong_shape_is_told_so():
    class Wrong(Ranker):
        name = "wrong"

        def score(self, tokens, generator=None):
            return torch.zeros(1, 2)

    with pytest.raises(ValueError, match="must return scores"):
        Wrong().select(tokens_of(), 9)


@pytest.mark.slow
def test_a_selector_as_the_docs_write_it_works_as_a_file_of_the_package(tmp_path: Path) -> None:
    package = tmp_path / "medtokenbudget"
    shutil.copytree(REPOSITORY / "src" / "medtokenbudget", package, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    page = (REPOSITORY / "docs" / "selectors.md").read_text(encoding="utf-8")
    found = [text for text in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "@register_selector" in text]
    assert len(found) == 2
    for number, text in enumerate(found):
        (package / "routing" / "selectors" / f"added_{number}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "medtokenbudget", "selectors"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"outlier", "linear-scorer"} < {line.split()[0] for line in done.stdout.splitlines()}
