"""``jpets plot``: from a text file to a task that is served on a domain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import Run
from support import ENGINE_SETTINGS, FIXTURES

from checkpoints.source import load_backbone
from checkpoints.task_file import read_task
from jpets.app.jobs import tables
from jpets.engine.engine import Engine
from jpets.tokenizing import TextEncoder
from jpets.types import Classification, Preprocessing, Query

QUICK = ("--epochs", 1, "--batch", 16, "--dtype", "float32", "--max-length", 16)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("the library reads files and writes files\nsome words of the domain are read again\n" * 24)
    return path


def test_a_domain_from_a_text_file_and_a_task_on_it(
    run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tables"
    of_root = ("--layers", 1, "--share", 1, "--values", "float8", *QUICK)
    result = run("plot", "root", FIXTURES / "tiny-bert", texts, folder, *of_root)
    assert result.exit_code == 0, result.output
    assert "tables: root" in result.stdout and "last loss" in result.stdout
    result = run("plot", "domain", folder, texts, "files", *QUICK)
    assert result.exit_code == 1 and "at least 20,000 tokens" in result.stderr
    monkeypatch.setattr(tables, "LEAST_TOKENS", 10)
    result = run("plot", "domain", folder, texts, "files", *QUICK)
    assert result.exit_code == 0, result.output
    result = run("plot", "domain", folder, texts, "files", *QUICK)
    assert result.exit_code == 2 and "--replace" in result.stderr
    listed = json.loads(run("plot", "list", folder, "--json").stdout)
    assert [each["domain"] for each in listed] == ["root", "files"] and listed[1]["share"] == 0.5
    assert "files" in run("plot", "list", folder).stdout

    data, task = tmp_path / "data.csv", tmp_path / "task.safetensors"
    data.write_text("text,label\n" + "the library reads files,reads\nthe library writes files,writes\n" * 20)
    arguments = (data, "-o", task, "--backbone", folder, "--domain", "files", "--epochs", 6, "--dtype", "float32")
    result = run("train", *arguments, "--devices", 2)
    assert result.exit_code == 1 and "trained on by one CPU device" in result.stderr
    result = run("train", *arguments)
    assert result.exit_code == 0, result.output
    backbone = load_backbone(folder)
    own = read_task(task, config=backbone.config, backbone=backbone.ref())
    assert own.preprocessing.domain == f"files@{listed[1]['layers']}"
    with Engine(backbone, [own], ENGINE_SETTINGS, cache_dir=tmp_path / "cache").start() as engine:
        (answer,) = engine.infer([Query("task", "the library reads files")])
    assert isinstance(answer, Classification) and np.isfinite(answer.logits).all()
    scored = json.loads(run("task", "eval", task, data, "--backbone", folder, "--json").stdout)
    assert scored["scores"]["accuracy"] > 0.9

    assert run("plot", "delete", folder, "files").exit_code == 0
    result = run("plot", "delete", folder, "files")
    assert result.exit_code == 1 and "there is no domain 'files'" in result.stderr
    result = run("task", "eval", task, data, "--backbone", folder)
    assert result.exit_code == 1 and "there is no domain" in result.stderr


def test_a_root_and_its_domains_by_normal_forms(
    run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are trained on, counted and looked up without their case, and are another backbone than those with it."""
    monkeypatch.setattr(tables, "LEAST_TOKENS", 10)
    source, folder, plain = FIXTURES / "tiny-roberta", tmp_path / "tables", tmp_path / "plain"
    of_root = ("--layers", 1, "--share", 1, *QUICK)
    for own, more in ((folder, ("--normal-forms",)), (plain, ())):
        result = run("plot", "root", source, texts, own, *of_root, *more, "--epochs", 0)
        assert result.exit_code == 0, result.output
    for epochs in (1, 0):
        result = run("plot", "domain", folder, texts, "files", "--share", 1, *QUICK, "--epochs", epochs)
        assert result.exit_code == 0, result.output
    result = run("plot", "root", plain, texts, tmp_path / "again", *of_root)
    assert result.exit_code == 1 and "are tables already" in result.stderr and "counted" not in result.output
    backbone, other = load_backbone(folder), load_backbone(plain)
    assert backbone.fingerprint != other.fingerprint
    assert backbone.tables is not None and other.tables is not None
    small, large = (TextEncoder.of(load_backbone(source)).encode(Query(None, text), Preprocessing()).ids
                    for text in ("x a b", "X A B"))  # fmt: skip
    assert (small != large).any()
    for domain in (None, "files"):
        opened = backbone.tables.opened(domain)
        np.testing.assert_array_equal(opened.rows(small), opened.rows(large))
    opened = other.tables.opened(None)
    assert (opened.rows(small) != opened.rows(large)).any()
    found = backbone.tables.report()[1].levels
    assert sum(found.values()) == 2 * len(small)


def test_a_domain_of_a_backbone_that_knows_its_texts(
    run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HMI trains the lower layers further on a domain before they become n-gram layers. The layers above are the
    root's, so that a backbone with others is refused."""
    monkeypatch.setattr(tables, "LEAST_TOKENS", 10)
    source, folder = shutil.copytree(FIXTURES / "tiny-bert", tmp_path / "source"), tmp_path / "tables"
    result = run("plot", "root", source, texts, folder, "--layers", 1, "--share", 1, *QUICK)
    assert result.exit_code == 0, result.output
    for layer, name in enumerate(("below", "above")):
        further = ("--layers", layer, "--dtype", "float32", "--rate", 0.01, "--batch", 16)
        result = run("backbone", "pretrain", source, texts, tmp_path / name, *further)
        assert result.exit_code == 0, result.output
    for domain, more in (("plain", ()), ("knowing", ("--whole", tmp_path / "below"))):
        if more:
            shutil.rmtree(source)  # the tables may be elsewhere by now
        result = run("plot", "domain", folder, texts, domain, *QUICK, *more)
        assert result.exit_code == 0, result.output
    named = {each["domain"]: each["layers"] for each in json.loads(run("plot", "list", folder, "--json").stdout)}
    assert named["plain"] != named["knowing"], "both imitate the same backbone"
    result = run("plot", "domain", folder, texts, "other", *QUICK, "--whole", tmp_path / "above")
    assert result.exit_code == 1 and "lower layers trained further" in result.stderr


def test_pairs_teach_a_root_the_types_of_their_tokens(run: Run, tmp_path: Path) -> None:
    """Where no text had a second type, it is served as the first."""
    pairs, folder = tmp_path / "pairs.csv", tmp_path
    pairs.write_text("text,other\n" + "the library reads files,files are read\nsome words,other words\n" * 24)
    of_root = ("--layers", 1, "--share", 1, *QUICK)
    told = {}
    for name, more in (("plain", ()), ("paired", ("--text-pair", "other"))):
        result = run("plot", "root", FIXTURES / "tiny-bert", pairs, folder / name, *of_root, *more)
        assert result.exit_code == 0, result.output
        first, second = np.asarray(load_backbone(folder / name).params["token_type"])
        told[name] = bool((first != second).any())
    assert told == {"plain": False, "paired": True}
    result = run("plot", "root", FIXTURES / "tiny-bert", pairs, folder / "none", *of_root, "--text-pair", "third")
    assert result.exit_code == 1 and "third" in result.stderr


def test_what_cannot_be_made_is_refused(run: Run, texts: Path, tmp_path: Path) -> None:
    source, out = FIXTURES / "tiny-bert", tmp_path / "out"
    for more, said in (
        (("--layers", 3), "tables must replace 1 to 2 layers"),
        (("--ngram", 4), "2, 3 or 5 tokens"),
    ):
        result = run("plot", "root", source, texts, out, *more, "--epochs", 0)
        assert result.exit_code == 1 and said in result.stderr and not out.exists()
    result = run("plot", "root", source, texts, out, "--values", "float4")
    assert result.exit_code == 2 and "bfloat16 or float8" in result.stderr
    result = run("plot", "root", source, texts, tmp_path)
    assert result.exit_code == 1 and "exists already" in result.stderr
    result = run("plot", "list", source)
    assert result.exit_code == 1 and "found none; build them" in result.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".making-")]
