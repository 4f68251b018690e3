"""Chooses the candidates of a family's operators: by measurement on its device, or as a setting says."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import pathlib
import re
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jaxlib.version

from jpets.deltas.operators import Operators
from jpets.engine.kernels.calls import Call, Table
from jpets.engine.kernels.choice import SUFFIX, Choice, read_choice
from jpets.engine.kernels.class_calls import MODEL, ClassCalls, class_calls, every_call
from jpets.engine.kernels.description import describe
from jpets.engine.kernels.operators import OPERATORS
from jpets.engine.kernels.trials import Name, Start, run_trials
from jpets.engine.programs.child import start_child
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family, ProgramKey, key_to_json
from jpets.engine.programs.sources import digest_of_code
from jpets.engine.programs.store import COMPILER_VARIABLES, compiler_settings, settings_as_variables
from jpets.errors import InvalidInput
from pallas_kernels.gates import Device

log = logging.getLogger(__name__)

AUTO = "auto"
CODE = "jpets.engine.kernels.operators"
"""The module that names all candidates: what it imports decides what they compute, and how fast."""
MOSAIC = "pallas_kernels.hopper"
"""The module that imports Mosaic, for the kernels of one generation of GPUs."""
_tried: set[pathlib.Path] = set()
"""Files of choices for which this process had its trials: several engines of a process share the time for them."""


class Chosen(NamedTuple):
    """The candidates of a family, and what is known of all; ``choice`` is None where there was nothing to choose."""

    operators: Operators
    choice: Choice | None = None


def choose(
    family: Family,
    program: ProgramKey,
    mesh: MeshSlice,
    kernels: str,
    folder: pathlib.Path,
    *,
    table: Table = OPERATORS,
    device: Device | None = None,
    start: Start | None = None,
) -> Chosen:
    """The operators of ``family``, whose own are the usual ones: measured at the shapes of ``program`` for "auto".

    ``folder`` is that of costs. Raises ``InvalidInput`` if ``kernels`` is no candidate, or none for the device.
    """
    device = device or describe(mesh.devices[0])
    if kernels != AUTO:
        return Chosen(forced(family.operators, kernels, table, device, len(mesh.devices)))
    if device.platform == "cpu" or len(mesh.devices) > 1:  # nothing to choose; kernels are not divided among devices
        return Chosen(family.operators)
    classes = class_calls(family, program)
    path = folder / file_name(family, device, mesh.devices[0])
    choice = read_choice(path) or Choice(_about(family, device))
    _measure(choice, path, every_call(classes), table, device, start or _Processes(family, program, mesh))
    return Chosen(_operators(family.operators, choice, classes, table, device), choice)


def known_operators(
    family: Family, program: ProgramKey, mesh: MeshSlice, choice: Choice | None, device: Device | None = None
) -> Operators:
    """The operators of ``family`` in the bucket of ``program`` by what is known, for classes that came since the trials
    too. Of shapes that were never tried they have the usual ones until the next start."""
    if choice is None:
        return family.operators
    device = device or describe(mesh.devices[0])
    return _operators(family.operators, choice, class_calls(family, program), OPERATORS, device)


def before_trials(usual: Operators, kernels: str, mesh: MeshSlice) -> Operators:
    """What is known of the operators without any trial: the usual ones for "auto", else those that are forced. Raises
    ``InvalidInput`` as ``choose`` does."""
    if kernels == AUTO:
        return usual
    return forced(usual, kernels, OPERATORS, describe(mesh.devices[0]), len(mesh.devices))


def _measure(
    choice: Choice,
    path: pathlib.Path,
    calls: dict[tuple[str, str], Call],
    table: Table,
    device: Device,
    start: Start,
) -> None:
    """Adds what can be found of the missing candidates in the time that a start has for it."""
    known = str(choice.found)
    missing = choice.missing(calls.values(), table, device)
    wanted = [(*call.name, candidate) for call, candidates in missing for candidate in candidates]
    if wanted and path not in _tried:
        _tried.add(path)
        log.info("trying %d candidates of kernels on %s, which is done once", len(wanted), device)
        for (operator, shape, candidate), outcome in run_trials(wanted, start).items():
            choice.found[operator, shape][candidate] = outcome
        left = sum(len(candidates) for _, candidates in choice.missing(calls.values(), table, device))
        if left:
            log.warning("%d candidates of kernels were not tried in time; the next start goes on with them", left)
    if str(choice.found) != known:
        choice.save(path)


def _operators(
    usual: Operators, choice: Choice, classes: Sequence[ClassCalls], table: Table, device: Device
) -> Operators:
    """The usual ones, where a class's calls are faster with another one that one."""
    own = []
    for each in classes:
        candidate = choice.best(each.calls, table, device)
        if candidate == usual[each.operator]:
            continue
        if each.owner == MODEL:
            usual = usual.replaced(**{each.operator: candidate})
        else:
            own.append((each.owner, each.operator, candidate))
    return Operators(usual.chosen, tuple(sorted(own)))


def forced(usual: Operators, name: str, table: Table, device: Device, together: int) -> Operators:
    """``usual`` with the candidate of this name wherever an operator has it."""
    have = {operator: own.candidates[name] for operator, own in table.items() if name in own.candidates}
    if not have:
        known = sorted({candidate for own in table.values() for candidate in own.candidates})
        raise InvalidInput(f"--kernels: no operator has a candidate {name[:64]!r}; give one of {[AUTO, *known]}")
    reasons = {candidate.gate.refuses(device) for candidate in have.values()}
    if together > 1 and not any(candidate.gate.divisible for candidate in have.values()):
        reasons = {f"it cannot be divided among {together} devices that compute each batch together"}
    if "" not in reasons:
        raise InvalidInput(f"--kernels: {name} cannot run here: it {'; it '.join(sorted(reasons))}")
    fitting = [operator for operator, candidate in have.items() if not candidate.gate.refuses(device)]
    if any(have[operator].gate.capability for operator in fitting):
        importlib.import_module(MOSAIC)  # names a library that a stored program needs when it is loaded
    return usual.replaced(**dict.fromkeys(fitting, name))


def file_name(family: Family, device: Device, own: jax.Device) -> str:
    """Of the file that keeps a choice: a readable part, and a digest of all that figures depend on. Backbones of
    other depths share it, as calls are those of a layer."""
    config = {name: value for name, value in family.config.to_dict().items() if name not in ("layers", "vocab_size")}
    parts = [
        json.dumps([family.network.kind, config]),
        family.dtype,
        str(device),
        own.client.platform_version,
        jax.__version__,
        jaxlib.version.__version__,
        *(f"{name}={os.environ.get(name, '')}" for name in COMPILER_VARIABLES),
        json.dumps(compiler_settings(), default=str),
        digest_of_code(CODE),
    ]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    readable = re.sub(r"[^a-z0-9]+", "-", device.kind.lower()).strip("-")[:40]
    return f"{readable}-{digest}{SUFFIX}"


def _about(family: Family, device: Device) -> dict[str, str]:
    config = family.config
    shape = f"{config.family}, {config.layers} layers of {config.hidden_size}"
    return {"device": str(device), "backbone": shape, "dtype": family.dtype, "jax": jax.__version__}


class _Processes:
    """Starts processes that try candidates."""

    def __init__(self, family: Family, program: ProgramKey, mesh: MeshSlice) -> None:
        self._work = {"family": family.to_json(), "program": key_to_json(program)}
        self._device = mesh.devices[0]

    def __call__(self, wanted: Sequence[Name]) -> subprocess.Popen[str]:
        process = start_child("jpets.engine.kernels.process", [], [self._device], settings_as_variables())
        assert process.stdin is not None
        process.stdin.write(json.dumps({**self._work, "wanted": wanted}) + "\n")
        process.stdin.flush()
        return process
