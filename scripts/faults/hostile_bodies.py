"""Whether any body can keep a server from saying that it lives, or make it take much memory.

``PYTHONPATH=scripts python -m faults.hostile_bodies`` starts a demo server that takes bodies of 16 MB, sends it one
hostile body after another and asks for its health 20 times a second meanwhile. It prints a line for each, and ends with
1 where an answer was later, or more memory was taken, than the bounds allow, or where a status is 500.
"""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table
from served import serve

from faults.hostile_payloads import BACKBONE, TASK, Payload, payloads

PERIOD = 0.05
"""Seconds between two questions for health."""
SETTLE = 0.2
"""Seconds of questions before and behind each body."""


@dataclass(frozen=True)
class Outcome:
    """``status`` is 0 where the server closed the connection without an answer."""

    name: str
    sent: int
    status: int
    seconds: float
    health: float
    added: int

    def within(self, health: float, added: float) -> bool:
        return self.health <= health and self.added <= added and self.status not in (500, 0)


class Health:
    """Asks whether the server lives, on a connection of its own; ``worst`` is the longest time until it said so,
    infinite once it did not."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.worst = 0.0

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        with contextlib.closing(http.client.HTTPConnection(self._address, timeout=60)) as connection:
            while True:
                start = time.perf_counter()
                alive = False
                with contextlib.suppress(OSError, http.client.HTTPException):
                    connection.request("GET", "/v2/health/live")
                    answer = connection.getresponse()
                    answer.read()
                    alive = answer.status == 200
                self.worst = max(self.worst, time.perf_counter() - start if alive else float("inf"))
                if not alive or self._stop.wait(PERIOD):
                    return


def send(address: str, payload: Payload, body: bytes, path: str) -> int:
    """The status of the answer, which is read to its end."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=120)) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            connection.request(payload.method, path, body, dict(payload.headers))
        try:
            answer = connection.getresponse()
            answer.read()
        except (http.client.HTTPException, OSError):
            return 0
        return answer.status


def attack(
    url: str, task: str, backbone: str, size: int, peak: Callable[[], int], chosen: str = "", settle: float = SETTLE
) -> Iterator[Outcome]:
    """Sends each payload whose name contains ``chosen``. ``peak`` gives the most bytes that the server has held since
    it was last asked."""
    address = urlsplit(url).netloc
    for payload in payloads():
        if chosen not in payload.name:
            continue
        body = payload.make(size).replace(TASK.encode(), task.encode()).replace(BACKBONE.encode(), backbone.encode())
        path = payload.path.format(task=task, backbone=backbone)
        peak()
        before = peak()
        with Health(address) as health:
            time.sleep(settle)
            start = time.perf_counter()
            status = send(address, payload, body, path)
            seconds = time.perf_counter() - start
            time.sleep(settle)
        name = payload.name if payload.path == "/v1/classify" else f"{payload.name} ({path.split('/')[-1]})"
        yield Outcome(name, len(body), status, seconds, health.worst, peak() - before)


def peak_of(pid: int) -> Callable[[], int]:
    """What tells the most resident bytes of a process since it was last asked."""
    folder = pathlib.Path("/proc") / str(pid)

    def peak() -> int:
        lines = (folder / "status").read_text().splitlines()
        (most,) = [line for line in lines if line.startswith("VmHWM")]
        (folder / "clear_refs").write_text("5")
        return int(most.split()[1]) << 10

    return peak


def main(
    megabytes: Annotated[float, typer.Option(help="size of a body (10^6 bytes)")] = 16,
    max_body_mb: Annotated[int, typer.Option(help="largest body that the server takes, in MiB")] = 16,
    health: Annotated[float, typer.Option(help="milliseconds within which it has to say that it lives")] = 200,
    added: Annotated[float, typer.Option(help="megabytes that it may take for a body")] = 200,
    only: Annotated[str, typer.Option(help="send only the bodies whose name contains this")] = "",
    cache: Annotated[pathlib.Path | None, typer.Option(help="cache folder; an empty one by default")] = None,
) -> None:
    """Prints a table of the bodies, and those that went over the bounds."""
    with contextlib.ExitStack() as stack:
        folder = cache or stack.enter_context(tempfile.TemporaryDirectory(prefix="jpets-hostile-"))
        options = ["--demo", "--cache-dir", str(folder), "--max-body-mb", str(max_body_mb)]
        server = stack.enter_context(serve(options))
        server.settle()
        backbone = server.client.get("/v1/backbones").json()["backbones"][0]["name"]
        found = attack(server.url, server.tasks()[0], backbone, int(megabytes * 1e6), peak_of(server.pid), only)
        outcomes = []
        for outcome in found:
            outcomes.append(outcome)
            typer.echo(f"{outcome.name}: {outcome.status} in {outcome.seconds:.2f} s", err=True)
    over = [each.name for each in outcomes if not each.within(health / 1e3, added * 1e6)]
    table = Table("body", "MB", "status", "seconds", "worst health ms", "added MB")
    for each in outcomes:
        row = f"{each.sent / 1e6:.1f}", str(each.status), f"{each.seconds:.2f}", f"{each.health * 1e3:.0f}"
        table.add_row(each.name, *row, f"{each.added / 1e6:.0f}", style="bold" if each.name in over else "")
    Console(width=120).print(table)
    typer.echo(f"{len(outcomes)} bodies, {len(over)} over the bounds" + (f": {', '.join(over)}" if over else ""))
    raise typer.Exit(1 if over else 0)


if __name__ == "__main__":
    typer.run(main)
