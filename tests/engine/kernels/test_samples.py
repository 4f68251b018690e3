"""The calls of a program, and random operands for them: every plain candidate passes its trial with them."""

from __future__ import annotations

import functools
import io
import json
import sys

import jax
import numpy as np
import pytest
from support import method_tasks, shallow

from jpets.config import DType
from jpets.deltas import mask, onebit
from jpets.engine.batch.bucket import Bucket, widest
from jpets.engine.kernels import process
from jpets.engine.kernels.calls import Call, is_array
from jpets.engine.kernels.class_calls import MODEL, class_calls, every_call
from jpets.engine.kernels.operators import OPERATORS
from jpets.engine.kernels.trial import Outcome, Trials, difference
from jpets.engine.kernels.trials import Name, _told
from jpets.engine.programs.program import Family, ProgramKey, key_to_json, trace_program
from jpets.engine.workloads.registry import network_of

PACKED = Bucket(64, ((4, 8), (2, 16)))


def family(dtype: DType = "bfloat16") -> Family:
    backbone = shallow()
    network, params = network_of(backbone), dict(backbone.params)
    keys = {key for task in method_tasks(backbone) for key in network.classes(task, params)}
    return Family(network, dtype, tuple((key, 8) for key in sorted(keys)))


def program(of: Family) -> ProgramKey:
    return ProgramKey(PACKED, widest([key for key, _ in of.slots], heavy=True))


@functools.cache
def calls(dtype: DType = "bfloat16") -> dict[tuple[str, str], Call]:
    own = family(dtype)
    return every_call(class_calls(own, program(own)))


def test_every_operator_is_called() -> None:
    named = {operator for operator, _ in calls()}
    assert named == set(OPERATORS) - {"block_sparse_matmul"}
    owners = {each.owner for each in class_calls(family(), program(family()))}
    assert MODEL in owners and {owner.split("/")[0] for owner in owners - {MODEL}} == {
        "adapter",
        "diff",
        "lora",
        "mask",
        "onebit",
    }


def test_calls_have_the_shapes_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the methods really pass, as they are traced; slots and layers of banks may differ."""
    own, traced = family(), set()
    expected = {
        (call.operator, *operand_shapes(call.operands))
        for call in every_call(class_calls(own, program(own))).values()
        if call.operator in ("masked_matmul", "sign_matmul")
    }

    def listening(operator: str, compute: object) -> object:
        def listen(*operands: object, **settings: object) -> object:
            traced.add((operator, *operand_shapes(operands)))
            return compute(*operands, **settings)  # type: ignore[operator]

        return listen

    for module, name in ((mask, "masked_matmul"), (onebit, "sign_matmul")):
        monkeypatch.setattr(module, name, listening(name, getattr(module, name)))
    trace_program(own, program(own))
    assert traced == expected


def operand_shapes(operands: tuple[object, ...]) -> list[tuple[tuple[int, ...], str]]:
    arrays = [leaf for leaf in jax.tree.leaves(operands) if is_array(leaf)]
    return [((leaf.shape if leaf.ndim < 3 else leaf.shape[2:]), str(leaf.dtype)) for leaf in arrays]


PLAIN = [
    ("masked_matmul", "batched"),
    ("sign_matmul", "batched"),
    ("sparse_matmul", "dense"),
    ("low_rank", "reference"),
    ("packed_attention", "reference"),
]


@pytest.mark.parametrize(("operator", "candidate"), PLAIN)
def test_plain_candidates_pass_their_trials(operator: str, candidate: str) -> None:
    """As ``Trials`` compares them, without the timing."""
    call = next(own for (name, _), own in calls().items() if name == operator)
    trials = Trials(OPERATORS[operator], call, jax.local_devices()[0])
    for sample, expected in zip(trials.samples, trials.expected, strict=True):
        found = np.asarray(trials.compiled(candidate).run(sample), np.float32)
        assert difference(found, expected, sample, trials.dtype) == ""
        own = slice(None) if sample.own is None else sample.own
        assert np.isfinite(expected[own]).all() and np.abs(expected[own]).max() > 0.1
        assert sample.own is None or sample.own.any()
    poisoned = [leaf for leaf in jax.tree.leaves(trials.samples[0].operands) if is_array(leaf)]
    assert operator == "packed_attention" or any(has_nan(leaf) for leaf in poisoned)


def test_the_process_tries_what_it_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it but for its start, in this process."""
    own, call = family(), next(own for own in calls().values() if own.operator == "low_rank")
    name: Name = (*call.name, "reference")
    work = {"family": own.to_json(), "program": key_to_json(program(own)), "wanted": [name]}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(work) + "\n"))
    monkeypatch.setattr(sys, "argv", ["process", "0"])
    process.main()
    first, second = map(_told, capsys.readouterr().out.splitlines())
    assert first == (name, "trying")
    assert second is not None and second[0] == name and isinstance(second[1], Outcome) and second[1].ratio == 1.0


def has_nan(leaf: jax.Array) -> bool:
    array = np.asarray(leaf)
    if array.dtype == np.uint16:  # bf16, or places below 0x7fc0
        return bool((array == 0x7FC0).any())
    return array.dtype.kind in "fV" and bool(np.isnan(array.astype(np.float32)).any())
