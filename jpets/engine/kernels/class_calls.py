"""The operators that a family's classes call, at the shapes of one program: what there is to choose for.

A class of a method that is not named here, of an installed package, say, has the operators that are usual on its
platform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpets.config import LINEAR_SITES, BackboneConfig
from jpets.deltas import class_method
from jpets.deltas.bank import storage_dtype
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, Bucket, capacity
from jpets.engine.kernels.calls import Call
from jpets.engine.programs.program import Family, ProgramKey
from pallas_kernels.packed_attention import AttentionGroup
from pallas_kernels.windows import Runs

MODEL = ""
"""In the place of a class: the operators that the model itself calls."""
LAYER = 0


class ClassCalls(NamedTuple):
    """The calls of one operator that a class makes in each layer: ``owner`` is the class's name, or ``MODEL``."""

    owner: str
    operator: str
    calls: Sequence[Call]


def class_calls(family: Family, program: ProgramKey) -> list[ClassCalls]:
    """All calls of a program with every class of ``family``, heavy classes first, which gain most by a choice.

    Banks have one layer, and as many slots as rows need.
    """
    shapes = _Shapes(family, program)
    keys = sorted((key for key, _ in family.slots), key=lambda key: class_method(key.method).kind != "heavy")
    found = [
        ClassCalls(str(key), operator, calls)
        for key in keys
        if key.method in METHODS
        for operator, calls in [METHODS[key.method](shapes, key)]
        if calls
    ]
    own = ClassCalls(MODEL, "packed_attention", [shapes.attention()]), ClassCalls(MODEL, "linear", shapes.products())
    return [*found, *own]


def every_call(classes: Sequence[ClassCalls]) -> dict[tuple[str, str], Call]:
    """Each call once, by operator and shape."""
    return {call.name: call for each in classes for call in each.calls}


class _Shapes:
    """Shapes of operands in one program."""

    def __init__(self, family: Family, program: ProgramKey) -> None:
        self.config: BackboneConfig = family.config
        self.dtype = family.dtype
        self.bucket: Bucket = program.bucket
        self.size = self.bucket.run(program.variant.run)
        self.runs = self.bucket.most_runs(program.variant.run)
        self.slots = self.bucket.rows + 2

    def array(self, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype or self.dtype))

    def banks(self, key: ClassKey, site: str) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The arrays of a site in a class's bank, by their names without the site's."""
        specs = class_method(key.method).bank_arrays(key, self.config)
        return {
            name.removeprefix(f"{site}/"): self.array(
                self.slots, 1, *spec.shape[1:], dtype=storage_dtype(spec, self.dtype)
            )
            for name, spec in specs.items()
            if name.startswith(f"{site}/")
        }

    def tokens(self, key: ClassKey) -> Iterator[tuple[str, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, Runs]]:
        """(site, inputs, outputs, runs) of each site of a heavy class."""
        index = self.array(self.runs, dtype=np.int32)
        runs = Runs(self.array(dtype=np.int32), index, index, index, index)  # type: ignore[arg-type]
        for site, _ in key.sites:
            inputs, outputs = self.config.dims(site)
            yield (
                site,
                self.array(self.bucket.tokens, inputs),
                self.array(self.bucket.tokens, outputs, dtype=np.float32),
                runs,
            )

    def heavy(self, operator: str, shape: str, *operands: Any) -> Call:
        return Call(operator, f"{shape} {self.dtype}", operands, {"size": self.size, "layer": LAYER})

    def low_rank(self, down: Any, up: Any, **settings: Any) -> Call:
        (*_, inputs, rank), outputs = down.shape, up.shape[-1]
        groups = capacity(self.bucket, FULL)
        length = self.bucket.longest if self.bucket.rectangular else self.bucket.segment
        words = "".join(f" {value}" for value in settings.values() if isinstance(value, str))
        x, slots = self.array(groups, length, inputs), self.array(groups, dtype=np.int32)
        shape = f"{inputs}x{rank}x{outputs}{words} {self.dtype}"
        return Call("low_rank", shape, (x, down, up, slots, LAYER), settings)

    def products(self) -> list[Call]:
        """The shared products of a layer."""
        sizes = dict.fromkeys(self.config.dims(site) for site in LINEAR_SITES)
        return [
            Call(
                "linear",
                f"{inputs}x{outputs} {self.dtype}",
                (self.array(self.bucket.tokens, inputs), self.array(inputs, outputs)),
                {},
            )
            for inputs, outputs in sizes
        ]

    def attention(self) -> Call:
        bucket, width = self.bucket, self.config.hidden_size
        part = self.array(bucket.tokens, width)
        groups = tuple(
            AttentionGroup(
                None if bucket.rectangular else self.array(rows, length, dtype=np.int32),  # type: ignore[arg-type]
                self.array(rows, dtype=np.int32),  # type: ignore[arg-type]
            )
            for rows, length in bucket.groups
        )
        cells = None if bucket.rectangular else self.array(bucket.tokens, dtype=np.int32)
        heads = self.config.heads
        shape = f"{heads} heads of {width // heads} {self.dtype}"
        return Call("packed_attention", shape, (part, part, part, groups, cells, heads), {})


def _mask(shapes: _Shapes, key: ClassKey) -> tuple[str, list[Call]]:
    calls = []
    for site, x, y, runs in shapes.tokens(key):
        weight = shapes.array(x.shape[1], y.shape[1])
        bits = shapes.banks(key, site)["bits"]
        calls.append(shapes.heavy("masked_matmul", f"{x.shape[1]}x{y.shape[1]}", x, y, weight, bits, runs))
    return "masked_matmul", calls


def _onebit(shapes: _Shapes, key: ClassKey) -> tuple[str, list[Call]]:
    calls = []
    for site, x, y, runs in shapes.tokens(key):
        banks = shapes.banks(key, site)
        operands = (x, y, banks["signs"], banks["scale"], runs)
        calls.append(shapes.heavy("sign_matmul", f"{x.shape[1]}x{y.shape[1]}", *operands))
    return "sign_matmul", calls


def _diff(shapes: _Shapes, key: ClassKey) -> tuple[str, list[Call]]:
    operator = "block_sparse_matmul" if key.options else "sparse_matmul"
    calls = []
    for site, x, y, runs in shapes.tokens(key):
        lists = [shapes.banks(key, site)[name] for name in ("rows", "cols", "ends", "values")]
        blocks = f" in blocks of {lists[-1].shape[-1]}" if key.options else ""
        shape = f"{x.shape[1]}x{y.shape[1]} {lists[0].shape[-1]} entries{blocks}"
        calls.append(shapes.heavy(operator, shape, x, y, *lists, runs))
    return operator, calls


def _lora(shapes: _Shapes, key: ClassKey) -> tuple[str, list[Call]]:
    banks = (shapes.banks(key, site) for site, _ in key.sites)
    return "low_rank", [shapes.low_rank(each["A"], each["B"]) for each in banks]


def _adapter(shapes: _Shapes, key: ClassKey) -> tuple[str, list[Call]]:
    banks = (shapes.banks(key, site) for site, _ in key.sites)
    activation = key.option("activation")
    return "low_rank", [
        shapes.low_rank(
            each["down"], each["up"], activation=activation, down_bias=each["down_bias"], up_bias=each["up_bias"]
        )
        for each in banks
    ]


METHODS: Mapping[str, Callable[[_Shapes, ClassKey], tuple[str, list[Call]]]] = {
    "mask": _mask,
    "onebit": _onebit,
    "diff": _diff,
    "lora": _lora,
    "adapter": _adapter,
}
