"""From a library's folder to an answer: each kind of head, imported by the command and served, against its library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Run
from safetensors.numpy import load_file, save_file
from sentence_folder import describe
from support import ENGINE_SETTINGS, FIXTURES, tiny

from checkpoints.task_file import read_task
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.types import Classification, Embedding, Query, Regression, Result, Span, Task, Tokens

HEADS = FIXTURES / "tiny-bert-heads"
KEPT = np.load(FIXTURES / "tiny-bert" / "outputs.npz")
LENGTHS = KEPT["attention_mask"].sum(1)
CASES: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "classes": ("bert-sequence", "BertForSequenceClassification", {"id2label": dict(enumerate("abcd"))}),
    "sets": (
        "bert-sequence",
        "BertForSequenceClassification",
        {"problem_type": "multi_label_classification", "id2label": dict(enumerate("abcd"))},
    ),
    "values": ("bert-sequence", "BertForSequenceClassification", {"problem_type": "regression"}),
    "tokens": ("bert-token", "BertForTokenClassification", {"id2label": dict(enumerate(["O", "A", "B", "C", "D"]))}),
    "answers": ("bert-qa", "BertForQuestionAnswering", {}),
    "vectors": ("", "BertModel", {}),
}
"""Task -> kept head, class of the model, settings beside tiny-bert's."""


def library_folder(folder: Path, head: str, model: str, settings: Mapping[str, Any]) -> Path:
    """As the library saves a model; a Sentence-Transformers folder without a head."""
    folder.mkdir()
    config = json.loads((FIXTURES / "tiny-bert" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [model], **settings}))
    (folder / "tokenizer.json").write_bytes((FIXTURES / "tiny-bert" / "tokenizer.json").read_bytes())
    tensors = load_file(FIXTURES / "tiny-bert" / "model.safetensors")
    if head:
        tensors = {f"bert.{name}": own for name, own in tensors.items()} | load_file(HEADS / head / "head.safetensors")
    else:
        describe(folder, settings={"max_seq_length": 16})
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def imported(run: Run, tmp_path: Path) -> dict[str, Task]:
    tasks = {}
    for name, (head, model, settings) in CASES.items():
        folder = library_folder(tmp_path / name, head, model, settings)
        out = tmp_path / f"{name}.safetensors"
        result = run(
            "task", "import", folder, "-o", out, "--backbone", FIXTURES / "tiny-bert", "--method", "bitfit", "--json"
        )
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["notes"] == []
        tasks[name] = read_task(out, config=tiny().config, backbone=tiny().ref())
    return tasks


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def check(name: str, result: Result, row: int) -> None:
    """Against what the library gave for that row."""
    n = LENGTHS[row]
    if name == "vectors":
        assert isinstance(result, Embedding)
        expected = KEPT["hidden_states"][-1][row, 0]
        np.testing.assert_allclose(result.embedding, expected / np.linalg.norm(expected), atol=1e-4)
        return
    logits = np.load(HEADS / CASES[name][0] / "outputs.npz")["logits"][row]
    if name in ("classes", "sets"):
        assert isinstance(result, Classification) and result.names == tuple("abcd")
        probs = softmax(logits) if name == "classes" else 1 / (1 + np.exp(-logits))
        np.testing.assert_allclose(result.probs, probs, atol=1e-4)
        assert result.label == "abcd"[int(logits.argmax())]
        assert result.labels == (() if name == "classes" else tuple("abcd"[at] for at in np.flatnonzero(probs >= 0.5)))
        return
    assert isinstance(result, Regression | Tokens | Span)
    assert isinstance(result, {"values": Regression, "tokens": Tokens, "answers": Span}[name])
    np.testing.assert_allclose(result.logits, logits if name == "values" else logits[:n], atol=1e-4)


def test_each_kind_of_head_answers_as_in_its_library(imported: dict[str, Task], program_cache: Path) -> None:
    assert imported["vectors"].preprocessing.max_length == 16
    tasks = [Task(**{**vars(task), "id": name}) for name, task in imported.items()]
    rows = [row for row in range(len(LENGTHS)) if LENGTHS[row] <= 16]
    queries = [
        (
            name,
            row,
            Query(
                name,
                input_ids=KEPT["input_ids"][row, : LENGTHS[row]].tolist(),
                token_type_ids=KEPT["token_type_ids"][row, : LENGTHS[row]].tolist(),
            ),
        )
        for name in CASES
        for row in rows
    ]
    assert len(rows) > 1
    buckets = [Bucket(128, ((8, 16),))]
    with Engine(tiny(), tasks, ENGINE_SETTINGS, cache_dir=program_cache, buckets=buckets).start() as engine:
        for (name, row, _), result in zip(queries, engine.infer([query for _, _, query in queries]), strict=True):
            assert result.error is None, (name, result.error)
            check(name, result, row)
        words = engine.infer([Query(name, "a library", "for reading files") for name in CASES if name != "vectors"])
        assert [result.error for result in words] == [None] * 5


def test_label_names_and_pooling_that_are_not_said_are_told(run: Run, tmp_path: Path) -> None:
    out, backbone = tmp_path / "own.safetensors", FIXTURES / "tiny-bert"
    lora = FIXTURES / "imports" / "peft" / "lora-token"
    told = run("task", "import", lora, "-o", out, "--backbone", backbone)
    assert "does not name its" in told.stdout and "--labels" in told.stdout
    folder = library_folder(tmp_path / "vectors", *CASES["vectors"])
    (folder / "modules.json").unlink()
    arguments = ("task", "import", folder, "-o", out, "--backbone", backbone, "--method", "bitfit")
    assert "--normalize" in run(*arguments).stdout
    said = run(*arguments, "--pooling", "cls", "--normalize", "--max-length", 9)
    assert "cls pooling, normalised" in said.stdout and "cut to 9 tokens" in said.stdout and "see --" not in said.stdout


def test_a_backbone_says_how_it_embeds(run: Run, tmp_path: Path) -> None:
    folder = library_folder(tmp_path / "own", *CASES["vectors"])
    shown = run("backbone", "show", folder)
    assert "by cls, normalised, texts cut to 16 tokens" in shown.stdout
    assert run("backbone", "import", folder, tmp_path / "native").exit_code == 0
    (document,) = [json.loads(run("backbone", "show", tmp_path / "native", "--json").stdout)]
    assert document["embeds"]["pooling"] == "cls" and document["embeds"]["preprocessing"]["max_length"] == 16
