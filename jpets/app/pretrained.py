"""The engine as Python users meet it, with backbones and tasks by path or name. Wiring: it joins engine and readers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable
from typing import Any, Self

from checkpoints.source import load_backbone
from checkpoints.task_file import read_task
from checkpoints.validation import validate
from jpets.config import DType, EngineSettings
from jpets.engine.students.serving import StudentServing
from jpets.engine.tasks.lowered import LoweredTask
from jpets.tokenizing import TextEncoder
from jpets.types import DEFAULT_TENANT, BackboneRef, LoadedBackbone, Task
from jpets.xla_flags import set_xla_flags

__all__ = ["Engine", "TaskSource", "read_task"]

TaskSource = Task | str | pathlib.Path


class Engine(StudentServing):
    """Serves the tasks of one backbone, groups of students among them. Use it as a context manager, or call ``close``.

    engine = Engine.from_pretrained("folder-or-package", tasks=["a.safetensors"])
    results = engine.infer([Query(task="a", text="..."), Query(task=None, text="...")])
    """

    backbone: LoadedBackbone
    text: TextEncoder
    """Makes token ids of texts."""

    @classmethod
    def from_pretrained(
        cls,
        source: str | pathlib.Path,
        tasks: Iterable[TaskSource] = (),
        *,
        dtype: DType = "bfloat16",
        cache_dir: str | pathlib.Path | None = None,
        reserve: Iterable[TaskSource] = (),
        **settings: Any,
    ) -> Self:
        """Loads a backbone (folder, installed package, hub id), compiles, and returns an engine that is ready.

        ``tasks`` are task files, whose id is the file's stem, or task objects; ``reserve`` lends only shapes, for tasks
        added later. ``settings`` are fields of ``EngineSettings``. Raises ``InvalidBackbone``, ``InvalidTask``.
        """
        set_xla_flags(preallocate=not settings.get("device_memory_gb"))
        backbone = load_backbone(source)

        def load(task: TaskSource) -> Task:
            if not isinstance(task, Task):
                return read_task(task, config=backbone.config, backbone=backbone.ref())
            validate(task, backbone.config, backbone.ref())
            return task

        engine = cls.of_tasks(
            backbone,
            [load(task) for task in tasks],
            EngineSettings(dtype=dtype, **settings),
            reserve=[load(task) for task in reserve],
            cache_dir=pathlib.Path(cache_dir) if cache_dir is not None else None,
        )
        engine.backbone, engine.text = backbone, TextEncoder.of(backbone, looked_up=False)
        engine.start()
        return engine

    def add_task(
        self,
        task: TaskSource | LoweredTask,
        *,
        tenant: str = DEFAULT_TENANT,
        version: int | None = None,
        load: Callable[[], Task] | None = None,
        place: int | None = None,
    ) -> None:
        """Loads a task object or file (its id is the file's stem); returns when the next query sees it."""
        if isinstance(task, str | pathlib.Path):
            task = read_task(task, config=self.backbone.config, backbone=self.backbone.fingerprint)
        elif isinstance(task, Task):
            validate(task, self.backbone.config, BackboneRef.of(self.backbone))
        super().add_task(task, tenant=tenant, version=version, load=load, place=place)
