"""jpets serves thousands of fine-tuned encoder tasks over one shared backbone, in one device batch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpets.errors import JpetsError
    from jpets.pretrained import Engine
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
    "Engine": "jpets.pretrained",
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
]


def __getattr__(name: str) -> Any:
    """Public names on first use: the command line and the scheduling functions do without JAX."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'jpets' has no attribute {name!r}")
