"""``bench.py migration`` and ``bench.py interval``: a simulation of devices that move tasks between them.

Multi-GPU PetS figures 13 and 14 (by devices and tasks), and 15 (by how often calls are distributed anew).

Batches are planned, and their seconds predicted, from a cost profile that was measured on one device; tasks are moved
by the real balancing code. Time alone is simulated, so no device is needed, and equal seeds give equal figures.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer

from benches.engine.capacity import DTYPE, classes_by_method
from benches.scheduling.profiles import digest_of_file, load_profile
from benches.shared import console, random_backbone, report
from jpets.deltas.protocol import ClassKey
from jpets.engine.device.memory import slot_bytes
from jpets.scheduling.balancing.rebalance import BACKLOG, NOISE
from jpets.scheduling.costs.measured_profile import CostProfile
from jpets.scheduling.costs.policy_lookup import Costs, Limits
from jpets.scheduling.simulate.cluster import Cluster, Link
from jpets.scheduling.simulate.run import Outcome, simulate
from jpets.scheduling.simulate.systems import SYSTEMS, System
from jpets.scheduling.simulate.traffic import draw_traffic

LONGEST = 128
"""Tokens; lengths are normal (32, 8)."""


@dataclasses.dataclass(frozen=True)
class Fleet:
    """What clusters of all sizes share: costs, and kind and bytes of the tasks' deltas, by method."""

    profile: pathlib.Path
    backbone: str
    costs: Costs
    sizes: Mapping[str, int]
    spare: float

    def cluster(self, devices: int, tasks: int) -> Cluster:
        """Tasks that take the methods in turn, on devices with ``spare`` times the room that their share needs."""
        kinds = np.arange(tasks) % len(self.sizes)
        sizes = np.array(list(self.sizes.values()), float)[kinds]
        return Cluster(devices, kinds, sizes, self.costs, memory=(1 + self.spare) * float(sizes.sum()) / devices)


def read_costs(profile: CostProfile, limits: Limits, classes: Mapping[str, Sequence[ClassKey]]) -> Costs:
    """Costs of queries whose tasks have one kind for each method, by the classes of its deltas."""
    return Costs(
        profile, limits, [tuple(str(key) for key in keys if key.method != "head") for keys in classes.values()]
    )


def read_fleet(profile: pathlib.Path, backbone: str, methods: Sequence[str], spare: float) -> Fleet:
    loaded = random_backbone(backbone)
    classes = classes_by_method(loaded, methods)
    limits = Limits(rows=128, tokens=2048, longest=LONGEST)
    costs = read_costs(load_profile(profile), limits, classes)
    sizes = {method: sum(slot_bytes(key, loaded.config, DTYPE) for key in keys) for method, keys in classes.items()}
    return Fleet(profile, backbone, costs, sizes, spare)


def rules(systems: Mapping[str, System]) -> dict[str, dict[str, Any]]:
    """How each balances: its function by name, and its numbers."""
    return {
        name: {
            "balancer": None if own.balancer is None else own.balancer.__name__,
            "interval": dataclasses.asdict(own.interval),
            "half_life": own.half_life,
            "rate": own.rate if math.isfinite(own.rate) else None,
        }
        for name, own in systems.items()
    }


def settings(fleet: Fleet, systems: Sequence[str], queries: int, load: float, seeds: int) -> dict[str, Any]:
    return {
        "rules": rules({name: SYSTEMS[name] for name in systems}),
        "profile": fleet.profile.name,
        "profile_digest": digest_of_file(fleet.profile),
        "backbone": fleet.backbone,
        "bytes": dict(fleet.sizes),
        "spare": fleet.spare,
        "queries": queries,
        "load": load,
        "seeds": seeds,
        "link": dataclasses.asdict(Link()),
        "noise": NOISE,
        "backlog": BACKLOG,
    }


def compare(
    cluster: Cluster, systems: Sequence[str], queries: int, load: float, redraw: float, seeds: int
) -> dict[str, dict[str, Any]]:
    """Every system over the same traffic, once for each seed."""
    rate = load * cluster.rate(seed=0)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for seed in range(seeds):
        traffic = draw_traffic(len(cluster.kinds), queries, rate, seed=seed, redraw=redraw)
        placement = cluster.deal(seed)
        base = 0.0
        for name in systems:
            outcome = simulate(cluster, traffic, placement, SYSTEMS[name])
            base = outcome.throughput if name == "none" else base
            found[name].append({"gain": outcome.throughput / base - 1, **_figures(outcome)})
    return {
        name: {key: statistics.mean(each[key] for each in rounds) for key in rounds[0]}
        | {"gains": [each["gain"] for each in rounds]}
        for name, rounds in found.items()
    }


def sweep(
    cases: Iterable[tuple[Mapping[str, float], Cluster, float]],
    systems: Sequence[str],
    queries: int,
    load: float,
    seeds: int,
) -> dict[str, dict[str, Any]]:
    """The points of every system: for each case the fields that name it, its cluster, and seconds between redraws."""
    points: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for case, cluster, redraw in cases:
        console.log(case)
        for name, figures in compare(cluster, systems, queries, load, redraw, seeds).items():
            points[name].append({**case, **figures})
    return {name: {"points": own} for name, own in points.items()}


def _figures(outcome: Outcome) -> dict[str, float]:
    rounds = outcome.rounds
    first, later = rounds[:1], rounds[1:]
    return {
        "qps": outcome.throughput,
        "p99": float(np.percentile(outcome.latencies, 99)),
        "least_utilisation": float(outcome.utilisation.min()),
        "rounds": float(len(rounds)),
        "moves": float(sum(each.moves for each in rounds)),
        "copies": float(sum(each.copies for each in rounds)),
        "phi": statistics.median(each.phi for each in rounds) if rounds else 0.0,
        "first_seconds": sum(each.seconds for each in first),
        "first_bytes": sum(each.bytes for each in first),
        "later_seconds": statistics.mean(each.seconds for each in later) if later else 0.0,
        "later_bytes": statistics.mean(each.bytes for each in later) if later else 0.0,
    }


ProfileOption = Annotated[pathlib.Path, typer.Option(exists=True, dir_okay=False, help="measured cost profile")]
BackboneOption = Annotated[str, typer.Option(help="what the profile was measured of")]
LoadOption = Annotated[float, typer.Option(help="queries that arrive, as a share of what balanced devices serve")]
SpareOption = Annotated[float, typer.Option(help="free memory of a device, as a share of what its tasks take")]
METHODS = "adapter,mask,diff,bitfit"


def migration(
    profile: ProfileOption,
    backbone: BackboneOption = "minilm-l6",
    methods: str = METHODS,
    devices: str = "4,8",
    tasks: str = "128,256,512,1024,2048,4096",
    systems: str = "none,fixed,adaptive,ours,anywhere",
    queries: int = 130_000,
    load: LoadOption = 1.0,
    spare: SpareOption = 0.25,
    seeds: int = 3,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Throughput relative to that without migration, by devices and tasks (multi-GPU PetS figures 13 and 14)."""
    fleet, names = read_fleet(profile, backbone, methods.split(","), spare), _systems(systems)
    cases = (
        ({"devices": size, "tasks": count}, fleet.cluster(size, count), math.inf)
        for size in map(int, devices.split(","))
        for count in map(int, tasks.split(","))
    )
    found = sweep(cases, names, queries, load, seeds)
    report("migration", settings(fleet, names, queries, load, seeds), found, json_out)


def interval(
    profile: ProfileOption,
    backbone: BackboneOption = "minilm-l6",
    methods: str = METHODS,
    devices: int = 8,
    tasks: int = 128,
    redraws: Annotated[str, typer.Option(help="seconds after which calls are distributed anew")] = "4,8,16,32,64,128",
    systems: str = "none,fixed,adaptive,ours",
    queries: int = 300_000,
    load: LoadOption = 1.0,
    spare: SpareOption = 0.25,
    seeds: int = 3,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Throughput relative to that without migration, by how often calls are distributed anew (multi-GPU PetS figure
    15)."""
    fleet, names = read_fleet(profile, backbone, methods.split(","), spare), _systems(systems)
    cases = (({"redraw": redraw}, fleet.cluster(devices, tasks), redraw) for redraw in map(float, redraws.split(",")))
    found = sweep(cases, names, queries, load, seeds)
    own = settings(fleet, names, queries, load, seeds)
    report("interval", {"devices": devices, "tasks": tasks, **own}, found, json_out)


def _systems(given: str) -> list[str]:
    names = given.split(",")
    if names[0] != "none" or not set(names) <= set(SYSTEMS):
        raise typer.BadParameter(f"--systems takes none first, then any of {', '.join(SYSTEMS)}; got {given!r}")
    return names
