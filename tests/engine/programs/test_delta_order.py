"""The order and the streams of delta operators inside programs."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from benches.engine.programs import operations
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, Bench, make_head, make_task, random_delta, shallow

from jpets.config import LINEAR_SITES, EngineSettings
from jpets.deltas import METHODS, class_method
from jpets.deltas.operators import REFERENCES, Operators, usual_operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.assembly import assemble
from jpets.engine.batch.bucket import Bucket, make_variant, widest
from jpets.engine.engine import Engine
from jpets.engine.programs.delta_order import Streams, class_operator, delta_order, delta_streams
from jpets.engine.programs.program import Family, ProgramKey, compile_program, trace_program
from jpets.engine.workloads.encoder_network import INPUTS, EncoderNetwork
from jpets.engine.workloads.registry import family_from_json
from jpets.model.forward import Outputs

BUCKET = Bucket(128, ((8, 16),))
PACKED = Bucket(120, ((12, 16), (2, 32)))
ANNOTATION = re.compile(r'_xla_stream_annotation = "(\d+)"')


@functools.cache
def crowded(methods: tuple[str, ...] = tuple(METHODS)) -> Bench:
    """Three lora and two diff classes that meet at a site, and the other ``methods``."""
    backbone, rng = shallow(), np.random.default_rng(0)
    drawn: list[tuple[str, dict[str, Any]]] = [
        *((method, {}) for method in methods),
        ("lora", {"rank": 7}),
        ("lora", {"rank": 30}),
        ("diff", {"density": 0.1}),
    ]
    deltas = [random_delta(method, backbone.config, i, **settings) for i, (method, settings) in enumerate(drawn)]
    head = make_head(rng, backbone.config.hidden_size, 3)
    return Bench(backbone, [make_task(backbone, f"task-{i}", [delta], head) for i, delta in enumerate(deltas)])


def family(own: Bench, streams: Streams, operators: Operators = REFERENCES) -> Family:
    slots = tuple((key, bank.slots) for key, bank in own.banks.items())
    return Family(EncoderNetwork(own.config), "float32", slots, streams, operators)


def run(own: Bench, bucket: Bucket, streams: Streams) -> Outputs:
    rng = np.random.default_rng(1)
    rows = [own.row(task, rng.integers(5, 800, 5 + i % 10)) for i, task in enumerate(list(own.tasks)[: bucket.rows])]
    key = ProgramKey(bucket, widest(list(own.banks), heavy=True))
    program = compile_program(family(own, streams), key)
    banks = {key: bank.arrays for key, bank in own.banks.items()}
    assembled = assemble(rows, bucket, key.variant, INPUTS)
    outputs: Outputs = jax.tree.map(np.asarray, program(own.params, banks, (), assembled)[1])
    return outputs


def test_classes_take_turns_by_intensity_within_their_step() -> None:
    own = crowded()
    variant = widest(list(own.banks), heavy=True)
    turns = delta_order(own.config, BUCKET, variant, Streams())
    assert {turn.stream for turn in turns} == {None}
    assert {turn.key for turn in turns} == {k for k in own.banks if class_method(k.method).kind in ("light", "heavy")}
    sums = [turn.key for turn in turns if turn.key.method in ("lora", "diff")]
    assert len(sums) == 5
    intensity = [class_operator(own.config, BUCKET, variant, key).intensity for key in sums]
    ranks = np.argsort(np.argsort(intensity))
    np.testing.assert_array_equal(ranks, [0, 3, 1, 4, 2])
    assert [key.method for key in sums].count("diff") == 2


def test_no_streams_keep_the_order_of_the_classes() -> None:
    own = crowded()
    variant = widest(list(own.banks), heavy=True)
    given = [key for key in variant.classes() if class_method(key.method).kind in ("light", "heavy")]
    assert [turn.key for turn in delta_order(own.config, BUCKET, variant, Streams(0))] == given
    assert [turn.key for turn in delta_order(own.config, BUCKET, variant, Streams(1))] != given


def test_streams_are_few_where_classes_have_few_tokens() -> None:
    own = crowded()
    variant = widest(list(own.banks), heavy=True)

    def streams_of(streams: Streams, methods: tuple[str, ...]) -> list[int | None]:
        turns = delta_order(own.config, BUCKET, variant, streams)
        return [turn.stream for turn in turns if turn.key.method in methods]

    sums = ("lora", "diff", "onebit")
    assert streams_of(Streams(32), sums) == [1, 2, 3, 4, 5, 6]
    assert streams_of(Streams(3), sums) == [1, 2, 3, 1, 2, 3]
    assert streams_of(Streams(32, tokens=BUCKET.tokens // 6), sums) == [1, 2, 3, 4, 5, 6]
    assert streams_of(Streams(32, tokens=BUCKET.tokens // 6 + 1), sums) == [1, 2, 1, 2, 1, 2]
    assert streams_of(Streams(32), ("mask",)) == [1]


def test_a_full_class_counts_every_slot_and_token() -> None:
    config = shallow().config
    key = ClassKey("lora", (("query", 4),), (0,))
    full, half = ({key: level} for level in (8, 4))
    d = config.hidden_size
    for needs, rows in ((full, 8), (half, 4)):
        own = class_operator(config, BUCKET, make_variant(needs), key)
        assert own.flops == 2 * rows * 16 * 4 * 2 * d
        assert own.bytes == rows * 2 * 4 * 2 * d + rows * 16 * (2 * d + 8 * d)


@pytest.mark.parametrize(("bucket", "streams"), [(BUCKET, Streams(4)), (PACKED, Streams(1))], ids=str)
def test_order_and_streams_change_no_answer(bucket: Bucket, streams: Streams) -> None:
    """Also with the calls kept, as they are for a GPU."""
    own = crowded(("adapter", "lora", "mask", "diff"))
    expected, found = run(own, bucket, Streams(0)), run(own, bucket, streams)
    assert np.isfinite(expected.pooled).all()
    for mine, theirs in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_a_gpu_program_says_which_stream_each_operator_runs_on() -> None:
    own = crowded()
    key = ProgramKey(BUCKET, widest(list(own.banks), heavy=True))

    def lines(streams: Streams) -> list[str]:
        lowered = trace_program(family(own, streams), key).lower(lowering_platforms=("cuda",))
        return [line for line in lowered.as_text().splitlines() if ANNOTATION.search(line)]

    assert lines(Streams(1)) == []
    annotated = lines(Streams(4))
    assert all(" call @" in line and 'inlineable = "false"' in line for line in annotated)
    calls = Counter[str]()
    for turn in delta_order(own.config, key.bucket, key.variant, Streams(4)):
        calls[str(turn.stream)] += len(turn.key.sites) * len(turn.key.layers)
    assert Counter(ANNOTATION.search(line)[1] for line in annotated) == calls  # type: ignore[index]


def annotated_calls(lowered: jax.stages.Lowered) -> Counter[tuple[str, int]]:
    """Calls by stream and depth: how many such calls lie before one, each of which waits for the one before."""
    depths: dict[Any, int] = {}
    calls = Counter[tuple[str, int]]()
    main = next(f for f in operations(lowered.compiler_ir("stablehlo")) if "main" in str(f.attributes["sym_name"]))
    for each in operations(main):
        depth = max((depths.get(operand, 0) for operand in each.operands), default=0)
        notes = "mhlo.frontend_attributes"
        if notes in each.attributes and (found := ANNOTATION.search(str(each.attributes[notes]))):
            calls[found[1], depth] += 1
            depth += 1
        depths.update(dict.fromkeys(each.results, depth))
    return calls


@pytest.mark.parametrize("bucket", [BUCKET, PACKED], ids=str)
def test_no_operator_waits_for_another_one_at_its_site(bucket: Bucket) -> None:
    """So all operators of a site have one depth. Of one step each class has a stream of its own."""
    own = crowded()
    key = ProgramKey(bucket, widest(list(own.banks), heavy=True))
    traced = trace_program(family(own, Streams(32), usual_operators("gpu")), key)
    turns = delta_order(own.config, bucket, key.variant, Streams(32))
    in_turn = (LINEAR_SITES[:3], *((site,) for site in ("attn_out", "after_attn_out", "ffn_in", "ffn_out")))
    expected = Counter[tuple[str, int]]()
    for turn in turns:
        for site, _ in turn.key.sites:
            for layer in turn.key.layers:
                place = next((at for at, sites in enumerate(in_turn) if site in sites), len(in_turn))
                factors = class_method(turn.key.method).step == "scale"  # they wait for nothing
                expected[str(turn.stream), 0 if factors else layer * (len(in_turn) + 1) + place] += 1
    assert annotated_calls(traced.lower(lowering_platforms=("cuda",))) == expected
    steps = Counter((class_method(turn.key.method).step, turn.stream) for turn in turns)
    assert set(steps.values()) == {1}


def test_only_gpus_get_streams() -> None:
    settings = EngineSettings(delta_streams=8, delta_stream_tokens=64)
    assert delta_streams(settings, "gpu") == Streams(8, 64)
    assert delta_streams(settings, "cpu") == delta_streams(EngineSettings(), "cpu") == Streams(1)
    assert delta_streams(EngineSettings(delta_streams=0), "cpu") == Streams(0)
    assert delta_streams(EngineSettings(), "gpu") == Streams(1)
    with pytest.raises(ValueError, match="must not be negative, got -1 and 0"):
        delta_streams(EngineSettings(delta_streams=-1), "cpu")


def test_an_engine_on_a_cpu_asks_for_no_streams(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, delta_streams=8)
    own = Engine(shallow(), [], settings, cache_dir=tmp_path_factory.mktemp("cache"), buckets=ENGINE_BUCKETS[:1])
    assert own.family.streams == Streams(1)


def test_a_compiling_process_is_told_the_streams() -> None:
    told = family(Bench(shallow(), []), Streams(8, 64))
    assert family_from_json(told.to_json()) == told
