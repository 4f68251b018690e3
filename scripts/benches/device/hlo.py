"""Optimised HLO as text: the kernels of a program, and the bytes that each moves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

SIZES = {"pred": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
SIZES |= {f"{kind}{bits}": bits // 8 for kind in "su" for bits in (8, 16, 32, 64)}
SHAPE = re.compile(rf"\b({'|'.join(SIZES)})\[([\d,]*)\]")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ((?:\(.*?\)|\S+)) ([\w\-]+)\((.*)$")
NAMES = re.compile(r"%([\w.\-]+)")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
CALLS = re.compile(r"calls=%([\w.\-]+)")
FREE = frozenset({"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all"})
"""Instructions that run nothing."""
PASSED_ON = frozenset({"bitcast", "convert", "reshape", "copy"})
"""Inside of a fusion: their result is as much of the parameter as their reader reads."""
PARTS = frozenset({"gather", "dynamic-slice", "slice"})
IN_PLACE = frozenset({"scatter", "dynamic-update-slice"})


class Instruction(NamedTuple):
    name: str
    shape: str
    operation: str
    operands: Sequence[str]
    line: str
    root: bool


class Kernel(NamedTuple):
    """``operation`` is HLO's, or a custom call's target. ``flops`` of products alone."""

    name: str
    operation: str
    shape: str
    bytes: int
    flops: int


Computations = Mapping[str, Sequence[Instruction]]


def kernels_of(text: str) -> Iterator[Kernel]:
    """What the entry computation runs, in the order of its schedule.

    A fusion that reads a parameter in gathers or slices alone reads no more of it than they give; one that ends in a
    scatter or in the update of a slice writes no more than that.
    """
    computations, entry = _parsed(text)
    known = {each.name: each for each in entry}
    for each in entry:
        if each.operation in FREE:
            continue
        operands = [known[name] for name in each.operands if name in known]
        called = CALLS.search(each.line)
        moved, flops = nbytes(each.shape), 0
        operation = each.operation
        if each.operation == "fusion" and called:
            inside = computations[called[1]]
            moved = _written(inside, each.shape)
            moved += sum(_read(inside, at, nbytes(own.shape)) for at, own in enumerate(operands))
        else:
            moved += sum(nbytes(own.shape) for own in operands)
            if target := TARGET.search(each.line):
                operation = target[1]
                flops = _flops(operands, each.shape) if "gemm" in operation or "cublas" in operation else 0
        yield Kernel(each.name, operation, each.shape, moved, flops)


def nbytes(shape: str) -> int:
    """Of an array's shape, or of a tuple's."""
    return sum(SIZES[kind] * _elements(dims) for kind, dims in SHAPE.findall(shape))


def _elements(dims: str) -> int:
    return math.prod(int(size) for size in dims.split(",") if size)


def _parsed(text: str) -> tuple[Computations, Sequence[Instruction]]:
    found: dict[str, list[Instruction]] = {}
    entry: list[Instruction] = []
    own: list[Instruction] = []
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            own = found.setdefault(head[2], [])
            entry = own if head[1] else entry
        elif match := INSTRUCTION.match(line):
            operands = NAMES.findall(match[5].partition(")")[0])
            own.append(Instruction(match[2], match[3], match[4], operands, line, bool(match[1])))
    return found, entry


def _read(inside: Sequence[Instruction], number: int, whole: int) -> int:
    """Bytes that a fusion reads of a parameter."""
    names = {each.name for each in inside if each.operation == "parameter" and f"parameter({number})" in each.line}
    total, used = 0, False
    for each in inside:
        if not names & set(each.operands):
            continue
        if each.operation in PASSED_ON:
            names.add(each.name)
            continue
        used = True
        first = bool(each.operands) and each.operands[0] in names
        if first and each.operation in PARTS:
            total += nbytes(each.shape)
        elif not (first and each.operation in IN_PLACE):
            return whole
    return min(total, whole) if used else whole


def _written(inside: Sequence[Instruction], shape: str) -> int:
    """Bytes that a fusion writes."""
    root = next((each for each in inside if each.root), None)
    if root is None or root.operation not in IN_PLACE:
        return nbytes(shape)
    known = {each.name: each for each in inside}
    update = root.operands[2 if root.operation == "scatter" else 1]
    return nbytes(known[update].shape) if update in known else nbytes(shape)


def _flops(operands: Sequence[Instruction], shape: str) -> int:
    """Of a product, or of a batch of them along the first axis."""
    found = SHAPE.search(shape)
    if found is None or len(operands) < 2:
        return 0
    left, right = (sum(_elements(dims) for _, dims in SHAPE.findall(own.shape)) for own in operands[:2])
    out, dims = _elements(found[2]), found[2].split(",")
    batch = int(dims[0]) if len(dims) > 2 else 1
    return 2 * out * math.isqrt(left * right // (out * batch))
