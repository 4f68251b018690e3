"""What is kept of a run, and what becomes of it when a file was damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest

from jpets.errors import InvalidInput
from jpets.training.checkpoints import Checkpoints
from jpets.training.fit import State
from jpets.training.run import TrainingProgress


def progress(step: int) -> TrainingProgress:
    trained = {"own": {"weight": jnp.full(3, float(step))}, "head": {}}
    state = State(trained, optax.adam(1e-3).init(trained), step)
    return TrainingProgress(state, trained, np.asarray(1.0), np.asarray(0), np.zeros(9))


@pytest.fixture
def keep(tmp_path: Path) -> Callable[..., Path]:
    def kept(*steps: int) -> Path:
        keeper = Checkpoints(tmp_path / "run")
        for step in steps:
            keeper.save(progress(step))
        keeper.close()
        return tmp_path / "run"

    return kept


def damage(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")


def loaded(folder: Path) -> TrainingProgress:
    keeper = Checkpoints(folder)
    try:
        return keeper.load(progress(0))
    finally:
        keeper.close()


def test_the_newest_progress_is_loaded(keep: Callable[..., Path]) -> None:
    found = loaded(keep(1, 2, 3))
    assert int(found.state.step) == 3
    np.testing.assert_array_equal(jax.tree.leaves(found.state.trained)[0], np.full(3, 3.0))


def test_a_run_goes_on_from_an_older_checkpoint_where_the_newest_is_damaged(keep: Callable[..., Path]) -> None:
    """A power cut may damage the last one; its step comes again and is saved again."""
    folder = keep(1, 2)
    damage(folder / "2")
    assert int(loaded(folder).state.step) == 1
    keep(2)
    assert int(loaded(folder).state.step) == 2


def test_where_all_are_damaged_nothing_is_thrown_away(keep: Callable[..., Path]) -> None:
    folder = keep(1, 2)
    damage(folder / "1")
    damage(folder / "2")
    with pytest.raises(InvalidInput, match="its checkpoint 2 is damaged"):
        loaded(folder)
    assert (folder / "1").exists() and (folder / "2").exists()
    shutil.rmtree(folder)
    assert int(loaded(folder).state.step) == 0
