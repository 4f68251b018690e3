"""jpets serves thousands of fine-tuned encoder tasks over one shared backbone, in one device batch."""

from __future__ import annotations

import os
import sys


def _leave_working_folder() -> None:
    """``python -m jpets.serve`` looks for modules in the working folder first, where a file called ``serving.py`` or
    ``typing.py`` would be taken for ours or for Python's. Nothing else is imported before this."""
    ours = any(each == "jpets" or each.startswith("jpets.") for each in sys.orig_argv[1:])
    if sys.argv[:1] == ["-m"] and ours and not sys.flags.safe_path:
        root, others = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sys.path[1:]
        sys.path[:] = others if root in others else [root, *others]


_leave_working_folder()

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from jpets.app.pretrained import Engine, read_task
    from jpets.errors import JpetsError
    from jpets.types import (
        Classification,
        Embedding,
        Failure,
        Query,
        Regression,
        Result,
        Span,
        Task,
        Tokens,
    )

__version__ = "0.1.0"

_HOME = {
    "Engine": "jpets.app.pretrained",
    "read_task": "jpets.app.pretrained",
    "JpetsError": "jpets.errors",
    **dict.fromkeys(
        ("Classification", "Embedding", "Failure", "Query", "Regression", "Result", "Span", "Task", "Tokens"),
        "jpets.types",
    ),
}

__all__ = [
    "Classification",
    "Embedding",
    "Engine",
    "Failure",
    "JpetsError",
    "Query",
    "Regression",
    "Result",
    "Span",
    "Task",
    "Tokens",
    "read_task",
]


def __getattr__(name: str) -> Any:
    """Public names on first use: the command line and the scheduling functions do without JAX."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'jpets' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
