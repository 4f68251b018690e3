"""The code that decides what a program computes: a module, and all that it imports."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import pathlib
import sys
import sysconfig
import uuid
from collections.abc import Iterator, Mapping, Sequence

OURS = ("jpets", "pallas_kernels", "checkpoints", "serving")
LIBRARIES = ("flax", "jax", "jaxlib", "jaxtyping", "ml_dtypes", "numpy", "optax", "scipy", "tokenizers", "transformers")
"""Packages that count by their version; of other packages, every file counts."""
PROGRAM = "jpets.engine.programs.program"
"""The module that traces and compiles programs."""
LARGE = 64 << 20
"""Bytes of a package that counts by its version too."""


@functools.cache
def digest_of_code(*roots: str) -> str:
    """Digest of these modules, of the modules that they import anywhere in their sources, and so on.

    Of our packages single modules count; of other packages all files, data included; of ``LIBRARIES`` the version.
    Installed packages other than a root's own are not followed further. A root without a source, such as one typed in
    a session, has another digest in every process.
    """
    followed = {*map(_top, roots), *OURS}
    found: dict[str, bytes] = {}
    wanted, seen = list(roots), set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen or _top(name) in sys.stdlib_module_names:
            continue
        seen.add(name)
        files = _files(name)
        if not files:
            found[name] = uuid.uuid4().bytes if name in roots else _version(_top(name))
        for path, module in files.items():
            content = found[f"{module}:{path.name}"] = path.read_bytes()
            if path.suffix == ".py" and (_top(name) in followed or not _installed(path)):
                wanted += _imports(content, module, package=path.name == "__init__.py")
    digest = hashlib.sha256()
    for name, content in sorted(found.items()):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def modules_of(kind: type) -> Sequence[str]:
    """The modules in which a class and its base classes are written, without Python's own."""
    modules = {each.__module__ for each in kind.__mro__}
    return sorted(name for name in modules if _top(name) not in sys.stdlib_module_names)


def foreign_modules(kind: type) -> Sequence[str]:
    """``modules_of``, without our packages."""
    return [name for name in modules_of(kind) if _top(name) not in OURS]


def _top(name: str) -> str:
    return name.partition(".")[0]


def _files(name: str) -> Mapping[pathlib.Path, str]:
    """The files that count for a module, each with its module's name; none for a module that counts by version."""
    top = _top(name)
    spec = _spec(top) if top not in LIBRARIES else None
    if spec is None:
        return {}
    folders = [pathlib.Path(location) for location in spec.submodule_search_locations or ()]
    if top in OURS:
        return dict(_own_file(folders, name))
    if not folders:
        file = pathlib.Path(spec.origin or "")
        return {file: top} if file.is_file() else {}
    files = {path: module for folder in folders for path, module in _package(folder, top)}
    return files if sum(path.stat().st_size for path in files) <= LARGE else {}


def _own_file(folders: list[pathlib.Path], name: str) -> Iterator[tuple[pathlib.Path, str]]:
    """The ``__init__`` of one of our packages only names what is in it."""
    _, *parts = name.split(".")
    for folder in folders if parts else ():
        base = folder.joinpath(*parts)
        yield from ((path, name) for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file())


def _package(folder: pathlib.Path, top: str) -> Iterator[tuple[pathlib.Path, str]]:
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        if path.is_file() and "__pycache__" not in inside.parts:
            parts = inside.parent.parts if inside.name == "__init__.py" else inside.with_suffix("").parts
            yield path, ".".join([top, *parts])


def _imports(source: bytes, module: str, *, package: bool) -> Iterator[str]:
    """The names that a source imports, also inside functions; some are of things in a module, not of modules."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # a template or the like: its content counts, but it cannot be imported
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if package else module.split(".")[:-1]
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names = [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name if _top(name) in OURS else _top(name) for name in names if name)


def _spec(top: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):  # __main__ of a session
        return None


def _installed(path: pathlib.Path) -> bool:
    return any(path.is_relative_to(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))


def _version(name: str) -> bytes:
    """The version of a module's package; empty for a module that is not a package, or not there."""
    try:
        return importlib.metadata.version(name).encode()
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return b""
