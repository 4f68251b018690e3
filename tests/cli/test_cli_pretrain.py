"""Further pretraining: what is hidden, what is learned, what stays as it is."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import Run
from support import FIXTURES, tiny

from checkpoints.source import load_backbone
from jpets.app.jobs import further
from jpets.errors import InvalidInput
from jpets.model.encoder import random_params, split
from jpets.tokenizing import Tokens
from jpets.training.checkpoints import Checkpoints
from jpets.training.data import Example
from jpets.training.forward import TextRows
from jpets.training.plan import TrainingPlan
from jpets.training.pretrain import Vocabulary, hide, pretrain
from jpets.training.run import UpdateReport

VOCABULARY = Vocabulary(800, 4, (0, 1, 2, 3, 4))


def test_fifteen_per_cent_are_hidden_as_the_paper_says() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 800, (64, 128)).astype(np.int32)
    ids[:, 0], lengths = 2, rng.integers(20, 128, 64)
    rows = TextRows(jnp.asarray(ids), jnp.zeros_like(ids), jnp.asarray(lengths))
    hidden, targets = jax.tree.map(np.asarray, hide(rows, VOCABULARY, jax.random.key(1)))
    chosen, inside = targets >= 0, np.arange(128)[None] < lengths[:, None]
    assert not chosen[:, 0].any() and not chosen[~inside].any()
    np.testing.assert_array_equal(targets[chosen], ids[chosen])
    np.testing.assert_array_equal(hidden.ids[~chosen], ids[~chosen])
    assert chosen.sum() / (inside.sum() - 64) == pytest.approx(0.15, abs=0.015)
    masked = hidden.ids[chosen] == 4
    kept = hidden.ids[chosen] == ids[chosen]
    assert masked.mean() == pytest.approx(0.8, abs=0.04) and kept.mean() == pytest.approx(0.1, abs=0.04)


def test_no_special_token_is_put_in_anothers_place() -> None:
    ids = np.random.default_rng(0).integers(5, 8, (64, 128)).astype(np.int32)
    rows = TextRows(jnp.asarray(ids), jnp.zeros_like(ids), jnp.full(64, 128))
    hidden, targets = jax.tree.map(np.asarray, hide(rows, Vocabulary(8, 4, (0, 1, 2, 3, 4)), jax.random.key(1)))
    assert set(np.unique(hidden.ids[targets >= 0])) == {4, 5, 6, 7}


def test_weights_that_diverged_in_the_last_update_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverged(encoder: Any, base: Any, *rest: Any, **how: Any) -> Any:
        layers = {**base["layers"], 1: jax.tree.map(lambda leaf: leaf * np.nan, base["layers"][1])}
        return {**base, "layers": layers}, [1.0]

    monkeypatch.setattr(further, "pretrain", diverged)
    with pytest.raises(InvalidInput, match="training diverged"):
        further.further_pretrained(tiny(), "new", [Example("a library")], [1], 16, TrainingPlan(epochs=1))


def test_chosen_layers_learn_and_the_others_stay(run: Run, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the library reads files and writes files and reads files again\n" * 64)
    out = tmp_path / "domain"
    arguments = (FIXTURES / "tiny-bert", texts, out, "--layers", "1,2", "--epochs", 4, "--batch", 16, "--rate", 3e-3)
    result = run("backbone", "pretrain", *arguments, "--dtype", "float32", "--max-length", 16)
    assert result.exit_code == 0, result.output
    shown = dict(line.rsplit("  ", 1) for line in result.stdout.splitlines())
    first, last = (float(value) for name, value in shown.items() if "loss" in name)
    assert last < 0.9 * first
    made, base = load_backbone(out), tiny()
    assert made.name == "domain" and made.fingerprint == made.computed_fingerprint() != base.fingerprint
    for layer in range(3):
        same = [
            np.array_equal(made.params["layers"][layer][n], base.params["layers"][layer][n]) for n in ("qkv", "ffn_in")
        ]
        assert same == [layer == 0] * 2
    np.testing.assert_array_equal(made.params["word"], base.params["word"])
    wrong: list[tuple[tuple[object, ...], str]] = [
        ((FIXTURES / "tiny-bert", texts, out), "exists already"),
        ((FIXTURES / "tiny-bert", texts, tmp_path / "x", "--layers", "7"), "layers must be some of 0 to 2"),
        ((FIXTURES / "tiny-bert", texts, tmp_path / "x", "--layers", "a"), "layers must be numbers"),
    ]
    for given, message in wrong:
        result = run("backbone", "pretrain", *given)
        assert result.exit_code == 1 and message in result.stderr


@pytest.mark.parametrize(("count", "expected"), [(1, [0]), (3, [0]), (6, [0, 1, 2]), (12, [0, 1, 2, 3, 4, 5])])
def test_by_default_the_lower_half_is_trained(count: int, expected: list[int]) -> None:
    assert further.chosen_layers(None, count) == expected


def test_a_run_that_ended_early_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    config = dataclasses.replace(tiny().config, layers=1)
    base = jax.tree.map(np.asarray, random_params(config))
    rng = np.random.default_rng(0)
    texts = [Tokens(rng.integers(5, 800, 16).astype(np.int32), np.zeros(16, np.int32)) for _ in range(24)]
    plan = TrainingPlan(epochs=2, batch=8, dtype="float32")

    def run(folder: Path | None, stop: int | None = None) -> Any:
        def report(step: UpdateReport) -> None:
            if step.number == stop:
                raise KeyboardInterrupt

        with contextlib.ExitStack() as stack:
            keeper = stack.enter_context(contextlib.closing(Checkpoints(folder))) if folder is not None else None
            return pretrain(split(config), base, texts, [0], VOCABULARY, plan, keeper=keeper, report=report)

    expected, losses = run(None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop=5)
    found, own = run(tmp_path)
    assert own == losses and len(losses) == 6
    jax.tree.map(np.testing.assert_array_equal, found["layers"], expected["layers"])
