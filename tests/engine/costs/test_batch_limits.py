"""How many tokens and rows a batch has by default."""

from __future__ import annotations

import pytest

from jpets.config import EngineSettings
from jpets.engine.costs.batch_limits import LEAST_TOKENS, MANY_TOKENS, MOST_ROWS, cheap_tokens, with_batch_limits
from jpets.scheduling.costs.measured_profile import PackedPoint


def points(*pairs: tuple[int, float]) -> list[PackedPoint]:
    return [PackedPoint(tokens, ((tokens // 16, 16),), seconds) for tokens, seconds in pairs]


def test_batches_are_as_large_as_makes_a_token_cheaper() -> None:
    assert cheap_tokens([]) is None
    assert cheap_tokens(points((64, 0.02), (256, 0.03), (1024, 0.1), (4096, 0.4))) == 1024
    assert cheap_tokens(points((4096, 0.1), (64, 0.02), (1024, 0.05))) == 4096
    assert cheap_tokens(points((64, 0.0064), (1024, 0.1), (2048, 0.21))) == 64


@pytest.mark.parametrize(
    ("tokens", "rows", "platform", "expected"),
    [
        (0, 0, "cpu", (1024, 128)),
        (512, 0, "cpu", (512, 64)),
        (0, 32, "gpu", (MANY_TOKENS, 32)),
        (64, 7, "cpu", (64, 7)),
    ],
)
def test_what_is_set_stays(tokens: int, rows: int, platform: str, expected: tuple[int, int]) -> None:
    settings = EngineSettings(max_batch_tokens=tokens, max_batch_rows=rows)
    found = with_batch_limits(settings, platform, [])
    assert (found.max_batch_tokens, found.max_batch_rows) == expected


def test_measured_costs_decide() -> None:
    found = with_batch_limits(EngineSettings(), "cpu", points((512, 0.1), (2048, 0.2), (8192, 0.8)))
    assert (found.max_batch_tokens, found.max_batch_rows) == (2048, 256)
    assert with_batch_limits(EngineSettings(), "gpu", []).max_batch_rows == MOST_ROWS
    found = with_batch_limits(EngineSettings(), "cpu", points((64, 0.0064), (1024, 0.1), (2048, 0.21)))
    assert found.max_batch_tokens == LEAST_TOKENS, "deltas gain from more"


@pytest.mark.parametrize(("platform", "usual"), [("cpu", 1024), ("gpu", MANY_TOKENS)])
def test_a_rate_that_still_falls_at_the_largest_measured_shape_sets_no_limit(platform: str, usual: int) -> None:
    found = with_batch_limits(EngineSettings(), platform, points((128, 0.1), (256, 0.15)))
    assert found.max_batch_tokens == usual
    found = with_batch_limits(EngineSettings(), platform, points((4096, 1.0), (32768, 2.0)))
    assert found.max_batch_tokens == 32768
