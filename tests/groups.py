"""Groups of students over tiny backbones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from support import make_head, make_task, random_delta, shallow

from checkpoints.backbone import Backbone
from jpets.model.encoder import split
from jpets.tokenizing import TextEncoder
from jpets.training.predict import group_logits
from jpets.types import FloatArray, Preprocessing, Query, Students, Task

RULE = Preprocessing(max_length=32, truncation=True)


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
