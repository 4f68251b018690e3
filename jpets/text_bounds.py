"""How long the texts of a task may be that comes in: its answers, lists and queries repeat them."""

from __future__ import annotations

from jpets.errors import InvalidTask
from jpets.types import Task

MOST_LABEL, MOST_DESCRIBED, MOST_AROUND = 1 << 10, 1 << 16, 1 << 16
"""Characters of a label, of a description, and of what stands around a text."""


def with_short_texts(task: Task) -> Task:
    """``task``; raises ``InvalidTask`` where a text is too long. Tasks that are stored already are served as before."""
    own = task.preprocessing
    described = {"description": task.description, "license": task.license, "created": task.created}
    around = {"prefix": own.prefix, **{f"prompts[{name[:80]!r}]": text for name, text in (own.prompts or {}).items()}}
    bounds = [
        *((name, text, MOST_DESCRIBED) for name, text in described.items()),
        *((f"preprocessing.{name}", text, MOST_AROUND) for name, text in around.items()),
        ("labels", max(task.labels, key=len, default=None), MOST_LABEL),
    ]
    for name, text, most in bounds:
        if text is not None and len(text) > most:
            raise InvalidTask(f"{name}: expected at most {most} characters, found {len(text)}")
    return task
