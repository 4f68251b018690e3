"""Which room may import which. An arrow that is not in ``ALLOWED`` is a decision: put it there, and say why."""

from __future__ import annotations

import ast
import functools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import pytest

ROOT = pathlib.Path(__file__).parents[1]
OURS = ("pallas_kernels", "jpets", "checkpoints", "serving")
ENTRY = ("jpets", "jpets.__main__", "jpets.cli", "jpets.serve")
"""Entry points. They are no part of the room ``jpets``, which all others may import."""

KERNELS = {f"pallas_kernels.{part}" for part in ("low_rank", "masked_matmul", "packed_attention", "sparse_matmul")}
PLAIN = {"jpets"}
"""Settings, types, errors, files, texts."""
ARRAYS = PLAIN | {"jpets.deltas", "jpets.model"}

ALLOWED: Mapping[str, set[str]] = {
    # Functions of arrays and numbers.
    "pallas_kernels": set(),
    **{kernel: {"pallas_kernels"} for kernel in KERNELS},
    "jpets": set(),
    "jpets.deltas": PLAIN | KERNELS | {"pallas_kernels"},
    "jpets.model": PLAIN | {"jpets.deltas", "pallas_kernels", "pallas_kernels.packed_attention"},
    "jpets.scheduling": set(),
    "jpets.scheduling.costs": {"jpets.scheduling"},
    "jpets.scheduling.order": {"jpets.scheduling.costs"},
    "jpets.scheduling.policies": {"jpets.scheduling", "jpets.scheduling.costs", "jpets.scheduling.order"},
    "jpets.scheduling.balancing": {"jpets.scheduling"},
    "jpets.scheduling.simulate": {
        "jpets.scheduling",
        *(f"jpets.scheduling.{part}" for part in ("balancing", "costs", "policies")),
    },
    # An engine, from what it is made of to what it does.
    "jpets.engine.results": PLAIN,
    "jpets.engine.tasks": PLAIN | {"jpets.deltas"},
    "jpets.engine.batch": ARRAYS | {"pallas_kernels", "pallas_kernels.packed_attention"},
    "jpets.engine.programs": ARRAYS | {"jpets.scheduling.costs", "jpets.engine.batch"},
    "jpets.engine.workloads": ARRAYS
    | {"jpets.scheduling.costs"}
    | {f"jpets.engine.{part}" for part in ("batch", "programs", "results", "tasks")},
    "jpets.engine.device": ARRAYS | {"jpets.scheduling.costs", "jpets.engine.batch", "jpets.engine.programs"},
    "jpets.engine.costs": ARRAYS
    | {"jpets.scheduling", "jpets.scheduling.costs"}
    | {"jpets.engine.batch", "jpets.engine.device", "jpets.engine.programs"},
    "jpets.engine.kernels": ARRAYS
    | KERNELS
    | {"pallas_kernels"}
    | {f"jpets.engine.{part}" for part in ("batch", "programs", "workloads")},
    "jpets.engine.compilation": ARRAYS
    | {f"jpets.engine.{part}" for part in ("batch", "costs", "device", "programs", "tasks", "workloads")},
    "jpets.engine.queue": ARRAYS
    | {"jpets.scheduling.order"}
    | {f"jpets.engine.{part}" for part in ("batch", "results", "tasks", "workloads")},
    "jpets.engine.residency": ARRAYS
    | {f"jpets.engine.{part}" for part in ("batch", "device", "programs", "queue", "results", "tasks")},
    "jpets.engine.planning": ARRAYS
    | {"jpets.scheduling"}
    | {f"jpets.scheduling.{part}" for part in ("costs", "order", "policies")}
    | {f"jpets.engine.{part}" for part in ("batch", "costs", "device", "programs", "queue", "tasks")},
    "jpets.engine.loop": ARRAYS
    | {"jpets.scheduling.order"}
    | {f"jpets.engine.{part}" for part in ("batch", "device", "planning", "programs", "queue", "results", "workloads")},
    "jpets.engine": PLAIN
    | {"jpets.deltas"}
    | {f"jpets.engine.{part}" for part in ("batch", "compilation", "costs", "device", "kernels", "loop")}
    | {
        f"jpets.engine.{part}"
        for part in ("planning", "programs", "queue", "residency", "results", "tasks", "workloads")
    },
    "jpets.engine.group": PLAIN
    | {"jpets.deltas", "jpets.scheduling", "jpets.scheduling.balancing"}
    | {"jpets.engine", "jpets.engine.batch", "jpets.engine.results", "jpets.engine.tasks"},
    "jpets.engine.students": PLAIN
    | {"jpets.deltas", "jpets.engine"}
    | {f"jpets.engine.{part}" for part in ("batch", "results", "tasks", "workloads")},
    # Beside an engine.
    "jpets.plot": PLAIN | {"jpets.model", "pallas_kernels.packed_attention"},
    "jpets.training": ARRAYS
    | {"jpets.plot", "pallas_kernels", "pallas_kernels.masked_matmul", "pallas_kernels.packed_attention"},
    "jpets.students": ARRAYS | {"jpets.training"},
    "checkpoints": PLAIN | {"jpets.deltas", "jpets.plot"},
    "checkpoints.demo": set(),
    "checkpoints.imports": PLAIN | {"jpets.deltas", "checkpoints", "pallas_kernels"},
    # A server, from a connection to its routes.
    "serving.http": PLAIN,
    "serving.options": PLAIN | {"jpets.engine.batch", "jpets.scheduling.balancing", "serving.http"},
    "serving.hosted": PLAIN
    | {"jpets.deltas", "jpets.engine", "serving.http"}
    | {f"jpets.engine.{part}" for part in ("device", "group", "results", "tasks", "workloads")},
    "serving.jobs": PLAIN | {"jpets.deltas", "serving.hosted", "serving.http"},
    "serving.tenants": PLAIN | {"serving.http"},
    "serving.requests": PLAIN
    | {"jpets.engine.results", "serving.hosted", "serving.http", "serving.jobs", "serving.tenants"},
    "serving.protocols.oip": PLAIN
    | {"jpets.engine.results"}
    | {"serving.http", "serving.protocols", "serving.requests"},
    "serving.protocols": PLAIN
    | {"jpets.engine.results"}
    | {f"serving.{part}" for part in ("hosted", "http", "jobs", "requests")},
    "serving.grpc": PLAIN | {"serving.http", "serving.protocols.oip", "serving.requests", "serving.tenants"},
    "serving": {
        f"serving.{part}" for part in ("hosted", "http", "jobs", "protocols", "protocols.oip", "requests", "tenants")
    },
}
"""Rooms, and which others each may import: also inside functions, and for types. ``jpets.app`` may import all."""


def module_of(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for part in OURS for path in sorted((ROOT / part).rglob("*.py"))}


def room_of(module: str) -> str:
    """The folder of a module; entry points are rooms of their own."""
    if module in ENTRY or MODULES[module].name == "__init__.py":
        return module
    return module.rpartition(".")[0]


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Modules that one imports, anywhere in it; ``from a import b`` counts as ``a.b`` where that is a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in names}
    return frozenset(found)


def wired(module: str) -> bool:
    return module in ENTRY or module.startswith("jpets.app.") or module == "jpets.app"


def arrows() -> Iterator[tuple[str, str]]:
    """(module, imported module of another room), entry points and ``jpets.app`` apart."""
    for module in MODULES:
        if not wired(module):
            yield from (
                (module, other) for other in imports(module) if other in MODULES and room_of(other) != room_of(module)
            )


def test_rooms_import_only_what_they_may() -> None:
    wrong = [
        f"{module} imports {other}" for module, other in arrows() if room_of(other) not in ALLOWED[room_of(module)]
    ]
    assert not wrong


def test_the_table_names_every_room_and_no_arrow_too_many() -> None:
    assert set(ALLOWED) == {room_of(module) for module in MODULES if not wired(module)} | {"jpets"}
    drawn = {(room_of(module), room_of(other)) for module, other in arrows()}
    usual = ARRAYS | KERNELS
    assert not [(room, to) for room, all in ALLOWED.items() for to in all - usual if (room, to) not in drawn]


def test_rooms_have_no_cycle() -> None:
    left = {room: set(all) for room, all in ALLOWED.items()}
    while free := {room for room, all in left.items() if not all & left.keys()}:
        left = {room: all for room, all in left.items() if room not in free}
    assert not left


def test_wiring_has_no_cycle() -> None:
    """Between the rooms of ``jpets.app``; entry points are imported by none of them."""
    left: dict[str, set[str]] = {}
    for module in MODULES:
        if wired(module) and module not in ENTRY:
            assert not imports(module) & set(ENTRY[1:]), module
            rooms = {room_of(other) for other in imports(module) if other in MODULES and wired(other)}
            left.setdefault(room_of(module), set()).update(rooms - {room_of(module), *ENTRY})
    while free := {room for room, all in left.items() if not all & left.keys()}:
        left = {room: all for room, all in left.items() if room not in free}
    assert not left


FORBIDDEN = {
    "pallas_kernels": ("flax", "transformers"),
    "jpets.scheduling": ("jax", "flax"),
    "jpets.engine": ("flax", "transformers"),
    "jpets.deltas": ("flax",),
    "jpets.training": ("flax",),
    "checkpoints": ("flax",),
    "serving": ("flax", "jax"),
}


@pytest.mark.parametrize("part", [*FORBIDDEN, "jpets"])
def test_parts_do_without_libraries(part: str) -> None:
    """Only the model imports Flax, scheduling is plain Python, and nothing imports PyTorch."""
    for module in MODULES:
        if module == part or module.startswith(f"{part}."):
            tops = {name.partition(".")[0] for name in imports(module)}
            assert not tops & {"torch", *FORBIDDEN.get(part, ())}, module


SERVERS = ("fastapi", "starlette", "uvicorn", "sqlalchemy", "cachetools")


@pytest.mark.parametrize(
    ("absent", "wanted"),
    [
        (SERVERS, "bench, benches.device.everything"),
        ((*SERVERS, "pydantic", "beartype"), "conftest, groups, support"),
    ],
)
def test_a_bare_checkout_needs_no_package_of_a_server(absent: Sequence[str], wanted: str) -> None:
    """Benchmarks of the engine, and the tests of kernels, run so on machines with a GPU."""
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {wanted}"
    folders = os.pathsep.join(str(ROOT / name) for name in (".", "scripts", "tests"))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": folders}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_processes_that_are_started_import_nothing_of_the_working_folder() -> None:
    for module, path in MODULES.items():
        text = path.read_text()
        assert len(re.findall(r'sys\.executable,\s+"-P",\s+"-m"', text)) == text.count("sys.executable"), module
