"""jpets serves thousands of fine-tuned encoder tasks over one shared backbone, in one device batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jpets.errors import JpetsError
from jpets.types import (
    Classification,
    Embedding,
    Failure,
    Query,
    Regression,
    Result,
    Task,
    Tokens,
)

if TYPE_CHECKING:
    from jpets.pretrained import Engine

__all__ = [
    "Classification",
    "Embedding",
    "Engine",
    "Failure",
    "JpetsError",
    "Query",
    "Regression",
    "Result",
    "Task",
    "Tokens",
]


def __getattr__(name: str) -> Any:
    """``jpets.Engine`` on first use: it imports JAX and the checkpoint readers, which plain data does not need."""
    if name == "Engine":
        from jpets.pretrained import Engine

        return Engine
    raise AttributeError(f"module 'jpets' has no attribute {name!r}")
