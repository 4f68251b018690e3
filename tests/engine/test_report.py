"""An engine's report, and the memory limit that it is given."""

from __future__ import annotations

import dataclasses
import math

import pytest
from support import wait_until

from jpets.engine.engine import Engine
from jpets.engine.results.stats import BatchRecord
from jpets.types import Query


def test_a_report_is_data_of_its_moment(engine: Engine) -> None:
    batches: list[BatchRecord] = []
    (before,) = engine.report().devices
    engine.observe(batches.append)
    engine.infer([Query(None, "a text"), Query("nobody", "a text")])
    wait_until(lambda: engine.report().idle)
    (after,) = engine.report().devices
    assert after.answers["ok"] - before.answers.get("ok", 0) == 1
    assert after.answers["not_found"] - before.answers.get("not_found", 0) == 1
    assert after.batches - before.batches == len(batches) == 1
    assert after.real_tokens - before.real_tokens == batches[0].real_tokens
    assert 0 < batches[0].computing <= batches[0].seconds
    for name in ("computing", "predicted", "missed"):
        total = getattr(after, f"{name}_seconds") - getattr(before, f"{name}_seconds")
        assert total == pytest.approx(getattr(batches[0], name), abs=1e-9)
    assert batches[0].predicted > 0
    assert after.tasks.known == after.tasks.tiers["repository"] == len(engine.tasks)
    assert sum(found.bytes for found in after.classes.values()) == after.memory.banks
    assert engine.report().balance is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.batches = 0  # type: ignore[misc]


def test_a_limit_is_what_is_taken_and_what_is_spare(engine: Engine) -> None:
    taken = engine.report().device_bytes
    engine.limit([1000.0])
    assert engine.report().devices[0].limit == taken + 1000
    with pytest.raises(ValueError, match="unpack"):
        engine.limit([1.0, 1.0])
    engine.limit([math.inf])
    assert engine.report().devices[0].limit == math.inf
