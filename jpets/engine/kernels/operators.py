"""All operators with their candidates, the gates of these, and operands to try them with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jpets.deltas.operators import CANDIDATES, OVER_RUNS, usual_operators
from jpets.engine.kernels import samples
from jpets.engine.kernels.calls import Call, Candidate, Operator, Sample, Table
from pallas_kernels import low_rank, masked_matmul, packed_attention, sparse_matmul
from pallas_kernels.gates import OPEN, Device
from pallas_kernels.linear import GATES as LINEAR_GATES
from pallas_kernels.linear import linear

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "masked_matmul": masked_matmul.masked_matmul,
    "sign_matmul": masked_matmul.sign_matmul,
    "sparse_matmul": sparse_matmul.sparse_matmul,
    "block_sparse_matmul": sparse_matmul.block_sparse_matmul,
    "low_rank": low_rank.low_rank,
    "packed_attention": packed_attention.packed_attention,
    "linear": linear,
}
GATES = {**masked_matmul.GATES, **sparse_matmul.GATES, **low_rank.GATES, **packed_attention.GATES, **LINEAR_GATES}
"""Of candidates that not every device can run, or that leave some operands to another candidate."""
SAMPLES: Mapping[str, Callable[[Call, Any], Sample]] = {
    "masked_matmul": samples.masked_matmul,
    "sign_matmul": samples.sign_matmul,
    "sparse_matmul": samples.sparse_matmul,
    "block_sparse_matmul": samples.sparse_matmul,
    "low_rank": samples.low_rank,
    "packed_attention": samples.packed_attention,
    "linear": samples.linear,
}


def _usual(operator: str, device: Device) -> str:
    return usual_operators(device.platform)[operator]


OPERATORS: Table = {
    operator: Operator(
        {
            name: Candidate(functools.partial(FUNCTIONS[operator], candidate=name), GATES[operator].get(name, OPEN))
            for name in names
        },
        SAMPLES[operator],
        functools.partial(_usual, operator),
        operator in OVER_RUNS,
    )
    for operator, names in CANDIDATES.items()
}
