"""What tests of several devices share: their settings, buckets and tasks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, dense_answer, light_or_mask_task, logits_of, shallow

from jpets.engine.group.group import EngineGroup
from jpets.tokenizing import TextEncoder
from jpets.types import Query, Result, Task

TEXT = "a library of functions for sparse matrices"
SETTINGS = dataclasses.replace(ENGINE_SETTINGS, slots=15, host_memory_gb=1.0)
DEVICES = 4
BUCKETS = ENGINE_BUCKETS[1:]
TASKS = [light_or_mask_task(number) for number in range(24)]
Make = Callable[..., EngineGroup]


def query(number: int, name: str | None = None) -> Query:
    return Query(name or f"task-{number}", f"{TEXT} {number}")


@functools.cache
def expected(number: int) -> np.ndarray:
    return _dense(TASKS[number], f"{TEXT} {number}")


def _dense(task: Task, text: str) -> np.ndarray:
    own, config = shallow(), shallow().config
    encoder = TextEncoder(own.tokenizer_json, config.vocab_size, config.type_vocab_size, ENGINE_SETTINGS.max_length)
    ids = encoder.encode(Query(task.id, text), task.preprocessing).ids
    return np.asarray(dense_answer(own, task, ids)["logits"][0])


def check(results: Sequence[Result], numbers: Sequence[int]) -> None:
    for number, result in zip(numbers, results, strict=True):
        assert result.error is None, result.error
        np.testing.assert_allclose(logits_of(result), expected(number), atol=1e-4)
