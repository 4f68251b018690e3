"""Attacks the connections of a server, and shows what that does to health and memory.

``PYTHONPATH=scripts python -m faults.hostile_connections`` starts a server of its own on a free loopback port and
attacks it in one way after the other, while another client asks for health. It prints a line for each attack: the
outcomes of its connections, the slowest answer about health, and the growth of resident memory. It fails where an
attack got another outcome than it should.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import json
import multiprocessing
import multiprocessing.connection
import pathlib
import resource
import selectors
import socket
import sys
import tempfile
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Self

import rich.console
import rich.table
import typer
from served import serve

MIB = 1 << 20
PIECE = 1 << 16
HEALTH = "GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE_ANSWER = "GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
CLASSIFY = "POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
UPLOAD = "PUT /v1/tasks/hostile HTTP/1.1\r\nHost: x\r\n"
Outcomes = Counter[str]
"""How many connections got which status, or were ``closed``, or stayed ``open``."""


@dataclasses.dataclass(frozen=True)
class Target:
    host: str
    port: int
    pid: int

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=30)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes (bytes) and times (seconds) of the attacks."""

    connections: int = 60
    crowd: int = 1500
    """Connections of an attack by number; more than the server takes."""
    endless: int = 64 * MIB
    body: int = 15 * MIB
    upload: int = 200 * MIB
    uploads: int = 4
    pause: float = 2.0
    """Between two bytes of a slow client."""
    patience: float = 60.0
    """How long an answer is waited for."""


@dataclasses.dataclass(frozen=True)
class Attack:
    name: str
    run: Callable[[Target, Scale], Outcomes]
    expected: frozenset[str]
    """The only outcomes that its connections may have."""
    needed: str
    """Outcomes that some of them must have."""
    shuts: bool = False
    """No new connection can be taken meanwhile, not even one that asks for health."""


def send(connection: socket.socket, data: bytes) -> None:
    """Sends as much as the server takes."""
    with contextlib.suppress(OSError):
        connection.sendall(data)


def outcome(connection: socket.socket, patience: float) -> str:
    """The status of the answer that comes next."""
    connection.settimeout(patience)
    try:
        start = connection.recv(1 << 16)
    except TimeoutError:
        return "open"
    except OSError:
        return "closed"
    return start.split()[1].decode() if start else "closed"


def at_once(target: Target, scale: Scale, count: int, head: str, size: int, piece: bytes = bytes(PIECE)) -> Outcomes:
    """``count`` clients that send a head and ``size`` bytes as fast as they can."""

    def one(_: int) -> str:
        with target.connect() as connection:
            send(connection, head.encode())
            left = size
            with contextlib.suppress(OSError):
                while left > 0:
                    connection.sendall(piece[:left])
                    left -= len(piece)
            return outcome(connection, scale.patience)

    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(one, range(count)))


def slowly(target: Target, scale: Scale, head: str, byte: bytes) -> Outcomes:
    """Clients that send a head, and then a byte now and then."""
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(scale.connections):
            connection = stack.enter_context(target.connect())
            send(connection, head.encode())
            selector.register(connection, selectors.EVENT_READ)
        found: Outcomes = Counter()
        end = time.monotonic() + scale.patience
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(scale.pause):
                assert isinstance(key.fileobj, socket.socket)
                found[outcome(key.fileobj, 0)] += 1
                selector.unregister(key.fileobj)
            for key in selector.get_map().values():
                assert isinstance(key.fileobj, socket.socket)
                send(key.fileobj, byte)
        found["open"] += len(selector.get_map())
        return +found


def crowded(target: Target, scale: Scale) -> Outcomes:
    """More connections than the server takes; each of them asks for something while all are open."""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(scale.crowd):
            with contextlib.suppress(OSError):
                connections.append(stack.enter_context(target.connect()))
        for connection in connections:
            send(connection, f"{CLASSIFY}Content-Length: 9\r\n\r\n{{".encode())
        return Counter(outcome(connection, scale.patience) for connection in connections)


def unread(target: Target, scale: Scale) -> Outcomes:
    """Clients that ask for much, and never read an answer."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(target.connect()) for _ in range(scale.connections)]
        for connection in connections:
            connection.setblocking(False)
        found: Outcomes = Counter()
        end = time.monotonic() + scale.patience
        while connections and time.monotonic() < end:
            for connection in list(connections):
                try:
                    connection.send(LARGE_ANSWER.encode() * 100)
                except BlockingIOError:
                    pass
                except OSError:
                    found["closed"] += 1
                    connections.remove(connection)
            time.sleep(scale.pause / 10)
        found["open"] += len(connections)
        return +found


def task_like(scale: Scale, folder: pathlib.Path) -> pathlib.Path:
    """A safetensors file of one large tensor, which is no task of any server."""
    path = folder / "large.safetensors"
    size = scale.upload // 4 * 4
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": {"jpets": "{}"}, "head/kernel": entry}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return path


def uploads(target: Target, scale: Scale) -> Outcomes:
    """Large files at the same time, each of which is refused."""

    def one(file: pathlib.Path) -> str:
        client = http.client.HTTPConnection(target.host, target.port, timeout=scale.patience)
        with contextlib.closing(client), file.open("rb") as content:
            client.request("PUT", "/v1/tasks/hostile", content, {"Content-Length": str(file.stat().st_size)})
            return str(client.getresponse().status)

    with tempfile.TemporaryDirectory(prefix="jpets-hostile-") as folder, ThreadPoolExecutor(scale.uploads) as pool:
        file = task_like(scale, pathlib.Path(folder))
        return Counter(pool.map(one, [file] * scale.uploads))


def without_descriptors(target: Target, scale: Scale) -> Outcomes:
    """Uploads while the server may not open another file, on connections that it has already."""
    limits = resource.prlimit(target.pid, resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(target.connect()) for _ in range(scale.uploads)]
        for connection in connections:
            send(connection, HEALTH.encode())
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            answer.read()
        resource.prlimit(target.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        stack.callback(resource.prlimit, target.pid, resource.RLIMIT_NOFILE, limits)
        for connection in connections:
            send(connection, f"{UPLOAD}Content-Length: 5\r\n\r\nabcde".encode())
        return Counter(outcome(connection, scale.patience) for connection in connections)


def _attack(name: str, run: Callable[[Target, Scale], Outcomes], needed: str, *others: str) -> Attack:
    return Attack(name, run, frozenset((needed, *others)), needed)


def _flood(head: str, piece: bytes = b"a" * PIECE) -> Callable[[Target, Scale], Outcomes]:
    return lambda target, scale: at_once(target, scale, 4, head, scale.endless, piece)


def _slow(head: str, byte: bytes = b"a") -> Callable[[Target, Scale], Outcomes]:
    return functools.partial(slowly, head=head, byte=byte)


CHUNKED = "Transfer-Encoding: chunked\r\n\r\n"
HUGE = f"Content-Length: {1 << 40}\r\n"
ATTACKS: Sequence[Attack] = (
    _attack("a header without end", _flood("GET / HTTP/1.1\r\nX: "), "431", "closed"),
    _attack("headers without end", _flood("GET / HTTP/1.1\r\n", b"A: b\r\n" * 10_000), "431", "closed"),
    _attack("a path without end", _flood("GET /"), "414", "closed"),
    _attack("a chunk's extension without end", _flood(f"{CLASSIFY}{CHUNKED}1;"), "431", "400", "closed"),
    _attack("trailers without end", _flood(f"{CLASSIFY}{CHUNKED}0\r\n", b"A: b\r\n" * 10_000), "431", "400", "closed"),
    _attack("no request at all", _slow("", b""), "closed"),
    _attack("slow headers", _slow("GET / HTTP/1.1\r\nX: "), "408", "closed"),
    _attack("a slow body", _slow(f"{CLASSIFY}Content-Length: 1000\r\n\r\n"), "408", "closed"),
    _attack("a slow upload", _slow(f"{UPLOAD}Content-Length: 1000\r\n\r\n"), "408", "closed"),
    _attack("a large body announced", lambda t, s: at_once(t, s, s.connections, f"{CLASSIFY}{HUGE}\r\n", 0), "413"),
    _attack("a large upload announced", lambda t, s: at_once(t, s, s.connections, f"{UPLOAD}{HUGE}\r\n", 0), "413"),
    _attack(
        "the same, asking whether to send",
        lambda t, s: at_once(t, s, s.connections, f"{UPLOAD}{HUGE}Expect: 100-continue\r\n\r\n", 0),
        "413",
    ),
    _attack(
        "bodies at the same time",
        lambda t, s: at_once(
            t, s, s.connections, f"{CLASSIFY}Content-Length: {s.body + 1}\r\n\r\n", s.body, b" " * PIECE
        ),
        "503",
        "408",
        "closed",
    ),
    _attack("refused uploads at the same time", uploads, "422"),
    _attack("answers that are not read", unread, "closed"),
    _attack("more connections than there may be", crowded, "503", "408", "closed"),
    Attack("uploads without a descriptor", without_descriptors, frozenset({"503"}), "503", shuts=True),
)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a watch saw: seconds of the slowest answer about health, and bytes of resident memory."""

    before: int
    slowest: float = 0.0
    most: int = 0
    after: int = 0
    failed: int = 0


class Watch:
    """Asks for health on new connections, and looks at memory, in a process of its own: the attack's threads must not
    hold it up."""

    def __init__(self, target: Target) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_watch, args=(target, there), daemon=True)
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()

    def begin(self) -> None:
        self._here.send("begin")
        self._here.recv()

    def end(self) -> Seen:
        """What was seen since ``begin``."""
        self._here.send("end")
        seen: Seen = self._here.recv()
        return seen


def _watch(target: Target, orders: multiprocessing.connection.Connection) -> None:
    seen = Seen(0)
    while True:
        now = resident(target.pid)
        seen = dataclasses.replace(seen, most=max(seen.most, now))
        if orders.poll(0.01):
            if orders.recv() == "begin":
                seen = Seen(now, most=now)
                orders.send("begun")
            else:
                orders.send(dataclasses.replace(seen, after=now))
        start = time.perf_counter()
        failed = not is_healthy(target)
        slowest = max(seen.slowest, time.perf_counter() - start)
        seen = dataclasses.replace(seen, failed=seen.failed + failed, slowest=slowest)


def is_healthy(target: Target) -> bool:
    client = http.client.HTTPConnection(target.host, target.port, timeout=60)
    with contextlib.closing(client):
        try:
            client.request("GET", "/v2/health/live")
            return client.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def resident(pid: int) -> int:
    """Resident memory of a process, in bytes."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def run_attacks(
    target: Target, scale: Scale, attacks: Sequence[Attack]
) -> Iterator[tuple[Attack, Outcomes, Seen, bool]]:
    """A row for each attack: its outcomes and effects, and whether they are as they should be."""
    with Watch(target) as watch:
        for attack in attacks:
            watch.begin()
            found = attack.run(target, scale)
            seen = watch.end()
            healthy = is_healthy(target) if attack.shuts else not seen.failed
            yield attack, found, seen, healthy and found.keys() <= attack.expected and bool(found[attack.needed])


def main(
    connections: Annotated[int, typer.Option(help="of an attack")] = Scale.connections,
    upload_mb: Annotated[int, typer.Option(help="MiB of a large upload")] = Scale.upload // MIB,
    only: Annotated[str, typer.Option(help="attacks whose name has this in it")] = "",
    cache: Annotated[pathlib.Path | None, typer.Option(help="folder of compiled programs")] = None,
) -> None:
    """Runs the attacks and prints the table."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    scale = dataclasses.replace(Scale(), connections=connections, upload=upload_mb * MIB)
    chosen = [attack for attack in ATTACKS if only in attack.name]
    table = rich.table.Table("attack", "what its connections got", "worst health", "memory at most", "afterwards")
    good = True
    with contextlib.ExitStack() as stack:
        folder = cache or stack.enter_context(tempfile.TemporaryDirectory(prefix="jpets-hostile-"))
        server = stack.enter_context(serve(["--demo", "--cache-dir", str(folder), "--max-body-mb", "16"]))
        server.settle()
        url = urllib.parse.urlsplit(server.url)
        assert url.hostname is not None and url.port is not None
        target = Target(url.hostname, url.port, server.pid)
        stack.callback(lambda: rich.console.Console(width=160).print(table))
        for attack, found, seen, fine in run_attacks(target, scale, chosen):
            got = ", ".join(f"{count} x {name}" for name, count in sorted(found.items()))
            health = f"{seen.slowest * 1e3:.0f} ms" if not seen.failed else f"{seen.failed} failed"
            table.add_row(
                attack.name if fine else f"[bold]{attack.name}: expected {', '.join(sorted(attack.expected))}[/bold]",
                got,
                health,
                f"{(seen.most - seen.before) / 1e6:+.0f} MB",
                f"{(seen.after - seen.before) / 1e6:+.0f} MB",
            )
            good = good and fine
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
