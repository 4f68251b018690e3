"""A replica: one device, or a slice of a mesh, with a backbone, its banks and its programs.

Only its own thread touches the device, but for the first runs of programs that arrive (``dispatch_beside``).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jpets.deltas.bank import Bank, SlotArrays
from jpets.deltas.operators import Operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.assembly import Assembled, fill
from jpets.engine.batch.layout import Layout
from jpets.engine.batch.rows import Row, TokenInput
from jpets.engine.device.staging import Staging
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.network import Outputs, Params, State
from jpets.engine.programs.program import Family, Program, ProgramKey

log = logging.getLogger(__name__)

SlotContents = Mapping[ClassKey, tuple[int, SlotArrays]]
"""A task's slot in each class's bank, and the slot's contents."""


class Generation(NamedTuple):
    """Classes, and the programs that together take any batch of them."""

    classes: frozenset[ClassKey]
    core: tuple[ProgramKey, ...]


class Replica:
    """``mesh`` places every array. ``inputs`` are the network's, or the workload's, which say what empty places of a
    batch hold.

    It has more than 20 methods, as whatever touches a device goes through its one owner.
    """

    def __init__(
        self,
        family: Family,
        params: Mapping[str, Any],
        mesh: MeshSlice,
        inputs: Mapping[str, TokenInput] | None = None,
    ) -> None:
        self.family = family
        """With the classes that were added after the start."""
        self.mesh = mesh
        self._inputs = inputs or family.network.inputs
        self._base_bias = family.network.base_bias(dict(params))
        with jax.default_device(mesh.devices[0]):  # nothing passes through another device
            cast = family.network.cast(dict(params), family.dtype)
            self.params: Params = self.place(cast)
            self._state = self._blank_state()
            self.banks = {key: self._make_bank(key, count) for key, count in family.slots}
        self.generations: Sequence[Generation] = (Generation(self.classes, ()),)
        """The classes of the start, then all that are open each time that more are in use; a new tuple at every
        change."""
        self.opened = self.classes
        """The classes that tasks may have: others have a bank, and wait for their programs."""
        self._programs: dict[ProgramKey, Program] = {}
        self.programs: Sequence[Program] = ()
        """The programs that are ready; a new tuple at every change."""
        self.for_mixtures: Sequence[Program] = ()
        """Those of them that take rows of different texts; also a new tuple at every change."""
        self.staging = Staging()
        self.choose: Callable[[Family], Operators] = lambda family: family.operators
        """Gives the operators of the family with classes that came after the start."""
        self._lock = threading.Lock()
        self._handing = threading.Lock()
        """Held while another thread than the owner passes the banks to a program: they must not be donated
        meanwhile."""

    @property
    def device(self) -> jax.Device:
        """The first of its devices."""
        return self.mesh.devices[0]

    @property
    def classes(self) -> frozenset[ClassKey]:
        return frozenset(key for key, _ in self.family.slots)

    def place(self, params: Params) -> Params:
        """Cast parameters, or some of them, on this replica's devices."""
        network = self.family.network
        arranged = network.arranged(params, len(self.mesh.devices))
        mapped = {name: np.asarray(arranged[name]) for name in network.mapped if name in arranged}  # of no device yet
        arranged = {**arranged, **mapped}
        placed: Params = jax.device_put(arranged, self.mesh.params(arranged, network.split_axes), may_alias=True)
        return placed

    def _make_bank(self, key: ClassKey, slots: int) -> Bank:
        return Bank(key, slots, self.family.config, self.family.dtype, self._base_bias, self.mesh.bank)

    def add_banks(self, slots: Mapping[ClassKey, int]) -> None:
        """Makes room for more classes, with the operators that ``choose`` gives, but for those that are there. With
        several devices, owner thread only."""
        slots = {key: count for key, count in slots.items() if key not in self.banks}
        with jax.default_device(self.mesh.devices[0]):
            made = {key: self._make_bank(key, count) for key, count in slots.items()}
            for bank in made.values():
                bank.read(0)  # compiled before a task of it moves, which queries would wait for
        self.banks = {**self.banks, **made}
        family = dataclasses.replace(self.family, slots=tuple(sorted([*self.family.slots, *slots.items()])))
        self.family = dataclasses.replace(family, operators=self.choose(family))

    def has_program(self, key: ProgramKey) -> bool:
        return key in self._programs

    def add_program(self, program: Program) -> None:
        with self._lock:
            self._programs[program.key] = program
            self.programs = tuple(self._programs.values())
            self.for_mixtures = _for_mixtures(self.programs)

    def drop_program(self, key: ProgramKey) -> None:
        """Removes a program. A batch that is planned for it still runs in it."""
        with self._lock:
            self._programs.pop(key, None)
            self.programs = tuple(self._programs.values())
            self.for_mixtures = _for_mixtures(self.programs)

    def task_bytes(self, keys: Sequence[ClassKey] | None) -> int:
        """Bytes of a task of these classes, about; where they are not known, as many as the largest slot has."""
        if keys is None:
            return max((bank.slot_bytes for bank in self.banks.values()), default=0)
        return sum(self.banks[key].slot_bytes for key in keys)

    def write(self, contents: SlotContents) -> None:
        """Puts (slot, arrays) into each class's bank. Owner thread only."""
        with self._handing:
            for key, (slot, arrays) in contents.items():
                self.banks[key].write(slot, arrays)

    def read(self, slots: Mapping[ClassKey, int]) -> dict[ClassKey, SlotArrays]:
        """A copy of what ``write`` put into these slots, on the device. Owner thread only."""
        return {key: self.banks[key].read(slot) for key, slot in slots.items()}

    def take_in(self, contents: Mapping[ClassKey, SlotArrays]) -> dict[ClassKey, SlotArrays]:
        """What another replica ``read``, for ``write`` here: from device to device, or through the host where several
        devices hold it in parts."""
        if len(self.mesh.devices) > 1:
            return {key: {name: np.asarray(array) for name, array in own.items()} for key, own in contents.items()}
        moved: dict[ClassKey, SlotArrays] = jax.block_until_ready(jax.device_put(dict(contents), self.device))
        return moved

    def assemble(self, rows: Sequence[Row], program: Program) -> Assembled:
        return self.fill(Layout(rows, program.key.bucket), rows, program)

    def fill(self, layout: Layout, rows: Sequence[Row], program: Program, below: Layout | None = None) -> Assembled:
        """``assemble`` for rows that were laid out before; ``rows`` are the layout's, with the inputs looked up since.
        ``below``: their text, for a program with a trunk."""
        return fill(layout, rows, program.arguments(self._inputs), below)

    def write_rows(self, places: Int[np.ndarray, " k"], rows: Shaped[np.ndarray, "k p e"], *, anew: bool) -> None:
        """``jpets.engine.workloads.row_cache.WriteRows``, into the parameter ``table``. Owner thread only."""
        with self._handing:
            table = self.params["table"]
            if anew:
                table = jnp.zeros(table.shape, table.dtype, device=table.sharding)
            self.params = {**self.params, "table": self._written(table, places, rows)}

    @functools.cached_property
    def _written(self) -> Callable[..., Array]:
        def written(table: Array, places: Array, rows: Array) -> Array:
            return table.at[places].set(rows, mode="drop", unique_indices=True)

        return jax.jit(written, donate_argnums=0, out_shardings=self.params["table"].sharding)

    def dispatch(self, program: Program, assembled: Assembled, params: Params | None = None) -> Outputs:
        """Starts the program, on other parameters of the same shapes if given, and returns before it is done. Owner
        thread only."""
        own = self.params if params is None else self._with_table(params)
        self._state, outputs = self._start(program, assembled, own, self._state)
        if self.device.platform != "cpu":
            for output in jax.tree.leaves(outputs):  # all copies begin when the program ends, not one after the other
                output.copy_to_host_async()
        return outputs

    def try_out(self, program: Program, assembled: Assembled) -> Outputs:
        """``dispatch`` of a batch that leaves no trace for later ones: its state is its own. Owner thread only."""
        return self._start(program, assembled, self.params, self._blank_state())[1]

    def try_out_beside(self, program: Program, assembled: Assembled) -> Outputs:
        """``try_out`` by another thread while the owner goes on; for a replica of one device only."""
        with self._handing:
            return self.try_out(program, assembled)

    def _start(self, program: Program, assembled: Assembled, params: Params, state: State) -> tuple[State, Outputs]:
        program.last_used = time.monotonic()
        own = {key: self.banks[key].arrays for key in program.key.variant.classes()}
        return program(params, own, state, assembled)

    def _with_table(self, params: Params) -> Params:
        """With rows of tables as they are by now."""
        return {**params, "table": self.params["table"]} if "table" in self.params else params

    def _blank_state(self) -> State:
        return jax.device_put(self.family.network.initial_state(), self.mesh.everywhere)

    def bank_bytes(self) -> dict[ClassKey, int]:
        return {key: bank.nbytes for key, bank in self.banks.items()}


def _for_mixtures(programs: Sequence[Program]) -> Sequence[Program]:
    return tuple(program for program in programs if program.key.trunk is None)
