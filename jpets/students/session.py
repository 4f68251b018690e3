"""A group of students from labelled texts and a teacher: all stages of one training."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jpets.deltas import task_lead
from jpets.deltas.recipe import FROZEN, FULL
from jpets.errors import InvalidInput
from jpets.model.encoder import split
from jpets.students.augment import Thesaurus, augmented
from jpets.students.boosting import Ensemble, GroupPlan, boost
from jpets.students.depth import check_computes, deepest, is_enough, smallest_depth
from jpets.students.pruning import Pruned, prune
from jpets.students.student import Student, prefix_sums
from jpets.students.teacher import Teacher
from jpets.students.texts import Texts
from jpets.tokenizing import TextEncoder, Tokens
from jpets.training.checkpoints import Checkpoints, claimed
from jpets.training.data import Example
from jpets.training.holding_out import hold_out
from jpets.training.labels import make_rows
from jpets.training.methods import checked_settings, first_stage, is_direct, lead_of
from jpets.training.metrics import check_can_score, main_name, scores
from jpets.training.predict import group_logits
from jpets.training.run import Keeper, UpdateReport
from jpets.training.tokens import encoded, text_encoder
from jpets.types import BackboneRef, LoadedBackbone, Preprocessing, Query, Students, Task

STUDENT_METHOD = "lora"
STUDENT_SETTINGS: Mapping[str, Any] = {"rank": 64}
"""What makes one student of the shallow backbone by default, beside the method's usual settings."""
PRUNING = "pruning"
LESSONS = "teacher"
"""Of a group's folder the one with what the teacher said."""


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """A trained group. ``scores`` are those of the first 1, 2, ... students on held-out texts, ``teacher`` those of
    the teacher; ``best`` is the number of students that did best, without pruning that of all: the task has so many."""

    task: Task
    scores: Sequence[Mapping[str, float]]
    teacher: Mapping[str, float]
    best: int
    ensemble: Ensemble
    pruned: Pruned
    by_size: Callable[[Sequence[Example]], list[dict[str, float]]]
    """Scores of the first 1, 2, ... of all trained students on labelled texts."""

    @property
    def metric(self) -> str:
        return main_name(self.teacher)


def train_group(
    id: str,
    backbone: LoadedBackbone,
    teacher: Teacher,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    plan: GroupPlan,
    *,
    method: str = STUDENT_METHOD,
    settings: Mapping[str, Any] | None = None,
    more: Sequence[Example] = (),
    max_length: int = 128,
    folder: Path | None = None,
    report: Callable[[str, UpdateReport], None] = lambda what, step: None,
) -> GroupResult:
    """Trains a group on the shallow ``backbone``. Labels are only read to judge; ``more`` are texts without labels.

    Those of ``more`` that are held out are left out. ``folder`` keeps what the teacher said and checkpoints, from which
    a killed run resumes. Raises ``InvalidInput``.
    """
    check_can_score()
    settings = student_settings(method, settings)
    check_method(method, settings, backbone)
    if not held_out:
        raise InvalidInput("a group of students takes held-out texts: they say how many students to train and to keep")
    config, text = backbone.config, text_encoder(backbone, lead_of(method, settings))
    own = teacher.task
    rule = dataclasses.replace(
        own.preprocessing,
        max_length=min(max_length, text.longest),
        truncation=True,
        thresholds=None,
        domain=None,
    )
    make_rows(held_out, own.head, own.labels, text, rule)  # labels that the teacher does not know are refused first
    kept_out = {(each.text, each.text_pair) for each in held_out}
    every = [*examples, *(each for each in more if (each.text, each.text_pair) not in kept_out)]
    every += augmented(every, Thesaurus(backbone), plan.copies, plan.training.seed) if plan.copies else []
    recipe = first_stage(method, settings, config, dict(backbone.params), 1, plan.training.seed).recipe
    student = Student(split(config), dict(backbone.params), recipe, text)
    if folder is not None:
        teacher = teacher.keeping(folder / LESSONS)
    texts, judged = (_texts(some, text, rule, teacher) for some in (every, held_out))
    with _keepers(folder, backbone.fingerprint, plan, method, settings, texts, judged) as keeper:
        ensemble = boost(
            student,
            texts,
            judged,
            plan,
            keeper=lambda number: keeper(f"student-{number}"),
            report=lambda number, step: report(f"student {number + 1}", step),
        )
        pruned = prune(
            student,
            ensemble,
            teacher.head,
            texts,
            judged,
            plan,
            keeper=keeper(PRUNING),
            report=lambda step: report(PRUNING, step),
        )

    def by_size(some: Sequence[Example]) -> list[dict[str, float]]:
        rows = make_rows(some, own.head, own.labels, text, rule)
        limits = own.preprocessing.thresholds or ()
        every = _logits(student, pruned, rows.tokens)
        return [scores(pruned.head, own.labels, logits, rows.targets, limits) for logits in every]

    found = by_size(held_out)
    by_teacher = teacher.scores(held_out, judged.lessons)
    metric = main_name(by_teacher)
    best = best_size([each[metric] for each in found], lower=metric == "rmse") if plan.pruning else len(found)
    task = _task(id, backbone, own, rule, student, pruned, best)
    kept = tuple(each[metric] for each in found[:best])
    least = 1 if plan.pruning else best  # the head learnt from no smaller number
    told = Students(pruned.multipliers[:best], kept, metric, by_teacher[metric], least)
    return GroupResult(dataclasses.replace(task, students=told), found, by_teacher, best, ensemble, pruned, by_size)


def student_settings(method: str, given: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """What makes a student: the ``given`` settings, and its usual ones for the others."""
    return {**(STUDENT_SETTINGS if method == STUDENT_METHOD else {}), **(given or {})}


def check_method(method: str, settings: Mapping[str, Any], backbone: LoadedBackbone) -> None:
    """Raises ``InvalidInput`` where a method cannot make several students of one backbone that are served together."""
    check_computes(backbone.config)
    checked_settings(method, settings, backbone.config)
    if method == FROZEN or (method != FULL and not is_direct(method)):
        raise InvalidInput(f"students take a method whose numbers are next to the weights, or {FULL}; found {method}")


def best_size(found: Sequence[float], *, lower: bool = False) -> int:
    """The number of students that did best; of equal ones the smallest."""
    each = np.asarray(found) * (-1 if lower else 1)
    return int(each.argmax()) + 1


def group_scores(task: Task, backbone: LoadedBackbone, examples: Sequence[Example]) -> list[dict[str, float]]:
    """Scores of the first 1, 2, ... students of a group on labelled texts. Raises ``InvalidInput``."""
    check_can_score()
    if task.students is None:
        raise InvalidInput(f"task {task.id!r} is no group of students")
    text = text_encoder(backbone, task_lead(task.parts[0]))
    rows = make_rows(examples, task.head, task.labels, text, task.preprocessing)
    limits = task.preprocessing.thresholds or ()
    logits = group_logits(task, split(backbone.config), dict(backbone.params), text, rows.tokens)
    return [scores(task.head, task.labels, list(each), rows.targets, limits) for each in logits]


def _texts(examples: Sequence[Example], text: TextEncoder, rule: Preprocessing, teacher: Teacher) -> Texts:
    tokens = [encoded(text, Query(None, each.plain, each.text_pair), rule) for each in examples]
    return Texts(tokens, teacher.lessons(examples))


def _logits(student: Student, pruned: Pruned, tokens: Sequence[Tokens]) -> list[list[Float[np.ndarray, " c"]]]:
    """The answers of the first 1, 2, ... students."""
    vectors = student.of_texts(pruned.trees, tokens)
    sums = np.asarray(prefix_sums(vectors, np.asarray(pruned.multipliers, np.float32)))
    return [list(each) for each in sums @ pruned.head.tensors["kernel"] + pruned.head.tensors["bias"]]


def _task(
    id: str, backbone: LoadedBackbone, teacher: Task, rule: Preprocessing, student: Student, pruned: Pruned, best: int
) -> Task:
    deltas = [delta for tree in pruned.trees[:best] for delta in student.recipe.finish(tree)]
    head = dataclasses.replace(pruned.head, pooling=student.pooling)
    rule = dataclasses.replace(rule, thresholds=teacher.preprocessing.thresholds)
    return Task(id, BackboneRef.of(backbone), tuple(deltas), head, teacher.labels, rule)


@contextlib.contextmanager
def _keepers(folder: Path | None, *run: Any) -> Iterator[Callable[[str], Keeper | None]]:
    """Gives what keeps the progress of each stage."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(claimed(folder, *run))

        def keeper(stage: str) -> Keeper | None:
            if folder is None:
                return None
            return stack.enter_context(contextlib.closing(Checkpoints(folder / stage)))

        yield keeper


def train_at_depth(
    id: str,
    backbones: Sequence[LoadedBackbone],
    teacher: Teacher,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    plan: GroupPlan,
    *,
    folder: Path | None = None,
    report: Callable[[str, UpdateReport], None] = lambda what, step: None,
    **how: Any,
) -> GroupResult:
    """``train_group`` on the shallowest of some backbones whose first student reaches enough of the teacher's score
    (``depth.smallest_depth``), or on the deepest of them. Backbones of more than a quarter of the teacher's layers
    (two of a small one) are left out where there are others."""
    if folder is not None:
        teacher = teacher.keeping(folder / LESSONS)
    most = deepest(teacher.layers)
    by_depth = sorted(backbones, key=lambda each: each.config.layers)
    by_depth = [own for own in by_depth if own.config.layers <= most] or by_depth[:1]

    def within(number: int) -> Path | None:
        if folder is None or len(by_depth) == 1:
            return folder
        own = by_depth[number - 1]
        return folder / f"{own.config.layers}-layers-{own.fingerprint[-12:]}"

    def told(number: int, which: str) -> Callable[[str, UpdateReport], None]:
        if len(by_depth) == 1:
            return report
        layers = by_depth[number - 1].config.layers
        return lambda what, step: report(f"{what} of {layers} layers{which}", step)

    def reaches(number: int) -> bool:
        alone = dataclasses.replace(plan, most=1)
        kept = within(number)
        found = train_group(
            id, by_depth[number - 1], teacher, examples, held_out, alone,
            folder=kept / "first" if kept is not None else None, report=told(number, ", alone"), **how,
        )  # fmt: skip
        scores = found.scores[0][found.metric], found.teacher[found.metric]
        return is_enough(*scores, lower=found.metric == "rmse")

    number = smallest_depth(reaches, len(by_depth))
    return train_group(
        id, by_depth[number - 1], teacher, examples, held_out, plan,
        folder=within(number), report=told(number, ""), **how,
    )  # fmt: skip


def split_examples(examples: Sequence[Example], share: float, seed: int) -> tuple[Sequence[Example], Sequence[Example]]:
    """(texts to learn from, texts held out), drawn at random, copies of a text on one side: at least one of each.

    Raises ``InvalidInput`` for fewer than two.
    """
    if len(examples) < 2:
        raise InvalidInput(f"expected two texts or more, one of them to judge by, found {len(examples)}")
    count = min(len(examples) - 1, max(1, round(share * len(examples))))
    parts = hold_out([(each.text, each.text_pair) for each in examples], count, seed)
    learnt, held_out = ([examples[at] for at in sorted(part)] for part in parts)
    return learnt, held_out
