"""How much a tenant may ask: requests and tokens of a minute, as token buckets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jpets.access import Limits
from jpets.errors import OverQuota
from jpets.types import Query, Result

BURST = 2.0
"""Seconds of its rate that a tenant may use at once."""
MINUTE = 60.0
CHARACTERS = 4
"""Of a token, before the text's tokens are counted."""
Clock = Callable[[], float]
UNLIMITED = Limits()


class Bucket:
    """``rate`` a second, of which ``BURST`` seconds may be saved up, but always one whole unit."""

    def __init__(self, rate: float, clock: Clock = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._full = max(1.0, rate * BURST)
        self._level, self._at = self._full, clock()

    def take(self, count: float) -> float:
        """0 where it is taken, else the seconds until it could be. What is more than the bucket holds is taken from a
        full one, which then is in debt."""
        if not (wait := self.wait(count)):
            self._level -= count
        return wait

    def wait(self, count: float) -> float:
        """What ``take`` would return; nothing is taken."""
        now = self._clock()
        self._level, self._at = min(self._full, self._level + self._rate * (now - self._at)), now
        return max(0.0, min(count, self._full) - self._level) / self._rate

    def give(self, count: float) -> None:
        """Gives back what was not used; less than 0 takes more."""
        self._level = min(self._full, self._level + count)


class Allowance:
    """What is left to one tenant. One thread at a time."""

    def __init__(self, limits: Limits = UNLIMITED, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        self._requests, self._tokens = (
            None if each is None else Bucket(each / MINUTE, clock)
            for each in (limits.requests_per_minute, limits.tokens_per_minute)
        )

    def request(self) -> None:
        """Counts a request. Raises ``OverQuota``."""
        if self._requests is not None and (wait := self._requests.take(1)):
            raise OverQuota(f"over {self.limits.requests_per_minute:g} requests a minute; send fewer", wait)

    def check(self, queries: Sequence[Query]) -> None:
        """Raises ``OverQuota`` where their tokens, by their texts' lengths, would be too many now: before long texts
        are tokenised, which takes time even where none is computed."""
        if self._tokens is not None and (wait := self._tokens.wait(sum(map(_about, queries)))):
            raise self._too_many(wait)

    def queries(self, queries: Sequence[Query], longest: int) -> Sequence[int]:
        """Counts their tokens before they are known, by their texts' lengths and at most ``longest`` each; returns how
        many of each, and nothing where they are not limited. Raises ``OverQuota``."""
        if self._tokens is None:
            return ()
        counted = [min(longest, _about(query)) for query in queries]
        if wait := self._tokens.take(sum(counted)):
            raise self._too_many(wait)
        return counted

    def _too_many(self, wait: float) -> OverQuota:
        return OverQuota(f"over {self.limits.tokens_per_minute:g} tokens a minute; send fewer", wait)

    def settle(self, counted: Sequence[int], computed: Sequence[int | None]) -> None:
        """Replaces what ``queries`` counted by the tokens that were ``computed``; None where that is not known."""
        if self._tokens is not None:
            pairs = zip(counted, computed, strict=True)
            self._tokens.give(sum(before - own for before, own in pairs if own is not None))

    def give_back(self, counted: Sequence[int]) -> None:
        """What ``queries`` counted, where nothing came of it."""
        if self._tokens is not None:
            self._tokens.give(sum(counted))


def computed_tokens(result: Result) -> int:
    """How many tokens were computed for an answer, or for what turned out to be none."""
    return 0 if result.timing is None or result.timing.cached else result.timing.tokens


def _about(query: Query) -> int:
    if query.input_ids is not None:
        return len(query.input_ids)
    return 2 + sum(len(text) for text in (query.text, query.text_pair) if text) // CHARACTERS
