"""The kinds of model, by the name that a backbone gives for its kind."""

from __future__ import annotations

import json
from typing import Any

from jpets.config import BackboneConfig
from jpets.deltas.operators import Operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.programs.delta_order import Streams
from jpets.engine.programs.network import Network
from jpets.engine.programs.program import Family
from jpets.engine.workloads.encoder import EncoderWorkload
from jpets.engine.workloads.workload import Workload
from jpets.errors import InvalidInput
from jpets.types import LoadedBackbone

WORKLOADS: dict[str, type[Workload]] = {"encoder": EncoderWorkload}


def workload_named(kind: str) -> type[Workload]:
    """Raises ``InvalidInput`` for an unknown kind."""
    if kind not in WORKLOADS:
        raise InvalidInput(f"unknown kind of model {kind!r}; there are {sorted(WORKLOADS)}")
    return WORKLOADS[kind]


def network_of(backbone: LoadedBackbone) -> Network:
    return workload_named(backbone.kind).make_network(backbone.config)


def family_from_json(text: str) -> Family:
    """The inverse of ``Family.to_json``."""
    data: dict[str, Any] = json.loads(text)
    slots = tuple((ClassKey.from_dict(key), count) for key, count in data["slots"])
    network = workload_named(data["kind"]).make_network(BackboneConfig.from_dict(data["network"]["config"]))
    operators = Operators(**{name: tuple(map(tuple, entries)) for name, entries in data["operators"].items()})
    return Family(network, data["dtype"], slots, Streams(**data["streams"]), operators, data["chained"])
