"""Texts that tables are made of: as those are that are looked up there."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
from support import tiny

from checkpoints.native import read_native
from jpets.app.jobs import tables
from jpets.app.jobs.tables import Making, make_domain, make_root
from jpets.tokenizing import TextEncoder
from jpets.training.data import Example
from jpets.training.plan import TrainingPlan
from jpets.types import EmbeddingRule, Preprocessing, Query

TEXT = "the library reads files"
MAKING = Making(TrainingPlan(0, 16), share=1.0, max_length=16)


def test_a_root_has_what_stands_before_texts_that_are_embedded_and_a_domain_what_tasks_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "LEAST_TOKENS", 1)
    rule, examples = Preprocessing(prefix="some words: "), [Example(TEXT)] * 8
    whole = dataclasses.replace(tiny(), embeds=EmbeddingRule(preprocessing=rule))
    make_root(whole, "root", examples, tmp_path / "root", 1, 3, MAKING)
    make_domain(tmp_path / "root", "files", examples, MAKING)
    backbone = read_native(tmp_path / "root")
    embedded, plain = (TextEncoder.of(whole).encode(Query(None, TEXT), own).ids for own in (rule, Preprocessing()))
    assert backbone.tables is not None and len(embedded) > len(plain)
    backbone.tables.opened(None).rows(embedded)
    backbone.tables.opened("files").rows(plain)
    root, files = (each.levels for each in backbone.tables.report())
    assert (root["root"], files["domain"]) == (len(embedded), len(plain))
