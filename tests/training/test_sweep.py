"""Sweeps: which rates are tried, which result is kept, and that one program serves them all."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from checkpoints.source import load_backbone
from jpets.errors import InvalidInput
from jpets.model.encoder import split
from jpets.tokenizing import Tokens
from jpets.training import plan, sweep
from jpets.training.batches import Rows, each_batch
from jpets.training.fit import TaskFunctions
from jpets.training.heads import new_head
from jpets.training.methods import direct_recipe
from jpets.training.plan import Training
from jpets.training.run import UpdateReport


def test_the_rates_of_a_sweep() -> None:
    assert plan.rates_of(None, 0.3) == [0.3]
    for given in ("rate=1e-4..1e-1", "lr=1e-4..1e-1", "1e-4..1e-1"):
        assert plan.rates_of(given, None) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    for bad in ("rate", "rate=1..", "rate=2..1", "depth=1..2", "rate=0..1", "rate=nan..1", ""):
        with pytest.raises(InvalidInput, match=r"must be rate=LOW\.\.HIGH"):
            plan.rates_of(bad, None)
        with pytest.raises(InvalidInput, match=r"must be rate=LOW\.\.HIGH"):
            plan.check_rates(bad, None, "lora")
    with pytest.raises(InvalidInput, match="one of them"):
        plan.check_rates("1e-4..1e-1", 0.3, "lora")
    for sweep_of, rate in (("1e-4..1e-1", None), (None, 0.3)):
        with pytest.raises(InvalidInput, match="head_rate"):
            plan.check_rates(sweep_of, rate, "frozen")
    plan.check_rates(None, None, "frozen")
    assert len(plan.rates_of("1e-4..1e-1", 0.3)) == 4, "as a job of the release before says it"


def test_the_rate_with_the_least_held_out_loss_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    losses = {1.0: math.nan, 2.0: 0.5, 3.0: 0.25, 4.0: 0.75}
    folders = []

    def run_training(id: str, backbone: Any, training: Training, *data: Any, folder: Path, report: Any) -> Any:
        del id, backbone, data
        folders.append(folder.name)
        report(UpdateReport(1, 1, 0.0))
        return SimpleNamespace(held_out=losses[training.plan.rate or 0])

    monkeypatch.setattr(sweep, "run_training", run_training)
    seen = []
    result, rate = sweep.best_of(
        [1.0, 2.0, 3.0, 4.0], "own", cast("Any", None), Training("lora"), [], folder=tmp_path,
        report=lambda own, step: seen.append((own, step.number)),
    )  # fmt: skip
    assert (result.held_out, rate) == (0.25, 3.0)
    with pytest.raises(InvalidInput, match="diverged"):
        sweep.best_of([1.0], "own", cast("Any", None), Training("lora"), [], folder=tmp_path / "x")
    assert folders.pop() == "0"
    assert folders == ["0", "1", "2", "3"] and seen == [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)]


def test_an_update_is_one_program_for_all_rates_and_seeds(fixtures: Path) -> None:
    backbone = load_backbone(fixtures / "tiny-bert")
    base = dict(backbone.params)
    recipe = direct_recipe("bitfit", {}, backbone.config, base)
    head = new_head("sequence-classification", "single-label", 2, backbone.config.hidden_size)
    rows = Rows(
        [Tokens(np.arange(4, dtype=np.int32), np.zeros(4, np.int32))], [np.array(1, np.int32)], np.ones(1, np.float32)
    )
    texts = []
    for own in (plan.SettledPlan(batch=1), plan.SettledPlan(batch=1, rate=0.5, head_rate=0.25, seed=7)):
        task = TaskFunctions(split(backbone.config), recipe, head, own)
        trained = {"own": recipe.start(np.random.default_rng(0)), "head": dict(head.tensors)}
        (batch,) = each_batch(rows, own, 0)
        step, steps = np.int32(0), np.int32(3)
        arguments = (base, trained, task.optimiser.init(trained), step, steps, task.pace, *batch)
        texts.append(jax.jit(task.update).lower(*arguments).as_text())
    assert texts[0] == texts[1]


@pytest.fixture
def no_cache(jaxs_cache: None) -> None:
    """JAX keeps no compiled programs, as if it was not asked to."""
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.mark.usefixtures("no_cache")
def test_compiled_programs_are_kept_as_long_as_a_sweep_lasts() -> None:
    with sweep.shared_programs():
        folder = Path(jax.config.values["jax_compilation_cache_dir"])
        jax.jit(lambda x: x * 3 + 1)(np.arange(7)).block_until_ready()
        assert list(folder.iterdir())
        with sweep.shared_programs():
            assert Path(jax.config.values["jax_compilation_cache_dir"]) == folder
        assert folder.exists()
    assert not folder.exists() and jax.config.values["jax_compilation_cache_dir"] is None
