"""Programs whose functions are compiled one by one: a function that a network's chain has several times is compiled
once.

Twelve layers of BERT-base are one function where the same classes act on all of them. It is compiled and kept in a
fraction of the time and memory, and each layer costs a call of its own, some 0.1 ms of the host.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import serialize_executable

from jpets.engine.batch.bucket import Variant
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.network import BankArrays, Network, Outputs, Params, State

WHOLE = "run"
"""The name of the only function of a program that is not a chain."""


class ChainMemory(NamedTuple):
    """Device memory of a chain's run, named as the compiler names one function's."""

    argument_size_in_bytes: int
    temp_size_in_bytes: int
    """The most that a function needs, with what the function before left to it."""
    output_size_in_bytes: int


class Chain:
    """A network's chain of compiled functions, to be called as one compiled program is."""

    def __init__(
        self, network: Network, variant: Variant, functions: Mapping[str, jax.stages.Compiled], mesh: MeshSlice
    ) -> None:
        self.functions = functions
        self._network = network
        places = {key: at for at, key in enumerate(variant.classes())}
        self._links = [
            (
                link,
                functions[link.name],
                [places[key] for key in link.classes],
                jax.device_put(np.asarray(link.moved, np.int32), mesh.everywhere),
            )
            for link in network.chain(variant)
        ]
        self._everywhere = mesh.everywhere

    def __call__(
        self, params: Params, banks: Sequence[BankArrays], state: State, buffers: Sequence[Any]
    ) -> tuple[State, Outputs]:
        """Starts a run and returns before it is done."""
        placed = jax.device_put(tuple(buffers), self._everywhere)  # once for all functions
        carried: Any = ()
        for link, function, places, moved in self._links:
            own = tuple(banks[at] for at in places)
            carried = function(self._network.link_params(link, params), own, carried, moved, placed)
        return state, carried

    def memory_analysis(self) -> ChainMemory | None:
        """None if the compiler gives no figures."""
        figures = [function.memory_analysis() for _, function, *_ in self._links]
        known = [own for own in figures if own is not None]
        if len(known) < len(figures):
            return None
        left = max((own.output_size_in_bytes for own in known[:-1]), default=0)
        arguments = max(own.argument_size_in_bytes for own in known)
        temporary = max(own.temp_size_in_bytes + own.output_size_in_bytes for own in known)
        return ChainMemory(arguments, left + temporary, known[-1].output_size_in_bytes)

    def as_text(self) -> str:
        """The compiled text of each function, once."""
        return "\n".join(function.as_text() or "" for function in self.functions.values())


def dumped(compiled: jax.stages.Compiled | Chain) -> bytes:
    """A program's functions by name, each serialised by JAX."""
    functions = compiled.functions if isinstance(compiled, Chain) else {WHOLE: compiled}
    return pickle.dumps({name: serialize_executable.serialize(function)[0] for name, function in functions.items()})


def loaded(
    payload: bytes, structures: Mapping[str, tuple[Any, Any]], mesh: MeshSlice
) -> dict[str, jax.stages.Compiled]:
    """The functions in ``payload``, where ``structures`` has each one's arguments and outputs. A damaged payload may
    raise any error of the unpickler or XLA."""
    functions = pickle.loads(payload)
    return {
        name: serialize_executable.deserialize_and_load(
            functions[name],
            jax.tree.structure((arguments, {})),
            jax.tree.structure(outputs),
            execution_devices=mesh.devices,
        )
        for name, (arguments, outputs) in structures.items()
    }
