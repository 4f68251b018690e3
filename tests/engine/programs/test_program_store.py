"""Programs on disk: a loaded program computes the same as the compiled one, and damage only costs a compilation."""

from __future__ import annotations

import contextlib
import pathlib

import jax
import numpy as np
import pytest
from support import logits_of, method_tasks, shallow

from jpets.config import LINEAR_SITES, BackboneConfig, EngineSettings
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, Bucket, Variant, bucket_menu, make_variant
from jpets.engine.batch.layout import Layout
from jpets.engine.costs.cost_table import CostTable, full_rows, rows_of
from jpets.engine.engine import Engine
from jpets.engine.programs.mesh import first_device
from jpets.engine.programs.program import (
    Family,
    Program,
    ProgramKey,
    _no_compilation_cache,
    compile_program,
    key_from_json,
    key_to_json,
)
from jpets.engine.programs.store import ProgramStore, platforms_variable
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.engine.workloads.registry import family_from_json
from jpets.types import Query

BUCKETS = [Bucket(64, ((6, 16), (1, 64)))]
SETTINGS = EngineSettings(dtype="float32", max_length=64, max_batch_rows=7, background_compile=False)
CONFIG = BackboneConfig("bert", 50, 16, 1, 2, 32, 64)
FAMILY = Family(EncoderNetwork(CONFIG), "float32", ())
KEY = ProgramKey(BUCKETS[0], Variant())


def start(folder: pathlib.Path) -> Engine:
    return Engine(shallow(), [method_tasks(shallow())[1]], SETTINGS, cache_dir=folder, buckets=BUCKETS).start()


def answer(engine: Engine) -> bytes:
    (result,) = engine.infer([Query("lora", "some text")])
    assert result.error is None
    return logits_of(result).tobytes()


@pytest.mark.parametrize("damage", [b"", b"garbage", None], ids=["empty", "garbage", "truncated"])
def test_a_start_survives_damaged_programs(tmp_path: pathlib.Path, damage: bytes | None) -> None:
    with start(tmp_path) as first:
        expected = answer(first)
    (path,) = (tmp_path / "programs").glob("*.program")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with start(tmp_path) as second:
        assert answer(second) == expected
    with start(tmp_path) as third:
        assert answer(third) == expected
    assert path.stat().st_size == pytest.approx(len(whole), rel=0.2)


@pytest.mark.usefixtures("jaxs_cache")
def test_programs_do_not_come_from_jaxs_own_cache(tmp_path: pathlib.Path) -> None:
    """An executable that JAX's persistent cache served cannot be serialised again; ours never come from it."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    for round_ in range(2):
        store = ProgramStore(tmp_path / f"programs-{round_}", first_device())
        store.save(FAMILY, compile_program(FAMILY, KEY))
        loaded = store.load(FAMILY, KEY)
        assert isinstance(loaded, Program)


@pytest.mark.usefixtures("jaxs_cache")
def test_jaxs_own_cache_stays_off_while_any_thread_compiles(tmp_path: pathlib.Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(_no_compilation_cache)
    second.enter_context(_no_compilation_cache)
    first.close()
    assert not jax.config.values["jax_enable_compilation_cache"]
    second.close()
    assert jax.config.values["jax_enable_compilation_cache"]


def test_names_change_with_what_a_program_depends_on(tmp_path: pathlib.Path) -> None:
    store = ProgramStore(tmp_path, first_device())
    store.save(FAMILY, compile_program(FAMILY, KEY))
    assert store.load(FAMILY, KEY) is not None
    assert store.load(Family(EncoderNetwork(CONFIG), "bfloat16", ()), KEY) is None
    assert store.load(FAMILY, ProgramKey(Bucket(64, ((4, 16),)), Variant())) is None


def test_keys_survive_json(tmp_path: pathlib.Path) -> None:
    engine = Engine(shallow(), method_tasks(shallow()), SETTINGS, buckets=BUCKETS, cache_dir=tmp_path)
    assert family_from_json(engine.family.to_json()) == engine.family
    for key in engine.core:
        assert key_from_json(key_to_json(key)) == key


@pytest.mark.parametrize("limits", [(300, 1024, 16), (129, 1024, 8), (200, 1024, 16), (512, 1024, 32), (20, 64, 3)])
def test_every_bucket_can_be_filled_for_measuring(limits: tuple[int, int, int]) -> None:
    for bucket in bucket_menu(*limits):
        rows = full_rows(bucket, FAMILY.network)
        assert rows
        assert bucket.holds(np.array([row.length for row in rows]))


@pytest.mark.parametrize("level", [1, 2, 4, FULL])
@pytest.mark.parametrize("bucket", [Bucket(1024, ((28, 64),)), Bucket(1024, ((64, 32), (8, 128), (1, 512)))])
def test_programs_without_room_for_all_runs_are_measured_by_fewer_rows(bucket: Bucket, level: int) -> None:
    """Where products are left out, every row needs runs of its own weights."""
    mask = ClassKey("mask", tuple((site, 1) for site in LINEAR_SITES), tuple(range(CONFIG.layers)))
    variant = make_variant({mask: level}, 32, replaced=True)
    rows = rows_of(ProgramKey(bucket, variant), FAMILY.network)
    layout = Layout(rows, bucket)
    assert rows and layout.run_levels(variant.run)[mask] <= level
    assert all(row.slots == {mask: 1} for row in rows)
    every = len(full_rows(bucket, FAMILY.network))
    assert len(rows) == every if level == FULL else len(rows) <= every


def test_cost_table_keeps_figures_and_forgets_damage(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "costs" / "a.json"
    table = CostTable(path, FAMILY)
    other = ProgramKey(Bucket(128, ((2, 64),)), Variant())
    table.set(KEY, 0.25)
    assert table.estimate(other) > 0.25
    table.save()
    assert CostTable(path, FAMILY).get(KEY) == 0.25
    path.write_text("{broken")
    assert CostTable(path, FAMILY).get(KEY) is None


@pytest.mark.parametrize(("configured", "of_gpu"), [(None, ""), ("cuda,cpu", "cuda,cpu")])
def test_a_child_process_finds_the_devices_of_its_parent(
    configured: str | None, of_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name "gpu" would be every kind of GPU, of which JAX wants all."""
    monkeypatch.setattr(type(jax.config), "values", property(lambda config: {"jax_platforms": configured}))
    assert (platforms_variable("cpu"), platforms_variable("gpu")) == ("cpu", of_gpu)
