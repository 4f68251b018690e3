"""Options that suit some heads."""

from __future__ import annotations

from jpets.errors import InvalidInput
from jpets.types import Aggregation, Task


def check_options(
    task: Task, top_k: int | None, aggregation: Aggregation | None, use_activation: bool | None = None
) -> None:
    """Raises ``InvalidInput`` for an option that means nothing to the task's head. Where there are several tasks, it
    may be meant for others."""
    head = task.head
    labels = head.type == "sequence-classification" and head.problem != "regression"
    if top_k is not None and not labels and head.type != "fill-mask":
        kind = "a head for values" if head.type == "sequence-classification" else f"a {head.type} head"
        raise InvalidInput(f"top_k: {task.id!r} has {kind}, which ranks no labels; leave it out")
    if aggregation is not None and head.type != "token-classification":
        raise InvalidInput(f"aggregation: {task.id!r} has a {head.type} head, which labels no tokens; leave it out")
    if use_activation is not None and head.type != "sequence-classification":
        raise InvalidInput(f"use_activation: {task.id!r} has a {head.type} head, which gives no probs; leave it out")
