"""In which order, and on which streams, the delta operators of one program run (PetS section 4.2).

A class is one operator here: it serves all its tasks in the batch. Classes of different steps of the unified
representation keep their order; within a step the order is free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jpets.config import BackboneConfig, EngineSettings
from jpets.deltas import class_method
from jpets.deltas.operators import REFERENCES, Operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket, Variant, capacity, windowed
from jpets.scheduling.costs.operators import Operator, assign_streams, interleave, stream_count

ORDER_STREAMS = 2
"""On a single stream operators take turns as if each half, memory-bound and compute-bound, had a stream of its own."""


@dataclasses.dataclass(frozen=True)
class Streams:
    """``most`` streams for deltas: 1 only orders them, 0 keeps the order of the classes.

    A program with fewer than ``tokens`` tokens for each class uses two (PetS section 6.3.3).
    """

    most: int = 1
    tokens: int = 0


ONE_STREAM = Streams()


@dataclasses.dataclass(frozen=True)
class Execution:
    """How the operators of a program run: their streams, and the candidate of each."""

    streams: Streams = ONE_STREAM
    operators: Operators = REFERENCES


ORDERED = Execution()
"""One stream, and references."""


def delta_streams(settings: EngineSettings, platform: str) -> Streams:
    """The streams that ``settings`` ask for; one if XLA has no streams, as calls would then only prevent fusion.

    Raises ``ValueError`` for a negative number.
    """
    most, tokens = settings.delta_streams, settings.delta_stream_tokens
    if most < 0 or tokens < 0:
        raise ValueError(f"delta_streams and delta_stream_tokens must not be negative, got {most} and {tokens}")
    return Streams(most, tokens) if platform == "gpu" else Streams(min(most, 1))


@dataclasses.dataclass(frozen=True)
class Turn:
    """A class and the stream of its operators, None for the stream of the shared operators."""

    key: ClassKey
    stream: int | None = None


def class_operator(config: BackboneConfig, bucket: Bucket, variant: Variant, key: ClassKey) -> Operator:
    """One layer of a class, as full as the variant has room for."""
    if windowed(key):
        slots = capacity(bucket, variant.level(key))
        length = bucket.longest if bucket.rectangular else bucket.segment
    else:
        slots, length = bucket.run_room(variant.run, variant.level(key)), bucket.run(variant.run)
    return Operator(str(key), *class_method(key.method).work(key, config, slots * length, slots))


def delta_order(config: BackboneConfig, bucket: Bucket, variant: Variant, streams: Streams) -> list[Turn]:
    """The light and heavy classes of a program in the order in which they act. A program always gets the same order."""
    classes = [key for key in variant.classes() if class_method(key.method).kind in ("light", "heavy")]
    if streams.most == 0:
        return [Turn(key) for key in classes]
    steps: dict[str, list[ClassKey]] = {}
    for key in classes:
        steps.setdefault(class_method(key.method).step, []).append(key)
    return [turn for together in steps.values() for turn in _step_order(config, bucket, variant, together, streams)]


def _step_order(
    config: BackboneConfig, bucket: Bucket, variant: Variant, classes: Sequence[ClassKey], streams: Streams
) -> list[Turn]:
    operators = [class_operator(config, bucket, variant, key) for key in classes]
    length, rows_each = bucket.tokens / bucket.rows, bucket.rows / len(classes)
    many = max(streams.most, ORDER_STREAMS)
    count = stream_count(len(classes), length, rows_each, streams.tokens, many=many, few=ORDER_STREAMS)
    assignment = assign_streams(operators, count)
    own = streams.most > 1
    return [Turn(classes[at], 1 + assignment[at] if own else None) for at in interleave(operators, assignment)]
