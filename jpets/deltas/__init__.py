"""PET methods, one file each, and the banks that hold many tasks' deltas on a device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jpets.deltas.adapter import Adapter
from jpets.deltas.bitfit import Bitfit
from jpets.deltas.diff import Diff
from jpets.deltas.head import HeadClass
from jpets.deltas.ia3 import Ia3
from jpets.deltas.lora import Lora
from jpets.deltas.mask import Mask
from jpets.deltas.onebit import Onebit
from jpets.deltas.protocol import Method
from jpets.errors import InvalidTask

METHODS: Mapping[str, Method] = MappingProxyType(
    {m.name: m for m in (Adapter(), Lora(), Bitfit(), Mask(), Diff(), Ia3(), Onebit())}
)
"""Every PET method by its name in task files."""
HEAD = HeadClass()


def method_named(name: str) -> Method:
    """The method of a task file's delta. Raises ``InvalidTask`` for an unknown one."""
    if name not in METHODS:
        raise InvalidTask(f"unknown delta method {name!r}; this server knows {sorted(METHODS)}")
    return METHODS[name]


def class_method(class_name: str) -> Method:
    """The code behind a class: a PET method's, or the heads'."""
    return HEAD if class_name == HEAD.name else METHODS[class_name]
