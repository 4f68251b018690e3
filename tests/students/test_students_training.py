"""Training groups of students: boosting, stacking, one head for every size, and what is kept of a run."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from groups import group_task, logits_by_size
from hypothesis import given
from hypothesis import strategies as st
from support import make_head, make_task, random_delta, shallow, tiny

from checkpoints.task_file import read_task, task_to_bytes
from jpets.errors import InvalidInput, InvalidTask
from jpets.model.encoder import split
from jpets.students.augment import Thesaurus, augmented
from jpets.students.boosting import GroupPlan, boost
from jpets.students.depth import deepest, distilled, is_enough, shallow_config, smallest_depth, spread_layers
from jpets.students.pruning import answer_losses
from jpets.students.session import (
    best_size,
    group_scores,
    split_examples,
    student_settings,
    train_at_depth,
    train_group,
)
from jpets.students.student import Student, prefix_sums
from jpets.students.teacher import Lessons, Teacher
from jpets.students.texts import Texts
from jpets.tokenizing import TextEncoder, Tokens
from jpets.training.data import Example
from jpets.training.methods import direct_recipe
from jpets.training.plan import TrainingPlan
from jpets.training.session import evaluate_task
from jpets.types import Head, Task

WORDS = {"code": ["library", "python", "module"], "fun": ["game", "music", "sound"]}
PLAN = GroupPlan(TrainingPlan(epochs=6, batch=8, dtype="float32", rate=1e-2), most=3, copies=0, worst=0.3, random=0.2)
SETTINGS = {"rank": 8}


def examples(count: int, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    labels = rng.choice(sorted(WORDS), count)
    return [Example(" ".join(rng.choice(WORDS[label], rng.integers(12, 15))), None, str(label)) for label in labels]


def teacher_task(head: Head | None = None) -> Task:
    backbone = tiny()
    own = head or make_head(np.random.default_rng(5), backbone.config.hidden_size, 2, pooling="mean")
    task = make_task(backbone, "teacher", [random_delta("lora", backbone.config, 3)], own)
    return dataclasses.replace(task, labels=tuple(sorted(WORDS)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("group")
    teacher = Teacher(teacher_task(), tiny())
    found = train_group(
        "group",
        shallow(),
        teacher,
        examples(48),
        examples(24, 1),
        PLAN,
        settings=SETTINGS,
        max_length=16,
        folder=folder,
    )
    return folder, teacher, found


def test_a_group_learns_and_answers_the_same_from_its_file(made) -> None:  # type: ignore[no-untyped-def]
    _, _, found = made
    assert found.ensemble.left[0] < 0.9, "the first student learns something of the teacher"
    assert len(found.ensemble.left) >= 2
    assert all(later < earlier for earlier, later in itertools.pairwise(found.ensemble.left))
    assert len(found.task.parts) == found.best == len(found.task.students.multipliers)
    again = read_task(task_to_bytes(found.task), id="group", config=shallow().config, backbone=shallow().ref())
    assert again.students == found.task.students
    for one, other in zip(group_scores(again, shallow(), examples(24, 1)), found.scores, strict=False):
        assert one == pytest.approx(dict(other))
    assert evaluate_task(again, shallow(), examples(24, 1)) == pytest.approx(dict(found.scores[found.best - 1]))


def test_an_output_that_stands_for_its_sigmoid_is_scored_so() -> None:
    """As of a teacher that ranks texts."""
    own = make_head(np.random.default_rng(5), tiny().config.hidden_size, 1, problem="regression", pooling="mean")
    task = make_task(tiny(), "teacher", [], dataclasses.replace(own, relevance="sigmoid"))
    rated, judged = (
        [dataclasses.replace(each, label=float(each.label == "fun")) for each in examples(16, seed)] for seed in (0, 1)
    )
    plan = dataclasses.replace(PLAN, most=1, training=dataclasses.replace(PLAN.training, epochs=1))
    found = train_group("g", shallow(), Teacher(task, tiny()), rated, judged, plan, settings=SETTINGS, max_length=16)
    assert found.task.head.relevance == "sigmoid" and found.scores[0]["rmse"] < 1
    again = group_scores(found.task, shallow(), judged)
    assert [dict(each) for each in found.scores] == [pytest.approx(each) for each in again]


def test_without_pruning_no_smaller_group_may_answer(made) -> None:  # type: ignore[no-untyped-def]
    """The head learnt from the sum of all alone, which the file says."""
    _, teacher, pruned = made
    plan = dataclasses.replace(PLAN, pruning=False, most=2, training=dataclasses.replace(PLAN.training, epochs=1))
    found = train_group("g", shallow(), teacher, examples(16), examples(8, 1), plan, settings=SETTINGS, max_length=16)
    assert pruned.task.students.least == 1
    assert found.task.students is not None
    assert found.task.students.least == found.best == len(found.pruned.multipliers) == len(found.task.parts)
    again = read_task(task_to_bytes(found.task), id="g", config=shallow().config, backbone=shallow().ref())
    assert again.students == found.task.students
    wrong = dataclasses.replace(found.task, students=dataclasses.replace(found.task.students, least=found.best + 1))
    with pytest.raises(InvalidTask, match=r"students\.least"):
        read_task(task_to_bytes(wrong), id="g", config=shallow().config, backbone=shallow().ref())


def test_a_run_goes_on_from_what_it_kept(made) -> None:  # type: ignore[no-untyped-def]
    folder, teacher, found = made
    steps = []
    again = train_group(
        "group", shallow(), teacher, examples(48), examples(24, 1), PLAN, settings=SETTINGS, max_length=16,
        folder=folder, more=examples(24, 1), report=lambda what, step: steps.append(what),
    )  # fmt: skip
    assert not steps, "all updates were done, as texts that are held out are not learnt from"
    assert again.scores == found.scores
    for one, other in zip(again.task.deltas, found.task.deltas, strict=True):
        jax.tree.map(np.testing.assert_array_equal, dict(one.tensors), dict(other.tensors))
    assert len(list((folder / "teacher").iterdir())) == 2, "the teacher was asked once for each set of texts"
    with pytest.raises(InvalidInput, match="other texts"):
        train_group("group", shallow(), teacher, examples(48, 9), examples(24, 1), PLAN, folder=folder)


def lessons(count: int, wide: int, rng: np.random.Generator, kinds: int = 6) -> Texts:
    """Texts of a few kinds, all of one kind alike."""
    ids = np.tile(rng.integers(5, 800, (kinds, 8)), (-(-count // kinds), 1)).astype(np.int32)[:count]
    tokens = [Tokens(one, np.zeros(8, np.int32)) for one in ids]
    vectors = np.tile(rng.normal(0, 1, (kinds, wide)), (-(-count // kinds), 1)).astype(np.float32)[:count]
    return Texts(tokens, Lessons(vectors, rng.normal(0, 1, (count, 2)).astype(np.float32)))


def student(layers: int = 2) -> Student:
    backbone = shallow(layers=layers)
    base = dict(backbone.params)
    return Student(
        split(backbone.config), base, direct_recipe("lora", SETTINGS, backbone.config, base), TextEncoder.of(backbone)
    )


@pytest.mark.parametrize(("layers", "wide", "boosting"), [(2, 64, True), (1, 64, True), (2, 24, True), (2, 64, False)])
def test_each_student_lowers_what_is_left(layers: int, wide: int, boosting: bool) -> None:
    """Also with one layer, where nothing is stacked, with a teacher of another width, and without boosting."""
    rng = np.random.default_rng(0)
    texts = lessons(24, wide, rng)
    training = dataclasses.replace(PLAN.training, epochs=24)
    plan = dataclasses.replace(PLAN, training=training, boosting=boosting, most=2)
    found = boost(student(layers), texts, texts, plan)
    assert len(found.left) == 2 and found.left[1] < found.left[0] < 1
    assert (found.to_teacher is None) == (wide == 64)
    assert found.multipliers[0] == (1.0 if boosting else 0.5)
    vectors = student(layers).of_texts(found.trees, texts.tokens)
    total = np.asarray(prefix_sums(vectors, np.asarray(found.multipliers, np.float32)))[-1]
    mapped = total if found.to_teacher is None else total @ found.to_teacher
    expected = texts.lessons.vectors
    share = np.square(expected - mapped).sum() / np.square(expected - expected.mean(0)).sum()
    assert share == pytest.approx(found.left[-1], rel=1e-3)


def test_prefixes_are_sums_of_the_first_students() -> None:
    task, texts = group_task(), ["a small text", "another one of some more words"]
    by_size = logits_by_size(task, texts)
    for size in (1, 2, 3):
        assert task.students is not None
        told = dataclasses.replace(task.students, multipliers=task.students.multipliers[:size], scores=())
        first = dataclasses.replace(task, deltas=task.deltas[:size], students=told)
        np.testing.assert_allclose(logits_by_size(first, texts)[-1], by_size[size - 1], rtol=1e-5)


@pytest.mark.parametrize("problem", ["single-label", "multi-label", "regression"])
def test_gradients_of_all_sizes_add_up(problem: str) -> None:
    """Algorithm 2, line 8: the gradient of the mean over sizes is the mean of the gradients of each size."""
    rng = np.random.default_rng(0)
    head = make_head(rng, 8, 3, problem=problem)
    vectors = jnp.asarray(rng.normal(0, 1, (3, 5, 8)), jnp.float32)
    teacher = jnp.asarray(rng.normal(0, 1, (5, 3)), jnp.float32)

    def loss(vectors: jax.Array, sizes: slice) -> jax.Array:
        sums = prefix_sums(vectors, jnp.ones(3))[sizes]
        return answer_losses(head, sums @ head.tensors["kernel"] + head.tensors["bias"], teacher).mean()

    whole = jax.grad(loss)(vectors, slice(None))
    each = [jax.grad(loss)(vectors, slice(at, at + 1)) for at in range(3)]
    np.testing.assert_allclose(whole, sum(each) / 3, atol=1e-6)


def test_answers_equal_to_the_teachers_cost_least() -> None:
    teacher = jnp.asarray([[2.0, -1.0, 0.5]])
    for problem in ("single-label", "multi-label", "regression"):
        head = Head("sequence-classification", problem=problem)
        least = float(answer_losses(head, teacher[None], teacher)[0, 0])
        for shift in (0.3, -0.3):
            assert float(answer_losses(head, teacher[None].at[0, 0, 1].add(shift), teacher)[0, 0]) > least


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 20))
def test_the_smallest_depth_is_found_with_few_questions(rises: list[int], teacher: int) -> None:
    scores = np.cumsum(rises)
    asked: list[int] = []

    def score(depth: int) -> float:
        asked.append(depth)
        return float(scores[depth - 1])

    expected = next((at + 1 for at, own in enumerate(scores) if own >= 0.95 * teacher), len(scores))
    assert smallest_depth(lambda depth: is_enough(score(depth), teacher), len(scores)) == expected
    assert len(asked) == len(set(asked)) <= max(1, len(scores)).bit_length() + 1


def test_depths_and_layers_of_students() -> None:
    assert [deepest(layers) for layers in (4, 6, 12, 24)] == [2, 2, 3, 6]
    assert spread_layers(6, 2) == [2, 5] and spread_layers(6, 1) == [5] and spread_layers(12, 3) == [3, 7, 11]
    assert spread_layers(3, 2) == [1, 2]


def test_enough_of_an_error_is_little_of_it() -> None:
    assert is_enough(0.95, 1.0) and not is_enough(0.94, 1.0)
    assert is_enough(1.05, 1.0, lower=True) and not is_enough(2.0, 1.0, lower=True)


def test_a_shallow_backbone_learns_the_states_of_the_whole() -> None:
    whole = tiny()
    tokens = lessons(24, 4, np.random.default_rng(1)).tokens
    plan = TrainingPlan(epochs=8, batch=8, dtype="float32", rate=2e-3)
    params, losses = distilled(whole.config, dict(whole.params), 1, tokens, plan)
    assert losses[-1] < 0.8 * losses[0]
    own = split(shallow_config(whole.config, 1)).abstract_params()
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, own)
    np.testing.assert_array_equal(params["word"], whole.params["word"])
    with pytest.raises(InvalidInput, match="1 to"):
        shallow_config(whole.config, whole.config.layers)


def test_words_are_replaced_by_known_ones() -> None:
    thesaurus = Thesaurus(tiny())
    own = [Example("library module python sound music game " * 3, "what is this library", "code")]
    varied = augmented(own, thesaurus, 3, 0)
    assert len(varied) == 3 and varied == augmented(own, thesaurus, 3, 0)
    for each in varied:
        assert each.label is None and len(each.plain.split()) == len(own[0].plain.split())
    assert any(each.plain != own[0].plain for each in varied)
    assert thesaurus.near("nosuchwordatall") == ()


def test_the_best_size_is_the_smallest_of_equal_ones() -> None:
    assert best_size([0.5, 0.7, 0.7, 0.6]) == 2
    assert best_size([0.5, 0.3, 0.3], lower=True) == 2


def test_settings_that_are_not_given_stay_as_usual() -> None:
    assert student_settings("lora") == {"rank": 64}
    assert student_settings("lora", {"sites": ["query"]}) == {"rank": 64, "sites": ["query"]}
    assert student_settings("lora", {"rank": 8}) == {"rank": 8}
    assert student_settings("adapter", {"bottleneck": 8}) == {"bottleneck": 8}


def test_held_out_texts_are_not_learnt_from() -> None:
    every = examples(20)
    learnt, judged = split_examples(every, 0.25, 3)
    assert len(judged) == 5 and sorted(map(id, [*learnt, *judged])) == sorted(map(id, every))
    for share in (0.01, 0.9, 0.99):
        learnt, judged = split_examples(every[:4], share, 3)
        assert learnt and judged and len(learnt) + len(judged) == 4
    learnt, judged = split_examples(every * 2, 0.25, 3)
    assert len(judged) == 10 and not {each.text for each in learnt} & {each.text for each in judged}


def test_what_a_group_cannot_learn_is_refused(tmp_path: Path) -> None:
    for kind in ("token-classification", "question-answering"):
        head = make_head(np.random.default_rng(0), 64, 2, kind=kind)
        with pytest.raises(InvalidInput, match="whole text"):
            Teacher(dataclasses.replace(teacher_task(), head=head), tiny())
    teacher = Teacher(teacher_task(), tiny())
    with pytest.raises(InvalidInput, match="next to the weights"):
        train_group("g", shallow(), teacher, examples(8), examples(8), PLAN, method="mask")
    with pytest.raises(InvalidInput, match="held-out"):
        train_group("g", shallow(), teacher, examples(8), [], PLAN)
    unknown = [dataclasses.replace(each, label="spam") for each in examples(8)]
    with pytest.raises(InvalidInput, match="row 1: expected one of"):  # before anything is trained
        train_group("g", shallow(), teacher, examples(8), unknown, PLAN, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InvalidTask, match="group of students"):
        Teacher(group_task(), shallow())
    with pytest.raises(InvalidInput, match="no group"):
        group_scores(teacher_task(), tiny(), examples(4))


def test_the_shallowest_backbone_that_is_enough_is_taken(tmp_path: Path) -> None:
    teacher = Teacher(teacher_task(), tiny())
    plan = dataclasses.replace(PLAN, most=1, training=dataclasses.replace(PLAN.training, epochs=1))
    judged = [dataclasses.replace(each, label="code") for each in examples(16, 2)]
    told = list[str]()
    found = train_at_depth(
        "g", [shallow(layers=2), shallow(layers=1)], teacher, examples(16), judged, plan, settings=SETTINGS,
        max_length=16, folder=tmp_path, report=lambda what, step: told.append(what),
    )  # fmt: skip
    assert told[0] == "student 1 of 1 layers, alone" and f"student 1 of {found.task.backbone.layers} layers" in told
    first = train_group("g", shallow(layers=1), teacher, examples(16), judged, plan, settings=SETTINGS, max_length=16)
    enough = first.scores[0]["accuracy"] >= 0.95 * teacher.scores(judged)["accuracy"]
    assert found.task.backbone.layers == (1 if enough else 2)
    assert len(list((tmp_path / "teacher").iterdir())) == 2, "the teacher was asked once for each set of texts"
    assert not list(tmp_path.glob("*/**/teacher"))
