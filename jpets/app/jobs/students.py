"""Shallow backbones and groups of students from files: the stages around ``jpets.students``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from checkpoints.backbone import Backbone
from checkpoints.canonical import from_params
from checkpoints.task_file import write_task
from checkpoints.validation import validate
from jpets.errors import InvalidInput
from jpets.students.boosting import GroupPlan
from jpets.students.depth import distilled, shallow_config
from jpets.students.session import GroupResult, split_examples, train_at_depth
from jpets.students.teacher import Teacher
from jpets.tokenizing import TextEncoder
from jpets.training.checkpoints import Checkpoints, claimed
from jpets.training.data import Example
from jpets.training.plan import TrainingPlan
from jpets.training.run import UpdateReport
from jpets.types import Preprocessing, Query
from serving.jobs.request import GroupOptions


def shallow_backbone(
    backbone: Backbone,
    name: str,
    examples: Sequence[Example],
    layers: int,
    max_length: int,
    plan: TrainingPlan,
    *,
    folder: Path | None = None,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> tuple[Backbone, list[float]]:
    """(a backbone of ``layers`` layers that learnt the hidden states of ``backbone`` on these texts, losses).

    ``folder`` keeps checkpoints. Raises ``InvalidInput``, also for a run that diverged.
    """
    config = backbone.config
    shallow = shallow_config(config, layers)
    encoder = TextEncoder.of(backbone)
    rule = Preprocessing(max_length=min(max_length, config.max_positions), truncation=True)
    tokens = [encoder.encode(Query(None, each.plain), rule) for each in examples]
    with contextlib.ExitStack() as stack:
        stack.enter_context(claimed(folder, backbone.fingerprint, plan, tokens, layers))
        keeper = stack.enter_context(contextlib.closing(Checkpoints(folder))) if folder is not None else None
        params, losses = distilled(
            config,
            dict(backbone.params),
            layers,
            tokens,
            plan,
            keeper=keeper,
            pad_id=encoder.pad_id,
            report=report,
        )
    if not all(map(math.isfinite, losses)):
        raise InvalidInput("losses are not finite: training diverged; try a lower rate")
    tensors = from_params(params, shallow)
    return Backbone.of_tensors(name, shallow, tensors, backbone.tokenizer_json, backbone.embeds), losses


class GroupTexts(NamedTuple):
    """``labelled`` texts, and those to judge by; where these are none, some of the first. ``more`` have no labels."""

    labelled: Sequence[Example]
    held_out: Sequence[Example] = ()
    more: Sequence[Example] = ()


def make_group(
    id: str,
    backbones: Sequence[Backbone],
    teacher: Teacher,
    texts: GroupTexts,
    options: GroupOptions,
    file: Path,
    *,
    folder: Path | None = None,
    report: Callable[[str, UpdateReport], None] = lambda what, step: None,
) -> GroupResult:
    """Trains a group on one of the shallow ``backbones``, and writes its task file. ``folder`` keeps checkpoints.

    Raises ``InvalidInput``, ``OutOfSpace``.
    """
    learnt, judged = texts.labelled, texts.held_out
    if not judged:
        learnt, judged = split_examples(learnt, options.held_out, options.seed)
    made = train_at_depth(
        id,
        backbones,
        teacher,
        learnt,
        judged,
        plan_of(options),
        method=options.method,
        settings=options.settings,
        more=texts.more,
        max_length=options.max_length,
        folder=folder,
        report=report,
    )
    own = next(each for each in backbones if each.fingerprint == made.task.backbone.fingerprint)
    validate(made.task, own.config, own.ref())
    write_task(made.task, file, "bfloat16")
    return made


def plan_of(options: GroupOptions) -> GroupPlan:
    """The options as ``jpets.students`` takes them."""
    return GroupPlan(
        TrainingPlan(options.epochs, options.batch, rate=options.rate, dtype=options.dtype, seed=options.seed),
        options.most,
        GroupPlan.stacking if options.stacking is None else options.stacking,
        boosting=options.boosting,
        pruning=options.pruning,
        copies=options.copies,
    )
