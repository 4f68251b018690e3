"""Who may import whom."""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
OURS = ("jpets", "pallas_kernels", "checkpoints", "serving")
WIRING = ("jpets/serve.py", "jpets/hosting.py", "jpets/cli.py", "jpets/pretrained.py", "jpets/commands/")
"""Entry points, which alone may put the parts together."""


def imports(path: pathlib.Path) -> set[str]:
    """Modules that a file imports, anywhere in it, as dotted names; ``from a import b`` counts as ``a.b`` and ``a``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def files(part: str) -> list[pathlib.Path]:
    return sorted((ROOT / part).rglob("*.py")) if (ROOT / part).is_dir() else [ROOT / part]


def reaches(modules: set[str], package: str) -> set[str]:
    return {name for name in modules if name == package or name.startswith(package + ".")}


@pytest.mark.parametrize(
    ("part", "forbidden"),
    [
        ("pallas_kernels", ["jpets", "checkpoints", "serving", "numpy.random", "flax", "transformers"]),
        ("jpets/scheduling", ["jax", "flax", "checkpoints", "serving", "jpets.engine", "jpets.model", "jpets.deltas"]),
        ("checkpoints", ["serving", "jpets.model", "jpets.engine", "jpets.scheduling", "torch", "flax"]),
        ("serving", ["jpets.model", "checkpoints", "flax", "torch"]),
        ("jpets/engine", ["flax", "torch", "transformers"]),
        ("jpets/deltas", ["flax", "torch", "jpets.engine", "jpets.model"]),
        ("jpets/model", ["jpets.engine", "jpets.scheduling", "torch"]),
    ],
)
def test_parts_import_only_downwards(part: str, forbidden: list[str]) -> None:
    for path in files(part):
        for package in forbidden:
            assert not reaches(imports(path), package), path


def test_only_wiring_joins_the_parts() -> None:
    for path in files("jpets"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(WIRING):
            for package in ("serving", "checkpoints"):
                assert not reaches(imports(path), package), name


def test_only_the_model_imports_flax_and_nothing_imports_torch() -> None:
    for part in OURS:
        for path in files(part):
            name = path.relative_to(ROOT).as_posix()
            assert not reaches(imports(path), "torch"), name
            assert name.startswith("jpets/model/") or not reaches(imports(path), "flax"), name


def test_processes_that_are_started_import_nothing_of_the_working_folder() -> None:
    for part in OURS:
        for path in files(part):
            text = path.read_text()
            assert text.count('sys.executable, "-P", "-m"') == text.count("sys.executable"), path
