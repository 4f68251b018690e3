"""Settings that every test runs under: several CPU devices, strict promotion, shapes checked in the array functions."""

from __future__ import annotations

import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

from jpets.engine.xla_flags import set_xla_flags

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("jpets", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("jpets")

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "tests"))
set_xla_flags()  # as commands do, some of which run in this process
install_import_hook(["pallas_kernels", "jpets.model.encoder", "jpets.model.forward"], "beartype.beartype")


@pytest.fixture(scope="session")
def shallow_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """``support.shallow`` as a folder."""
    from support import shallow  # after the import hook

    from checkpoints.native import write_native

    folder = tmp_path_factory.mktemp("backbones") / "tiny-bert"
    write_native(shallow(), folder)
    return folder


@pytest.fixture(scope="session")
def program_cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of compiled programs that all test processes share."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "programs"


@pytest.fixture(scope="session")
def fixtures() -> pathlib.Path:
    return pathlib.Path(__file__).parent / "fixtures"
