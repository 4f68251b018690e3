"""Tables of the server's options and metrics, and of jpets' errors, from the code."""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, cast, get_args, get_origin

from pydantic.fields import FieldInfo
from results.markdown import markdown_table

from jpets import errors
from serving.options.options import Options
from serving.options.sources import PREFIX, option_of

NODE = re.compile(r"(?:\|   |    )*(?:\|-- |`-- )(\w+)(?: \((\w+)\))?(?: +(\d{3}))?(?:  (.*))?$")
"""A line of the tree in ``jpets.errors``: name, Python's base class, status, meaning."""


def options() -> str:
    rows = [
        [f"`{option_of(name)}`", f"`{PREFIX}{name.upper()}`", _default(field), _about(field)]
        for name, field in Options.model_fields.items()
    ]
    return markdown_table(["option", "variable", "default", "what it says"], rows, left=4)


def _default(field: FieldInfo) -> str:
    match field.default:
        case None | []:
            return ""
        case {}:
            return ", ".join(f"{name}={value}" for name, value in field.default.items())
        case bool() as given:
            return "yes" if given else "no"
        case float() as given:
            return f"{given:g}"
        case given:
            return str(given)


def _about(field: FieldInfo) -> str:
    kind = field.annotation
    if isinstance(kind, types.UnionType):  # a union with None
        kind = get_args(kind)[0]
    choices = f": {', '.join(f'`{each}`' for each in get_args(kind))}" if get_origin(kind) is Literal else ""
    return f"{field.description}{choices}"


def metrics() -> str:
    rows = [
        [f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), text]
        for name, kind, labels, text in sorted(_families())
    ]
    return markdown_table(["metric", "type", "labels", "what it says"], rows, left=4)


def _families() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """(name as it is scraped, type, labels, text) of all metrics of a server over two devices."""
    from serving.requests.metrics import Metrics

    engines, jobs = [_engine()], types.SimpleNamespace(counts=dict)
    service = types.SimpleNamespace(
        live=True,
        first=types.SimpleNamespace(ready=True),
        unreadable=0,
        seen_age=0.0,
        backbones=types.SimpleNamespace(counted=lambda: (engines, Counter())),
        all=(),
        observe=lambda run: None,
    )
    registry = Metrics(cast(Any, service), cast(Any, jobs)).registry
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        owner = family if hasattr(family, "_labelnames") else registry._names_to_collectors[family.name]
        yield name, family.type, tuple(cast(Any, owner)._labelnames), family.documentation


def _engine() -> Any:
    """A device that is never started, with a group of students: it has counters, and compiles nothing."""
    import jax
    from benches.shared import RandomBackbone

    from jpets.config import BackboneConfig, EngineSettings
    from jpets.engine.group.group import EngineGroup
    from jpets.engine.students.serving import StudentServing
    from jpets.model.encoder import random_params

    config = BackboneConfig("bert", 64, 32, 1, 2, 64, 64)
    backbone = RandomBackbone("tiny", config, jax.tree.map(jax.device_get, random_params(config)))
    engine = StudentServing(EngineGroup(backbone, jax.devices()[:1], EngineSettings(background_compile=False)))
    engine.register_task("group", NotImplemented, students=1)
    return engine


def error_codes() -> str:
    rows = []
    for line in (errors.__doc__ or "").splitlines():
        if match := NODE.match(line.strip("\n")[4:]):
            name, _, _, meaning = match.groups()
            kind = getattr(errors, name)
            retry = f"{kind.retry_after} s" if kind.retry_after else ""
            retry = "until it is accepted" if kind is errors.OverQuota else retry
            rows.append([f"`{kind.code}`", str(kind.status), retry, f"`{name}`", meaning or ""])
    return markdown_table(["code", "status", "Retry-After", "exception", "when"], rows, left=5)
