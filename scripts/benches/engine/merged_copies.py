"""What people use instead of deltas: one dense copy a task with its delta merged."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benches.shared import RandomBackbone, usual_family
from jpets.deltas import METHODS, class_method, merge_deltas, task_lead
from jpets.deltas.bank import Bank, lower_task, slot_arrays
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.assembly import Assembled, assemble
from jpets.engine.batch.bucket import FULL, Bucket, make_variant
from jpets.engine.batch.rows import Row, led
from jpets.engine.programs.mesh import first_device
from jpets.engine.programs.program import Family, Program, ProgramKey, compile_program
from jpets.engine.workloads.encoder_network import INPUTS
from jpets.model.encoder import Params, cast_params
from jpets.types import Task

AT_ONCE = 4
"""Copies that ``pars`` runs concurrently."""


class Call(NamedTuple):
    """One copy's batch."""

    params: Params
    banks: Mapping[ClassKey, Mapping[str, jax.Array]]
    key: ProgramKey
    assembled: Assembled


class MergedCopies:
    """One dense copy a task; methods without a dense form are inline. Embeddings are shared, or 32 copies would not
    fit."""

    def __init__(self, backbone: RandomBackbone, tasks: Sequence[Task]) -> None:
        self._config = backbone.config
        self._mesh = first_device()
        self._base_bias = np.asarray(backbone.params["bias"])
        shared = jax.device_put(cast_params(backbone.params, "bfloat16"), self._mesh.everywhere)
        self._programs: dict[ProgramKey, Program] = {}
        self._copies = [(task, self._params(task, backbone.params, shared)) for task in tasks]

    def batch(self, per_task: int, lengths: Sequence[int]) -> CopiesBatch:
        """Queries of these lengths: ``per_task`` of the first task, as many of the next, and so on.

        Lengths are padded to multiples of 8, one program each; the queries of one task are one rectangle.
        """
        calls = []
        for at, first in enumerate(range(0, len(lengths), per_task)):
            task, params = self._copies[at]
            calls.append(self._call(task, params, per_task, max(lengths[first : first + per_task])))
        return CopiesBatch(usual_family(self._config), [(self._programs[call.key], call) for call in calls])

    def _call(self, task: Task, params: Params, rows: int, length: int) -> Call:
        banks: dict[ClassKey, Bank] = {}
        for part in lower_task(task, self._config):
            if not class_method(part.key.method).merges:
                banks[part.key] = Bank(part.key, 2, self._config, "bfloat16", self._base_bias, self._mesh.bank)
                banks[part.key].write(1, slot_arrays(part, part.key, self._config, "bfloat16", self._base_bias))
        padded, lead, slots = -(-length // 8) * 8, task_lead(task), dict.fromkeys(banks, 1)
        key = ProgramKey(Bucket(rows * padded, ((rows, padded),)), make_variant(dict.fromkeys(banks, FULL)))
        if key not in self._programs:
            self._programs[key] = compile_program(usual_family(self._config, dict.fromkeys(banks, 2)), key)
        ids = np.arange(1000, 1000 + length - lead.tokens, dtype=np.int32)
        row = led(Row.of_tokens(ids, np.zeros_like(ids), slots, 0), lead, INPUTS)
        arrays = {each: bank.arrays for each, bank in banks.items()}
        return Call(params, arrays, key, assemble([row] * rows, key.bucket, key.variant, INPUTS))

    def _params(self, task: Task, host: Params, shared: Params) -> Params:
        dense = [delta for delta in task.deltas if METHODS[delta.method].merges]
        if not dense:
            return shared
        params: Params = {**host, "layers": dict(host["layers"])}
        params = merge_deltas(dense, self._config, jax.tree.map(jnp.asarray, params))
        own = cast_params({name: params[name] for name in ("layers", "bias")}, "bfloat16")
        return {**shared, **jax.block_until_ready(own)}


class CopiesBatch:
    """The queries of one batch, split by task: a call for each copy."""

    def __init__(self, family: Family, calls: Sequence[tuple[Program, Call]]) -> None:
        self._family = family
        self._calls = calls

    def in_turn(self) -> None:
        """``seqs``: one task after the other."""
        for program, call in self._calls:
            _run(program, call)

    def concurrently(self) -> None:
        """``pars``: several tasks at a time (PetS's ParS)."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(_run, *each) for each in self._calls]:
                done.result()

    def stacked(self) -> Callable[[], None]:
        """``stacked``: copies with the same program as one call, their weights on an axis that is mapped over."""
        groups: dict[ProgramKey, list[Call]] = defaultdict(list)
        for _, call in self._calls:
            groups[call.key].append(call)
        ready = [self._stack(key, calls) for key, calls in groups.items()]

        def run() -> None:
            for compiled, arguments in ready:
                np.asarray(compiled(*arguments)[1].logits[0])

        return run

    def _stack(self, key: ProgramKey, calls: Sequence[Call]) -> tuple[Any, tuple[Any, ...]]:
        def stack(*leaves: Any) -> jax.Array:
            return jnp.stack([jnp.asarray(leaf) for leaf in leaves])

        first = calls[0].params
        own = {name for name in first if any(call.params[name] is not first[name] for call in calls)}
        params = {
            name: jax.tree.map(stack, *(c.params[name] for c in calls)) if name in own else first[name]
            for name in first
        }
        axes = {name: 0 if name in own else None for name in first}
        banks = tuple(jax.tree.map(stack, *(c.banks[each] for c in calls)) for each in key.variant.classes())
        batch, views = (
            jax.tree.map(stack, *(getattr(c.assembled, part) for c in calls)) for part in ("batch", "views")
        )
        function = jax.vmap(
            functools.partial(self._family.network.run, key.bucket, key.variant, self._family.execution),
            (axes, 0, None, 0, 0),
        )
        arguments = (params, banks, (), batch, views)
        return jax.jit(function).lower(*arguments).compile(), arguments


def _run(program: Program, call: Call) -> None:
    _, outputs = program(call.params, call.banks, (), call.assembled)
    np.asarray(outputs.logits[0])
