"""The server's process: starts its parts, says when it is ready, and ends it on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self

import rich.progress
import typer
import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from checkpoints.task_file import fingerprint_of
from jpets.app.commands.bars import Bars, done_of
from jpets.app.exposure import check_open_to_all, is_loopback, tls_files
from jpets.app.host_use import HostUse
from jpets.app.hosting import (
    Shelf,
    add_demo_tasks,
    default_backbone,
    make_engine,
    make_jobs,
    make_service,
    opened_repository,
    share_device_memory,
)
from jpets.engine.programs.cache_folder import open_cache
from jpets.errors import one_line
from jpets.free_memory import freeze_heap
from jpets.repeated import Repeated
from jpets.scratch import scratch_folder
from jpets.xla_flags import set_xla_flags
from serving.app import create_app
from serving.grpc.server import GrpcServer
from serving.hosted.services import Services
from serving.http.connections import Connections
from serving.jobs.service import Jobs
from serving.options.options import Options
from serving.requests.context import Context
from serving.tenants.keyring import Keyring

log = logging.getLogger("jpets.serve")

BACKLOG = 2048
MOST_PORT = 65535
LOOK = 0.1
"""Seconds between looks for a second signal while calls finish."""


class Stopped(Exception):
    """The server was told to end during its start."""


def run(options: Options) -> None:
    """Serves until a signal ends it. Raises ``JpetsError`` or ``OSError`` if it cannot start."""
    try:
        _serve(options)
    except SQLAlchemyError as error:
        used = "--catalogue" if options.catalogue else "--repository"
        raise OSError(f"{used} cannot be used: {one_line(error)}") from error


def _serve(options: Options) -> None:
    set_xla_flags(preallocate=not options.device_memory_gb)
    options = options.model_copy(update={"cache_dir": open_cache(options.cache_dir)})
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen("--host, --port", options.host, options.port))
        if options.grpc and options.grpc_port:
            _listen("--grpc-port", options.host, options.grpc_port).close()
        tls = tls_files(options)
        with Display() as display:
            display.show("backbone", 0, None)
            backbone = default_backbone(options)
        repository = stack.enter_context(opened_repository(options, backbone))
        keyring = Keyring(repository.access)
        check_open_to_all(options, keyring)
        follower = Repeated(keyring.refresh, "following the keys", watch=repository.access.watch())
        stack.callback(follower.close)
        if options.demo:
            add_demo_tasks(repository)
        shelf = Shelf(options, repository)
        service = Services(
            make_service(options, repository, backbone),
            available=shelf.names,
            open_backbone=shelf.open,
            backbone_of=fingerprint_of,
            share_memory=partial(share_device_memory, options),
            grace=options.grace,
        )
        jobs = make_jobs(options, repository, service, shelf)
        uploads = stack.enter_context(scratch_folder())
        server = DrainingServer(options, service, jobs, uploads, keyring, tls)
        scheme = "http" if tls is None else "https"
        start = Start(options, service, jobs, server, f"{scheme}://{_address(*listener.getsockname()[:2])}")
        start.begin()
        follower.start()
        server.run(sockets=[listener])
        start.end()
        jobs.runner.close()
        service.close()
        start.raise_failure()


class DrainingServer(uvicorn.Server):
    """The first signal drains: not ready any more, running requests finish. A second one ends it at once."""

    def __init__(
        self,
        options: Options,
        service: Services,
        jobs: Jobs,
        uploads: Path,
        keyring: Keyring,
        tls: tuple[bytes, bytes] | None,
    ) -> None:
        """``tls``: private key and certificates."""
        limits = options.connection_limits()
        local = is_loopback(options.host) and not options.insecure
        settings = dataclasses.replace(options.serving_settings(), upload_folder=uploads, local=local)
        app = create_app(service, settings, jobs, keyring)
        super().__init__(
            uvicorn.Config(
                app,
                http=Connections(limits).protocol,
                timeout_keep_alive=limits.keep_alive,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=math.ceil(options.grace),
                ssl_certfile=options.tls_certificate,
                ssl_keyfile=options.tls_key,
            )
        )
        self._service = service
        self._options = options
        self._tls = tls
        self._context: Context = app.state.context
        self._remote: GrpcServer | None = None
        self.grpc_address: str | None = None
        """Where gRPC is spoken."""

    @property
    def needs_key(self) -> bool:
        return self._context.keyring.required

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._options.grpc:
            self._remote = GrpcServer(self._context, self._options.connection_limits(), self._tls)
            host, port, given = self._options.host, self._options.port, self._options.grpc_port
            chosen = given if given is not None else port and min(port + 1, MOST_PORT)
            try:
                self.grpc_address = _address(host, await self._remote.start(_address(host, chosen)))
            except OSError as error:
                if given is not None:
                    raise
                log.warning(f"no gRPC: {error}; give --grpc-port another one")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._remote.stop(self._options.grace)) if self._remote is not None else None
        await super().shutdown(sockets=sockets)
        while ending is not None and not (ending.done() or self.force_exit):
            await asyncio.wait([ending], timeout=LOOK)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del sig, frame
        self.force_exit = self.should_exit
        self._service.drain()
        self.should_exit = True


class Start:
    """Warms the engine in a thread while the port is already open."""

    def __init__(self, options: Options, service: Services, jobs: Jobs, server: DrainingServer, url: str) -> None:
        self._options = options
        self._service = service
        self._jobs = jobs
        self._server = server
        self._url = url
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="jpets-start", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Waits for the thread. A compilation cannot be interrupted; one that takes too long ends with the process."""
        self._thread.join(timeout=self._options.grace)
        if self._thread.is_alive():
            logging.shutdown()
            os._exit(0)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            with Display() as display:

                def progress(what: str, done: int, total: int) -> None:
                    if self._server.should_exit:
                        raise Stopped
                    display.show(what, done, total)

                self._service.start(partial(make_engine, self._options, self._service.first.backbone, tuple), progress)
        except Stopped:
            log.info("stopped while starting")
        except Exception as error:  # noqa: BLE001 (any error: the main thread ends the process with it)
            self._failure = error
            self._server.should_exit = True
        else:
            freeze_heap()
            self._jobs.runner.start()
            self._announce()

    def _announce(self) -> None:
        found, _ = self._service.repository.list(limit=1)
        head = found[0].metadata["head"]["type"] if found else "embedding"
        if head == "fill-mask":  # its texts have a mask, which backbones write in several ways
            found, head = [], "embedding"
        path = "embeddings" if head == "embedding" else "classify"
        model = found[0].id if found else self._service.first.backbone.name
        text = '[["Your question?", "Your text here"]]' if head == "question-answering" else '"Your text here"'
        body = f'{{"model": "{model}", "input": {text}}}'
        typer.echo(f"jpets is ready at {self._url} (API: {self._url}/docs)")
        if self._server.grpc_address is not None:
            typer.echo(f"  gRPC (Open Inference Protocol) at {self._server.grpc_address}")
        key = " -H 'Authorization: Bearer KEY'" if self._server.needs_key else ""
        typer.echo(f"  curl {self._url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'")
        if (use := HostUse.of(self._service, self._options.engine_settings())) is not None:
            typer.echo(f"  host memory: {use}")
        sys.stdout.flush()


class Display:
    """Progress bars on a terminal, log lines elsewhere."""

    def __init__(self) -> None:
        self._bars = Bars(rich.progress.MofNCompleteColumn(), tell=_log_progress)
        self._ids: dict[str, rich.progress.TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def show(self, what: str, done: int, total: int | None) -> None:
        """``total`` is None for work without a measure of progress."""
        if what not in self._ids:
            self._ids[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._ids[what], completed=done, total=total)
        if done == total and not self._bars.on_terminal:
            log.info("start", extra={what: f"{done}/{total}"})


def _log_progress(task: rich.progress.Task) -> None:
    log.info("starting", extra={task.description: done_of(task) or "...", "seconds": round(task.elapsed or 0)})


def _listen(named: str, host: str, port: int) -> socket.socket:
    """A bound socket: a port in use is found out before anything is loaded. ``named``: the options that name it."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"{named}: cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
