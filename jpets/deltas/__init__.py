"""PET methods, one file each, and the banks that hold many tasks' deltas on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jpets.config import BackboneConfig
from jpets.deltas.adapter import Adapter
from jpets.deltas.bitfit import Bitfit
from jpets.deltas.diff import Diff
from jpets.deltas.head import HeadClass
from jpets.deltas.ia3 import Ia3
from jpets.deltas.lora import Lora
from jpets.deltas.mask import Mask
from jpets.deltas.merge import Params
from jpets.deltas.onebit import Onebit
from jpets.deltas.prefix import Prefix
from jpets.deltas.prompt import Prompt
from jpets.deltas.protocol import NO_LEAD, Lead, Method, Step
from jpets.deltas.recipe import Course
from jpets.deltas.registry import Methods
from jpets.errors import InvalidTask
from jpets.types import Delta, Task

METHODS: Mapping[str, Method] = Methods(
    (Adapter(), Lora(), Bitfit(), Mask(), Diff(), Ia3(), Onebit(), Prefix(), Prompt())
)
"""Every PET method by its name in task files, with those of installed packages."""
HEAD = HeadClass()
MERGED: Sequence[Step] = ("bias", "weight", "sums", "scale", "embeddings", "attention", "adapter")
"""The order of dense forms in the unified representation: whole biases first, as they replace."""


def method_named(name: str) -> Method:
    """The method of a task file's delta. Raises ``InvalidTask`` for an unknown one."""
    if name not in METHODS:
        raise InvalidTask(f"unknown delta method {name!r}; this server knows {sorted(METHODS)}")
    return METHODS[name]


def in_merge_order(deltas: Sequence[Delta]) -> list[Delta]:
    """Deltas that replace, then that add, then that scale: the order in which ``merge`` applies a task's deltas."""
    return sorted(deltas, key=lambda delta: MERGED.index(METHODS[delta.method].step))


def merge_deltas(deltas: Sequence[Delta], config: BackboneConfig, params: Params) -> Params:
    """Backbone parameters with a task's deltas folded in densely.

    Raises ``NotImplementedError`` for methods that do not change the weights.
    """
    for delta in in_merge_order(deltas):
        params = METHODS[delta.method].merge(delta, config, params)
    return params


def task_lead(task: Task) -> Lead:
    """The virtual tokens that a task's deltas together set before each query's tokens."""
    return sum((method_named(delta.method).lead(delta) for delta in task.deltas), NO_LEAD)


def first_layer(task: Task, config: BackboneConfig) -> int:
    """The first layer where a task's deltas act; all layers where only what reads them is the task's own."""
    return min((METHODS[own.method].first_layer(own.settings, config) for own in task.deltas), default=config.layers)


def class_method(class_name: str) -> Method:
    """The code behind a class: a PET method's, or the heads'."""
    return HEAD if class_name == HEAD.name else METHODS[class_name]


def trainable() -> Mapping[str, Course]:
    """The methods that can be trained, by name; first those with stored numbers that are trained from the start."""
    found = {name: method.course for name, method in METHODS.items() if method.course is not None}
    return dict(sorted(found.items(), key=lambda pair: pair[1].first is not None))
