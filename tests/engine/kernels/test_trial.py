"""A candidate against the reference: what is out, and why."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from fake_kernels import CALL, TABLE

from jpets.engine.kernels.calls import Sample
from jpets.engine.kernels.process import try_all
from jpets.engine.kernels.trial import Outcome, Trials, difference
from jpets.engine.kernels.trials import Name, _told


@functools.cache
def trials() -> Trials:
    return Trials(TABLE["double"], CALL, jax.local_devices()[0])


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        ("wrong", "differs from the reference's by 0.01 of the largest number"),
        ("spills", "it reads numbers that are not its own"),
        ("overwrites", "it changes rows that are not its own"),
        ("broken", "NotImplementedError: no such instruction"),
    ],
)
def test_a_candidate_is_out_for_a_reason(candidate: str, reason: str) -> None:
    outcome = trials().outcome(candidate)
    assert outcome is not None and reason in outcome.out and str(outcome) == outcome.out
    assert outcome.seconds == 0


def test_a_right_candidate_is_timed_in_turn_with_the_reference() -> None:
    same, slow = trials().outcome("wide"), trials().outcome("slow")
    assert same is not None and slow is not None
    assert not same.out and same.seconds > 0
    assert not slow.out and slow.ratio < 0.5 * same.ratio


def test_candidates_are_timed_beside_the_usual_one() -> None:
    own = Trials(TABLE["double"], CALL, jax.local_devices()[0], usual="slow")
    usual, fast = own.outcome("slow"), own.outcome("wide")
    assert usual is not None and fast is not None
    assert usual.ratio == 1 and fast.ratio > 2


@pytest.mark.parametrize("usual", ["broken", "large"])
def test_where_the_usual_one_does_not_run_others_are_timed_alone(usual: str) -> None:
    own = Trials(TABLE["double"], CALL, jax.local_devices()[0], usual=usual)
    own.outcome(usual)
    found = own.outcome("wide")
    assert found is not None and not found.out and found.seconds > 0 and found.ratio == 0
    assert "usual" not in str(found)


def test_differences_by_one_left_out_input_are_seen() -> None:
    """One of 3,072: the least error that a wrong tile can make in bf16."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((64, 3072)), rng.standard_normal((3072, 128))
    sample = Sample((), {})
    exact = x @ w
    assert difference(x[:, :-1] @ w[:-1], exact, sample, "bfloat16")
    near = exact * (1 + rng.uniform(-(2**-9), 2**-9, exact.shape))
    assert not difference(near, exact, sample, "bfloat16")
    assert "shape" in difference(exact[:-1], exact, sample, "bfloat16")


def test_a_process_tells_of_each_candidate_before_and_after() -> None:
    wanted: list[Name] = [("double", CALL.shape, name) for name in ("reference", "broken", "wide")]
    lines: list[str] = []
    device = jax.local_devices()[0]
    assert try_all([CALL], wanted, TABLE, device, lines.append, lambda device: True)
    told = [_told(line) for line in lines]
    assert [each and each[0] for each in told] == [name for name in wanted for _ in range(2)]
    outcomes = [each[1] for each in told if each and isinstance(each[1], Outcome)]
    assert [bool(each.out) for each in outcomes] == [False, True, False]
    lines.clear()
    assert not try_all([CALL], wanted, TABLE, device, lines.append, lambda device: False)
    assert len(lines) == 4  # the device answered no more after the broken one


def test_without_a_reference_nothing_is_tried() -> None:
    def sample(call: object, rng: np.random.Generator) -> Sample:
        raise MemoryError("no room")

    table = {"double": dataclasses.replace(TABLE["double"], sample=sample)}
    lines: list[str] = []
    assert try_all([CALL], [("double", CALL.shape, "wide")], table, jax.local_devices()[0], lines.append, bool)
    assert lines == []


def test_a_candidate_without_room_is_left_for_the_next_start() -> None:
    name: Name = ("double", CALL.shape, "large")
    lines: list[str] = []
    assert try_all([CALL], [name], TABLE, jax.local_devices()[0], lines.append, lambda device: True)
    assert [_told(line) for line in lines] == [(name, "trying"), (name, "left")]
