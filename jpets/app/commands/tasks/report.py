"""What ``jpets task check`` says about a file: its problems, or what is in it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpets.app.commands.output import size

if TYPE_CHECKING:
    from jpets.errors import InvalidTask
    from jpets.types import BackboneRef, Delta, Task

PROBLEM = re.compile(
    r"; (?=(?:delta/|head[/.:]|labels:|preprocessing\.|backbone\.|students[.:]|unexpected tensor |and \d+ more))"
)
"""Where the next problem starts in the message of an ``InvalidTask``; some problems hold a semicolon themselves."""
TOKEN_HEADS = ("token-classification", "question-answering", "fill-mask")


@dataclasses.dataclass(frozen=True)
class DeltaReport:
    """``settings`` are the method's hyper-parameters without sites and layers; ``parameters`` counts numbers stored."""

    method: str
    sites: list[str]
    layers: list[int] | None
    settings: dict[str, Any]
    parameters: int

    @classmethod
    def of_delta(cls, delta: Delta) -> DeltaReport:
        settings = {name: value for name, value in delta.settings.items() if name not in ("sites", "layers")}
        sites = sorted({name.partition("/")[0] for name in delta.tensors})
        layers = delta.settings.get("layers")
        parameters = sum(array.size for array in delta.tensors.values())
        return cls(delta.method, sites, list(layers) if layers is not None else None, settings, parameters)

    def __str__(self) -> str:
        layers = "all layers" if self.layers is None else f"layers {_brief(self.layers)}"
        settings = [f"{name} {_brief(value)}" for name, value in self.settings.items()]
        return "; ".join(
            [f"{self.method} at {', '.join(self.sites)}", layers, *settings, f"{self.parameters:,} numbers"]
        )


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """``complete``: the file was held against a backbone, not only against itself."""

    file: str
    bytes: int
    problems: list[str] = dataclasses.field(default_factory=list)
    complete: bool = False
    backbone: BackboneRef | None = None
    deltas: list[DeltaReport] = dataclasses.field(default_factory=list)
    head: dict[str, Any] | None = None
    labels: list[str] = dataclasses.field(default_factory=list)
    preprocessing: dict[str, Any] | None = None
    students: dict[str, Any] | None = None

    @classmethod
    def of_error(cls, file: Path, error: InvalidTask) -> TaskReport:
        return cls(file.name, file.stat().st_size, PROBLEM.split(error.message))

    @classmethod
    def of_task(cls, file: Path, task: Task, *, complete: bool) -> TaskReport:
        head: dict[str, Any] = {
            "type": task.head.type,
            "problem": task.head.problem,
            "pooling": task.head.pooling,
            "outputs": task.head.outputs,
            "dense": task.head.dense,
        }
        if task.head.type == "embedding":
            head["normalize"] = task.head.normalize
        if task.head.relevance is not None:
            head["relevance"] = task.head.relevance
        deltas = [DeltaReport.of_delta(delta) for delta in task.deltas]
        own = dataclasses.asdict(task.preprocessing)
        group = dataclasses.asdict(task.students) if task.students is not None else None
        known = (complete, task.backbone, deltas, head, list(task.labels), own, group)
        return cls(file.name, file.stat().st_size, [], *known)

    def to_dict(self) -> dict[str, Any]:
        return {"valid": not self.problems, **dataclasses.asdict(self)}

    def fields(self) -> Iterator[tuple[str, object]]:
        """What a table shows of a report without problems."""
        assert self.backbone is not None and self.head is not None
        yield "file", self.file
        yield "valid", "yes" if self.complete else "in itself; --backbone checks shapes and fingerprint too"
        yield "backbone", f"{self.backbone.name} {self.backbone.fingerprint}"
        if self.students is not None:
            yield "students", ", ".join(_student_words(self.students))
        for index, delta in enumerate(self.deltas):
            yield f"delta {index}", delta
        if not self.deltas:
            yield "deltas", "none"
        yield "head", ", ".join(_head_words(self.head))
        yield "labels", ", ".join(self.labels) or "none"
        if texts := ", ".join(_text_words(self.preprocessing or {})):
            yield "texts", texts
        yield "size", f"{size(self.bytes)} ({self.bytes} bytes)"


def _student_words(students: Mapping[str, Any]) -> Iterator[str]:
    yield f"{len(students['multipliers'])}, with as many deltas each"
    if students["scores"]:
        scores = " ".join(f"{score:.3f}" for score in students["scores"])
        yield f"{students['metric']} of the first 1, 2, ...: {scores}"


def _head_words(head: Mapping[str, Any]) -> Iterator[str]:
    yield head["type"]
    if head["type"] == "sequence-classification":
        yield head["problem"]
    if head["type"] not in TOKEN_HEADS:
        yield f"{head['pooling']} pooling"
    if head.get("normalize"):
        yield "normalised"
    if head["outputs"]:
        yield f"{head['outputs']} outputs"
    if head["dense"]:
        yield f"dense layer of {head['dense']}"
    if "relevance" in head:
        yield f"pairs ranked by its {'output' if head['relevance'] == 'raw' else 'sigmoid'}"


def _text_words(own: Mapping[str, Any]) -> Iterator[str]:
    if own.get("prefix"):
        yield f"{own['prefix']!r} before each"
    if own.get("prompts"):
        yield f"prompts {', '.join(sorted(own['prompts']))}"
    if own.get("max_length"):
        yield f"{'cut to' if own.get('truncation') else 'at most'} {own['max_length']} tokens"
    if (strategy := own.get("truncation_strategy", "longest_first")) != "longest_first":
        yield f"pairs cut by {strategy}"


def _brief(value: object) -> str:
    """Numbers in lists, also by site, as their range; anything else as it is."""
    numbers = list(_numbers(value))
    if not numbers:
        return str(value)
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _numbers(value: object) -> Iterator[int | float]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
