"""Training of tasks whose tokens are rows of tables."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from hierarchical import IN_DOMAIN, opened, write_tables

from checkpoints import native
from checkpoints.native import PLOT, write_native
from jpets.errors import InvalidInput
from jpets.plot.tree import TABLES, Tree
from jpets.training.data import Example
from jpets.training.plan import Training, TrainingPlan
from jpets.training.session import run_training

EXAMPLES = [Example("some text", label="x"), Example("other words of the domain", label="y")] * 8


def test_a_killed_run_goes_on_when_other_domains_come_and_go(tmp_path: Path) -> None:
    """Where a table is in memory depends on those before it: that is not what a run is told by."""
    folder = write_tables(tmp_path / "own", domains=(("early", ("words",), 3), ("games", IN_DOMAIN, 2)))
    training = Training("bitfit", plan=TrainingPlan(1, 8, dtype="float32"), max_length=8, domain="games")
    kept = tmp_path / "kept"
    first = run_training("t", opened(folder), training, EXAMPLES, EXAMPLES, folder=kept)
    Tree.change(folder / PLOT, lambda tree: tree.without("early"))
    again = run_training("t", opened(folder), training, EXAMPLES, EXAMPLES, folder=kept)
    assert again.losses == first.losses
    others = dataclasses.replace(training, domain=None)
    with pytest.raises(InvalidInput, match="progress of a run with other texts"):
        run_training("t", opened(folder), others, EXAMPLES, EXAMPLES, folder=kept)


def test_tables_are_not_written_as_weights(tmp_path: Path) -> None:
    backbone = opened(write_tables(tmp_path / "own"))
    with pytest.raises(InvalidInput, match="copy its folder instead"):
        write_native(backbone, tmp_path / "other")
    with pytest.raises(InvalidInput, match="copy its folder instead"):
        write_native(dataclasses.replace(backbone, tables=None), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("links", [True, False])
def test_tables_stay_until_the_backbone_that_has_them_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """A process that is killed meanwhile loses none of the work of hours."""
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    folder = write_tables(tmp_path / "own")
    plot = tmp_path / "kept"
    shutil.copytree(folder / PLOT, plot)
    backbone = dataclasses.replace(opened(folder), tables=None)
    params = {name: own for name, own in backbone.params.items() if name != "table"}
    backbone = dataclasses.replace(backbone, params=params)
    monkeypatch.setattr(native, "_publish", refuse)
    with pytest.raises(OSError, match="refused"):
        write_native(backbone, tmp_path / "other", plot)
    assert not (tmp_path / "other").exists() and list((plot / TABLES).iterdir())
    monkeypatch.undo()
    write_native(backbone, tmp_path / "other", plot)
    assert not plot.exists()
    assert opened(tmp_path / "other").fingerprint == opened(folder).fingerprint


def refuse(*args: object) -> None:
    raise OSError("refused")
