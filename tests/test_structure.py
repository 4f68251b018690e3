"""How large things may be."""

from __future__ import annotations

import ast
import functools
import pathlib
import statistics
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("jpets", "pallas_kernels", "checkpoints", "serving", "scripts", "examples", "tests")
LINES, MEDIAN = 400, 120
ARGUMENTS, METHODS = 8, 20
REASON = "It has more than 20 methods, as "


def files() -> Iterator[pathlib.Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    return [
        (f"{path.relative_to(ROOT).as_posix()}:{node.name}", node)
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def functions(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_are_short() -> None:
    """A file that grows beyond a few screens holds more than one thing."""
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files()}
    assert not {name: count for name, count in lines.items() if count > LINES}
    assert statistics.median(lines.values()) < MEDIAN


def test_constructors_take_few_arguments() -> None:
    """More than so many parts say that a class does more than one thing. Frozen data has fields instead."""
    found = {}
    for name, node in classes():
        for function in functions(node):
            own = function.args
            count = len(own.posonlyargs) + len(own.args) + len(own.kwonlyargs) - 1
            if function.name == "__init__" and count > ARGUMENTS:
                found[name] = count
    assert not found


def test_classes_with_many_methods_say_why() -> None:
    many = {name: ast.get_docstring(node) or "" for name, node in classes() if len(functions(node)) > METHODS}
    assert not {name for name, text in many.items() if REASON not in text}
