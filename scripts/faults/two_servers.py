"""How long two servers on one repository answer differently while tasks come, change and go through both of them.

``PYTHONPATH=scripts python -m faults.two_servers`` starts two demo servers on one folder, or on the database that
``--catalogue`` names. It uploads, rolls back and deletes through both in turn, and stores tasks in the repository
directly, no two files alike. After each change it asks the other server (both, after a direct one) until it has and
serves the same version, or none. Meanwhile ``--queries`` a second name a version that one of the servers told of, and
must be answered by it, or told that another one is served by now. In the end it compares all that the two report, and
what the repository holds with what was uploaded. Exit code 1 where a change took longer than a second to be seen, or an
upload was lost; an answer that is neither right nor a 404 ends the run.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from served import ROOT, serve

from checkpoints.repository import Repository
from checkpoints.task_file import read_task, task_to_bytes
from jpets.errors import NotFound

TEXT = "a chess engine that plays over the network"
SOURCES = ("topic", "role")
"""Demo tasks whose like are uploaded in turn."""
MARK = "file 00000000"
"""The description of an uploaded task, up to its number: no two files are alike, and making one takes no time."""
LIMIT = 1.0
"""Seconds within which both must answer alike."""
LOOK = 0.04
PATIENCE = 30.0
TASKS = 40
OTHERS = 4
"""Of this many uploads one comes with a rollback, one with a deletion, and one with a task that is stored directly."""
ROLLED_BACK, DELETED, BESIDE = OTHERS, OTHERS + 1, 2 * OTHERS - 1
"""How many uploads ago the task of a rollback, deletion or direct store was uploaded: no task has two of these
kinds."""


class Change(NamedTuple):
    """Seconds from the answer to a change until the other server got the first question that it answered alike, and
    until that answer came."""

    kind: str
    seconds: float
    answered: float


class Pair:
    """Two servers, and which answers each version of each task must give. ``stored`` has the newest version of each
    task that was uploaded."""

    def __init__(
        self, clients: Sequence[httpx.AsyncClient], repository: Repository, sources: Mapping[str, bytes]
    ) -> None:
        self.clients = clients
        self._ids = list(sources)
        tasks = [read_task(data, id=id) for id, data in sources.items()]
        self._files = [task_to_bytes(dataclasses.replace(task, description=MARK)) for task in tasks]
        self._made = itertools.count()
        self._repository = repository
        self._labels: Sequence[str | None] = ()
        self.changes: list[Change] = []
        self._locks = collections.defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._sources: dict[tuple[str, int], int] = {}
        self.stored: dict[str, int] = {}
        self.queries = collections.Counter[str]()
        """Outcomes of queries that named a version."""

    async def start(self) -> None:
        """Asks for the answers of the tasks that are there."""
        self._labels = [await self.label(0, id) for id in self._ids]

    def _file(self, source: int) -> bytes:
        """A file of a source's task, with a description that no other file has."""
        return self._files[source].replace(MARK.encode(), f"file {next(self._made):08}".encode(), 1)

    async def upload(self, id: str, at: int, source: int) -> None:
        async with self._locks[id]:
            answer = await self.clients[at].put(f"/v1/tasks/{id}", content=self._file(source))
            answer.raise_for_status()
            version = answer.json()["version"]
            self._keep(id, version, source)
            await self._agree("upload", id, 1 - at, version)

    async def store(self, id: str, source: int) -> None:
        """As ``jpets task add --repository`` does."""
        async with self._locks[id]:
            stored = await asyncio.to_thread(self._repository.put, id, self._file(source))
            self._keep(id, stored.version, source)
            await asyncio.gather(*(self._agree("stored beside", id, at, stored.version) for at in (0, 1)))

    async def roll_back(self, id: str, at: int) -> None:
        """Rolls a task back that has an earlier version."""
        async with self._locks[id]:
            answer = await self.clients[at].post(f"/v1/tasks/{id}/rollback")
            if answer.status_code != 404:
                answer.raise_for_status()
                await self._agree("rollback", id, 1 - at, answer.json()["version"])

    async def delete(self, id: str, at: int) -> None:
        async with self._locks[id]:
            answer = await self.clients[at].delete(f"/v1/tasks/{id}")
            if answer.status_code != 404:
                answer.raise_for_status()
                await self._agree("deletion", id, 1 - at, None)

    def _keep(self, id: str, version: int, source: int) -> None:
        """Notes an upload that was answered. Versions of a task never go back, whatever was deleted."""
        if version <= self.stored.get(id, 0):
            raise RuntimeError(f"{id}: version {version} was given twice")
        self._sources[id, version] = source
        self.stored[id] = version

    async def query(self, id: str, at: int) -> None:
        """Asks a server which version of a task it has, and then that version."""
        if (version := await self._version(at, id)) is None:
            return
        path = f"/v2/models/{id}/versions/{version}/infer"
        text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [TEXT]}
        answer = await self.clients[at].post(path, json={"inputs": [text], "outputs": [{"name": "label"}]})
        if answer.status_code == 404:
            self.queries["another version by then"] += 1
            return
        answer.raise_for_status()
        found = answer.json()
        if (source := self._sources.get((id, int(version)))) is None:  # its upload is not answered yet
            self.queries["not checked"] += 1
        elif found["model_version"] != version or found["outputs"][0]["data"] != [self._labels[source]]:
            raise RuntimeError(f"version {version} of {id} was asked, another one answered")
        else:
            self.queries["by the version asked"] += 1

    async def _agree(self, kind: str, id: str, other: int, version: int | None) -> None:
        """Asks the other server until it has ``version``, None for no task, and checks its answer."""
        began, asked = time.perf_counter(), 0.0
        wanted = None if version is None else str(version)
        while await self._version(other, id) != wanted:
            if asked > PATIENCE:
                raise TimeoutError(f"after {PATIENCE:g} s the other server does not know of a {kind}")
            await asyncio.sleep(LOOK)
            asked = time.perf_counter() - began
        label = await self.label(other, id)
        self.changes.append(Change(kind, asked, time.perf_counter() - began))
        expected = None if version is None else self._labels[self._sources[id, version]]
        if label != expected:
            raise RuntimeError(f"after a {kind} the other server answers {label!r}, expected {expected!r}")

    async def _version(self, at: int, id: str) -> str | None:
        answer = await self.clients[at].get(f"/v2/models/{id}")
        return answer.json()["versions"][0] if _is_there(answer) else None

    async def label(self, at: int, id: str) -> str | None:
        answer = await self.clients[at].post("/v1/classify", json={"model": id, "input": TEXT})
        return str(answer.json()["data"][0]["label"]) if _is_there(answer) else None

    async def told(self, at: int, ids: Sequence[str]) -> dict[str, Any]:
        """All by which a client can tell two servers apart: the list, answers, readiness, and the count of tasks."""
        client = self.clients[at]
        listed = (await client.get("/v1/tasks", params={"limit": 1000})).json()["tasks"]
        ready = [(await client.get(f"/v2/models/{id}/ready")).status_code for id in ids]
        counted = {
            sample.labels["tier"]: sample.value
            for family in text_string_to_metric_families((await client.get("/metrics")).text)
            for sample in family.samples
            if sample.name == "jpets_tasks"
        }
        answers = [await self.label(at, id) for id in ids]
        return {"list": listed, "ready": ready, "known": counted["repository"], "answers": answers}


def _is_there(answer: httpx.Response) -> bool:
    """False for a task that is not there; raises ``httpx.HTTPStatusError`` for any other error."""
    if answer.status_code == 404:
        return False
    answer.raise_for_status()
    return True


async def measure(
    urls: Sequence[str],
    repository: Repository,
    sources: Mapping[str, bytes],
    rate: float,
    seconds: float,
    queries: float = 0,
) -> dict[str, Any]:
    """Uploads ``rate`` times a second for so long, through both servers in turn, beside so many queries a second.

    ``sources`` are tasks that both serve, with their files; the like of them are uploaded in turn. Their answers must
    differ.
    """
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60)) for url in urls]
        pair = Pair(clients, repository, sources)
        await pair.start()
        ids = [f"task-{number}" for number in range(TASKS)]
        async with asyncio.TaskGroup() as running:
            if queries:
                running.create_task(_ask(pair, ids, queries, seconds))
            start = time.perf_counter()
            for number in range(round(rate * seconds)):
                at, source = number % 2, number // TASKS % 2
                running.create_task(pair.upload(ids[number % TASKS], at, source))
                if number % OTHERS == 1:
                    running.create_task(pair.roll_back(ids[(number - ROLLED_BACK) % TASKS], 1 - at))
                if number % OTHERS == 2:
                    running.create_task(pair.store(ids[(number - BESIDE) % TASKS], source))
                if number % OTHERS == 3:
                    running.create_task(pair.delete(ids[(number - DELETED) % TASKS], at))
                await asyncio.sleep(max(0.0, start + (number + 1) / rate - time.perf_counter()))
        took = time.perf_counter() - start
        all_alike = await _all_alike(pair, ids)
        missing = await asyncio.to_thread(_missing, repository, pair.stored)
    times = [change.seconds for change in pair.changes]
    kinds = collections.Counter(change.kind for change in pair.changes)
    return {
        "changes": dict(kinds),
        "uploads_a_second": kinds["upload"] / took,
        "median_seconds": statistics.median(times),
        "worst_seconds": max(times),
        "worst_answered_seconds": max(change.answered for change in pair.changes),
        "worst_by_kind": {kind: max(c.seconds for c in pair.changes if c.kind == kind) for kind in kinds},
        "all_alike_seconds": all_alike,
        "queries": dict(pair.queries),
        "uploads_lost": missing,
    }


async def _ask(pair: Pair, ids: Sequence[str], rate: float, seconds: float) -> None:
    async with asyncio.TaskGroup() as running:
        start = time.perf_counter()
        for number in range(round(rate * seconds)):
            running.create_task(pair.query(ids[number % len(ids)], number % 2))
            await asyncio.sleep(max(0.0, start + (number + 1) / rate - time.perf_counter()))


def _missing(repository: Repository, stored: Mapping[str, int]) -> int:
    """Tasks whose newest version in the repository is older than an upload that was answered. A deleted one shows
    nothing, but its next upload would have been given the same number again."""
    lost = 0
    for id, version in stored.items():
        try:
            newest = repository.versions(id)[-1].version
        except NotFound:
            continue
        lost += newest < version
    return lost


async def _all_alike(pair: Pair, ids: Sequence[str]) -> float:
    """Seconds until the two servers report the same in all."""
    began = time.perf_counter()
    while True:
        asked = time.perf_counter() - began
        one, other = await asyncio.gather(pair.told(0, ids), pair.told(1, ids))
        differ = [what for what in one if one[what] != other[what]]
        if not differ:
            return asked
        if asked > PATIENCE:
            raise TimeoutError(f"after {PATIENCE:g} s the servers differ in {differ}")


def main(
    rate: Annotated[float, typer.Option(help="uploads a second")] = 20,
    seconds: Annotated[float, typer.Option(help="how long")] = 10,
    queries: Annotated[float, typer.Option(help="queries a second that name a version")] = 0,
    catalogue: Annotated[str | None, typer.Option(help="URL of an empty database for the catalogue")] = None,
    cache: Annotated[pathlib.Path | None, typer.Option(help="cache folder; an empty one by default")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Prints the figures as JSON."""
    with tempfile.TemporaryDirectory(prefix="jpets-two-") as folder:
        options = ["--demo", "--repository", f"{folder}/tasks", "--cache-dir", str(cache or f"{folder}/cache")]
        options += ["--catalogue", catalogue] if catalogue is not None else []
        with serve(options) as first, serve(options) as second:
            sources = {name: (ROOT / "checkpoints" / "demo" / f"{name}.safetensors").read_bytes() for name in SOURCES}
            with contextlib.closing(Repository.open(f"{folder}/tasks", catalogue=catalogue)) as repository:
                found = asyncio.run(measure([first.url, second.url], repository, sources, rate, seconds, queries))
    found |= {"database": "SQLite" if catalogue is None else catalogue.partition(":")[0]}
    text = json.dumps(found, indent=1)
    typer.echo(text)
    if json_out is not None:
        json_out.write_text(text + "\n")
    late = max(found["worst_seconds"], found["all_alike_seconds"]) > LIMIT
    raise typer.Exit(late or found["uploads_lost"] > 0)


if __name__ == "__main__":
    typer.run(main)
