"""Groups of students over tiny backbones, what they answer, and their sizes under a clock that a test sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from support import logits_of, make_head, make_task, random_delta, shallow

from checkpoints.backbone import Backbone
from jpets.config import SizingRule
from jpets.engine.interface import Serves
from jpets.engine.students.sizing import GroupSize
from jpets.model.encoder import split
from jpets.tokenizing import TextEncoder
from jpets.training.predict import group_logits
from jpets.types import Classification, FloatArray, Preprocessing, Query, Result, Students, Task

RULE = Preprocessing(max_length=32, truncation=True)
TEXTS = ["a small text", "another one of some more words", "one"]
FIXED = SizingRule(fixed=True)


def group_task(name: str = "group", students: int = 3, seed: int = 0, backbone: Backbone | None = None) -> Task:
    """A group of random LoRA students."""
    backbone = backbone or shallow()
    deltas = [random_delta("lora", backbone.config, seed + at) for at in range(students)]
    head = make_head(np.random.default_rng(seed), backbone.config.hidden_size, 3, pooling="mean")
    multipliers = tuple(1.0 / (at + 1) for at in range(students))
    scores = tuple(0.8 + 0.01 * at for at in range(students))
    task = make_task(backbone, name, deltas, head, preprocessing=RULE)
    return dataclasses.replace(task, students=Students(multipliers, scores, "accuracy", 0.9))


def logits_by_size(task: Task, texts: Sequence[str], backbone: Backbone | None = None) -> FloatArray:
    """What the first 1, 2, ... students answer, computed without an engine: [m, n, c]."""
    backbone = backbone or shallow()
    text = TextEncoder.of(backbone)
    tokens = [text.encode(Query(None, each), RULE) for each in texts]
    return group_logits(task, split(backbone.config), dict(backbone.params), text, tokens)


def asked(serving: Serves, task: str, texts: Sequence[str] = TEXTS) -> list[Result]:
    return serving.infer([Query(task, text) for text in texts])


def assert_answers(found: Sequence[Result], task: Task, size: int) -> None:
    """Whether these are the answers by the first ``size`` students, of each of ``TEXTS`` from the first on."""
    for own, logits in zip(found, logits_by_size(task, TEXTS[: len(found)])[size - 1], strict=True):
        assert isinstance(own, Classification) and own.students == size and own.task == task.id, own
        assert own.names == task.labels and own.timing is not None
        np.testing.assert_allclose(logits_of(own), logits, atol=2e-4)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sized(clock: Clock, largest: int = 3, devices: int = 1, **rule: Any) -> GroupSize:
    size = GroupSize(SizingRule(**rule), devices, clock)
    size.resize(largest)
    return size


def ask(size: GroupSize, queries: int) -> None:
    for _ in range(queries):
        size.asked()


def answer(size: GroupSize, queries: int) -> None:
    for _ in range(queries):
        size.answered()
