"""Ids by which the engine knows students: no task of a user has such a one."""

from __future__ import annotations

MARK = "#"
"""Between the name of a group and the rest of a student's id; no id that a user gives has one."""


def student_ids(group: str, number: int, students: int) -> tuple[str, ...]:
    """The first student first. ``number`` tells this version of the group from any other one of the process."""
    return tuple(f"{group}{MARK}{number}.{at + 1}" for at in range(students))


def group_mark(id: str) -> str | None:
    """What the ids of a group's students have before their numbers, which begin at 1; None for any other task."""
    return id.rpartition(".")[0] + "." if MARK in id else None


def is_first(id: str) -> bool:
    """Whether an engine's task is a group's first student, or no student at all."""
    return MARK not in id or id.endswith(".1")
