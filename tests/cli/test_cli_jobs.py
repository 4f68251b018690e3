"""``jpets train --task`` and ``jpets jobs``: training as a job of a server."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from full_model import biases, write_full
from runs import Run

from checkpoints.source import TOKENIZERS
from jpets.app.commands.client.jobs import pack, texts_to_send
from jpets.app.jobs.work import TRAIN, VALIDATION, texts_of
from jpets.errors import JpetsError
from jpets.training.data import Columns, Example


def sides(columns: Columns) -> dict[str, Columns]:
    return {TRAIN: columns, VALIDATION: columns}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\na fine game,good\n")
    return path


def test_a_job_is_started_followed_listed_and_removed(run: Run, server: str, data: Path) -> None:
    here = ("--server", server)
    options = ("--task", "fresh", "--set", "rank=4", "--epochs", 2, "--balanced")
    result = run("train", data, *options, *here, "--json", env={"JPETS_BACKBONE": "a folder of this machine"})
    assert result.exit_code == 0, result.output
    item = json.loads(result.stdout)
    assert (item["state"], item["task"], item["version"]) == ("succeeded", "fresh", 1)
    assert item["scores"] == {"accuracy": 0.75} and item["backbone"] == "tiny-bert"
    assert run("task", "show", "fresh", *here).exit_code == 0
    id = item["id"]
    assert json.loads(run("jobs", "show", id, *here, "--json").stdout) == item
    shown = run("jobs", "show", id, *here).stdout
    assert "succeeded" in shown and "version 1" in shown and "0.7500" in shown
    assert id in run("jobs", "list", *here).stdout
    assert json.loads(run("jobs", "list", *here, "--json").stdout)[0] == item
    assert run("jobs", "log", id, *here).stdout == "as if it were trained\n"
    assert run("jobs", "cancel", id, *here).stdout == f"{id} is removed\n"
    assert run("jobs", "show", id, *here).exit_code == 1
    assert run("task", "remove", "fresh", *here).exit_code == 0


def test_a_job_that_fails_or_is_refused_is_one_line(run: Run, server: str, data: Path, tmp_path: Path) -> None:
    here = ("--server", server)
    data.write_text("no columns")
    failed = run("train", data, "--task", "fresh", "--set", "rank=4", *here)
    assert failed.exit_code == 1 and "failed: one column only" in failed.stderr and failed.stderr.count("\n") == 1
    for more, part in ((("--set", "depth=4"), "lora"), (("--backbone", "other"), "expected one of ['tiny-bert']")):
        refused = run("train", data, "--task", "fresh", *here, *more)
        assert refused.exit_code == 1 and part in refused.stderr
    with data.open("ab") as file:
        file.truncate(40 << 20)  # the refusal comes while it is sent
    refused = run("train", data, "--task", "fresh", *here, "--set", "depth=4")
    assert refused.exit_code == 1 and "lora" in refused.stderr
    text = tmp_path / "data.txt"
    text.write_text("a")
    assert "expected a file that ends in" in run("train", text, "--task", "fresh", *here).stderr


def test_training_here_and_there_are_told_apart(run: Run, data: Path, tmp_path: Path) -> None:
    for options, part in (
        ((), "exactly one of --output FILE and --task ID"),
        (("-o", tmp_path / "x.safetensors", "--task", "x"), "exactly one of"),
        (("--task", "x", "--checkpoints", data.parent), "--checkpoints: only without --task"),
        (("-o", tmp_path / "x.safetensors"), "--backbone"),
    ):
        result = run("train", data, *options)
        assert result.exit_code == 2 and part in " ".join(result.stderr.replace("│", "").split())


def test_held_out_texts_are_sent_along(run: Run, server: str, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "held-out.tsv"
    other.write_text("text\tlabel\na dull game\tbad\n")
    options = ("--task", "judged", "--set", "rank=4", "--validation", other, "--server", server, "--json")
    item = json.loads(run("train", data, *options).stdout)
    assert (item["state"], item["version"]) == ("succeeded", 1), item
    assert run("task", "remove", "judged", "--server", server).exit_code == 0
    sent = texts_to_send(data, other, Columns(), tmp_path)
    learnt, judged = [Example("a fine game", None, "good")], [Example("a dull game", None, "bad")]
    assert texts_of(sent, sides(Columns())) == {TRAIN: learnt, VALIDATION: judged}
    assert texts_of(data, sides(Columns())) == {TRAIN: learnt}


def test_folders_of_the_datasets_library_are_sent_as_files(run: Run, server: str, data: Path, tmp_path: Path) -> None:
    import datasets  # type: ignore[import-untyped]

    folder = tmp_path / "reviews"
    features = datasets.Features(
        {"words": datasets.List(datasets.Value("string")), "label": datasets.ClassLabel(names=["good", "bad"])}
    )
    rows = {"words": [["a", "fine", "gamé"], ["dull"]], "label": [0, 1]}
    datasets.Dataset.from_dict(rows, features).add_column("made", [b"x", b"y"]).save_to_disk(folder)
    expected = [Example(("a", "fine", "gamé"), None, "good"), Example(("dull",), None, "bad")]
    columns = Columns("words")
    assert texts_of(texts_to_send(folder, None, columns, tmp_path), sides(columns)) == {TRAIN: expected}
    sent = texts_of(texts_to_send(folder, folder, columns, tmp_path), sides(columns))
    assert sent == {TRAIN: expected, VALIDATION: expected}
    with pytest.raises(JpetsError, match=r"reviews, row 1: expected a column 'text', found .*'words'"):
        texts_to_send(data, folder, Columns(), tmp_path)
    with pytest.raises(JpetsError, match="expected 'made' to be a text"):
        texts_to_send(folder, None, Columns("made"), tmp_path)
    options = ("--task", "sent", "--set", "rank=4", "--text", "words", "--server", server)
    assert run("train", folder, *options).exit_code == 0
    assert run("task", "remove", "sent", "--server", server).exit_code == 0
    refused = run("train", tmp_path, *options)
    assert refused.exit_code == 1 and "that datasets' save_to_disk wrote" in refused.stderr


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["data.csv"], "expected an archive of train.csv"),
        (["train.csv", "train.tsv"], "expected an archive of train.csv"),
        (["train.csv", "validation.csv", "texts.csv"], "expected an archive of train.csv"),
        (["train.exe"], "expected a file that ends in"),
        (["../train.csv"], "would leave its folder"),
    ],
)
def test_archives_of_other_files_are_refused(tmp_path: Path, names: list[str], part: str) -> None:
    with zipfile.ZipFile(tmp_path / "sent.zip", "w") as archive:
        for name in names:
            archive.writestr(name, "text,label\na,b\n")
    with pytest.raises(JpetsError, match=part):
        texts_of(tmp_path / "sent.zip", sides(Columns()))


def test_nobody_waits_with_no_wait(run: Run, server: str, data: Path) -> None:
    here = ("--server", server)
    result = run("train", data, "--task", "later", "--set", "rank=4", "--no-wait", *here, "--json")
    assert json.loads(result.stdout)["version"] is None
    id = json.loads(result.stdout)["id"]
    while json.loads(run("jobs", "show", id, *here, "--json").stdout)["state"] in ("queued", "running"):
        pass
    run("jobs", "cancel", id, *here)
    run("task", "remove", "later", *here)


def test_other_kinds_of_jobs_are_started(run: Run, server: str, data: Path, tmp_path: Path) -> None:
    here = ("--server", server, "--json")
    model = write_full(tmp_path / "model", biases)
    (model / "weights.onnx").write_text("not read")
    made = run("jobs", "extract", model, "lifted", "--method", "auto", "--texts", data, "--set", "agreement=0.9", *here)
    assert made.exit_code == 0, made.output
    item = json.loads(made.stdout)
    assert (item["kind"], item["task"], item["version"], item["method"]) == ("extract", "lifted", 1, "auto")
    text = tmp_path / "texts.txt"
    text.write_text("a library\n")
    further = run("jobs", "pretrain", text, "domain", "--set", "epochs=2", "--set", "layers=0,1", *here)
    assert further.exit_code == 0, further.output
    assert json.loads(further.stdout)["new_backbone"] == "domain"
    listed = run("jobs", "list", *here[:2]).stdout
    assert "further-pretrain" in listed and "lifted" in listed and "domain" in listed
    for arguments, part in (
        (("extract", data, "x", "--method", "lora"), "expected a file that ends in one of ['.zip']"),
        (("extract", model, "x", "--method", "magic"), "query.method"),
        (("extract", data, "x", "--method", "auto", "--texts", text), "put the texts into it"),
        (("pretrain", text, "x", "--set", "layers=two"), "query.layers"),
        (("pretrain", text, "x", "--set", "layers"), "--set must be NAME=VALUE"),
    ):
        refused = run("jobs", *arguments, *here[:2])
        assert refused.exit_code in (1, 2) and part in " ".join(refused.stderr.replace("│", "").split()), refused.stderr
    run("task", "remove", "lifted", *here[:2])


def test_an_archive_holds_what_is_read(tmp_path: Path, data: Path) -> None:
    model = write_full(tmp_path / "model", biases)
    (model / "weights.onnx").write_text("not read")
    for name in TOKENIZERS:
        (model / name).touch()
    packed = pack(model, data, tmp_path / "model.zip")
    with zipfile.ZipFile(packed) as archive:
        assert sorted(archive.namelist()) == sorted({"config.json", "model.safetensors", "reviews.csv", *TOKENIZERS})
    assert pack(packed, None, tmp_path / "other.zip") == packed
