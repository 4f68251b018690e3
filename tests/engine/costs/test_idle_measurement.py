"""Costs of classes that are measured while an engine serves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import wait_until

from jpets.config import EngineSettings
from jpets.deltas.bitfit import BIAS_CLASS
from jpets.engine.costs import bench, idle_measurement
from jpets.engine.costs.batch_limits import LEAST_TOKENS, cheap_tokens, with_batch_limits
from jpets.engine.costs.figures import ClassFigures, Figures
from jpets.engine.costs.idle_measurement import IdleMeasurement
from jpets.engine.costs.live_profile import LiveProfile, figures_file
from jpets.engine.device.memory import tree_bytes
from jpets.engine.engine import Engine
from jpets.engine.programs.program import Family, Program, ProgramKey, compile_program
from jpets.scheduling.costs.measured_profile import Grid
from jpets.types import Query

Compile = Callable[[Family, ProgramKey], Program | None]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LIGHT_SHAPES", ("2x8",))
    monkeypatch.setattr(bench, "LOOP_SHAPES", ("2x8",))
    monkeypatch.setattr(bench, "HEAVY_CASES", {32: ((1, 1, 8), (2, 1, 8)), 128: ((1, 1, 8),)})
    monkeypatch.setattr(bench, "HEAVY_TOKENS", 32)
    monkeypatch.setattr(idle_measurement, "QUIET", 0.001)
    monkeypatch.setattr(idle_measurement, "LOOK_AGAIN", 0.01)
    monkeypatch.setattr(idle_measurement, "ROUNDS", 2)
    monkeypatch.setattr(idle_measurement, "MOST_REST", 0.0)
    monkeypatch.setattr(idle_measurement, "MOST_SIZE", 256)


@functools.cache
def compiled(family: Family, key: ProgramKey) -> Program:
    """Once for all tests."""
    return compile_program(family, key)


@pytest.fixture
def profile(engine: Engine, tmp_path: Path) -> LiveProfile:
    """All classes but two are measured."""
    own = LiveProfile(engine.replica, engine.costs, tmp_path / "a.profile.json")
    axis = np.array([1, 1000])
    known = ClassFigures(Grid(axis, axis, np.full((2, 2), 0.01)))
    keys = {key: str(key) for key in engine.replica.classes}
    missing = min(name for key, name in keys.items() if key.method == "mask"), str(BIAS_CLASS)
    own.add(Figures(classes=dict.fromkeys(set(keys.values()) - set(missing), known)))
    assert own.coarse == set(missing)
    return own


@contextlib.contextmanager
def measuring(engine: Engine, profile: LiveProfile, compile: Compile) -> Iterator[IdleMeasurement]:
    own = IdleMeasurement(
        engine.replica,
        profile,
        engine.memory,
        compile,
        lambda: engine._loop.idle_seconds,
        lambda: {BIAS_CLASS: 1},
        engine._liveness.wait,
    )
    own._thread.start()
    try:
        yield own
    finally:
        own.close()
        assert not own._thread.is_alive() and not engine.memory.measuring


def test_all_classes_are_measured_beside_queries_and_nothing_is_left(
    engine: Engine, profile: LiveProfile, tmp_path: Path
) -> None:
    coarse, before, asked = profile.coarse, engine.replica.programs, list[ProgramKey]()

    def compile(family: Family, key: ProgramKey) -> Program:
        asked.append(key)
        return compiled(family, key)

    with measuring(engine, profile, compile):
        while profile.coarse:
            (result,) = engine.infer([Query("mask", input_ids=[5, 6, 7])])
            assert result.error is None
            time.sleep(2 * idle_measurement.QUIET)
    assert coarse < profile.measured
    assert len(asked) == len(set(asked)), "bare programs are compared with each class"
    assert next(key for key in asked if key.variant.classes()).variant.classes() == (BIAS_CLASS,), "it has tasks"
    assert engine.replica.programs == before and engine.stats.request_path_compiles == 0
    again = LiveProfile(engine.replica, engine.costs, tmp_path / "a.profile.json")
    assert again.measured == profile.measured


def test_what_cannot_be_compiled_stays_coarse_for_a_while(
    engine: Engine, profile: LiveProfile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    coarse = profile.coarse
    with measuring(engine, profile, lambda family, key: None) as own:
        wait_until(lambda: not own._missing() and not engine.memory.measuring)
        assert profile.coarse == coarse
        monkeypatch.setattr(own, "_compile", compiled)
        own._not_before.clear()
        wait_until(lambda: not profile.coarse)
    assert "costs could not be measured" in caplog.text


def test_a_class_that_cannot_be_compiled_holds_up_no_other(engine: Engine, profile: LiveProfile) -> None:
    """The biases' class, whose tasks make it the first one."""

    def compile(family: Family, key: ProgramKey) -> Program | None:
        return None if BIAS_CLASS in key.variant.classes() else compiled(family, key)

    with measuring(engine, profile, compile) as own:
        wait_until(lambda: profile.coarse == {str(BIAS_CLASS)} and not own._missing())
        assert own._waits == {BIAS_CLASS: 2 * idle_measurement.TRY_AGAIN}


def test_a_device_without_room_is_left_alone(
    engine: Engine, profile: LiveProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.memory, "limit", engine.memory.use(engine.replica.programs).total + 1)
    with measuring(engine, profile, compiled) as own:
        wait_until(lambda: not own._missing())
    assert profile.coarse


def measured_all(profile: LiveProfile) -> LiveProfile:
    axis = np.array([1, 1000])
    known = ClassFigures(Grid(axis, axis, np.full((2, 2), 0.01)))
    profile.add(Figures(classes=dict.fromkeys(profile.coarse, known)))
    return profile


def test_sizes_are_measured_after_classes_for_the_next_start(
    engine: Engine, profile: LiveProfile, tmp_path: Path
) -> None:
    assert not measured_all(profile).sized
    with measuring(engine, profile, compiled):
        wait_until(lambda: profile.sized)
        (result,) = engine.infer([Query("mask", input_ids=[5, 6, 7])])
        assert result.error is None
    stored = figures_file(tmp_path / "a.profile.json").read()
    assert stored is not None and [point.tokens for point in stored.packed] == [64, 128, 256]
    assert all(point.seconds > 0 for point in stored.packed) and stored.alpha is None
    slow = [dataclasses.replace(point, tokens=64 * point.tokens) for point in stored.packed]
    settings = with_batch_limits(EngineSettings(), "cpu", slow)
    assert settings.max_batch_tokens == max(cheap_tokens(slow) or 0, LEAST_TOKENS) >= 64 * 64


def test_sizes_grow_until_one_would_hold_up_a_query(
    engine: Engine, profile: LiveProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_measurement, "MOST_SECONDS", 1e-9)
    with measuring(engine, measured_all(profile), compiled):
        wait_until(lambda: profile.sized)
    assert len(profile._figures.packed) == 1


def test_memory_is_asked_for_before_it_is_taken(
    engine: Engine, profile: LiveProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is asked for is what is taken."""
    taken: list[tuple[int, int]] = []

    class Watched(bench.Bench):
        def __init__(self, *arguments: Any) -> None:
            asked = engine.memory.measuring
            super().__init__(*arguments)
            own = self.replica
            taken.append((asked, tree_bytes([own.params, [bank.arrays for bank in own.banks.values()]])))

    monkeypatch.setattr(idle_measurement, "Bench", Watched)
    with measuring(engine, profile, lambda family, key: None) as own:
        wait_until(lambda: not own._missing())
        assert taken and all(asked == there for asked, there in taken)
        monkeypatch.setattr(engine.memory, "limit", 1)
        wait_until(lambda: not engine.memory.measuring)  # a bench that was given its memory before has ended
        taken.clear()
        own._not_before.clear()
        wait_until(lambda: not own._missing())
    assert not taken


def test_an_engine_that_closes_does_not_wait_for_quiet(engine: Engine, profile: LiveProfile) -> None:
    with measuring(engine, profile, compiled) as own:
        own._idle = lambda: 0.0
        wait_until(lambda: engine.memory.measuring > 0)
    assert profile.coarse
