"""Sweeps: which rates are tried, and which result is kept."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jpets.errors import InvalidInput
from jpets.training import plan, sweep
from jpets.training.run import Step
from jpets.training.session import Training


def test_the_rates_of_a_sweep() -> None:
    assert plan.rates_of(None, 0.3) == [0.3]
    for given in ("rate=1e-4..1e-1", "lr=1e-4..1e-1", "1e-4..1e-1"):
        assert plan.rates_of(given, None) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    for bad in ("rate", "rate=1..", "rate=2..1", "depth=1..2", "rate=0..1", "rate=nan..1", ""):
        with pytest.raises(InvalidInput, match=r"must be rate=LOW\.\.HIGH"):
            plan.rates_of(bad, None)


def test_the_rate_with_the_least_held_out_loss_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    losses = {1.0: math.nan, 2.0: 0.5, 3.0: 0.25, 4.0: 0.75}
    folders = []

    def run_training(id: str, backbone: Any, training: Training, *data: Any, folder: Path, report: Any) -> Any:
        del id, backbone, data
        folders.append(folder.name)
        report(Step(1, 1, 0.0))
        return SimpleNamespace(held_out=losses[training.plan.rate or 0])

    monkeypatch.setattr(sweep, "run_training", run_training)
    seen = []
    result, rate = sweep.best_of(
        [1.0, 2.0, 3.0, 4.0], "own", Any, Training("lora"), [], folder=tmp_path,
        report=lambda own, step: seen.append((own, step.number)),
    )  # fmt: skip
    assert (result.held_out, rate) == (0.25, 3.0)
    assert folders == ["0", "1", "2", "3"] and seen == [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)]
