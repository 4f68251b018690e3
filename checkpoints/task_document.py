"""The JSON document in a task file's metadata, read strictly: a hostile file gives ``InvalidTask`` and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pydantic

from jpets.errors import InvalidTask
from jpets.types import (
    BackboneRef,
    Delta,
    Head,
    HeadType,
    Pooling,
    Preprocessing,
    Problem,
    Relevance,
    Students,
    Task,
    Tensors,
    TruncationStrategy,
)

FORMAT = 1
MAX_DELTAS = 16
SHOWN_ERRORS = 8
USUAL = (("one_type", False), ("truncation_strategy", "longest_first"))
"""Absent from the files of most tasks, which earlier versions read."""

Setting = bool | int | float | str | list[str] | list[pydantic.StrictInt] | dict[str, list[pydantic.StrictInt]] | None


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class BackbonePart(_Part):
    name: str
    fingerprint: str
    family: str
    hidden_size: int
    layers: int


class DeltaPart(_Part):
    """``method`` and its hyper-parameters, which the method itself checks."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, Setting]
    method: str


class HeadPart(_Part):
    type: HeadType
    problem: Problem = "single-label"
    pooling: Pooling = "cls"
    activation: str = "tanh"
    normalize: bool = False
    relevance: Relevance | None = None


class PreprocessingPart(_Part):
    max_length: int | None = None
    truncation: bool = False
    template: str | None = None
    prefix: str | None = None
    thresholds: tuple[float, ...] | None = None
    prompts: dict[str, str] | None = None
    domain: str | None = None
    one_type: Literal[True] | None = None
    truncation_strategy: TruncationStrategy | None = None


class StudentsPart(_Part):
    """That the deltas are those of several students, one after the other."""

    multipliers: tuple[float, ...] = pydantic.Field(min_length=1, max_length=MAX_DELTAS)
    scores: tuple[float, ...] = ()
    metric: str | None = None
    teacher_score: float | None = None
    least: int = pydantic.Field(default=1, ge=1)


class TaskDocument(_Part):
    format: Literal[1]
    backbone: BackbonePart
    deltas: tuple[DeltaPart, ...] = pydantic.Field(max_length=MAX_DELTAS)
    head: HeadPart
    labels: tuple[str, ...] = ()
    preprocessing: PreprocessingPart = PreprocessingPart()
    created: str | None = None
    license: str | None = None
    description: str | None = None
    students: StudentsPart | None = None

    @classmethod
    def parse(cls, text: str | bytes) -> TaskDocument:
        """Raises ``InvalidTask`` naming the fields that cannot be accepted."""
        try:
            return cls.model_validate_json(text)
        except pydantic.ValidationError as error:
            raise InvalidTask(f"metadata 'jpets': {_describe(error)}") from error

    @classmethod
    def of_task(cls, task: Task) -> TaskDocument:
        """The document of a task, as its file will be read back. Raises ``InvalidTask`` for values JSON cannot hold."""
        document = {
            "format": FORMAT,
            "backbone": vars(task.backbone),
            "deltas": [{**delta.settings, "method": delta.method} for delta in task.deltas],
            "head": {name: value for name, value in vars(task.head).items() if name != "tensors"},
            "labels": task.labels,
            "preprocessing": {name: own for name, own in vars(task.preprocessing).items() if (name, own) not in USUAL},
            "created": task.created,
            "license": task.license,
            "description": task.description,
            "students": vars(task.students) if task.students is not None else None,
        }
        try:
            return cls.parse(json.dumps(document, default=_plain, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, InvalidTask):
                raise
            raise InvalidTask(f"settings must be numbers, texts and lists of them: {error}") from error

    def to_json(self) -> str:
        return self.model_dump_json(exclude_none=True)

    def to_dict(self) -> dict[str, Any]:
        """The plain JSON object, fields that are not set left out."""
        return self.model_dump(mode="json", exclude_none=True)

    def task(self, id: str, deltas: list[Tensors], head: Tensors) -> Task:
        """The task, given the tensors of each delta and of the head."""
        settings = [dict(part.model_extra or {}) for part in self.deltas]
        return Task(
            id=id,
            backbone=BackboneRef(**self.backbone.model_dump()),
            deltas=tuple(
                Delta(part.method, own, tensors)
                for part, own, tensors in zip(self.deltas, settings, deltas, strict=True)
            ),
            head=Head(tensors=head, **self.head.model_dump()),
            labels=self.labels,
            preprocessing=Preprocessing(**self.preprocessing.model_dump(exclude_none=True)),
            created=self.created,
            license=self.license,
            description=self.description,
            students=Students(**self.students.model_dump()) if self.students is not None else None,
        )

    def outline(self, id: str) -> Task | None:
        """``Task.outlined`` of its task; None if it does not say how many outputs the head has, as without labels."""
        if not self.labels:
            return None
        shape = (self.backbone.hidden_size, len(self.labels))
        head = {"kernel": np.broadcast_to(np.float32(0), shape)}
        return self.task(id, [{} for _ in self.deltas], head).outlined()


def _plain(value: object) -> object:
    """NumPy scalars and any mapping or sequence as plain Python, for ``json.dumps``."""
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (range, set, frozenset)):
        return sorted(value)
    raise TypeError(f"found a {type(value).__name__}")


def _describe(error: pydantic.ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False)
    lines = []
    for each in found[:SHOWN_ERRORS]:
        where = ".".join(str(part)[:60] for part in each["loc"]) or "document"
        value = "" if isinstance(each["input"], (dict, list, bytes)) else f", found {repr(each['input'])[:80]}"
        lines.append(f"{where}: {each['msg'][:200]}{value}")
    more = [f"and {len(found) - SHOWN_ERRORS} more"] if len(found) > SHOWN_ERRORS else []
    return "; ".join(lines + more)
