"""How annotated shapes are checked under test: ``conftest`` installs ``checked`` for whole packages."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

from jaxtyping import AbstractArray

try:
    from beartype import beartype
except ModuleNotFoundError:  # a bare checkout beside a device: nothing is checked
    beartype = None  # type: ignore[assignment]

PACKAGES = ("jpets.deltas", "jpets.model", "jpets.students", "jpets.training", "pallas_kernels")
"""Those whose functions take and give arrays."""


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which raises where an array that it takes or gives is not of the annotated shape and kind, if
    beartype is there to check it.

    The rest is left to mypy. What fields of dataclasses are made of is not looked at: JAX builds those that it knows of
    anything, of placeholders, abstract shapes and axes too.
    """
    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if _has_shape(hint)}
    if not function.__annotations__ or beartype is None:
        return function
    check: Callable[..., Any] = beartype(function)
    if function.__name__ != "__init__":
        return check

    @functools.wraps(function)
    def init(self: object, *arguments: Any, **named: Any) -> Any:
        own = function if dataclasses.is_dataclass(self) else check
        return own(self, *arguments, **named)

    return init


def _has_shape(hint: Any) -> bool:
    """Whether arrays with a shape are somewhere in it."""
    return (inspect.isclass(hint) and issubclass(hint, AbstractArray)) or any(map(_has_shape, typing.get_args(hint)))
