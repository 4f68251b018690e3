"""A page for each room of the library, from its modules' docstrings."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Mapping, Sequence

from results.documents import ROOT

ROOMS: Mapping[str, Sequence[str]] = {
    "jpets": ("jpets.types", "jpets.config", "jpets.errors"),
    "jpets.deltas": (),
    "jpets.model": (),
    "jpets.scheduling": (),
    "jpets.students": (),
    "jpets.training": (),
    "pallas_kernels": (),
}
"""Packages that have a page, and the modules on it; if none are named, all modules of the package."""
INTERNAL = ("process", "hopper", "mosaic", "cudnn")
"""Names of modules that are not an interface: the training process, and kernels among which ``api`` chooses."""


def write_api(folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes ``PACKAGE.md`` for each room, and removes pages of rooms that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    return [_write(folder / f"{room}.md", _page(room, named or _modules(room))) for room, named in ROOMS.items()]


def _write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(text)
    return path


def _modules(package: str) -> list[str]:
    """The package's modules that define something public, inner packages included, in order of name."""
    found = []
    for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if _public(path) and path.stem not in INTERNAL:
            found.append(module)
    return found


def _public(path: pathlib.Path) -> bool:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) and not node.name.startswith("_") for node in tree.body)


def _page(room: str, modules: Sequence[str]) -> str:
    parts = [f"# {room}"]
    if room == "jpets":
        parts.append(_PACKAGE)
    return "\n\n".join([*parts, *(_directive(module) for module in modules)]) + "\n"


def _directive(module: str) -> str:
    return f"## {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n```"


_PACKAGE = """```{eval-rst}
.. autoclass:: jpets.Engine
   :members:
   :inherited-members:

.. autofunction:: jpets.read_task
```"""
"""The names of ``jpets`` itself, besides the types below."""
