"""The cost profile of a running engine: coarse at first, then measured, corrected by what batches take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, method_tasks, random_delta, shallow, wait_until

from jpets.deltas import METHODS, class_method
from jpets.deltas.operators import Operators, usual_operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket, Variant, make_variant
from jpets.engine.batch.rows import Row
from jpets.engine.costs import idle_measurement
from jpets.engine.costs.bench import Bench
from jpets.engine.costs.correction import Correction
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.costs.delta_costs import HeavyTokens, heavy_tokens
from jpets.engine.costs.figures import ClassFigures, Figures
from jpets.engine.costs.live_profile import CERTAIN, LiveProfile
from jpets.engine.device.replica import Replica
from jpets.engine.engine import Engine
from jpets.engine.programs.mesh import first_device
from jpets.engine.programs.program import Family, Program, ProgramKey
from jpets.engine.programs.shared_file import SharedFile
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.errors import Saturated
from jpets.scheduling.costs.measured_profile import Grid


def grid(seconds: float) -> Grid:
    axis = np.array([1, 1000])
    return Grid(axis, axis, np.full((2, 2), seconds))


def figures(*names: str, seconds: float = 0.1) -> Figures:
    return Figures(classes={name: ClassFigures(grid(seconds), 0.25) for name in names})


def class_of(method: str, **settings: Any) -> ClassKey:
    config = shallow().config
    return METHODS[method].lower(random_delta(method, config, **settings), config)[0].key


def replica_of(*keys: ClassKey) -> Replica:
    family = Family(EncoderNetwork(shallow().config), "float32", tuple((key, 2) for key in sorted(keys)))
    return Replica(family, shallow().params, first_device())


def profile_of(replica: Replica, folder: Path) -> LiveProfile:
    return LiveProfile(replica, CostTable(folder / "a.json", replica.family), folder / "a.profile.json")


def used(*keys: ClassKey) -> HeavyTokens:
    """A row of five tokens for each of these classes' first tasks."""
    return heavy_tokens([Row({}, {key: 1}, 0, 5) for key in keys])


def test_an_engine_has_costs_of_all_its_classes_when_it_is_made(engine: Engine) -> None:
    keys = [key for key, _ in engine.family.slots if key.method != "head"]
    profile = engine.profile.current
    assert profile.beta.keys() == engine.profile.coarse == set(map(str, keys)) and not engine.profile.measured
    assert all((each.filled >= 0).all() for each in profile.beta.values())
    for key in keys:
        heavy = class_method(key.method).kind == "heavy"
        assert (str(key) in profile.heavy) == heavy == (engine.profile.seconds(used(key)) > 0)
    assert profile.alpha.at([8], [32]) > profile.alpha.at([1], [8]) > 0
    assert profile.packed_seconds(1024, 1024 * 32) > profile.packed_seconds(64, 64 * 32) > 0


def test_coarse_costs_follow_the_speed_that_the_start_measured(tmp_path: Path) -> None:
    """Twice the time of every program: twice the cost of every class."""
    mask = class_of("mask")
    fast, slow = (profile_of(replica_of(mask), tmp_path / name) for name in ("fast", "slow"))
    with Engine(shallow(), [], ENGINE_SETTINGS, cache_dir=tmp_path, buckets=ENGINE_BUCKETS) as shape:
        for profile, seconds in ((fast, 1e-9), (slow, 2e-9)):
            for key in shape.core:
                work = shape.family.network.arithmetic(key.bucket, key.variant)
                profile._costs.set(key, seconds * work)
    assert slow.seconds(used(mask)) == pytest.approx(2 * fast.seconds(used(mask)))


def test_classes_that_come_later_have_costs_too(tmp_path: Path) -> None:
    mask, diff = class_of("mask"), class_of("diff")
    replica = replica_of(mask)
    profile = profile_of(replica, tmp_path)
    before = profile.current
    assert profile.current is before, "the same until something changes"
    replica.add_banks({diff: 2})
    assert profile.current.beta.keys() == {str(mask), str(diff)}
    assert profile.seconds(used(diff)) > 0


def test_measured_figures_take_the_place_of_coarse_ones(tmp_path: Path) -> None:
    mask, diff = class_of("mask"), class_of("diff")
    profile = profile_of(replica_of(mask, diff), tmp_path)
    coarse = profile.seconds(used(diff))
    assert profile.certain_seconds(used(diff)) == pytest.approx(CERTAIN * coarse)
    profile.add(figures(str(mask)))
    assert profile.measured == {str(mask)} and profile.coarse == {str(diff)}
    assert profile.seconds(used(mask)) == profile.certain_seconds(used(mask)) == pytest.approx(0.1)
    assert profile.seconds(used(mask, mask)) == pytest.approx(0.1), "rows of a task share its cost"
    assert profile.seconds(used(mask, diff)) == pytest.approx(0.1 + coarse)


def test_a_class_learns_from_the_batches_that_use_it(
    tmp_path: Path, known_costs: Mapping[str, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that take twice as long as predicted: in the end its figure is twice as high, and that of no other."""
    monkeypatch.setattr(LiveProfile, "ran", known_costs["ran"])
    mask, diff = class_of("mask"), class_of("diff")
    profile = profile_of(replica_of(mask, diff), tmp_path)
    profile.add(figures(str(mask), str(diff), seconds=0.1))
    key = ProgramKey(Bucket(64, ((4, 16),)), make_variant({mask: 8, diff: 8}))
    program = Program(key, mock.Mock())
    program.seconds = 1e-4
    before = profile.current
    profile.ran(used(mask), program, 0.1 * 1.01)
    assert profile.current is before, "not worth telling"
    for _ in range(200):
        profile.ran(used(mask), program, 0.2)
    assert profile.seconds(used(mask)) == pytest.approx(0.2, rel=0.05)
    assert profile.seconds(used(diff)) == pytest.approx(0.1)
    profile._costs._timed[key] = 0.01
    for _ in range(200):
        profile.ran(used(), program, 0.02)
    assert profile.seconds(used(diff)) == pytest.approx(0.2, rel=0.05), "the machine is half as fast"


@pytest.mark.parametrize("background", [True, False])
def test_an_engine_measures_its_classes_by_itself(
    tmp_path: Path,
    program_cache: Path,
    known_costs: Mapping[str, Callable[..., None]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    background: bool,
) -> None:
    monkeypatch.setattr(idle_measurement.IdleMeasurement, "start", known_costs["start"])
    asked = mock.Mock(side_effect=Saturated("enough"))
    monkeypatch.setattr(idle_measurement.IdleMeasurement, "_with_bench", asked)
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=background)
    tasks = [task for task in method_tasks(shallow()) if task.id == "mask"]
    with Engine(shallow(), tasks, settings, cache_dir=program_cache, buckets=ENGINE_BUCKETS) as own:
        own.profile._file = SharedFile(tmp_path / "a.json", "figures", Figures.from_json, Figures.to_json)
        coarse = own.profile.coarse
        own.start()
        if background:
            wait_until(lambda: asked.called)
            assert {str(key) for key in asked.call_args.args[0]} == coarse
        else:
            assert not own._measurement._thread.is_alive() and not asked.called


def test_layers_tell_classes_apart(tmp_path: Path) -> None:
    """Two adapters in different layers, of another width, at another site, with another activation."""
    keys = [
        class_of("adapter", layers=(0,)),
        class_of("adapter", layers=(1,)),
        class_of("adapter", layers=(0, 1)),
        class_of("adapter", layers=(0,), bottleneck=32),
        class_of("adapter", layers=(0,), sites=("after_ffn_out",)),
        class_of("adapter", layers=(0,), activation="relu"),
    ]
    assert len(set(keys)) == len(set(map(str, keys))) == len(keys)
    profile = profile_of(replica_of(*keys), tmp_path)
    for number, key in enumerate(keys):
        profile.add(figures(str(key), seconds=1.0 + number))
    again = profile_of(replica_of(*keys), tmp_path)
    for number, key in enumerate(keys):
        assert again.current.beta[str(key)].at([1], [8])[0, 0] == 1.0 + number


def test_figures_are_found_whatever_slots_and_other_classes_there_are(tmp_path: Path) -> None:
    tasks = [task for task in method_tasks(shallow()) if task.id in ("mask", "bitfit")]

    def engine(number: int, slots: int) -> Engine:
        settings = dataclasses.replace(ENGINE_SETTINGS, slots=slots)
        return Engine(shallow(), tasks[:number], settings, cache_dir=tmp_path, buckets=ENGINE_BUCKETS)

    first = engine(2, 10)
    first.profile.add(figures(*first.profile.current.beta))
    for number in (1, 2):
        other = engine(number, 1000)
        assert other.profile.measured and not other.profile.coarse
    smaller = dataclasses.replace(ENGINE_SETTINGS, dtype="bfloat16")
    assert not Engine(shallow(), tasks, smaller, cache_dir=tmp_path, buckets=ENGINE_BUCKETS).profile.measured


def test_servers_that_measure_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    mask, diff = class_of("mask"), class_of("diff")
    one, two = (profile_of(replica_of(mask, diff), tmp_path) for _ in range(2))
    one.add(figures(str(mask), seconds=0.1))
    two.add(figures(str(diff), seconds=0.2))
    assert two.coarse == {str(mask)}, "not read yet"
    two.reload()
    assert two.seconds(used(mask, diff)) == pytest.approx(0.3)
    assert profile_of(replica_of(mask, diff), tmp_path).measured == {str(mask), str(diff)}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 2, "alpha": null}'])
def test_a_damaged_file_is_measured_again(tmp_path: Path, text: str) -> None:
    mask = class_of("mask")
    (tmp_path / "a.profile.json").write_text(text)
    profile = profile_of(replica_of(mask), tmp_path)
    assert profile.coarse == {str(mask)} and not (tmp_path / "a.profile.json").exists()
    profile.add(figures(str(mask)))
    assert profile_of(replica_of(mask), tmp_path).measured == {str(mask)}


@pytest.mark.parametrize("shares", [(-0.1, 0.0), (np.inf, 0.0), (0.0, 1.5), (np.nan, 0.0)])
def test_figures_without_sense_are_refused(shares: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        ClassFigures(grid(0.1), *shares)


def test_a_folder_that_cannot_be_written_costs_only_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = SharedFile(tmp_path / "file" / "a.json", "costs", Figures.from_json, Figures.to_json)
    assert kept.update(lambda stored: stored or Figures()) is None


def test_figures_that_come_while_a_batch_is_learnt_from_stay(
    tmp_path: Path, known_costs: Mapping[str, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveProfile, "ran", known_costs["ran"])
    mask = class_of("mask")
    profile = profile_of(replica_of(mask), tmp_path)
    lock, came = profile._lock, list[bool]()

    class Meanwhile:
        def __enter__(self) -> None:
            if not came:
                came.append(True)
                profile.add(figures(str(mask), seconds=0.1))
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    program = Program(ProgramKey(Bucket(64, ((4, 16),)), make_variant({mask: 8})), mock.Mock())
    program.seconds = 1e-4
    profile._lock = Meanwhile()  # type: ignore[assignment]
    profile.ran(used(mask), program, 0.1)
    assert profile.measured == {str(mask)} and profile.seconds(used(mask)) == pytest.approx(0.1, rel=0.1)


def simulate(correction: Correction, truth: dict[str, float], slow: float, batches: int, seed: int = 0) -> None:
    """Batches of two heavy classes and light ones, on a machine that is ``slow`` times slower, with noise. Each
    program's own time follows its batches, as in ``CostTable``."""
    rng = np.random.default_rng(seed)
    own = {"light": 0.010, "heavy": 0.012}
    for _ in range(batches):
        noise = slow * rng.lognormal(0, 0.05)
        if rng.random() < 0.3:
            seconds = noise * 0.010
            correction.light(0.010, seconds)
            own["light"] += 0.1 * (seconds - own["light"])
            continue
        raw = {name: 0.004 * rng.integers(0, 4) for name in truth}
        seconds = noise * (0.012 + sum(truth[name] * cost for name, cost in raw.items()))
        parts = {name: correction.factor(name) * cost for name, cost in raw.items() if cost}
        if parts:
            correction.heavy(own["heavy"], parts, seconds)
            own["heavy"] += 0.1 * (seconds - sum(parts.values()) - own["heavy"])


def test_costs_of_classes_go_where_batches_say() -> None:
    correction, truth = Correction(), {"mask": 2.0, "diff": 0.6}
    simulate(correction, truth, slow=1.0, batches=600)
    for name, factor in truth.items():
        assert correction.factor(name) == pytest.approx(factor, rel=0.1)
    assert correction.factor("another") == pytest.approx(1.0, rel=0.1)


def test_a_slow_machine_changes_no_ratios() -> None:
    correction, truth = Correction(), {"mask": 1.0, "diff": 1.0}
    correction.known(truth)
    simulate(correction, truth, slow=1.0, batches=300)
    simulate(correction, truth, slow=2.0, batches=600, seed=1)
    for name in (*truth, "another"):
        assert correction.factor(name) == pytest.approx(2.0, rel=0.12)


def test_factors_are_bounded() -> None:
    correction = Correction()
    for _ in range(1000):
        correction.heavy(0.01, {"mask": 0.01}, 60.0)
        correction.light(0.01, 60.0)
    assert correction.factor("mask") == pytest.approx(16.0)


def test_figures_hold_for_the_candidates_that_were_measured(tmp_path: Path) -> None:
    """Trials of kernels find a faster one at a later start."""
    mask, diff = class_of("mask"), class_of("diff")
    profile = profile_of(replica_of(mask, diff), tmp_path)
    profile.add(figures(str(mask), str(diff)))
    faster = Operators(classes=((str(mask), "masked_matmul", "batched"),))
    replica = replica_of(mask, diff)
    replica.family = dataclasses.replace(replica.family, operators=faster)
    again = profile_of(replica, tmp_path)
    assert again.measured == {str(diff)} and again.coarse == {str(mask)}
    own = dataclasses.replace(ClassFigures(grid(0.2), 0.1), operators=faster.exceptions_of(str(mask)))
    again.add(Figures(classes={str(mask): own}))
    assert again.measured == {str(mask), str(diff)}
    assert again.seconds(used(mask)) == pytest.approx(0.2)


def test_where_all_runs_are_computed_rows_add_nothing_by_arithmetic(tmp_path: Path) -> None:
    """The room for runs is part of the program's arithmetic there, so one with less room is the cheaper one."""
    mask = class_of("mask")
    replica = replica_of(mask)
    replica.family = dataclasses.replace(replica.family, operators=usual_operators("gpu"))
    profile = profile_of(replica, tmp_path)
    assert profile.seconds(used(mask)) == 0
    costs = CostTable(tmp_path / "b.json", replica.family)
    bucket = Bucket(256, ((8, 32),))
    estimates = [costs.estimate(ProgramKey(bucket, make_variant({mask: level}))) for level in (2, 4, 8)]
    bare = costs.estimate(ProgramKey(bucket, Variant()))
    assert bare < estimates[0] < estimates[1] < estimates[2]
    assert estimates[2] - bare == pytest.approx(4 * (estimates[0] - bare))


def test_a_bench_times_the_candidates_that_are_served() -> None:
    mask = class_of("mask")
    family = dataclasses.replace(
        replica_of(mask).family,
        operators=dataclasses.replace(usual_operators("gpu"), classes=((str(mask), "masked_matmul", "reference"),)),
    )
    bench = Bench(family, first_device(), 128)
    assert bench.family.operators.chosen == family.operators.chosen
    ((name, _),) = bench.family.slots
    assert bench.family.operators.exceptions_of(str(name)) == "masked_matmul=reference"
