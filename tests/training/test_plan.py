"""The settings that a training chooses by the number of texts, and its baselines."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jpets.errors import InvalidInput
from jpets.tokenizing import Tokens
from jpets.training.baselines import Baselines
from jpets.training.batches import Rows
from jpets.training.data import Example, contradictions
from jpets.training.groups import each_step
from jpets.training.heads import new_head, usual_answer
from jpets.training.linear import fitted_rows, linear_head
from jpets.training.losses import IGNORED
from jpets.training.methods import rates
from jpets.training.metrics import main_name, main_score
from jpets.training.plan import FEW_TEXTS, LEAST_EPOCHS, LEAST_OF_FEW, MOST_EPOCHS, UPDATES, TrainingPlan, settled
from jpets.training.together import _check_batch


@pytest.mark.parametrize("texts", [1, 20, 194, 800, FEW_TEXTS - 1, FEW_TEXTS, 100_000])
def test_a_plan_follows_the_number_of_texts(texts: int) -> None:
    found = settled(TrainingPlan(), texts)
    updates = found.epochs * found.per_epoch(texts)
    assert LEAST_EPOCHS <= found.epochs <= MOST_EPOCHS and found.patience is not None
    assert updates >= UPDATES or found.epochs == MOST_EPOCHS
    assert found.epochs <= LEAST_OF_FEW or updates < UPDATES + found.per_epoch(texts)
    assert found.batch == (16 if texts < FEW_TEXTS else 32)
    assert settled(found, 5) == found


def test_eight_hundred_texts_get_what_the_debian_experiment_found() -> None:
    """Batches of 16, two hundred updates: ``docs/experiments.md``."""
    found = settled(TrainingPlan(), 800)
    assert (found.batch, found.epochs, found.head_rate) == (16, 4, 5e-3)
    assert [rates()[name] for name in ("adapter", "lora", "bitfit")] == [2e-3, 4e-3, 3e-3]


def test_what_a_plan_says_itself_stays() -> None:
    plan = TrainingPlan(epochs=2, batch=8, rate=0.5, head_rate=0.25, seed=3)
    found = settled(plan, 1000)
    assert (found.epochs, found.batch, found.rate, found.head_rate, found.seed) == (2, 8, 0.5, 0.25, 3)
    assert found.patience is None  # a user who says how long to train means it
    assert settled(TrainingPlan(patience=1), 1000).patience == 1
    assert settled(TrainingPlan(batch=100), 1000).per_epoch(1000) == 10
    assert settled(TrainingPlan(accumulate=4), 194).epochs == 31


def test_tasks_that_train_together_share_the_size_of_batches() -> None:
    plans = [settled(TrainingPlan(), FEW_TEXTS - 1), settled(TrainingPlan(), FEW_TEXTS)]
    with pytest.raises(InvalidInput, match=r"batches of one size, found \[16, 32\]"):
        _check_batch(plans)
    _check_batch([settled(TrainingPlan(batch=4), count) for count in (10, 10_000)])


def tokens(count: int) -> list[Tokens]:
    one = np.array([1, 2, 3], np.int32)
    return [Tokens(one, np.zeros_like(one)) for _ in range(count)]


def test_each_task_has_epochs_of_its_own() -> None:
    sizes = (16, 160)
    data = [Rows(tokens(size), [np.array(0)] * size, np.ones(size, np.float32)) for size in sizes]
    steps = list(each_step(data, TrainingPlan(), pad_id=0))
    counts = [sum(at in group.tasks for groups in steps for group in groups) for at in range(2)]
    assert counts == [MOST_EPOCHS, UPDATES]


def rows_of(kind: str, x: np.ndarray) -> Rows:
    """Targets that a linear function of ``x`` [n, 4] gives."""
    slope = np.array([[1.0, -2, 0.5, 0], [0, 1, 1, -1], [-1, 1, -1, 1]], np.float32).T
    logits = 3 * x @ slope
    if kind == "single-label":
        targets = list(logits.argmax(-1).astype(np.int32))
    elif kind == "multi-label":
        targets = list((logits > 0).astype(np.float32))
    else:
        targets = list(logits.astype(np.float32))
    return Rows(tokens(len(x)), targets, np.ones(len(x), np.float32))


@pytest.mark.parametrize("kind", ["single-label", "multi-label", "regression"])
def test_a_linear_head_finds_what_is_linear(kind: str) -> None:
    x = np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)
    rows, judged = rows_of(kind, x[:500]), rows_of(kind, x[500:])
    head = new_head("sequence-classification", kind, 3, 4)  # type: ignore[arg-type]
    fitted = linear_head(head, rows, list(x[:500]), judged, list(x[500:]))
    found = x[500:] @ fitted.tensors["kernel"] + fitted.tensors["bias"]
    truth = np.stack(judged.targets)
    if kind == "single-label":
        assert (found.argmax(-1) == truth).mean() > 0.9
    elif kind == "multi-label":
        assert ((found > 0) == (truth > 0)).mean() > 0.9
    else:
        assert np.corrcoef(found.ravel(), truth.ravel())[0, 1] > 0.95


def test_a_linear_head_on_tokens_skips_what_has_no_tag() -> None:
    x = np.random.default_rng(1).normal(size=(80, 3, 4)).astype(np.float32)
    targets = [np.where([False, True, True], own[:, 0] > 0, IGNORED).astype(np.int32) for own in x]
    rows = Rows(tokens(80), targets, np.ones(80, np.float32), tags=True)
    head = new_head("token-classification", "single-label", 3, 4)  # also for a tag that does not occur
    fitted = linear_head(head, rows, list(x), rows, list(x))
    found = (x @ fitted.tensors["kernel"] + fitted.tensors["bias"]).argmax(-1)
    assert (found[:, 1:] == np.stack(targets)[:, 1:]).mean() > 0.9


def test_a_linear_head_takes_some_of_many_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(tokens(50), [np.array(at) for at in range(50)], np.ones(50, np.float32))
    assert fitted_rows(rows, 0) is rows
    monkeypatch.setattr("jpets.training.linear.MOST_TEXTS", 10)
    some = fitted_rows(rows, 0)
    assert len(some.tokens) == 10 and len({int(each) for each in some.targets}) == 10


def test_the_usual_answer_does_not_read_the_text() -> None:
    rows = Rows(tokens(4), [np.array(each) for each in (1, 1, 1, 0)], np.ones(4, np.float32))
    head = usual_answer(new_head("sequence-classification", "single-label", 2, 4), rows)
    assert not head.tensors["kernel"].any() and head.tensors["bias"].argmax() == 1
    balanced = rows._replace(weights=np.array([2 / 3, 2 / 3, 2 / 3, 2], np.float32))
    assert usual_answer(head, balanced).tensors["bias"].argmax() == 1, "the most frequent one, however much rows count"
    tags = [*[np.array([IGNORED, 1, IGNORED])] * 3, np.array([IGNORED, 0, 0, 0, 0])]
    long = rows._replace(targets=tags, tags=True)
    assert usual_answer(new_head("token-classification", "single-label", 2, 4), long).tensors["bias"].argmax() == 0


def test_training_gained_something_where_it_beats_all() -> None:
    beside = Baselines({"accuracy": 0.5, "f1_macro": 0.9}, {"accuracy": 0.8, "f1_macro": 0.1})
    assert beside.beaten({"accuracy": 0.9, "f1_macro": 0}) and not beside.beaten({"accuracy": 0.8, "f1_macro": 1})
    values = Baselines({"rmse": 2.0}, {"rmse": 1.0, "pearson": 0.9})
    assert values.beaten({"rmse": 0.5, "pearson": 0.1}) and not values.beaten({"rmse": 1.5, "pearson": 0.99})
    assert Baselines().beaten({"exact": 0.0}) and main_score({"rmse": 2.0}) == -2
    assert main_name({"accuracy": 1, "entity_f1": 0}) == "entity_f1"
    assert not dataclasses.replace(beside, frozen=None).beaten({"accuracy": 0.5})


def test_contradictions_are_counted() -> None:
    examples = [Example("a", None, "x"), Example("a", None, "x"), Example("a", None, "y"), Example("a", "b", "y")]
    assert contradictions(examples) == 1
    assert contradictions([Example("a", None, ["x"]), Example("a", None, ["y"]), Example("a", None, ["y"])]) == 2
