"""Puts tasks on the device at once, in the caller's thread: uploads, and tasks that come from another device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from jpets.deltas.bank import SlotArrays
from jpets.deltas.protocol import ClassKey
from jpets.engine.device.memory import DeviceMemory, slot_bytes
from jpets.engine.device.replica import Replica
from jpets.engine.residency.loading import LoadedTask, TaskLoader
from jpets.engine.residency.writing import SlotWriter
from jpets.engine.tasks.lowered import LoweredTask
from jpets.engine.tasks.table import TaskTable
from jpets.errors import EngineFailure, JpetsError, OutOfSpace
from jpets.types import Task

log = logging.getLogger(__name__)

T = TypeVar("T")


class TaskAdder:
    """``wait`` waits for staged work; ``used`` is told the classes of each task that comes."""

    def __init__(
        self,
        loader: TaskLoader,
        tasks: TaskTable,
        replica: Replica,
        writer: SlotWriter,
        memory: DeviceMemory,
        wait: Callable[[Future[None]], None],
        used: Callable[[Sequence[ClassKey]], None],
    ) -> None:
        self._loader = loader
        self._tasks = tasks
        self._replica = replica
        self._writer = writer
        self._memory = memory
        self._wait = wait
        self._used = used

    def lower(self, task: Task | LoweredTask) -> LoweredTask:
        """``Engine.lower_task``; a lowered task stays as it is."""
        return task if isinstance(task, LoweredTask) else self._loader.lower(task)

    def add(self, task: Task | LoweredTask, tenant: str, version: int | None, load: Callable[[], Task] | None) -> None:
        """``Engine.add_task``."""
        began = time.monotonic()
        loaded = self._loader.load(self.lower(task), self._tasks)
        if load is None:
            self.adopt(loaded, tenant, version)
            return
        try:
            cost = time.monotonic() - began
            self.adopt(loaded.outlined(), tenant, version, load=load, cost=cost)
        except OutOfSpace:
            if self._tasks.slots.hopeless(loaded.contents, tenant):
                raise
            self._tasks.register(tenant, loaded.task.id, load, version, keys=tuple(loaded.contents))

    def adopt(
        self,
        loaded: LoadedTask,
        tenant: str,
        version: int | None,
        *,
        load: Callable[[], Task] | None = None,
        cost: float = 0.0,
        pinned: bool = False,
    ) -> None:
        """``Engine.adopt``."""
        keys = list(loaded.contents)
        slots = self._with_numbers(keys, partial(self._tasks.slots.reserve, keys, tenant))
        try:
            contents = {key: (slots[key], arrays) for key, arrays in loaded.contents.items()}
            self._wait(self._replica.staging.stage(partial(self._writer.write, contents)))
        except BaseException as error:
            self._tasks.slots.release(slots)
            if isinstance(error, JpetsError) or not isinstance(error, Exception):
                raise
            raise EngineFailure(f"the task could not be written to the device: {type(error).__name__}") from error
        self._tasks.publish(loaded.resident(tenant, slots, version), load, cost, pinned=pinned)
        self._used(keys)

    def check(self, task: Task | LoweredTask, *, stays: bool) -> None:
        """``Engine.check_task``."""
        keys = self._tasks.fitting.fit(self.lower(task).classes)
        if stays or self._tasks.slots.hopeless(keys):
            self._with_numbers(keys, partial(self._tasks.slots.check, keys))

    def export(self, id: str, tenant: str) -> LoadedTask | None:
        """``Engine.export``."""
        entry = self._tasks.entry(tenant, id)
        resident = self._tasks.hold(entry, 1) if entry is not None else None
        if resident is None:
            return None
        try:
            contents: dict[ClassKey, SlotArrays] = {}
            self._wait(self._replica.staging.stage(lambda: contents.update(self._replica.read(resident.slots))))
            return LoadedTask(
                resident.task,
                contents,
                resident.pooling,
                resident.longest,
                resident.lead,
                resident.first_layer,
            )
        finally:
            self._tasks.done(resident)

    def _with_numbers(self, keys: Sequence[ClassKey], place: Callable[[], T]) -> T:
        """``place()``; an ``OutOfSpace`` of it is raised again with what the task takes. What others take the log has:
        the caller may be one of many tenants."""
        try:
            return place()
        except OutOfSpace as error:
            family = self._replica.family
            wanted = sum(slot_bytes(key, family.config, family.dtype, self._replica.mesh) for key in keys)
            log.warning("a task finds no room beside %s", self._memory.use(self._replica.programs))
            raise OutOfSpace(f"{error.message}. The task takes {wanted / 1e6:.1f} MB") from None
