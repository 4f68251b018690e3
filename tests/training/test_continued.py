"""Training that goes on from a task: with its answers at the start, its places and signs, and its own method."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_task import task_logits
from support import shallow

from jpets.app.jobs.work import training_of
from jpets.deltas import METHODS
from jpets.deltas.fold import fold_pooler, pooler_weight
from jpets.deltas.mask import MaskScores
from jpets.deltas.recipe import Recipe
from jpets.errors import InvalidInput
from jpets.model.encoder import random_params, split
from jpets.tokenizing import TextEncoder
from jpets.training.data import Example
from jpets.training.forward import task_outputs
from jpets.training.heads import new_head
from jpets.training.labels import make_rows
from jpets.training.methods import continued, direct_recipe, rates
from jpets.training.objective import fit_batches
from jpets.training.plan import Training, TrainingPlan, settled
from jpets.training.prepared import prepare
from jpets.training.session import run_training
from jpets.training.tokens import rectangle
from jpets.types import BackboneRef, Delta, Preprocessing, Task
from serving.jobs.request import STORED_BEFORE, FineTune

CONFIG = dataclasses.replace(shallow().config, layers=1)
RULE = Preprocessing(max_length=16, truncation=True)
NAMES = ("code", "fun")
TEXTS = [Example("a library", None, "code"), Example("a game", None, "fun")] * 8


def delta_of(method: str, settings: dict[str, Any], config: Any = CONFIG) -> Delta:
    return METHODS[method].init(np.random.default_rng(1), settings, config, 0.5)


def task_of(*deltas: Delta) -> Task:
    head = new_head("sequence-classification", "single-label", 2, CONFIG.hidden_size)
    return Task("earlier", BackboneRef.of(shallow()), deltas, head, NAMES, RULE)


def test_an_empty_list_of_differences_is_not_trained() -> None:
    """No checkpoint could hold it."""
    made = delta_of("diff", {})
    name = next(iter(n for n, own in made.tensors.items() if np.issubdtype(own.dtype, np.floating)))
    empty = dataclasses.replace(made, tensors={**made.tensors, "pooler/bias_values": np.zeros(0, np.float32)})
    started = continued([empty], CONFIG, {}).start(np.random.default_rng(0))
    assert name in started[0] and "pooler/bias_values" not in started[0]


def recipe_of(delta: Delta, base: dict[str, Any]) -> Recipe:
    return continued([delta], CONFIG, base)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("lora", {"sites": ["query"], "rank": 2}), ("diff", {}), ("diff", {"block": 4}), ("onebit", {}), ("mask", {})],
)
def test_it_starts_with_the_tasks_answers_and_keeps_its_places(method: str, settings: dict[str, Any]) -> None:
    base = jax.tree.map(np.asarray, random_params(CONFIG))
    encoder, params, delta = split(CONFIG), jax.tree.map(jnp.asarray, base), delta_of(method, settings)
    head, text = task_of().head, TextEncoder.of(shallow())
    rows = make_rows(TEXTS[:2], head, NAMES, text, RULE)
    batch = rectangle(rows.tokens, 16, 0)
    tensors = {name: 50 * jnp.asarray(array) for name, array in head.tensors.items()}
    recipe = recipe_of(delta, base)
    tree = recipe.start(np.random.default_rng(0))

    @jax.jit
    def answers(tree: Any) -> Any:
        own, deltas = recipe.vary(params, tree, None)
        return task_outputs(encoder, own, deltas, head, tensors, batch).logits

    served, plain = (task_logits(encoder, params, deltas, head, batch, tensors) for deltas in ((delta,), ()))
    far = float(np.abs(served - plain).max())
    assert far > 1e-3
    np.testing.assert_allclose(answers(tree), served, atol=1e-5 if method != "mask" else 0.2 * far)
    slopes = jax.jit(jax.grad(lambda tree: (answers(tree) ** 2).sum()))(tree)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(slopes) if leaf.size) > 1e-3
    moved = jax.tree.map(lambda leaf, slope: leaf - 1e-3 * slope, tree, slopes)
    (after,) = recipe.finish(moved)
    assert after.method == method and after.settings.keys() <= delta.settings.keys() | {"sites", "layers"}
    for name, array in delta.tensors.items():
        if method == "mask":
            changed = np.unpackbits(np.asarray(after.tensors[name] ^ array, np.uint8)).mean()
            assert changed < 0.01, name
        elif not np.issubdtype(array.dtype, np.floating):
            np.testing.assert_array_equal(after.tensors[name], array)


@pytest.mark.parametrize(
    ("methods", "training", "message"),
    [
        (["lora"], Training("adapter"), "method: training goes on from a task of lora, found adapter"),
        (["lora"], Training("frozen"), "found frozen"),
        (["lora"], Training("lora", {"rank": 2}), r"settings: those of the task .* stay, found \['rank'\]"),
        (["mask", "bitfit"], Training("mask"), rf"goes on from any of .*{sorted(rates())[0]}.* found \['mask'\]"),
        (["lora"], Training("lora", problem="regression"), "problem: expected labels of texts for regression"),
        (["lora"], Training("lora", head="embedding"), "head: expected a task with embedding to go on from"),
    ],
)
def test_what_is_asked_for_otherwise_is_refused(methods: list[str], training: Training, message: str) -> None:
    settings: dict[str, Any] = {"lora": {"sites": ["query"], "rank": 2}}
    start = task_of(*(delta_of(method, settings.get(method, {}), shallow().config) for method in methods))
    with pytest.raises(InvalidInput, match=message):
        run_training("own", shallow(), training, TEXTS, start=start)


def test_prompts_stay() -> None:
    start = task_of(delta_of("lora", {"sites": ["query"], "rank": 2}, shallow().config))
    rule = dataclasses.replace(start.preprocessing, prefix="query: ", prompts={"passage": "a: "}, thresholds=(0.5,) * 2)
    start = dataclasses.replace(start, preprocessing=rule)
    text, training = TextEncoder.of(shallow()), Training("lora", max_length=16)
    made = prepare(shallow().config, text, training, TEXTS, start=start)
    assert made.rule == Preprocessing(16, True, prefix="query: ", prompts={"passage": "a: "})
    plain = prepare(shallow().config, text, training, TEXTS)
    assert len(made.rows.tokens[0].ids) > len(plain.rows.tokens[0].ids)


def test_a_mask_of_some_matrices_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"mask: training goes on from masks of .* found \['query'\]"):
        MaskScores({}, CONFIG, delta_of("mask", {"sites": ["query"]}))


@pytest.mark.parametrize("method", ["mask", "diff"])
def test_a_heavy_task_is_trained_on(method: Literal["mask", "diff"]) -> None:
    training = Training(method, plan=TrainingPlan(epochs=3, batch=8, dtype="float32", head_rate=5e-2), max_length=16)
    first = run_training("own", shallow(), training, TEXTS * 4)
    second = run_training("own", shallow(), training, TEXTS * 4, start=first.task)
    assert [delta.method for delta in second.task.deltas] == [method]
    assert second.losses[0] < np.log(2) / 2 and second.held_out < first.held_out


@pytest.mark.parametrize(
    ("examples", "training", "message"),
    [
        (
            [Example(("a", "b"), None, ["O", "B-x"])] * 8,
            Training("lora", balanced=True),
            "balanced: expected one label",
        ),
        ([Example("a", None, ["x"])] * 8, Training("lora", balanced=True), "found multi-label"),
        ([Example("a", None, 0.5)] * 8, Training("lora", balanced=True), "found regression"),
        ([Example(("a", "b"), None, ["O", "B-x"])] * 8, Training("lora", problem="regression"), "problem: expected"),
        ([Example("a", "b")] * 8, Training("frozen", head="embedding"), "nothing would be trained"),
        ([Example(("a", "b"), "c", ["O", "B-x"])] * 8, Training("lora"), "row 1: expected no second text"),
    ],
)
def test_no_option_is_passed_over(examples: list[Example], training: Training, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        run_training("own", shallow(), training, examples)


def test_a_delta_at_the_pooler_acts_in_training_as_when_it_is_served() -> None:
    """A server folds it into the head; an operator of it does not exist."""
    base = jax.tree.map(np.asarray, random_params(CONFIG))
    encoder, params = split(CONFIG), jax.tree.map(jnp.asarray, base)
    delta = delta_of("lora", {"sites": ["query", "pooler"], "rank": 2})
    head = new_head("sequence-classification", "single-label", 2, CONFIG.hidden_size, "pooler")
    folded = fold_pooler(Task("own", BackboneRef.of(shallow()), (delta,), head, NAMES, RULE), CONFIG, params)
    rows = make_rows(TEXTS[:2], head, NAMES, TextEncoder.of(shallow()), RULE)
    batch = rectangle(rows.tokens, 16, 0)

    served, whole, plain = (
        task_logits(encoder, params, deltas, own, batch)
        for own, deltas in ((folded.head, (delta,)), (head, (delta,)), (head, ()))
    )
    kernel = {name: jnp.asarray(array) for name, array in head.tensors.items()}
    np.testing.assert_allclose(whole, served, atol=1e-5)
    assert pooler_weight(delta) is not None and float(np.abs(plain - served).max()) > 1e-3
    recipe = recipe_of(delta, base)
    tree = recipe.start(np.random.default_rng(0))

    def loss(tree: Any) -> Any:
        own, deltas = recipe.vary(params, tree, None)
        return (task_outputs(encoder, own, deltas, head, kernel, batch).logits ** 2).sum()

    slopes = recipe.finish(jax.jit(jax.grad(loss))(tree))[0].tensors
    assert all(np.abs(slopes[f"pooler/{name}"]).max() > 0 for name in "AB")


def test_a_task_keeps_its_length_unless_another_is_asked_for() -> None:
    start, text = (
        task_of(delta_of("lora", {"sites": ["query"], "rank": 2}, shallow().config)),
        TextEncoder.of(shallow()),
    )

    def length(training: Training, start: Task | None) -> int | None:
        return prepare(shallow().config, text, training, TEXTS, start=start).rule.max_length

    longest = shallow().config.max_positions
    whole = dataclasses.replace(start, preprocessing=Preprocessing())
    assert [length(Training("lora"), own) for own in (start, whole, None)] == [16, longest, min(128, longest)]
    assert length(Training("lora", max_length=9), start) == 9


def test_a_task_has_the_truncation_strategy_that_was_asked_for_or_that_of_its_start() -> None:
    start, text = (
        task_of(delta_of("lora", {"sites": ["query"], "rank": 2}, shallow().config)),
        TextEncoder.of(shallow()),
    )
    second = dataclasses.replace(start, preprocessing=Preprocessing(truncation_strategy="only_second"))

    def strategy(training: Training, start: Task | None) -> str:
        return prepare(shallow().config, text, training, TEXTS, start=start).rule.truncation_strategy

    assert [strategy(Training("lora"), own) for own in (None, start, second)] == [*["longest_first"] * 2, "only_second"]
    asked = Training("lora", truncation_strategy="only_first")
    assert strategy(asked, second) == strategy(asked, None) == "only_first"
    asked = training_of(FineTune(task="own", truncation_strategy="only_second"))
    pairs = [dataclasses.replace(each, text_pair="a game") for each in TEXTS]
    assert prepare(shallow().config, text, asked, pairs).rule.truncation_strategy == "only_second"
    templated = dataclasses.replace(start, preprocessing=Preprocessing(template="{text} or {text_pair}"))
    for examples, own, found in ((TEXTS, None, "read alone"), (pairs, templated, "a template")):
        with pytest.raises(InvalidInput, match=f"truncation_strategy: .* found .*{found}"):
            prepare(shallow().config, text, asked, examples, start=own)


def test_a_later_stage_makes_an_update() -> None:
    """One that takes an epoch has fewer batches than an update takes, where there are few texts."""
    stages: list[tuple[str, int]] = []
    plan = TrainingPlan(epochs=4, batch=8, accumulate=8, dtype="float32")
    training = Training("onebit", plan=plan, max_length=16)
    result = run_training(
        "own", shallow(), training, TEXTS * 3, report=lambda step: stages.append((step.stage, step.of))
    )
    assert set(stages) == {("", 24), ("stage 2", 12)}
    assert result.task.deltas[0].method == "onebit"


def test_the_scale_of_low_rank_products_is_where_they_start() -> None:
    """``alpha / rank`` of A; B is zero."""
    usual, scaled = (
        direct_recipe("lora", {"rank": 4, **alpha}, shallow().config, dict(shallow().params)).deltas[0].tensors
        for alpha in ({}, {"alpha": 16})
    )
    np.testing.assert_allclose(scaled["query/A"], 4 * usual["query/A"], rtol=1e-6)
    assert not scaled["query/B"].any()


def test_a_job_that_goes_on_from_a_task_keeps_its_pooling() -> None:
    assert training_of(FineTune(task="own")).pooling == "mean"
    assert training_of(FineTune(task="own", pooling="cls")).pooling == "cls"
    again = FineTune.model_validate_json(FineTune(task="own", start="before", method="lora").model_dump_json())
    assert again.pooling is None
    stored = {"task": "own", "start": "before", "method": "lora", "pooling": "mean", "rate": 0.1, "sweep": "1e-4..1e-1"}
    assert FineTune.model_validate(stored).pooling == "mean", "the server compares it with the task's"
    for pooling in ("mean", "cls"):
        kept = FineTune.model_validate({**stored, "pooling": pooling}, context=STORED_BEFORE)
        assert kept.pooling is None, "as the release before took it in"


def test_a_task_that_nothing_improves_stays_as_it_is() -> None:
    """Held-out texts choose among all epochs, and what there was before the first."""
    plan = TrainingPlan(epochs=4, batch=8, dtype="float32", head_rate=5e-2)
    first = run_training("own", shallow(), Training("lora", plan=plan, max_length=16), TEXTS * 4)
    worse = dataclasses.replace(plan, epochs=2, rate=10.0, head_rate=10.0)
    second = run_training("own", shallow(), Training("lora", plan=worse, max_length=16), TEXTS * 4, start=first.task)
    assert second.held_out == pytest.approx(first.held_out, abs=1e-5)
    assert first.held_out < min(second.losses[1:])
    for name, array in first.task.deltas[0].tensors.items():
        np.testing.assert_array_equal(second.task.deltas[0].tensors[name], array)


def test_an_objective_that_never_has_a_finite_loss_is_refused() -> None:
    plan = settled(TrainingPlan(epochs=2, batch=4), 4)

    def objective(frozen: Any, own: Any, batch: Any, key: Any) -> Any:
        return (own["own"]["w"] * batch).sum()

    def fit(judge: Any) -> Any:
        first = {"own": {"w": jnp.ones(2)}, "head": {}}
        return fit_batches(
            objective, {}, first, lambda epoch, at: jnp.ones(2), 1, plan, rate=1e-3, judge=judge, must_improve=True
        )

    with pytest.raises(InvalidInput, match="not finite"):
        fit(lambda own: float("nan"))
    assert len(fit(lambda own: 1.0)[1]) == 2
