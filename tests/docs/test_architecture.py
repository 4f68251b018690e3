"""``docs/architecture.md`` shows every room, in the order of a query's, an upload's and a batch's way."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HEADINGS = re.findall(r"^### `(\S+)`$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
SERVER = ("http", "protocols", "requests", "hosted")
WAYS = {
    "query": (
        SERVER,
        ("tasks", "workloads", "queue", "residency", "loop", "planning", "batch", "programs", "device", "results"),
    ),
    "upload": (SERVER, ("tasks", "residency", "device")),
    "batch": ((), ("loop", "planning", "costs", "batch", "programs", "device", "results")),
}


def test_every_room_has_its_heading() -> None:
    rooms = [
        path.relative_to(ROOT).as_posix()
        for folder in (ROOT / "jpets" / "engine", ROOT / "serving")
        for path in folder.iterdir()
        if (path / "__init__.py").exists()
    ]
    assert sorted(name for name in HEADINGS if name.startswith(("jpets/engine/", "serving/"))) == sorted(rooms)
    assert all((ROOT / name).is_dir() for name in HEADINGS)


@pytest.mark.parametrize("way", WAYS)
def test_headings_are_in_the_order_of_a_way(way: str) -> None:
    server, engine = WAYS[way]
    rooms = [*(f"serving/{room}" for room in server), *(f"jpets/engine/{room}" for room in engine)]
    assert _in_order(rooms)


def _in_order(rooms: Sequence[str]) -> bool:
    places = [HEADINGS.index(room) for room in rooms]
    return places == sorted(places)
