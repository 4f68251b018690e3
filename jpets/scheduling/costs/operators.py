"""Which stream and which turn each PET operator of a macro-batch gets (PetS section 4.2, Algorithm 2)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Operator(NamedTuple):
    """One PET operator: a label, its FLOPs, the bytes it moves, and beta, its run time in seconds.

    ``seconds`` may stay at 1 where beta was not measured: the intensity does not depend on it.
    """

    name: str
    flops: float
    bytes: float
    seconds: float = 1.0

    @property
    def bandwidth(self) -> float:
        """omega, the bandwidth that the operator uses, in bytes per second."""
        return self.bytes / self.seconds

    @property
    def intensity(self) -> float:
        """Operational intensity, FLOPs per byte.

        Algorithm 2 writes (FLOPs / beta) / omega; with omega = bytes / beta the run time cancels.
        """
        return self.flops / self.bytes


def _ranked(operators: Sequence[Operator]) -> list[int]:
    """Operator numbers by ascending intensity; equal ones keep their order."""
    return sorted(range(len(operators)), key=lambda at: operators[at].intensity)


def assign_streams(operators: Sequence[Operator], streams: int) -> list[int]:
    """Algorithm 2: the stream of each operator, 0 to ``streams`` - 1, in the order given.

    Operators are ranked by ascending intensity and cut into contiguous shares, ``floor(rank * S / O)``, so that
    different streams get operators that are bound by different resources. (As printed, ``floor(rank / S)`` leaves S.)
    Raises ``ValueError`` for fewer than one stream.
    """
    if streams < 1:
        raise ValueError(f"operators need at least one stream, got {streams}")
    assignment = [0] * len(operators)
    for rank, at in enumerate(_ranked(operators)):
        assignment[at] = rank * streams // len(operators)
    return assignment


def interleave(operators: Sequence[Operator], assignment: Sequence[int]) -> list[int]:
    """Operator numbers in the order of launching: the streams take turns, each in ascending intensity.

    With two streams memory-bound and compute-bound operators alternate. Raises ``ValueError`` where ``assignment``
    does not give one stream for each operator.
    """
    if len(assignment) != len(operators):
        raise ValueError(f"expected a stream for each of {len(operators)} operators, got {len(assignment)}")
    ranked = _ranked(operators)
    queues = [[at for at in ranked if assignment[at] == stream] for stream in sorted(set(assignment))]
    return [at for turn in itertools.zip_longest(*queues) for at in turn if at is not None]


def stream_count(
    operators: int, length: float, rows_per_task: float, threshold: float, many: int = 32, few: int = 2
) -> int:
    """Streams for a batch whose rows have ``length`` tokens, ``rows_per_task`` of them for each operator.

    ``few`` where an operator works on fewer than ``threshold`` tokens, too short a time for streams to overlap, else
    ``many`` (PetS section 6.3.3); never more than operators, never less than one. ``threshold`` is profiled on each
    kind of device.
    """
    wanted = min(few, many) if length * rows_per_task < threshold else many
    return max(1, min(wanted, operators))
