"""How long a new task takes from upload to its first right answer while requests to other tasks go on.

``PYTHONPATH=scripts python -m faults.upload_under_load`` starts a demo server, sends 50 requests a second, and uploads
copies of a demo task under new names; the first answer must equal that of the original. Exit code 1 where a request to
another task failed or was not answered.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import statistics
import tempfile
import time
from typing import Annotated, Any

import httpx
import typer
from served import ROOT, serve

TEXT = "a chess engine that plays over the network"
SOURCE = "topic"
NO_ANSWER = 0


async def measure(url: str, rate: float, uploads: int) -> dict[str, Any]:
    """Open-loop load at ``rate`` for as long as the uploads take, one upload a second."""
    statuses: list[int] = []
    others = ["role", "toolkit", "ecosystem", "language"]
    file = (ROOT / "checkpoints" / "demo" / f"{SOURCE}.safetensors").read_bytes()
    stop = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:

        async def ask(model: str) -> httpx.Response:
            return await client.post("/v1/classify", json={"model": model, "input": TEXT})

        async def one(number: int) -> None:
            try:
                statuses.append((await ask(others[number % len(others)])).status_code)
            except httpx.HTTPError:
                statuses.append(NO_ANSWER)

        async def load() -> None:
            start, number, running = time.perf_counter(), 0, set[asyncio.Task[None]]()
            while not stop.is_set():
                task = asyncio.create_task(one(number))
                running.add(task)
                task.add_done_callback(running.discard)
                number += 1
                await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
            await asyncio.gather(*running)

        expected = (await ask(SOURCE)).json()["data"][0]["label"]
        loading = asyncio.create_task(load())
        seconds = []
        for number in range(uploads):
            await asyncio.sleep(1)
            start = time.perf_counter()
            answer = await client.put(f"/v1/tasks/copy-{number}", content=file)
            answer.raise_for_status()
            first = await ask(f"copy-{number}")
            seconds.append(time.perf_counter() - start)
            if first.json()["data"][0]["label"] != expected:
                raise RuntimeError("the new task's first answer is wrong")
        stop.set()
        await loading
    failed = sum(status != 200 for status in statuses)
    worst = max(seconds)
    return {"upload_seconds": statistics.median(seconds), "worst": worst, "requests": len(statuses), "failed": failed}


def main(
    rate: Annotated[float, typer.Option(help="requests a second to other tasks")] = 50,
    uploads: Annotated[int, typer.Option(help="tasks to upload")] = 10,
    cache: Annotated[pathlib.Path | None, typer.Option(help="cache folder; an empty one by default")] = None,
) -> None:
    """Prints the figures as JSON."""
    with (
        tempfile.TemporaryDirectory(prefix="jpets-upload-") as empty,
        serve(["--demo", "--cache-dir", str(cache or empty)]) as server,
    ):
        found = asyncio.run(measure(server.url, rate, uploads))
    typer.echo(json.dumps(found, indent=1))
    raise typer.Exit(found["failed"] > 0)


if __name__ == "__main__":
    typer.run(main)
