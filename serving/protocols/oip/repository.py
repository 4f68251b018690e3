"""The model repository extension of the Open Inference Protocol: which tasks there are, and bringing them to the device
or making them leave it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from jpets.errors import DeadlineExceeded, InvalidInput
from jpets.types import TaskName
from serving.protocols.oip.inference import BACKBONE_VERSION, find_model
from serving.requests.context import Context

PAGE = 1000
LOOK = 0.01
"""Seconds between looks whether a task has come."""
READY, UNAVAILABLE = "READY", "UNAVAILABLE"


async def index(here: Context, *, ready: bool = False) -> list[dict[str, str]]:
    """Name, version and state of every task that the tenant may ask for, by name, behind those of the backbones. They
    are ready where their backbone is loaded: a task that is not on the device comes with its next query. ``ready``:
    those alone, and none while the server is not."""
    services = here.services
    if ready and not services.first.ready:
        return []
    found = [_ready(service.backbone.name, BACKBONE_VERSION) for service in services.all]
    after: str | None = None
    while True:
        page, after = await asyncio.to_thread(here.listed, PAGE, after)
        found += [_entry(here, stored.name, stored.version) for stored in page]
        if after is None:
            return [each for each in found if each["state"] == READY or not ready]


async def is_ready(here: Context, model: str, version: str | None = None) -> bool:
    """Whether queries of a task are answered: its backbone is ready, and it has a version whose programs are there.
    Raises ``NotFound``."""
    if (await find_model(here, model, version)).task is None:
        return here.services.first.ready
    task = here.named(model)
    with here.services.owning(task) as own:
        able = own.ready
    return able and _served(here, task) is not None


def _served(here: Context, task: TaskName) -> int | None:
    """The version that queries get."""
    with here.services.owning(task) as own:
        version = own.tasks.version(task)
    coming = here.services.preparation(task)
    return None if coming is not None and coming.version == version else version


def _entry(here: Context, task: TaskName, newest: int) -> dict[str, str]:
    version = _served(here, task)
    if version is not None:
        return _ready(task.id, str(version))
    why = "its backbone is not loaded, or the server compiles its first program"
    return {"name": task.id, "version": str(newest), "state": UNAVAILABLE, "reason": why}


def _ready(name: str, version: str) -> dict[str, str]:
    return {"name": name, "version": version, "state": READY, "reason": ""}


async def load(here: Context, model: str, parameters: Mapping[str, Any], seconds: float) -> None:
    """Waits until the task is on the device, as far as there is a free slot, and until so many ``seconds`` after the
    request came.

    Raises ``NotFound``, ``InvalidInput`` for parameters: no configuration or file comes this way; ``DeadlineExceeded``.
    """
    if parameters:
        raise InvalidInput(
            f"parameters: expected none, found {[name[:64] for name in parameters][:4]}; PUT /v1/tasks/ID takes files"
        )
    if (await find_model(here, model)).task is None:
        return
    name, until = here.named(model), here.arrived + seconds
    with here.services.owning(name) as own:
        own.engine.warm([model], tenant=name.tenant)
    while True:
        with here.services.owning(name) as own:
            if own.engine.tier(model, tenant=name.tenant) == "device" or not own.engine.warming:
                return
        if time.monotonic() > until:
            raise DeadlineExceeded(f"{model[:128]!r} did not come to the device in time; it comes with its next query")
        await asyncio.sleep(LOOK)


async def unload(here: Context, model: str) -> None:
    """The task leaves the device, and comes again with its next query. Raises ``NotFound``,
    ``Forbidden`` for a shared task."""
    if (await find_model(here, model)).task is None:
        raise InvalidInput(
            f"{model[:128]!r} is a backbone, which stays on the device; DELETE /v1/backbones/NAME ends one"
        )
    await asyncio.to_thread(here.refuse_shared, model)
    name = here.own(model)
    with here.services.owning(name) as own:
        own.engine.unload(model, tenant=name.tenant)
