"""Functions that take or give arrays say their shapes, and ``shapes.checked`` looks at them in every test."""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import pathlib
import typing
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import AbstractArray
from shapes import PACKAGES

from jpets.deltas.entries import block_norms
from pallas_kernels.numerics import dot

ROOT = pathlib.Path(__file__).parents[1]


def modules() -> Iterator[Any]:
    for package in PACKAGES:
        for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield importlib.import_module(name)


def functions(holder: Any, module: str) -> Iterator[tuple[str, Any]]:
    """Public functions and methods that are written in ``module``, by their names."""
    for name, each in vars(holder).items():
        if name.startswith("_") and name not in ("__call__", "__init__"):
            continue
        function: Any = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
        function = inspect.unwrap(function)
        if inspect.isclass(each) and each.__module__ == module:
            yield from ((f"{name}.{inner}", found) for inner, found in functions(each, module))
        elif inspect.isfunction(function) and function.__module__ == module:
            yield name, function


def bare(hint: Any) -> bool:
    """Whether arrays of any shape fit somewhere; what functions that are handed over take is theirs."""
    origin = typing.get_origin(hint)
    if origin is collections.abc.Callable:
        return False
    for kind in (hint, origin):
        if inspect.isclass(kind) and not issubclass(kind, AbstractArray) and issubclass(kind, (jax.Array, np.ndarray)):
            return True
    return any(bare(each) for each in typing.get_args(hint))


def test_every_public_array_function_says_its_shapes() -> None:
    """Also that annotations can be read at all: those that cannot are checked by nobody."""
    wrong, seen = [], 0
    for module in modules():
        for name, function in functions(module, module.__name__):
            hints = typing.get_type_hints(function)
            wrong += [f"{module.__name__}.{name}: {own}" for own, hint in hints.items() if bare(hint)]
            seen += 1
    assert not wrong and seen > 250


def test_shapes_are_checked() -> None:
    with pytest.raises(Exception, match="parameter"):
        dot(jnp.zeros((2, 3)), jnp.zeros((4, 5)))
    with pytest.raises(Exception, match="parameter"):
        block_norms(np.zeros(3, np.float32), 1)
