"""What one task answers by ``task_outputs``, as one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpets.model.encoder import Params, SplitEncoder
from jpets.training.forward import InputRows, acts_beside, task_outputs
from jpets.types import Delta, Head


def task_logits(
    encoder: SplitEncoder, params: Params, deltas: Sequence[Delta], head: Head, rows: InputRows, tensors: Any = None
) -> np.ndarray:
    """The logits of a task; ``tensors`` stand for the head's own. Outside a program every operation would be compiled
    by itself, which takes ten times as long."""
    beside = [dict(delta.tensors) if acts_beside(delta) else None for delta in deltas]

    @jax.jit
    def logits(params: Params, beside: Any, tensors: Any, rows: InputRows) -> Any:
        own = [
            delta if arrays is None else dataclasses.replace(delta, tensors=arrays)
            for delta, arrays in zip(deltas, beside, strict=True)
        ]
        return task_outputs(encoder, params, own, head, tensors, rows).logits

    tensors = jax.tree.map(jnp.asarray, dict(head.tensors)) if tensors is None else tensors
    return np.asarray(logits(params, beside, tensors, rows))
