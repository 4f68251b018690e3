"""The store of compiled programs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import platform
import time
from typing import Any

import jax
import jaxlib.version

from jpets.deltas import class_method
from jpets.engine.programs.chain import dumped
from jpets.engine.programs.mappings import mappings_left, spare_mappings
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family, Program, ProgramKey, key_to_json, load_program, whole_family
from jpets.engine.programs.sources import PROGRAM, digest_of_code, foreign_modules, modules_of
from jpets.errors import OutOfSpace
from jpets.files import TEMPORARY, sweep, write_atomic, written_by

log = logging.getLogger(__name__)

UNUSED_SECONDS = 30 * 24 * 3600.0
STALE_WRITE_SECONDS = 60.0
"""Seconds after which a temporary file is old: writing takes one, so a process that was killed left it."""
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


def compiler_settings() -> dict[str, Any]:
    """JAX's settings that change what is compiled."""
    return {name: jax.config.values[name] for name in COMPILER_SETTINGS if name in jax.config.values}


def settings_as_variables() -> dict[str, str]:
    """JAX's settings as a process reads them from its environment: a child is to compile as this
    thread would."""
    return {name.upper(): str(value) for name, value in compiler_settings().items() if value is not None}


def platforms_variable(platform: str) -> str:
    """``JAX_PLATFORMS`` of a child process that is to find the devices that this one found.

    Not "gpu", though devices say that it is their platform: as a variable it stands for CUDA, ROCm and others, and JAX
    refuses to start where one of them is missing. Without a setting JAX takes the accelerator that there is.
    """
    return platform if platform == "cpu" else str(jax.config.values.get("jax_platforms") or "")


class ProgramStore:
    """A folder of serialised programs. Loading one takes a seventh of the time of lowering it and reading JAX's cache.

    A name is a digest of all that a program depends on: its shapes, this code and that of its classes' methods, JAX's
    version and settings, the kind of device, and the devices' numbers: XLA loads a program only on the devices that it
    was compiled for. A damaged file is compiled again.
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
            _cpu(device.platform),
            *(f"{name}={os.environ.get(name, '')}" for name in COMPILER_VARIABLES),
            json.dumps(compiler_settings(), default=str),
        ]

    def family_name(self, family: Family) -> str:
        """A file name that changes with everything that figures or programs of ``family`` depend on."""
        methods = {key.method: foreign_modules(type(class_method(key.method))) for key, _ in family.slots}
        code = [digest_of_code(*modules) for _, modules in sorted(methods.items()) if modules]
        code.append(digest_of_code(PROGRAM, *modules_of(type(family.network))))
        return hashlib.sha256("\0".join([*self._base, *code, family.to_json()]).encode()).hexdigest()[:40]

    def shape_name(self, family: Family) -> str:
        """``family_name`` without the classes: for figures that are kept by class."""
        return self.family_name(dataclasses.replace(family, slots=()))

    def _path(self, family: Family, key: ProgramKey) -> pathlib.Path:
        devices = [device.id for device in self._mesh.devices]
        name = hashlib.sha256(f"{devices} {key_to_json(key)}".encode()).hexdigest()[:24]
        classes = key.variant.classes()  # other classes may come and go
        slots, operators = family.slots, family.operators
        own = dataclasses.replace(
            family,
            slots=tuple((of, count) for of, count in slots if of in classes),
            operators=operators.within([str(of) for of in classes]),
        )
        return self._folder / f"{self.family_name(own)}-{name}.program"

    def save(self, family: Family, program: Program) -> None:
        """Stores a program. A full or read-only disk only makes the next start slower."""
        payload = dumped(program.compiled)
        program.stored_bytes = len(payload)
        try:
            write_atomic(self._path(family, program.key), payload)
        except (OSError, OutOfSpace) as error:
            log.warning("a program could not be kept: %s", error)

    def forget(self, family: Family, key: ProgramKey) -> None:
        with contextlib.suppress(OSError):
            self._path(family, key).unlink()

    def forget_best(self, family: Family, key: ProgramKey) -> None:
        """All that ``load_best`` may load."""
        self.forget(family, key)
        self.forget(whole_family(family), key)

    def sweep_of(self, process: int) -> None:
        """Removes the unfinished files of a process that has ended."""
        sweep(self._folder, written_by(process), 0.0)

    def _sweep(self) -> None:
        """Removes programs that were not loaded for a long time, such as those of older versions, and unfinished
        files."""
        sweep(self._folder, TEMPORARY, STALE_WRITE_SECONDS)
        for path in self._folder.glob("*.program"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > UNUSED_SECONDS:
                    path.unlink()

    def load_best(self, family: Family, key: ProgramKey) -> Program | None:
        """``load`` of the program as one function, if that is stored, else as ``family`` has it."""
        whole = self.load(whole_family(family), key) if family.chained else None
        return whole or self.load(family, key)

    def load(self, family: Family, key: ProgramKey) -> Program | None:
        """The stored program; None if there is none. Raises ``OutOfSpace`` as ``compile_program`` does."""
        path = self._path(family, key)
        try:
            payload = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a read-only folder
            os.utime(path)
        left = spare_mappings()
        try:
            compiled = load_program(family, key, payload, self._mesh)
        except Exception:  # a damaged file may raise any error of the unpickler or XLA
            log.exception("a stored program could not be loaded and is compiled again")
            self.forget(family, key)
            return None
        return Program(key, compiled, stored_bytes=len(payload), mappings=left - mappings_left())


def _cpu(platform_of_device: str) -> str:
    """The features of the host's processor, and for a CPU as the device how many of its cores this process may use: a
    program runs only on a CPU with the same features, is made for so many cores, and takes another time on more."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "") or platform.processor()
    return f"{found} {len(cores)}" if platform_of_device == "cpu" else found
