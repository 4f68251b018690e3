"""How many tokens and rows a batch may have: as many as make a token cheaper."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jpets.config import EngineSettings
from jpets.scheduling.costs.measured_profile import PackedPoint

USUAL_TOKENS = {"cpu": 1024}
"""Tokens of a batch by platform while no costs are measured: on two cores a token of 1,024 costs as much as one of
4,096."""
MANY_TOKENS = 16384
"""The same for accelerators: 128 rows of 128 tokens keep one busy for milliseconds, which a host can plan beside."""
GAIN = 1.05
"""A batch is large enough when its tokens cost at most so many times what they cost at best."""
LEAST_TOKENS = 1024
"""Tokens up to which a batch may grow in any case: a task's heavy deltas are read once a batch, and the host plans once
a batch, which shapes without deltas do not show."""
TOKENS_A_ROW = 8
"""So short texts fill a batch too."""
MOST_ROWS = 512


def cheap_tokens(points: Iterable[PackedPoint]) -> int | None:
    """The fewest tokens of a measured shape that cost each hardly more than at best; None without measurements."""
    rates = sorted((point.tokens, point.seconds / point.tokens) for point in points)
    if not rates:
        return None
    least = min(rate for _, rate in rates)
    return next(tokens for tokens, rate in rates if rate <= GAIN * least)


def with_batch_limits(settings: EngineSettings, platform: str, points: Iterable[PackedPoint]) -> EngineSettings:
    """``settings`` with the tokens and rows of a batch that the device gains from, where they leave that open (0)."""
    points, usual = list(points), USUAL_TOKENS.get(platform, MANY_TOKENS)
    cheap = cheap_tokens(points) or usual
    if cheap == max((point.tokens for point in points), default=0):  # it may fall beyond what was measured
        cheap = max(cheap, usual)
    tokens = settings.max_batch_tokens or max(cheap, LEAST_TOKENS)
    rows = settings.max_batch_rows or min(MOST_ROWS, max(1, tokens // TOKENS_A_ROW))
    return dataclasses.replace(settings, max_batch_tokens=tokens, max_batch_rows=rows)
