"""What ``bench quotas`` sets: the other tenant may ask as many texts as it is said to, whatever its quota counts."""

from __future__ import annotations

import numpy as np
import pytest
from benches.scheduling.batching import draw
from benches.service.quotas import quota_of
from benches.service.serving import DEMO_TASKS, text_of

from jpets.errors import OverQuota
from jpets.types import Query
from serving.tenants.allowance import BURST, Allowance

RATE, SECONDS = 10.0, 60


def answered(allowance: Allowance, length: int) -> bool:
    """Whether a text of so many tokens is let in, and then computed."""
    query = Query(DEMO_TASKS[0], text_of(length))
    try:
        allowance.request()
        counted = allowance.queries([query], 512)
    except OverQuota:
        return False
    allowance.settle(counted, [length] * len(counted))
    return True


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("times", [1, 10])
def test_a_quota_of_either_kind_is_of_as_many_texts(times: int, *, tokens: bool) -> None:
    """Of usual length: of tokens that are left short texts get the last ones."""
    lengths = draw("gaussian", 4096, 8.0, 500)
    now = 0.0
    allowance = Allowance(quota_of(RATE, lengths if tokens else None), lambda: now)
    found, usual = 0.0, float(lengths.mean())
    for length in np.resize(lengths, round(RATE * times * SECONDS)).tolist():
        now += 1 / (RATE * times)
        found += answered(allowance, length) * (length / usual if tokens else 1)
    assert found == pytest.approx(RATE * (SECONDS + (BURST if times > 1 else 0)), rel=0.03)
