"""A task from labelled texts: the recipe and the stages of one training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from jpets.config import BackboneConfig
from jpets.deltas import task_lead
from jpets.deltas.fold import fold_pooler
from jpets.deltas.recipe import FULL, Recipe, Stage
from jpets.errors import InvalidInput
from jpets.model.encoder import Params, split
from jpets.training.baselines import Baselines, baselines
from jpets.training.batches import Rows
from jpets.training.checkpoints import Checkpoints, claimed
from jpets.training.data import Example
from jpets.training.labels import make_rows
from jpets.training.linear import FrozenFeatures
from jpets.training.methods import check_continued, checked_settings, continued, first_stage, lead_of
from jpets.training.metrics import check_can_score, scores
from jpets.training.plan import SettledPlan, Training, settled
from jpets.training.predict import Answer, Predictor, group_logits
from jpets.training.prepared import Prepared, domain_of, prepare
from jpets.training.run import Outcome, UpdateReport, train
from jpets.training.tokens import text_encoder
from jpets.types import BackboneRef, Head, LoadedBackbone, Task


@dataclasses.dataclass(frozen=True)
class Result:
    """A trained task; ``held_out`` is its mean loss and ``scores`` are its scores on texts that it was not trained on.

    The task of ``full`` has no deltas: its backbone's parameters are ``outcome.trained["own"]``.
    """

    task: Task
    losses: Sequence[float]
    held_out: float
    scores: Mapping[str, float]
    outcome: Outcome
    plan: SettledPlan
    """The settings that were chosen for the number of texts."""
    beside: Baselines
    texts: tuple[int, int]
    """How many texts were trained on, and how many held out."""

    @property
    def gained(self) -> bool:
        """Whether training beats its baselines on the held-out texts."""
        return self.beside.beaten(self.scores)


def run_training(
    id: str,
    backbone: LoadedBackbone,
    training: Training,
    examples: Sequence[Example],
    held_out: Sequence[Example] = (),
    *,
    start: Task | None = None,
    folder: Path | None = None,
    devices: Sequence[jax.Device] = (),
    report: Callable[[UpdateReport], None] = lambda step: None,
    begin: Callable[[Task], None] = lambda task: None,
) -> Result:
    """Trains a task; with ``start`` training continues that task's deltas and head, if ``training`` names one of its
    methods and no settings.

    ``folder`` keeps checkpoints, from which a killed run resumes. Several ``devices`` share every batch, so their
    number must divide its size. ``begin`` is given the head and labels that the data ask for, in a task without new
    deltas, and may refuse them. Raises ``InvalidInput``, ``InvalidTask``.
    """
    config, base = backbone.config, dict(backbone.params)
    if start is not None and start.students is not None:
        raise InvalidInput(f"task {start.id!r} is a group of students, which training cannot go on from")
    checked_settings(training.method, training.settings, config)
    training = dataclasses.replace(training, domain=domain_of(training, backbone, start))
    going_on = _going_on(start, training, config, base) if start is not None else None
    lead = task_lead(start) if start is not None and start.deltas else lead_of(training.method, training.settings)
    text = text_encoder(backbone, lead)
    made = prepare(config, text, training, examples, held_out, start)
    plan = settled(training.plan, len(made.rows.tokens))
    training = dataclasses.replace(training, plan=plan)
    if devices and plan.batch % len(devices):
        raise InvalidInput(f"{len(devices)} devices must divide the batch, which is {plan.batch}")
    before = start.deltas if start is not None else ()
    begin(Task(id, BackboneRef.of(backbone), tuple(before), made.head, made.labels, made.rule))
    features = FrozenFeatures(split(config), text, base, made.head)
    # A run over tables goes on over a newer one, in which the same texts have other rows.
    texts = (made.rows, made.judged) if backbone.tables is None else (examples, held_out)
    with claimed(folder, backbone.fingerprint, training, *texts, made.head, before):
        outcome = _Stages(training, config, base, made, text.pad_id, folder, devices, report).run(
            going_on, from_task=start is not None
        )
    params: Params = outcome.trained["own"] if training.method == FULL else base
    predictor = Predictor(split(config), text, outcome.head, outcome.deltas)
    return concluded(id, backbone, made, outcome, predictor, params, features, plan)


def concluded(
    id: str,
    backbone: LoadedBackbone,
    made: Prepared,
    outcome: Outcome,
    predictor: Predictor,
    params: Params,
    features: FrozenFeatures,
    plan: SettledPlan,
) -> Result:
    """The trained task, with its scores on the held-out texts."""
    judged = made.judged
    logits = predictor(params, outcome.head, [*judged.tokens, *judged.seconds], outcome.deltas)
    found = scores(outcome.head, made.labels, logits, judged.targets, cut=judged.cut, passages=judged.passages)
    task = Task(id, BackboneRef.of(backbone), tuple(outcome.deltas), outcome.head, made.labels, made.rule)
    assert outcome.held_out is not None
    counts = (len(made.rows.tokens), len(judged.tokens))
    beside = baselines(made, features, plan.seed)
    return Result(task, outcome.losses, outcome.held_out, found, outcome, plan, beside, counts)


def evaluate_task(task: Task, backbone: LoadedBackbone, examples: Sequence[Example]) -> dict[str, float]:
    """Scores of a task on labelled texts. Raises ``InvalidInput``, also for labels that the task does not know."""
    check_can_score()
    rows, logits = _answered(task, backbone, examples)
    limits = task.preprocessing.thresholds or ()
    return scores(task.head, task.labels, logits, rows.targets, limits, rows.cut, rows.passages)


def task_logits(task: Task, backbone: LoadedBackbone, examples: Sequence[Example]) -> list[Answer]:
    """A task's answers to labelled texts: see ``Predictor``. Raises ``InvalidInput``."""
    return _answered(task, backbone, examples)[1]


def _answered(task: Task, backbone: LoadedBackbone, examples: Sequence[Example]) -> tuple[Rows, list[Answer]]:
    """The texts and a task's answers; for pairs first those to all first texts, then those to the second ones."""
    text, params = text_encoder(backbone, task_lead(task.parts[0])), dict(backbone.params)
    rows = make_rows(examples, task.head, task.labels, text, task.preprocessing)
    if task.students is not None:
        return rows, list(group_logits(task, split(backbone.config), params, text, rows.tokens)[-1])
    task = fold_pooler(task, backbone.config, params)
    predictor = Predictor(split(backbone.config), text, task.head, task.deltas)
    return rows, predictor(params, task.head, [*rows.tokens, *rows.seconds], task.deltas)


class _Stages:
    """The trainings of a method that takes several, one after the other."""

    def __init__(
        self,
        training: Training,
        config: BackboneConfig,
        base: Params,
        made: Prepared,
        pad_id: int,
        folder: Path | None,
        devices: Sequence[jax.Device],
        report: Callable[[UpdateReport], None],
    ) -> None:
        self._training, self._encoder, self._base = training, split(config), base
        self._plan = settled(training.plan, len(made.rows.tokens))
        self._made = made
        self._pad_id, self._folder, self._devices, self._report = pad_id, folder, devices, report
        self._number = 0

    def run(self, going_on: Recipe | None, from_task: bool) -> Outcome:
        own, epochs = self._training, self._plan.epochs
        if going_on is not None:
            stage = Stage(going_on, epochs)
        else:
            stage = first_stage(own.method, own.settings, self._encoder.config, self._base, epochs, own.plan.seed)
        from_task &= stage.then is None  # a second stage needs a trained first one
        outcome = self._one(stage, self._made.head, from_task)
        while stage.then is not None:
            stage = stage.then(outcome.trained["own"])
            outcome = self._one(stage, outcome.head)
        return outcome

    def _one(self, stage: Stage, head: Head, from_task: bool = False) -> Outcome:
        per_epoch = self._plan.per_epoch(len(self._made.rows.tokens))
        least = -(-self._plan.accumulate // per_epoch) if self._number else 1  # a later stage makes an update
        plan = dataclasses.replace(self._plan, epochs=max(stage.epochs, least))
        keeper = Checkpoints(self._folder / str(self._number)) if self._folder is not None else None
        self._number += 1
        part = f"stage {self._number}" if self._number > 1 else ""
        try:
            return train(
                self._encoder,
                self._base,
                stage.recipe,
                head,
                self._made.rows,
                plan,
                held_out=self._made.judged,
                from_task=from_task,
                keeper=keeper,
                pad_id=self._pad_id,
                devices=self._devices,
                report=lambda step: self._report(step.within(part)),
            )
        finally:
            if keeper is not None:
                keeper.close()


def _going_on(start: Task, training: Training, config: BackboneConfig, base: Params) -> Recipe | None:
    """None if ``start`` has no deltas. Raises ``InvalidInput`` for a method other than its own, or for settings."""
    methods = [delta.method for delta in start.deltas]
    if not methods:
        return None
    check_continued(methods, training.method, training.settings)
    return continued(start.deltas, config, base)
