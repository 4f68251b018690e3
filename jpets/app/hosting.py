"""Wiring: a server's options become backbones, a repository and engines."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import logging
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy.exc import SQLAlchemyError

import checkpoints
from checkpoints.backbone import Backbone
from checkpoints.ids import check_id
from checkpoints.repository import Repository
from checkpoints.source import DEMO_BACKBONE, load_backbone, package_folder, resolve_source
from checkpoints.task_file import read_task
from jpets.app.standard import standard_tasks
from jpets.deltas import METHODS
from jpets.deltas.protocol import ClassKey
from jpets.engine.device.devices import choose_devices
from jpets.engine.device.memory import GIGABYTE, device_limit
from jpets.engine.engine import Engine
from jpets.engine.group.group import EngineGroup
from jpets.engine.interface import Serves
from jpets.engine.students.serving import StudentServing
from jpets.errors import Conflict, InvalidInput, InvalidTask, JpetsError, NotFound, Saturated, one_line
from jpets.files import STALE_SECONDS, TEMPORARY, space_errors, sweep, sync_folder, sync_tree, temporary_sibling
from jpets.scratch import scratch_folder
from jpets.students.depth import check_depths
from jpets.students.session import check_method, student_settings
from jpets.training.methods import check_continued, checked_settings, direct_recipe, is_direct
from jpets.training.plan import Training, check_rates
from jpets.types import BackboneRef, Delta, Head, LoadedBackbone, Task
from serving.hosted.service import MakeEngine, Service
from serving.hosted.services import Services
from serving.jobs.folder import JobFolder
from serving.jobs.needs import backbones_of
from serving.jobs.request import FineTune, MakeStudents
from serving.jobs.service import Jobs
from serving.options.options import Options

log = logging.getLogger("jpets.serve")

DEMO_TASKS = Path(checkpoints.__file__).parent / "demo"


class Shelf:
    """The backbones that a running server may load: the folders in ``--backbones``, by their names."""

    def __init__(self, options: Options, repository: Repository) -> None:
        if options.backbones is not None:
            if not options.backbones.is_dir():
                raise NotFound("--backbones: there is no such folder")
            sweep(options.backbones, TEMPORARY, STALE_SECONDS)
        self._options = options
        self._repository = repository

    def names(self) -> Sequence[str]:
        folder = self._options.backbones
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and _is_id(path.name)) if folder else ()

    def open(self, name: str, engines: Callable[[], Sequence[Serves]]) -> tuple[Service, MakeEngine]:
        assert self._options.backbones is not None
        backbone = load_backbone(self._options.backbones / name, name)
        service = make_service(self._options, self._repository, backbone)
        return service, partial(make_engine, self._options, backbone, engines)

    def source(self, name: str) -> str:
        """The argument of ``load_backbone`` for the backbone of that name. Raises ``NotFound``."""
        if self._options.backbones is None or name not in self.names():
            raise NotFound(f"no backbone {name[:128]!r} to train on; GET /v1/backbones lists what there is")
        return str(self._options.backbones / name)

    def add(self, name: str, folder: Path) -> None:
        """Copies a folder in, under a name; it may have been copied before. Raises ``Conflict`` if another backbone has
        that name, ``OutOfSpace``."""
        assert self._options.backbones is not None
        target = self._options.backbones / name
        if target.exists():
            if _same_files(folder, target):
                return
            raise Conflict(f"there is a backbone {name!r} already; choose another name")
        temporary = temporary_sibling(target)
        try:
            with space_errors():
                shutil.copytree(folder, temporary)  # it may be on another disk
                sync_tree(temporary)
                temporary.rename(target)
                sync_folder(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def make_service(options: Options, repository: Repository, backbone: Backbone) -> Service:
    """Accepts tasks of all shapes unless ``--reserve never``; has the standard shapes at once, unless device memory is
    short."""
    standard = options.reserve == "auto" and not options.device_memory_gb
    return Service(
        repository,
        backbone,
        validator_of(backbone),
        standard=partial(standard_tasks, backbone) if standard else tuple,
        growing=options.reserve != "never",
    )


def make_engine(
    options: Options, backbone: LoadedBackbone, others: Callable[[], Sequence[Serves]], coming: Mapping[ClassKey, int]
) -> Serves:
    """An engine for these numbers of tasks of each class, in the device memory that ``others`` leave: the engines
    that are there when it is made, and may end soon after."""
    wanted = options.reserve == "always" or (options.reserve == "auto" and not coming)
    together = options.tensor_parallel
    devices = choose_devices(options.devices, together)
    settings = options.engine_settings()
    limit = device_limit(devices[0], settings.device_memory_gb)
    if (left := _claim_rest(others(), limit)) < limit:
        settings = dataclasses.replace(settings, device_memory_gb=max(left, 1.0) / GIGABYTE)
    how: dict[str, Any] = {
        "settings": settings,
        "reserve": standard_tasks(backbone) if wanted else [],
        "coming": coming,
        "cache_dir": options.cache_dir,
        "buckets": options.bucket_menu(),
    }
    slices = [devices[first : first + together] for first in range(0, len(devices), together)]
    if len(slices) == 1:
        return StudentServing(Engine(backbone, devices=devices, **how), options.sizing_rule(settings.policy))
    rule = options.balance_interval() if options.migrate else None
    engines = EngineGroup(backbone, slices, interval=rule, **how)
    return StudentServing(engines, options.sizing_rule(settings.policy), devices=len(slices))


def _claim_rest(others: Sequence[Serves], limit: float) -> float:
    """Bytes that ``others`` leave of a device's ``limit``; from now on they take no more."""
    if math.isfinite(limit):
        for engine in others:
            engine.limit([0.0] * len(engine.report().devices))
    return limit - max(_taken(others).values(), default=0)


def share_device_memory(options: Options, engines: Sequence[Serves]) -> None:
    """Lets each engine of several backbones take an equal part of a device's free memory."""
    limit = device_limit(choose_devices(options.devices)[0], options.device_memory_gb)
    if not math.isfinite(limit):
        return
    taken = _taken(engines)
    for engine in engines:
        engine.limit(
            [max(0.0, limit - taken[number]) / len(engines) for number, _ in enumerate(engine.report().devices)]
        )


def _taken(engines: Sequence[Serves]) -> Counter[int]:
    """Bytes taken of each device."""
    taken = Counter[int]()
    for engine in engines:
        for number, device in enumerate(engine.report().devices):
            taken[number] += device.memory.total
    return taken


def make_jobs(options: Options, repository: Repository, services: Services, shelf: Shelf) -> Jobs:
    """Jobs, which are stored next to the tasks. They read the first backbone from where the server did: a hub may have
    another revision by then."""
    folder = package_folder(DEMO_BACKBONE) if options.backbone is None else resolve_source(options.backbone)

    def source_of(name: str) -> str:
        return str(folder) if name == services.first.backbone.name else shelf.source(name)

    def command(job: JobFolder) -> list[str]:
        own, *others = backbones_of(job.request)
        names = [own or services.first.backbone.name, *(name for name in others if name is not None)]
        places = [part for name in names for part in (source_of(name), name)]
        return [sys.executable, "-P", "-m", "jpets.app.jobs.process", str(job.path), *places]

    return Jobs(
        repository.folder / "jobs",
        services,
        command,
        outlines_of,
        platform=options.job_platform,
        keep_backbone=shelf.add if options.backbones is not None else None,
    )


def outlines_of(
    request: FineTune | MakeStudents, backbones: Sequence[LoadedBackbone], start: Sequence[str]
) -> Sequence[Task]:
    """A task on each of the backbones of the shape that a job would make, before anything is trained. Without deltas if
    the job continues a task of the methods ``start``: its shape is served already.

    Raises ``InvalidInput`` for settings that the method does not take, for backbones that do not go together, and for
    an invalid sweep.
    """
    if isinstance(request, MakeStudents):
        check_depths([own.config for own in backbones], stacked=bool(request.stacking))
    return [_outline(request, own, start) for own in backbones]


def _outline(request: FineTune | MakeStudents, backbone: LoadedBackbone, start: Sequence[str]) -> Task:
    if isinstance(request, MakeStudents):
        settings = student_settings(request.method, request.settings)
        check_method(request.method, settings, backbone)
        student = tuple(_untrained(request.method, settings, backbone))
        return Task(request.task, BackboneRef.of(backbone), student, Head("embedding", pooling="mean"))
    assert request.method is not None
    deltas: Sequence[Delta] = ()
    if start:
        check_continued(start, request.method, request.settings)
    else:
        deltas = _untrained(request.method, request.settings, backbone)
    check_rates(request.sweep, request.rate, request.method)
    return Task(
        request.task,
        BackboneRef.of(backbone),
        tuple(deltas),
        Head("embedding", pooling=request.pooling or Training.pooling),
    )


def _untrained(method: str, settings: Mapping[str, Any], backbone: LoadedBackbone) -> Sequence[Delta]:
    """Deltas of a method's shape; none if the method has none. Raises ``InvalidInput``."""
    config = backbone.config
    settings = checked_settings(method, settings, config)
    if is_direct(method):
        return direct_recipe(method, settings, config, dict(backbone.params)).deltas
    if method not in METHODS:
        return ()
    shape = {name: value for name, value in settings.items() if name != "price"}
    try:
        return (METHODS[method].init(np.random.default_rng(0), shape, config, 1.0),)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"settings: {error}") from error


def default_backbone(options: Options) -> Backbone:
    """Raises ``InvalidBackbone``, ``NotFound``."""
    if options.backbone is None:
        return load_backbone(package_folder(DEMO_BACKBONE), DEMO_BACKBONE)
    try:
        return load_backbone(options.backbone)
    except JpetsError as error:
        raise type(error)(f"--backbone: {error.message}") from error


@contextlib.contextmanager
def opened_repository(options: Options, backbone: Backbone) -> Iterator[Repository]:
    with contextlib.ExitStack() as stack:
        folder, catalogue, blobs = options.repository, options.catalogue, options.blobs
        if folder is None:
            if (catalogue is None) != (blobs is None):
                raise InvalidInput("--repository, --catalogue, --blobs: give two of them, or --repository alone")
            folder = stack.enter_context(scratch_folder())
            lost = "tasks" if catalogue is None else "jobs"
            log.warning(f"{lost} are gone when the server ends; give --repository DIR to keep them")
        cache = options.cache_dir and options.cache_dir / "task-files"
        repository = _opened(options, partial(Repository.open, folder, cache=cache, validator=validator_of(backbone)))
        stack.callback(repository.close)
        yield repository


def _opened(options: Options, open_it: Callable[..., Repository]) -> Repository:
    """Raises ``InvalidInput``, ``OSError`` and others that name the option to change."""
    catalogue, blobs = options.catalogue, options.blobs
    named = " or ".join([f"--{name}" for name in ("catalogue", "blobs") if getattr(options, name)] or ["--repository"])
    try:
        return open_it(catalogue=catalogue, blobs=blobs)
    except (OSError, SQLAlchemyError) as error:
        raise OSError(f"{named} cannot be opened: {one_line(error)}") from error
    except JpetsError as error:
        if catalogue is None and blobs is None:
            raise
        why = error.__cause__ if isinstance(error, Saturated) and isinstance(error.__cause__, Exception) else None
        raise type(error)(f"{named}: {error}" + (f" ({one_line(why)})" if why else "")) from error


def validator_of(backbone: Backbone) -> Any:
    return lambda data, id: read_task(data, id=id, config=backbone.config, backbone=backbone.fingerprint)


def add_demo_tasks(repository: Repository) -> None:
    """Adds the packaged tasks that the repository does not have yet. Raises ``InvalidInput`` where its backbone is not
    theirs."""
    for path in sorted(DEMO_TASKS.glob("*.safetensors")):
        try:
            repository.get(path.stem)
        except NotFound:
            try:
                repository.put(path.stem, path)
            except InvalidTask as error:
                raise InvalidInput(
                    f"--demo: its tasks are of {DEMO_BACKBONE}, and --backbone (JPETS_BACKBONE) names another one; "
                    f"leave one of them out: {error.message}"
                ) from error


def _same_files(first: Path, second: Path) -> bool:
    """Whether two folders hold the same files, byte for byte."""
    names = [{path.relative_to(folder) for path in folder.rglob("*")} for folder in (first, second)]
    files = [str(name) for name in names[0] if (first / name).is_file()]
    return names[0] == names[1] and len(filecmp.cmpfiles(first, second, files, shallow=False)[0]) == len(files)


def _is_id(name: str) -> bool:
    try:
        check_id(name)
    except JpetsError:
        return False
    return True
