"""Programs: each is compiled ahead of time for one bucket and one variant."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jpets.config import BackboneConfig, DType
from jpets.deltas import class_method
from jpets.deltas.bank import storage_dtype
from jpets.deltas.operators import REFERENCES, Operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.arguments import BatchArguments
from jpets.engine.batch.assembly import Assembled
from jpets.engine.batch.bucket import Bucket, Trunk, Variant
from jpets.engine.batch.rows import TokenInput
from jpets.engine.programs.chain import WHOLE, Chain, loaded
from jpets.engine.programs.delta_order import ONE_STREAM, Execution, Streams
from jpets.engine.programs.mappings import mappings_left, spare_mappings
from jpets.engine.programs.mesh import MeshSlice, first_device
from jpets.engine.programs.network import BankArrays, Link, Network, Outputs, Params, State

log = logging.getLogger(__name__)

HOST_BYTES_PER_STORED_BYTE = {"cpu": 27}
"""Host memory of a loaded program, as a multiple of its file's size (MiniLM on a CPU: 24 to 26)."""
ELSEWHERE = 3
"""The same where a file holds machine code of a device, which lies in the device's memory; assumed, not measured."""
WHOLE_GAIN = 0.1
"""Share of its time that a program gains as one function: MiniLM's on two cores gain 2 to 18 %."""
STATE = 2
"""The place of the state among a program's arguments."""
COMPILERS = 2
"""Programs that are compiled at a time: half of the work is XLA's, which does not need Python's lock."""


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """The bucket and variant that a program is compiled for, and the trunk below its rows if they are of one text."""

    bucket: Bucket
    variant: Variant
    trunk: Trunk | None = None

    def __str__(self) -> str:
        return f"{self.bucket} {self.variant}" + (f" above {self.trunk}" if self.trunk is not None else "")


@dataclasses.dataclass(frozen=True)
class Family:
    """Everything that all programs of one engine share: the network, number format, slots of each class's bank, the
    streams of delta operators, the candidates that are chosen for operators, and how programs are made of functions."""

    network: Network
    dtype: DType
    slots: tuple[tuple[ClassKey, int], ...]
    streams: Streams = ONE_STREAM
    operators: Operators = REFERENCES
    chained: bool = False
    """Whether the functions of a network's chain are compiled one by one."""

    @property
    def config(self) -> BackboneConfig:
        return self.network.config

    @property
    def execution(self) -> Execution:
        return Execution(self.streams, self.operators)

    def to_json(self) -> str:
        return json.dumps({"kind": self.network.kind, **dataclasses.asdict(self)})


def chained_on(mesh: MeshSlice) -> bool:
    """Whether programs there are compiled function by function, where their network allows it: an accelerator is so
    fast that the host's calls would be seen, and several devices compute one program together."""
    return len(mesh.devices) == 1 and mesh.devices[0].platform == "cpu"


def key_to_json(key: ProgramKey) -> str:
    return json.dumps(dataclasses.asdict(key))


def key_from_json(text: str) -> ProgramKey:
    data = json.loads(text)
    bucket, trunk = _bucket_of(data["bucket"]), data["trunk"]
    variant = Variant(
        tuple((ClassKey.from_dict(key), level) for key, level in data["variant"]["light"]),
        tuple(ClassKey.from_dict(key) for key in data["variant"]["others"]),
        int(data["variant"]["run"]),
        bool(data["variant"]["replaced"]),
        tuple((ClassKey.from_dict(key), level) for key, level in data["variant"]["runs"]),
    )
    below = Trunk(_bucket_of(trunk["bucket"]), int(trunk["layers"])) if trunk is not None else None
    return ProgramKey(bucket, variant, below)


def _bucket_of(data: Mapping[str, Any]) -> Bucket:
    return Bucket(int(data["tokens"]), tuple((int(n), int(length)) for n, length in data["groups"]))


def arguments_of(key: ProgramKey, inputs: Mapping[str, TokenInput]) -> BatchArguments:
    """How the arrays of a program's batches are passed to it."""
    return BatchArguments(key.bucket, key.variant, inputs, key.trunk.bucket if key.trunk is not None else None)


def abstract_arguments(family: Family, key: ProgramKey, mesh: MeshSlice) -> tuple[Any, ...]:
    """Shapes and placement of a program's arguments: parameters, banks, state, and the buffers of a batch."""
    network, config = family.network, family.config

    def shape(dims: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def bank(of: ClassKey, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        specs = class_method(of.method).bank_arrays(of, config)
        return {
            n: shape((slots, *s.shape), storage_dtype(s, family.dtype), mesh.bank(s.shape, s.split))
            for n, s in specs.items()
        }

    params = network.abstract_params(family.dtype)
    slots = dict(family.slots)
    banks = tuple(bank(of, slots[of]) for of in key.variant.classes())
    batch = arguments_of(key, network.inputs)
    buffers = tuple(
        shape((size,), dtype, mesh.everywhere) for size, dtype in zip(batch.sizes, batch.dtypes, strict=True)
    )
    placed = jax.tree.map(
        lambda leaf, own: shape(leaf.shape, leaf.dtype, own), params, mesh.params(params, network.split_axes)
    )
    state = jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype, mesh.everywhere), network.initial_state())
    return placed, banks, state, buffers


@dataclasses.dataclass
class Program:
    """A compiled program. ``seconds`` is the time of a batch in it, without heavy rows, as far as known."""

    key: ProgramKey
    compiled: jax.stages.Compiled | Chain
    seconds: float = 0.0
    expected: float = 0.0
    """What ``seconds`` was when it came, before any batch; 0 where it was not known."""
    followed: int = 0
    """Batches that have changed ``seconds``."""
    unsettled: int = 0
    """``followed`` when its code came: the batches before tell nothing of it."""
    best: float = math.inf
    """What it takes while nothing else takes the cores, once batches have settled it."""
    seen: tuple[int, float] | None = None
    """``followed`` and ``seconds`` at the latest look at all programs; None where its code is another one since."""
    computed: float = 0.0
    """Seconds that batches took in it, of all that it ran."""
    stored_bytes: int = 0
    mappings: int = 0
    """Memory mappings of its code; mappings that other threads made while it was loaded count too."""
    last_used: float = dataclasses.field(default_factory=time.monotonic)
    """Time of the last batch (``time.monotonic``)."""
    _arguments: BatchArguments | None = None

    @property
    def host_bytes(self) -> int:
        """Estimated host memory: XLA does not tell what it takes."""
        return self.stored_bytes * HOST_BYTES_PER_STORED_BYTE.get(jax.default_backend(), ELSEWHERE)

    def arguments(self, inputs: Mapping[str, TokenInput]) -> BatchArguments:
        """Those of its batches; ``inputs`` are always the same."""
        if self._arguments is None:
            self._arguments = arguments_of(self.key, inputs)
        return self._arguments

    @property
    def chained(self) -> bool:
        """Whether its functions were compiled one by one."""
        return isinstance(self.compiled, Chain)

    def exchange(self, other: Program) -> jax.stages.Compiled | Chain:
        """Takes the code of another program of its key, from the next batch on. Returns its own, which is freed with
        the last reference to it; that takes a while."""
        self.stored_bytes, self.mappings = other.stored_bytes, other.mappings
        former, self.compiled = self.compiled, other.compiled
        self.seconds *= 1 - WHOLE_GAIN
        self.expected *= 1 - WHOLE_GAIN
        self.best, self.unsettled, self.seen = math.inf, self.followed, None
        self.__dict__.pop("memory", None)
        return former

    @functools.cached_property
    def memory(self) -> Any:
        """The compiler's figures of a run's device memory; None if it gives none."""
        return self.compiled.memory_analysis()

    @functools.cached_property
    def label(self) -> str:
        """A short name for timings and logs: bucket, kind of variant, and a digest that tells variants apart."""
        variant = self.key.variant
        kind = "heavy" if variant.has("heavy") else "light" if variant.classes() else "bare"
        digest = hashlib.sha256(f"{variant}{self.key.trunk or ''}".encode()).hexdigest()
        return f"{self.key.bucket} {kind}-{digest[:6]}"

    def __call__(
        self, params: Params, banks: Mapping[ClassKey, BankArrays], state: State, assembled: Assembled
    ) -> tuple[State, Outputs]:
        """Starts a run and returns before it is done. ``state`` is donated."""
        chosen = tuple(banks[key] for key in self.key.variant.classes())
        after, outputs = self.compiled(params, chosen, state, assembled.buffers)
        return after, outputs


def trace_program(family: Family, key: ProgramKey, mesh: MeshSlice | None = None) -> jax.stages.Traced:
    """The program, for the first device by default, before it is lowered for a platform."""
    mesh = mesh or first_device()
    network, arguments_in = family.network, arguments_of(key, family.network.inputs)

    def run(
        params: Params, banks: Sequence[BankArrays], state: State, buffers: Sequence[jax.Array]
    ) -> tuple[State, Outputs]:
        batch, views, below = arguments_in.unpacked(buffers)
        if key.trunk is None or below is None:
            return network.run(key.bucket, key.variant, family.execution, params, banks, state, batch, views)
        layers = key.trunk.layers
        above = network.run_above(layers, below, key.bucket, key.variant, family.execution, params, banks, batch, views)
        return state, above

    arguments = abstract_arguments(family, key, mesh)
    function = mesh.on_each(run, arguments) if network.split_axes else run
    return jax.jit(function, out_shardings=mesh.everywhere, donate_argnums=STATE).trace(*arguments)


def chain_of(family: Family, key: ProgramKey) -> Sequence[Link]:
    """The first link of each function of a program that is a chain; of another program none."""
    first: dict[str, Link] = {}
    for link in family.network.chain(key.variant) if family.chained and key.trunk is None else ():
        first.setdefault(link.name, link)
    return list(first.values())


def whole_family(family: Family) -> Family:
    """``family``, whose programs are each compiled as one function."""
    return dataclasses.replace(family, chained=False)


def link_arguments(
    family: Family, key: ProgramKey, link: Link, program: tuple[Any, ...], carried: Any, mesh: MeshSlice
) -> tuple[Any, ...]:
    """Shapes of the arguments of a link's function, from the ``abstract_arguments`` of its program; ``carried`` is what
    it gets of the link before."""
    params, banks, _, buffers = program
    of = dict(zip(key.variant.classes(), banks, strict=True))
    moved = jax.ShapeDtypeStruct((len(link.moved),), np.int32, sharding=mesh.everywhere)
    return family.network.link_params(link, params), tuple(of[each] for each in link.classes), carried, moved, buffers


def _trace_link(
    family: Family, key: ProgramKey, link: Link, arguments: tuple[Any, ...], mesh: MeshSlice
) -> jax.stages.Traced:
    """A link's function of its ``link_arguments``, before it is lowered for a platform."""
    network, batch = family.network, arguments_of(key, family.network.inputs)

    def run(
        params: Params, banks: Sequence[BankArrays], carried: Any, moved: jax.Array, buffers: Sequence[jax.Array]
    ) -> Any:
        unpacked, views, _ = batch.unpacked(buffers)
        of = dict(zip(key.variant.classes(), views, strict=True))
        own = [of[each] for each in link.classes]
        return network.run_link(
            link, key.bucket, key.variant, family.execution, params, banks, carried, moved, unpacked, own
        )

    return jax.jit(run, out_shardings=mesh.everywhere).trace(*arguments)


def _compile(family: Family, key: ProgramKey, mesh: MeshSlice) -> jax.stages.Compiled | Chain:
    links = chain_of(family, key)
    if not links:
        return trace_program(family, key, mesh).lower().compile()
    program = abstract_arguments(family, key, mesh)
    functions: dict[str, jax.stages.Compiled] = {}
    carried: Any = ()
    for link in links:
        traced = _trace_link(family, key, link, link_arguments(family, key, link, program, carried, mesh), mesh)
        functions[link.name] = traced.lower().compile()
        carried = jax.tree.map(
            lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=mesh.everywhere), traced.out_info
        )
    return Chain(family.network, key.variant, functions, mesh)


def compile_program(family: Family, key: ProgramKey, mesh: MeshSlice | None = None) -> Program:
    """Lowers and compiles, always anew: only ``ProgramStore`` remembers programs.

    Raises ``OutOfSpace`` where the process may not map another program's code.
    """
    left = spare_mappings()
    with _no_compilation_cache:
        compiled = _compile(family, key, mesh or first_device())
    return Program(key, compiled, mappings=left - mappings_left())


def load_program(family: Family, key: ProgramKey, payload: bytes, mesh: MeshSlice) -> jax.stages.Compiled | Chain:
    """A program that was ``dumped``. A damaged payload may raise any error of the unpickler or XLA."""
    outputs = family.network.outputs(key.variant)
    links, program = chain_of(family, key), abstract_arguments(family, key, mesh)
    if not links:
        whole = program, (family.network.initial_state(), outputs)
        return loaded(payload, {WHOLE: whole}, mesh)[WHOLE]
    array = jax.ShapeDtypeStruct((), np.float32)
    carried, given = [(), *[array] * (len(links) - 1)], [*[array] * (len(links) - 1), outputs]
    structures = {
        link.name: (link_arguments(family, key, link, program, own, mesh), after)
        for link, own, after in zip(links, carried, given, strict=True)
    }
    return Chain(family.network, key.variant, loaded(payload, structures, mesh), mesh)


def compile_programs(family: Family, keys: Iterable[ProgramKey], mesh: MeshSlice | None = None) -> Iterator[Program]:
    """``compile_program`` of each, in order, ``COMPILERS`` at a time."""
    with _no_compilation_cache, ThreadPoolExecutor(COMPILERS) as pool:
        yield from pool.map(functools.partial(compile_program, family, mesh=mesh), keys)


class _NoCompilationCache:
    """Turns JAX's own cache off: an executable from it lacks its code when it is serialised again. The switch is the
    process's: of several threads the first turns it off, the last on again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                values = jax.config.values
                self._was_on = values["jax_enable_compilation_cache"] and bool(values["jax_compilation_cache_dir"])
                self._switch(on=False)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._switch(on=True)

    def _switch(self, *, on: bool) -> None:
        if self._was_on:
            jax.config.update("jax_enable_compilation_cache", on)
            compilation_cache.reset_cache()


_no_compilation_cache = _NoCompilationCache()
