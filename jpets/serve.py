"""``python -m jpets.serve``: wires a backbone, a repository, an engine and the HTTP front end into one process."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Self

import rich.console
import rich.progress
import typer
import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from checkpoints.task_file import fingerprint_of
from jpets.engine.memory import freeze_heap
from jpets.engine.xla_flags import set_xla_flags
from jpets.errors import JpetsError
from jpets.hosting import (
    Shelf,
    add_demo_tasks,
    default_backbone,
    make_engine,
    make_jobs,
    make_service,
    one_line,
    opened_repository,
    share_device_memory,
)
from serving.app import create_app
from serving.job_service import Jobs
from serving.logs import set_up_logging
from serving.options import Options, read_options
from serving.services import Services

log = logging.getLogger("jpets.serve")

BACKLOG = 2048

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Stopped(Exception):
    """The server was told to end while it was starting."""


@cli.command()
def main(
    backbone: Annotated[str | None, typer.Option(help="folder, installed package or hub id of the backbone")] = None,
    backbones: Annotated[
        Path | None, typer.Option(help="folder whose backbones may be loaded while it runs, by PUT /v1/backbones/NAME")
    ] = None,
    repository: Annotated[Path | None, typer.Option(help="folder of the tasks; a temporary one by default")] = None,
    demo: Annotated[bool | None, typer.Option("--demo", help="the packaged MiniLM and the demo tasks")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on  [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on, 0 for any  [8080]")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32  [bfloat16]")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="folder of compiled programs")] = None,
    max_length: Annotated[int | None, typer.Option(help="longest text in tokens  [512]")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="most tokens in a batch  [1024]")] = None,
    max_batch_rows: Annotated[int | None, typer.Option(help="most texts in a batch  [32]")] = None,
    max_queue: Annotated[int | None, typer.Option(help="most texts that wait; more get 503  [4096]")] = None,
    slots: Annotated[int | None, typer.Option(help="fewest tasks that each class has room for  [32]")] = None,
    max_slots: Annotated[
        int | None, typer.Option(help="most tasks of a class on the device; more take turns there  [1023]")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="how waiting texts are batched: auto, alpha, fixed or steady  [auto]")
    ] = None,
    fixed_batch: Annotated[int | None, typer.Option(help="texts in a batch of the policy fixed  [16]")] = None,
    trigger: Annotated[
        str | None, typer.Option(help="when a batch starts: hungry (at once) or lazy (waits for company)  [hungry]")
    ] = None,
    lazy_wait: Annotated[
        float | None, typer.Option(help="seconds that the lazy trigger waits at most  [0.005]")
    ] = None,
    latency_target: Annotated[
        float | None, typer.Option(help="seconds; the lazy trigger starts when half of them would pass  [0.1]")
    ] = None,
    buckets: Annotated[
        list[str] | None,
        typer.Option("--bucket", help="a static shape instead of the menu: 8x32 (padded), 1024:32x32+8x128 (packed)"),
    ] = None,
    devices: Annotated[str | None, typer.Option(help="all, how many, or a list of numbers like 0,2  [all]")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="devices that compute each batch together  [1]")] = None,
    migrate: Annotated[
        bool | None, typer.Option("--migrate/--no-migrate", help="move tasks between devices while they serve")
    ] = None,
    balance_start: Annotated[
        float | None, typer.Option(help="seconds until devices are compared for the first time  [10]")
    ] = None,
    balance_least: Annotated[float | None, typer.Option(help="shortest time between two comparisons  [0.2]")] = None,
    balance_most: Annotated[float | None, typer.Option(help="longest time between two comparisons  [20]")] = None,
    balance_step: Annotated[float | None, typer.Option(help="seconds added while devices are balanced  [0.5]")] = None,
    balance_threshold: Annotated[
        float | None, typer.Option(help="least over most loaded device, below which the time is halved  [0.9]")
    ] = None,
    device_memory_gb: Annotated[
        float | None, typer.Option(help="device memory (10^9 bytes) for everything, 0 for all there is  [0]")
    ] = None,
    host_memory_gb: Annotated[
        float | None, typer.Option(help="host memory (10^9 bytes) for tasks that are not on the device  [1]")
    ] = None,
    merged_memory_gb: Annotated[
        float | None, typer.Option(help="device memory (10^9 bytes) for merged weights of hot tasks  [0]")
    ] = None,
    program_memory_mb: Annotated[
        int | None, typer.Option(help="host memory (MiB) that compiled programs may take  [896]")
    ] = None,
    response_cache_mb: Annotated[
        int | None, typer.Option(help="host memory (MiB) for answers to texts that come again, 0 keeps none  [0]")
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option(
            help="room for shapes of tasks that are not there yet: auto (when they come), always, never  [auto]"
        ),
    ] = None,
    max_inputs: Annotated[int | None, typer.Option(help="most texts in a request  [1024]")] = None,
    max_body_mb: Annotated[int | None, typer.Option(help="largest JSON body in MiB  [16]")] = None,
    max_task_mb: Annotated[int | None, typer.Option(help="largest task file in MiB  [512]")] = None,
    max_data_mb: Annotated[int | None, typer.Option(help="largest file to train on in MiB  [512]")] = None,
    job_platform: Annotated[str | None, typer.Option(help="where JAX trains tasks: cpu, cuda ...  [cpu]")] = None,
    request_timeout: Annotated[float | None, typer.Option(help="seconds until 504  [60]")] = None,
    grace: Annotated[float | None, typer.Option(help="seconds that requests get to finish at the end  [10]")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error  [info]")] = None,
    log_json: Annotated[bool | None, typer.Option("--log-json", help="one JSON object a log line")] = None,
    config: Annotated[Path | None, typer.Option(envvar="JPETS_CONFIG", help="TOML file with options")] = None,
) -> None:
    """Serve many fine-tuned tasks over one shared backbone.

    Every option can also be an environment variable (--max-length: JPETS_MAX_LENGTH) or a line in a TOML file
    (max_length = 256); the command line wins over the environment, and that over the file.
    """
    given = {name: value for name, value in locals().items() if name != "config"}
    try:
        run(read_options(given, config))
    except (JpetsError, OSError, SQLAlchemyError) as error:
        typer.echo(f"jpets: {one_line(error)}", err=True)
        raise typer.Exit(1) from None


def run(options: Options) -> None:
    """Serves until a signal ends it. Raises what keeps it from starting."""
    set_xla_flags(preallocate=not options.device_memory_gb)
    set_up_logging(options.log_level, options.log_json)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(options.host, options.port))
        backbone = default_backbone(options)
        repository = stack.enter_context(opened_repository(options, backbone))
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
        server = DrainingServer(options, service, jobs)
        start = Start(options, service, jobs, server, f"http://{_address(listener)}")
        start.begin()
        server.run(sockets=[listener])
        start.end()
        jobs.runner.close()
        service.close()
        start.raise_failure()


class DrainingServer(uvicorn.Server):
    """The first signal drains: not ready any more, running requests finish. A second one ends it at once."""

    def __init__(self, options: Options, service: Services, jobs: Jobs) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service, options.serving_settings(), jobs),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=round(options.grace),
            )
        )
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del sig, frame
        self.force_exit = self.should_exit
        self._service.drain()
        self.should_exit = True


class Start:
    """Warms the engine in a thread while the port is open already."""

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

                self._service.start(partial(make_engine, self._options, self._service.backbone, tuple), progress)
        except Stopped:
            log.info("stopped while starting")
        except Exception as error:  # noqa: BLE001 (whatever it is, the main thread ends the process with it)
            self._failure = error
            self._server.should_exit = True
        else:
            freeze_heap()
            self._jobs.runner.start()
            self._announce()

    def _announce(self) -> None:
        found, _ = self._service.repository.list(limit=1)
        embeds = not found or found[0].metadata["head"]["type"] == "embedding"
        path = "embeddings" if embeds else "classify"
        model = found[0].id if found else self._service.backbone.name
        body = f'{{"model": "{model}", "input": "Your text here"}}'
        typer.echo(f"jpets is ready at {self._url} (API: {self._url}/docs)")
        typer.echo(f"  curl {self._url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'")
        sys.stdout.flush()


class Display:
    """Progress bars on a terminal, log lines elsewhere."""

    def __init__(self) -> None:
        self._bars: rich.progress.Progress | None = None
        self._ids: dict[str, rich.progress.TaskID] = {}
        if sys.stderr.isatty():
            columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
            self._bars = rich.progress.Progress(*columns, console=rich.console.Console(stderr=True))

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, what: str, done: int, total: int) -> None:
        if self._bars is None:
            log.log(logging.INFO if done == total else logging.DEBUG, "start", extra={what: f"{done}/{total}"})
            return
        if what not in self._ids:
            self._ids[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._ids[what], completed=done, total=total)


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket: a port in use is found before anything is loaded."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
        yield listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if __name__ == "__main__":
    cli()
