"""What the system lets a server have, for ``jpets doctor``: memory mappings, open files, shared memory, folders."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from jpets.app.commands.output import size
from jpets.engine.programs.cache_folder import PARTS, default_cache_dir
from jpets.engine.programs.mappings import MOST_MAPPINGS
from jpets.errors import InvalidInput

MAPPINGS_OF_ONE = 65_530
"""What Linux grants by default: enough for one backbone on one CPU device."""
MAPPINGS_OF_SEVERAL = 262_144
DESCRIPTORS = 4096
"""For 1,024 connections, and as many files again."""
SHARED = Path("/dev/shm")
SHARED_BYTES = 1 << 30
FREE_BYTES = 1 << 30
"""A cache of programs takes some 100 MB a backbone, an upload half of this."""


class Finding(NamedTuple):
    what: str
    status: Literal["ok", "note", "wrong"]
    detail: str


def limits() -> Iterator[Finding]:
    yield from _mappings()
    yield _descriptors()
    yield _shared_memory()


def folders() -> Iterator[Finding]:
    yield _cache()
    yield _temporary()


def _mappings() -> Iterator[Finding]:
    try:
        most = int(MOST_MAPPINGS.read_text(encoding="ascii"))
    except OSError:
        return  # not Linux, which alone counts them
    raised = f"sysctl -w vm.max_map_count={MAPPINGS_OF_SEVERAL}"
    if most >= MAPPINGS_OF_SEVERAL:
        yield Finding("memory mappings", "ok", f"vm.max_map_count is {most:,}")
    elif most >= MAPPINGS_OF_ONE:
        detail = f"vm.max_map_count is {most:,}: enough for one backbone on one CPU; for several backbones or devices"
        yield Finding("memory mappings", "note", f"{detail} on a CPU: {raised}")
    else:
        detail = f"vm.max_map_count is {most:,}; expected {MAPPINGS_OF_ONE:,} or more, or programs find no room"
        yield Finding("memory mappings", "wrong", f"{detail}: {raised}")


def _descriptors() -> Finding:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY or most >= DESCRIPTORS:
        shown = "unlimited" if most == resource.RLIM_INFINITY else f"{most:,}"
        return Finding("open files", "ok", f"at most {shown}, to which the server raises its limit")
    detail = f"at most {most:,}, too few for 1,024 connections; expected {DESCRIPTORS:,}"
    how = "ulimit -Hn, LimitNOFILE= of systemd, or docker run --ulimit nofile"
    return Finding("open files", "note", f"{detail}: raise the hard limit ({how})")


def _shared_memory() -> Finding:
    what = "shared memory"
    try:
        total = shutil.disk_usage(SHARED).total
    except OSError:
        return Finding(what, "note", f"there is no {SHARED}, through which several GPUs of one server talk")
    if total < SHARED_BYTES:
        detail = f"{SHARED} has {size(total)}; for several GPUs expected {size(SHARED_BYTES)}: docker run --shm-size=1g"
        return Finding(what, "note", detail)
    return Finding(what, "ok", f"{SHARED} has {size(total)}")


def _cache() -> Finding:
    remedy = "set JPETS_CACHE_DIR, or --cache-dir of the server, to a folder that can"
    try:
        folder = default_cache_dir()
    except InvalidInput as error:
        return Finding("cache", "wrong", f"{error.message}; {remedy} be written")
    made = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    parts = [made, *(folder / part for part in PARTS if (folder / part).exists())]
    if not all(place.is_dir() and os.access(place, os.W_OK | os.X_OK) for place in parts):
        return Finding("cache", "wrong", f"{folder} cannot be written; {remedy}")
    free = shutil.disk_usage(made).free
    few = f"; only {size(free)} are free there" if free < FREE_BYTES else ""
    if made != folder:
        return Finding("cache", "note" if few else "ok", f"{folder}, not made yet{few}")
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    return Finding("cache", "note" if few else "ok", f"{folder}, {len(sizes)} files, {size(sum(sizes))}{few}")


def _temporary() -> Finding:
    what = "temporary folder"
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError:
        return Finding(what, "wrong", "there is none that can be written, for uploads; set TMPDIR to one")
    if free < FREE_BYTES:
        detail = f"{folder} has {size(free)} free; uploads may need {size(FREE_BYTES)}: free some, or set TMPDIR"
        return Finding(what, "note", detail)
    return Finding(what, "ok", f"{folder}, {size(free)} free")
