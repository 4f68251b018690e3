"""Executables: one ahead-of-time compiled program for a bucket and a variant, and where their compiled form is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from jpets.config import BackboneConfig, DType
from jpets.deltas import class_method
from jpets.deltas.bank import storage_dtype
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.assembly import Assembled, assemble
from jpets.engine.batch.bucket import Bucket, Variant, replaces_weights
from jpets.engine.batch.rows import Row
from jpets.engine.programs.delta_order import ORDERED, Streams
from jpets.engine.programs.mappings import mappings_left, spare_mappings
from jpets.engine.programs.mesh import MeshSlice, first_device
from jpets.engine.programs.network import BankArrays, Network, Outputs, Params, State
from jpets.engine.programs.sources import PROGRAM, digest_of_code, foreign_modules, modules_of
from jpets.errors import OutOfSpace
from jpets.files import TEMPORARY, sweep, write_atomic, written_by

log = logging.getLogger(__name__)

HOST_BYTES_PER_STORED_BYTE = 27
"""Host memory of a loaded program over the size of its file (MiniLM on a CPU: 24 to 26)."""
STATE = 2
"""The place of the state among a program's arguments."""
COMPILERS = 2
"""Programs that are compiled at a time: half of the work is XLA's, which needs no lock of Python's."""
UNUSED_SECONDS = 30 * 24 * 3600.0
STALE_WRITE_SECONDS = 60.0
"""A program is written within a second: what is older was left by a process that was killed."""
COMPILER_VARIABLES = ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")
COMPILER_SETTINGS = (
    "jax_allow_f16_reductions",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_numpy_dtype_promotion",
    "jax_optimization_level",
    "jax_pallas_use_mosaic_gpu",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """What a program is compiled for."""

    bucket: Bucket
    variant: Variant

    def __str__(self) -> str:
        return f"{self.bucket} {self.variant}"


@dataclasses.dataclass(frozen=True)
class Family:
    """What all programs of one engine have in common: the network, number format, slots of each class's bank, and how
    delta operators are spread over streams."""

    network: Network
    dtype: DType
    slots: tuple[tuple[ClassKey, int], ...]
    streams: Streams = ORDERED

    @property
    def config(self) -> BackboneConfig:
        return self.network.config

    def to_json(self) -> str:
        return json.dumps({"kind": self.network.kind, **dataclasses.asdict(self)})


def key_to_json(key: ProgramKey) -> str:
    return json.dumps(dataclasses.asdict(key))


def key_from_json(text: str) -> ProgramKey:
    data = json.loads(text)
    bucket = Bucket(data["bucket"]["tokens"], tuple((n, length) for n, length in data["bucket"]["groups"]))
    variant = Variant(
        tuple((ClassKey.from_dict(key), level) for key, level in data["variant"]["light"]),
        tuple(ClassKey.from_dict(key) for key in data["variant"]["others"]),
        int(data["variant"]["run"]),
        bool(data["variant"]["replaced"]),
    )
    return ProgramKey(bucket, variant)


def _arguments(family: Family, key: ProgramKey, mesh: MeshSlice) -> tuple[Any, ...]:
    """Shapes of a program's arguments, and where they are, in the order of ``Network.run``."""
    network, config = family.network, family.config

    def shape(dims: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def bank(of: ClassKey, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        specs = class_method(of.method).bank_arrays(of, config)
        return {
            n: shape((slots, *s.shape), storage_dtype(s, family.dtype), mesh.bank(s.shape)) for n, s in specs.items()
        }

    params = network.abstract_params(family.dtype)
    slots = dict(family.slots)
    banks = tuple(bank(of, slots[of]) for of in key.variant.classes())
    token = network.sample(np.random.default_rng(0), 1)
    slots_used = {of: 1 for of in key.variant.classes() if replaces_weights(of)} if key.variant.replaced else {}
    empty = assemble([Row(token, slots_used, 0, 1)], key.bucket, key.variant, network.inputs)
    arrays = jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype, mesh.everywhere), (empty.batch, empty.views))
    placed = jax.tree.map(
        lambda leaf, own: shape(leaf.shape, leaf.dtype, own), params, mesh.params(params, network.split_axes)
    )
    state = jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype, mesh.everywhere), network.initial_state())
    return (placed, banks, state, *arrays)


@dataclasses.dataclass
class Program:
    """A compiled program. ``seconds`` is what a batch in it takes, heavy rows apart: what is known so far."""

    key: ProgramKey
    compiled: jax.stages.Compiled
    seconds: float = 0.0
    followed: bool = False
    """Whether batches had a say in ``seconds``."""
    stored_bytes: int = 0
    mappings: int = 0
    """Memory mappings of its code, those included that other threads made while it was loaded."""
    last_used: float = dataclasses.field(default_factory=time.monotonic)
    """``time.monotonic`` seconds of the last batch."""

    @property
    def host_bytes(self) -> int:
        """Host memory it takes, estimated: what XLA keeps of a program is no figure that it tells."""
        return self.stored_bytes * HOST_BYTES_PER_STORED_BYTE

    @functools.cached_property
    def memory(self) -> Any:
        """The compiler's figures of a run's device memory; None where it has none."""
        return self.compiled.memory_analysis()

    @functools.cached_property
    def label(self) -> str:
        """A short name for timings and logs: bucket, kind of variant, and a digest that tells variants apart."""
        variant = self.key.variant
        kind = "heavy" if variant.has("heavy") else "light" if variant.classes() else "bare"
        return f"{self.key.bucket} {kind}-{hashlib.sha256(str(variant).encode()).hexdigest()[:6]}"

    def __call__(
        self, params: Params, banks: Mapping[ClassKey, BankArrays], state: State, assembled: Assembled
    ) -> tuple[State, Outputs]:
        """Starts a run and returns before it is done. ``state`` is donated."""
        chosen = tuple(banks[key] for key in self.key.variant.classes())
        after, outputs = self.compiled(params, chosen, state, assembled.batch, assembled.views)
        return after, outputs


def trace_program(family: Family, key: ProgramKey, mesh: MeshSlice | None = None) -> jax.stages.Traced:
    """The program, for the first device by default, before it is lowered for a platform."""
    mesh = mesh or first_device()
    function = functools.partial(family.network.run, key.bucket, key.variant, family.streams)
    return jax.jit(function, out_shardings=mesh.everywhere, donate_argnums=STATE).trace(*_arguments(family, key, mesh))


def compile_program(family: Family, key: ProgramKey, mesh: MeshSlice | None = None) -> Program:
    """Lowers and compiles, always anew: ``ProgramStore`` is what remembers.

    Raises ``OutOfSpace`` where the process may not map another program's code.
    """
    left = spare_mappings()
    lowered = trace_program(family, key, mesh).lower()
    with _no_compilation_cache():
        compiled = lowered.compile()
    return Program(key, compiled, mappings=left - mappings_left())


def compile_programs(family: Family, keys: Iterable[ProgramKey], mesh: MeshSlice | None = None) -> Iterator[Program]:
    """``compile_program`` of each in order, ``COMPILERS`` at a time."""
    with _no_compilation_cache(), ThreadPoolExecutor(COMPILERS) as pool:
        yield from pool.map(functools.partial(compile_program, family, mesh=mesh), keys)


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Keeps JAX's own cache out: an executable that it served lacks its code when it is serialised again."""
    if not (jax.config.values["jax_enable_compilation_cache"] and jax.config.values["jax_compilation_cache_dir"]):
        yield
        return
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def compiler_settings() -> dict[str, Any]:
    """JAX's settings that change what is compiled."""
    return {name: jax.config.values[name] for name in COMPILER_SETTINGS if name in jax.config.values}


class ProgramStore:
    """A folder of serialised programs. Loading one takes a seventh of lowering and reading the compilation cache.

    Names digest all that a program depends on: its shapes, this code and that of its classes' methods, JAX's version
    and settings, the kind of device, and which devices of that kind: XLA compiles for them and loads a program on no
    others. What cannot be read is compiled again.
    """

    def __init__(self, folder: pathlib.Path, mesh: MeshSlice) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._mesh = mesh
        device = mesh.devices[0]
        self._sweep()
        self._base = [
            jax.__version__,
            jaxlib.version.__version__,
            device.platform,
            device.device_kind,
            device.client.platform_version,
            str(len(mesh.devices)),
            _cpu(),
            *(f"{name}={os.environ.get(name, '')}" for name in COMPILER_VARIABLES),
            json.dumps(compiler_settings(), default=str),
            digest_of_code(PROGRAM),
        ]

    def family_name(self, family: Family) -> str:
        """A file name that changes with everything that figures or programs of ``family`` depend on."""
        methods = {key.method: foreign_modules(type(class_method(key.method))) for key, _ in family.slots}
        code = [digest_of_code(*modules) for _, modules in sorted(methods.items()) if modules]
        code.append(digest_of_code(*modules_of(type(family.network))))
        return hashlib.sha256("\0".join([*self._base, *code, family.to_json()]).encode()).hexdigest()[:40]

    def _path(self, family: Family, key: ProgramKey) -> pathlib.Path:
        devices = [device.id for device in self._mesh.devices]
        name = hashlib.sha256(f"{devices} {key_to_json(key)}".encode()).hexdigest()[:24]
        classes = key.variant.classes()  # others may come and go
        own = dataclasses.replace(family, slots=tuple((of, slots) for of, slots in family.slots if of in classes))
        return self._folder / f"{self.family_name(own)}-{name}.program"

    def save(self, family: Family, program: Program) -> None:
        """A full or read-only disk only costs the next start its time."""
        payload, _, _ = serialize_executable.serialize(program.compiled)
        program.stored_bytes = len(payload)
        try:
            write_atomic(self._path(family, program.key), payload)
        except (OSError, OutOfSpace) as error:
            log.warning("a program could not be kept: %s", error)

    def forget(self, family: Family, key: ProgramKey) -> None:
        with contextlib.suppress(OSError):
            self._path(family, key).unlink()

    def sweep_of(self, process: int) -> None:
        """Removes what a process that has ended was writing."""
        sweep(self._folder, written_by(process), 0.0)

    def _sweep(self) -> None:
        """Removes what nobody has loaded for a long time, above all programs of older versions, and halves of files."""
        sweep(self._folder, TEMPORARY, STALE_WRITE_SECONDS)
        for path in self._folder.glob("*.program"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > UNUSED_SECONDS:
                    path.unlink()

    def load(self, family: Family, key: ProgramKey) -> Program | None:
        """The kept program; None where there is none. Raises ``OutOfSpace`` as ``compile_program`` does."""
        path = self._path(family, key)
        try:
            payload = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a folder that may only be read
            os.utime(path)
        left = spare_mappings()
        arguments = _arguments(family, key, self._mesh)
        in_tree = jax.tree.structure((arguments, {}))
        out_tree = jax.tree.structure((family.network.initial_state(), family.network.outputs(key.variant)))
        try:
            compiled = serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, execution_devices=self._mesh.devices
            )
        except Exception:  # a damaged file raises whatever the unpickler or XLA stumbled over
            log.exception("a stored program could not be loaded and is compiled again")
            self.forget(family, key)
            return None
        return Program(key, compiled, stored_bytes=len(payload), mappings=left - mappings_left())


def _cpu() -> str:
    """What the host's processor can do; a program for a CPU runs only on its like."""
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    return next((line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
