"""Settings that every test runs under: several CPU devices, strict promotion, shapes checked in the array functions."""

from __future__ import annotations

import functools
import gc
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import jax
import pytest
import safetensors.numpy
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import install_import_hook
from shapes import PACKAGES

from jpets.xla_flags import set_xla_flags

if TYPE_CHECKING:
    import sqlalchemy as sa

    from jpets.engine.device.replica import Replica
    from jpets.engine.programs.program import Program

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("jpets", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("jpets")

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "tests"))
set_xla_flags()  # as commands do, some of which run in this process
install_import_hook(PACKAGES, "shapes.checked")


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: each full collection would look at all of it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def forgetting() -> Iterator[None]:
    """JAX keeps what it traced, and FastAPI the routes of every application. After some thousand tests a full
    collection would take seconds, and an unloaded backbone asks for a dozen."""
    yield
    jax.clear_caches()
    for own in vars(sys.modules.get("fastapi.dependencies.models", sys)).values():
        if isinstance(own, functools._lru_cache_wrapper):
            own.cache_clear()
    gc.collect()


@pytest.fixture
def jaxs_cache() -> Iterator[None]:
    """A test may say where JAX keeps compiled programs, which it reads once; afterwards all is as it was."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def shallow_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """``support.shallow`` as a checkpoint in Hugging Face's format."""
    from support import FIXTURES, shallow  # after the import hook

    source, folder = FIXTURES / "tiny-bert", tmp_path_factory.mktemp("backbones") / "tiny-bert"
    folder.mkdir()
    layers = shallow().config.layers
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "tokenizer.json", folder)
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    kept = {name: array for name, array in tensors.items() if f".layer.{layers}." not in name}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def program_cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of compiled programs that all test processes share."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "programs"


@pytest.fixture(scope="session", autouse=True)
def known_costs() -> Iterator[Mapping[str, Callable[..., None]]]:
    """Programs cost what their arithmetic says, and a millisecond: what tests see must not depend on the seconds that
    programs took on a busy machine. Gives what learns from batches otherwise, for tests of that.
    """
    from jpets.engine.compilation import readiness  # after the import hook
    from jpets.engine.costs import cost_table, idle_measurement, live_profile

    def measure(replica: Replica, program: Program, repeats: int) -> float:
        cost_table.measure(replica, program, 0)
        return (
            1e-3 + 1e-10 * replica.family.network.arithmetic(program.key.bucket, program.key.variant)
            if repeats
            else 0.0
        )

    learning: dict[str, Callable[..., None]] = {
        "follow": cost_table.CostTable.follow,
        "ran": live_profile.LiveProfile.ran,
        "start": idle_measurement.IdleMeasurement.start,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readiness, "measure", measure)
        patch.setattr(cost_table.CostTable, "follow", lambda *_: None)
        patch.setattr(live_profile.LiveProfile, "ran", lambda *_: None)
        patch.setattr(idle_measurement.IdleMeasurement, "start", lambda *_: None)
        yield learning


@pytest.fixture
def learning_costs(known_costs: Mapping[str, Callable[..., None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs cost what they took when they were tried out, and then what their batches say."""
    from jpets.engine.compilation import readiness
    from jpets.engine.costs import cost_table

    monkeypatch.setattr(readiness, "measure", cost_table.measure)
    monkeypatch.setattr(cost_table.CostTable, "follow", known_costs["follow"])


@pytest.fixture
def all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that waits is one batch, whatever the policy would say."""
    from jpets.engine.planning.planner import Planner  # after the import hook

    monkeypatch.setattr(Planner, "next_batch", lambda planner, waiting, **_: planner.place(waiting))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[sa.URL]:
    """A server, or else the test is skipped."""
    from postgresql import running_postgresql

    with running_postgresql() as url:
        yield url


@pytest.fixture
def schema(postgresql: sa.URL) -> Iterator[str]:
    """The URL of an empty schema of PostgreSQL."""
    from postgresql import fresh_schema

    with fresh_schema(postgresql, "of_a_test") as url:
        yield url


@pytest.fixture(scope="session")
def fixtures() -> pathlib.Path:
    return pathlib.Path(__file__).parent / "fixtures"
