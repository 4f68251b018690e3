"""The benchmarks' JSON files, and the commands that made them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import typer

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
BenchCommand = typer.core.TyperCommand


@dataclasses.dataclass(frozen=True)
class Document:
    """One file: the bench, its settings, the machine, and the figures of every system. Files of before they kept their
    ``command`` have None."""

    path: pathlib.Path
    command: str | None
    name: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    systems: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The file's place in ``docs/results``, without its ending."""
        return self.path.relative_to(RESULTS).with_suffix("").as_posix()

    @property
    def gpu(self) -> str | None:
        """The kind of the machine's GPU; None where a CPU was measured."""
        kind = str(self.machine.get("device", "cpu"))
        return None if kind == "cpu" else kind

    @property
    def cpu(self) -> str:
        """The machine as tables name it."""
        return "Xeon" if "Xeon" in self.machine["cpu"] else "EPYC" if "EPYC" in self.machine["cpu"] else "?"


def read_documents(folder: pathlib.Path) -> list[Document]:
    """All reports of ``bench.py`` below a folder, by path. Other JSON files (profiles, the soak's) are left out."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        raw = json.loads(path.read_text())
        if "systems" in raw:
            keys = ("name", "machine", "versions", "settings", "systems")
            found.append(Document(path, raw.get("command"), *(raw[key] for key in keys)))
    return found


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def named(documents: Sequence[Document], name: str) -> list[Document]:
    return [document for document in documents if document.name == name]


def bench_commands() -> Mapping[str, BenchCommand]:
    """The commands of ``bench.py``, by name."""
    import bench  # it imports JAX: only for the page

    group = typer.main.get_command(bench.app)
    assert isinstance(group, typer.core.TyperGroup)
    return {name: own for name, own in group.commands.items() if isinstance(own, BenchCommand)}


MODULES: Mapping[str, tuple[str, Sequence[str]]] = {
    "infinity": ("benches.service.infinity --infinity COMMAND", ("seconds", "rounds")),
    "references": ("benches.service.references", ("texts", "threads")),
}
"""Reports of modules of their own: how each is called, and which settings are its options."""


def command(document: Document, commands: Mapping[str, BenchCommand]) -> str:
    """How the file was made; where it does not say so, how to make it again as ``FILE``, with the options that differ
    from ``bench.py``'s defaults."""
    if document.command is not None:
        return document.command
    if document.name == "debian-tasks":
        return "PYTHONPATH=scripts python -m experiments.debian_tasks report LINES --json FILE"
    if document.name in MODULES:
        module, taken = MODULES[document.name]
        own = {key: document.settings[key] for key in taken} | {"json": "FILE"}
        return f"PYTHONPATH=scripts python -m {module} {_given(own)}"
    given = {key: value for key, value in document.settings.items() if value is not None}
    given |= {option: ",".join(values) for option, values in _of_systems(document).items()}
    if "profile" in given:
        given["profile"] = f"docs/results/cpu-2core/{given['profile']}"
    params = commands[document.name].params
    options = {option.name: option.default for option in params}
    chosen = {key: value for key, value in given.items() if key in options and value != options[key]}
    arguments = [str(param.name).upper() for param in params if param.param_type_name == "argument"]
    return " ".join(["python scripts/bench.py", document.name, *arguments, _given(chosen | {"json": "FILE"})])


SERVED = "served "
"""Begins the names of systems of ``bench.py batching`` that are engines."""


def _of_systems(document: Document) -> dict[str, Sequence[str]]:
    """Options that select systems and cases, derived from the figures."""
    names = list(document.systems)
    series = [own["points"] for own in document.systems.values() if "points" in own]
    match document.name:
        case "throughput" | "serving":
            found: dict[str, Sequence[str]] = {"systems": names}
            if "reference" in document.settings:
                longest = max((own["curve"] for own in document.systems.values()), key=len)
                found["loads"] = [f"{point['load']:g}" for point in longest]
            return found
        case "batching":
            exact = [name for name in names if not name.startswith(SERVED)]
            policies = list(dict.fromkeys("fixed" if name.startswith("fixed") else name for name in exact))
            served = [name.removeprefix(SERVED) for name in names if name.startswith(SERVED)]
            return {"policies": policies, "served": served} if served else {"policies": policies}
        case "curve":
            sides = dict.fromkeys(name.partition("/")[2] for name in names)
            return {"systems": [side for side in sides if side != "single"]}
        case "interval":
            return {"systems": names, "redraws": [f"{point['redraw']:g}" for point in series[0]]}
        case "fanout":
            systems = list(dict.fromkeys(name.split()[0] for name in names))
            return {"systems": systems} if "transformers" in systems else {}
        case "migration":
            return {"systems": names}
        case "tenants":
            return {"loads": list(dict.fromkeys(name.rpartition(" ")[2] for name in names))}
        case "jobs":
            return {"rates": [name.removesuffix("/s") for name in names]}
        case "arrivals":
            cases = list(dict.fromkeys(name.split("/")[0] for name in names))
            return {
                "rates": [case.split()[1] for case in cases if case.startswith("rate")],
                "bursts": [case.split()[1] for case in cases if case.startswith("burst")],
                "systems": list(dict.fromkeys(name.split("/")[1] for name in names)),
            }
        case _:
            return {}


def _given(options: Mapping[str, Any]) -> str:
    flags = {name: f"--{name.replace('_', '-')}" for name in options}
    return " ".join(
        flags[name] if value is True else f"{flags[name]} {_value(value)}" for name, value in options.items()
    )


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shlex.quote(str(value))
