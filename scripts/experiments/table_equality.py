"""Answers over a real backbone's tables beside computing its n-gram layers: of long texts, one token, Chinese, emoji.

python -m experiments.table_equality minilm-3
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer

from checkpoints.backbone import Backbone
from checkpoints.native import read_native
from jpets.app.jobs.tables import Making, make_domain, opened_layers
from jpets.config import EngineSettings
from jpets.deltas import METHODS
from jpets.engine.engine import Engine
from jpets.model.encoder import split
from jpets.plot.ngrams import ngrams
from jpets.plot.values import stored
from jpets.tokenizing import TextEncoder
from jpets.training.data import Example
from jpets.training.forward import TextRows, task_outputs
from jpets.training.plan import TrainingPlan
from jpets.types import BackboneRef, Classification, Head, Preprocessing, Query, Task

LONG = "a package of many words that are not the same and its documentation, "
TEXTS: Mapping[str, str] = {
    "short": "a library that reads files",
    "one word": "library",
    "512 tokens": LONG * 40,
    "450 tokens": LONG * 32,
    "unknown words": "xqzzv wprt blorfing the ghlt",
    "Chinese": "这是一个用来阅读文件的程序库,它没有名字。",
    "emoji and accents": "naïve café 🚀 🧑‍💻 Ünïcödé",
}
DOMAIN = "equality"
VIRTUAL = 32
"""Tokens that are left for a prompt's, at least."""
OFTEN = 120
"""Times that each text is in the domain's corpus, which must not be small."""


def main(
    folder: Annotated[pathlib.Path, typer.Argument(exists=True, file_okay=False, help="of jpets plot root")],
    staged: bool = False,
) -> None:
    """The largest difference of a logit, of texts whose n-grams the domain's table holds."""
    with tempfile.TemporaryDirectory(prefix="equality-", dir=folder.parent) as temporary:
        copy = pathlib.Path(temporary) / folder.name
        shutil.copytree(folder, copy, copy_function=os.link)
        examples = [Example(text, None, None) for text in TEXTS.values()] * OFTEN
        make_domain(copy, DOMAIN, examples, Making(TrainingPlan(0, 32), share=1.0))
        backbone = read_native(copy)
        tasks = [_task(backbone, method) for method in ("lora", "prompt", "prefix")]
        settings = EngineSettings(tables="staged" if staged else "auto", background_compile=False, dtype="float32")
        with Engine(backbone, tasks, settings, cache_dir=copy.parent / "cache").start() as engine:
            for task in tasks:
                computed = _computed(backbone, copy, task)
                for (name, text), expected in zip(TEXTS.items(), computed, strict=True):
                    if expected is None:
                        continue  # cut elsewhere than its n-grams were counted
                    (found,) = engine.infer([Query(task.id, text)])
                    assert isinstance(found, Classification), found
                    off = np.abs(found.logits - expected).max()
                    tokens = len(_ids(backbone, text, task.preprocessing))
                    typer.echo(f"{task.id}, {name}: {tokens} tokens, off by {off:.1e} of {np.abs(expected).max():.2f}")


def _task(backbone: Backbone, method: str) -> Task:
    rng = np.random.default_rng(1)
    delta = METHODS[method].init(rng, METHODS[method].usual, backbone.config, 0.02)
    kernel = rng.standard_normal((backbone.config.hidden_size, 4), np.float32) * 0.1
    head = Head("sequence-classification", {"kernel": kernel, "bias": np.zeros(4, np.float32)}, pooling="mean")
    assert backbone.tables is not None
    longest = backbone.config.max_positions - (VIRTUAL if method == "prompt" else 0)
    rule = Preprocessing(truncation=True, max_length=longest, domain=backbone.tables.full_name(DOMAIN))
    return Task(method, BackboneRef.of(backbone), (delta,), head, tuple("abcd"), rule)


def _ids(backbone: Backbone, text: str, rule: Preprocessing) -> np.ndarray:
    encoder = TextEncoder.of(dataclasses.replace(backbone, tables=None))
    return encoder.encode(Query(None, text), dataclasses.replace(rule, domain=None)).ids


def _computed(backbone: Backbone, folder: pathlib.Path, task: Task) -> list[np.ndarray | None]:
    """Logits where the lower layers compute every n-gram; None for a text that the task cuts short."""
    layers, model = opened_layers(backbone, folder, DOMAIN)
    vectors = jax.jit(layers.vectors)
    found: list[np.ndarray | None] = []
    for text in TEXTS.values():
        ids = _ids(backbone, text, task.preprocessing)
        if len(ids) == task.preprocessing.max_length != backbone.config.max_positions:
            found.append(None)
            continue
        grams = ngrams(ids, None, layers.window)
        table = stored(np.asarray(vectors(model.ngrams, jnp.asarray(grams, jnp.int32))), backbone.config.table_format)
        config = dataclasses.replace(backbone.config, table_rows=len(ids))
        rows = TextRows(jnp.arange(len(ids))[None], jnp.zeros((1, len(ids)), jnp.int32), jnp.array([len(ids)]))
        tensors = jax.tree.map(jnp.asarray, dict(task.head.tensors))
        params = {**jax.tree.map(jnp.asarray, model.upper), "table": jnp.asarray(table)}
        outputs = task_outputs(split(config), params, task.deltas, task.head, tensors, rows)
        found.append(np.asarray(outputs.logits)[0])
    return found


if __name__ == "__main__":
    typer.run(main)
