"""Devices without room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jpets.engine.batch.assembly import Assembled
from jpets.engine.programs.network import Params
from jpets.engine.programs.program import Program

Dispatch = Callable[[Program, Assembled, Params | None], Any]


def no_memory_beyond(rows: int, late: bool) -> Callable[..., object]:
    """A device that has no room for batches of more than so many rows; it says so at once, or when results are read."""
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")

    class Lost:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise error

    def wrap(dispatch: Dispatch) -> Dispatch:
        def limited(program: Program, assembled: Assembled, params: Params | None = None) -> Any:
            if len(assembled.order) <= rows:
                return dispatch(program, assembled, params)
            if late:
                return Lost()
            raise error

        return limited

    return wrap
