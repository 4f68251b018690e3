"""Offline runs: every line answered in its place, and the same file whatever came between."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from runs import MakeTask, Run
from typer.testing import Result

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.task_file import task_to_bytes, write_task
from jpets.app.commands.offline import input as run_input
from jpets.app.commands.offline import scoring as run_scoring
from jpets.app.commands.offline.input import Asked, asked, contents
from jpets.app.commands.offline.scoring import Scorer
from jpets.config import EngineSettings
from jpets.engine.batch import bucket
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.errors import EngineFailure
from jpets.types import Answer, Classification, Embedding, Query, Span, Task

STEADY = EngineSettings(dtype="float32", policy="steady", slots=8, background_compile=False)
# A row of few tokens is tempted to join the others in the large program.
MENU = (Bucket(16, ((1, 16),)), Bucket(1024, ((8, 128),)))
TEXTS = ("a chess engine", "development files for the library of sparse matrices", "hello")


@pytest.fixture(scope="session")
def tasks(make_task: MakeTask) -> dict[str, Task]:
    every = (make_task("mood", seed=1), make_task("tags", seed=2, problem="multi-label"))
    return {task.id: task for task in every}


@pytest.fixture(scope="session")
def task_folder(tasks: dict[str, Task], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for task in tasks.values():
        write_task(task, folder / f"{task.id}.safetensors")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="session")
def engine(backbone: Backbone, tasks: dict[str, Task], cache: Path) -> Iterator[Engine]:
    with Engine(backbone, tasks.values(), STEADY, cache_dir=cache, buckets=MENU) as own:
        yield own.start()


@pytest.fixture
def score(
    run: Run, shallow_folder: Path, task_folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """``score(lines, *options)`` runs the command on ``tmp_path / "in.jsonl"`` with two small programs."""
    monkeypatch.setattr(bucket, "steady_menu", lambda max_length, max_tokens: MENU)

    def call(
        lines: list[Any] | None, *options: object, place: Path = task_folder, out: object = None, **how: Any
    ) -> Result:
        source = tmp_path / "in.jsonl"
        if lines is not None:
            source.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
        named = ("--backbone", shallow_folder, "--dtype", "float32", "--cache-dir", cache)
        out = tmp_path / "out.jsonl" if out is None else out
        return run("run", place, "-" if "input" in how else source, "-o", out, *named, *options, **how)

    return call


def written(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_kind_of_line(score: Run, engine: Engine, tmp_path: Path) -> None:
    long = " ".join(["word"] * 200)
    lines: list[Any] = [
        {"task": "mood", "text": TEXTS[0], "id": {"any": ["thing", 1.5, None]}},
        {"task": None, "text": TEXTS[0], "id": None},
        {"task": "tags", "text": TEXTS[0], "text_pair": TEXTS[1]},
        {"task": ["tags", "mood", "tags"], "text": TEXTS[1]},
        {"text": TEXTS[2], "id": 7},
        {"task": "nobody", "text": TEXTS[2], "id": "é"},
        {"task": ["mood", "nobody"], "text": TEXTS[2]},
        {"task": "mood", "text": long},
        {"task": "mood", "id": 9},
        {"task": "mood", "text": "a", "prompt_name": "passage"},
        {"task": 3, "text": "a"},
        {"task": [], "text": "a"},
        {"task": "mood", "text": "a", "colour": 1},
        "no json",
        "",
        "[1]",
        '{"task": "mood", "text": "a", "id": 1e999}',
        '{"task": "mood", "text": "\\ud800"}',
    ]
    result = score(lines)
    assert result.exit_code == 1
    assert result.stderr.startswith("18 lines, 13 failed;")
    found = written(tmp_path / "out.jsonl")
    assert [each["line"] for each in found] == list(range(1, 19))
    assert [each.get("id", "none") for each in found[:9]] == [
        lines[0]["id"],
        None,
        "none",
        "none",
        7,
        "é",
        "none",
        "none",
        9,
    ]

    (mood, bare, tags) = engine.infer([Query("mood", TEXTS[0]), Query(None, TEXTS[0]), Query("tags", *TEXTS[:2])])
    assert isinstance(mood, Classification) and isinstance(tags, Classification) and isinstance(bare, Embedding)
    assert found[0] == {
        "line": 1,
        "id": lines[0]["id"],
        "label": mood.label,
        "probs": mood.probs.tolist(),
        "num_classes": 3,
    }
    assert found[1]["embedding"] == bare.embedding.tolist()
    assert (found[2]["probs"], found[2]["labels"]) == (tags.probs.tolist(), list(tags.labels))
    assert list(found[3]["results"]) == ["tags", "mood"]
    assert list(found[4]["results"]) == ["mood", "tags"]
    assert found[6]["results"]["mood"]["label"]
    assert found[6]["results"]["nobody"]["error"]["code"] == "not_found"
    assert all("error" in each for each in (found[5], *found[7:]))
    codes = [each["error"]["code"] for each in found[7:]]
    invalid = "invalid_input"
    assert codes == ["input_too_long", *[invalid] * 5, *["unparseable"] * 2, invalid, *["unparseable"] * 2]
    assert found[8]["error"]["message"] == "text: Field required"
    assert "word" not in (tmp_path / "out.jsonl").read_text()


def test_a_run_without_errors(score: Run, tmp_path: Path) -> None:
    result = score([{"task": "mood", "text": text} for text in TEXTS], "--top-k", 2)
    assert (result.exit_code, result.stdout) == (0, "")
    for each in written(tmp_path / "out.jsonl"):
        assert [top["label"] for top in each["top"]][:1] == [each["label"]]
        assert len(each["top"]) == 2


def test_truncation_on_request(score: Run, tmp_path: Path) -> None:
    assert score([{"task": "mood", "text": " ".join(["word"] * 200)}], "--truncate").exit_code == 0


def test_standard_input_and_output(score: Run, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"task": "mood", "text": text}) + "\n" for text in TEXTS)
    result = score(None, out="-", input=lines)
    assert result.exit_code == 0
    assert [json.loads(line)["line"] for line in result.stdout.splitlines()] == [1, 2, 3]
    assert score(None, "--resume", input=lines).exit_code == 2
    assert score(None).exit_code == 2  # there is no in.jsonl


def test_tasks_from_a_file_and_from_a_repository(
    score: Run, tasks: dict[str, Task], task_folder: Path, tmp_path: Path
) -> None:
    repository = Repository(tmp_path / "repository")
    for task in tasks.values():
        repository.put(task.id, task_to_bytes(task))
    other = dataclasses.replace(task, backbone=dataclasses.replace(task.backbone, fingerprint="sha256:" + "0" * 64))
    repository.put("of-another-backbone", task_to_bytes(other))
    repository.close()
    lines = [{"text": text} for text in TEXTS]
    outputs = [tmp_path / name for name in ("folder", "repository.out", "one")]
    places = [task_folder, tmp_path / "repository", task_folder / "mood.safetensors"]
    for place, out in zip(places, outputs, strict=True):
        assert score(lines, place=place, out=out).exit_code == 0
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert [list(each["results"]) for each in written(outputs[2])] == [["mood"]] * 3


def test_a_tenants_tasks_are_its_own_and_the_shared_ones(score: Run, tasks: dict[str, Task], tmp_path: Path) -> None:
    place, out = tmp_path / "repository", tmp_path / "out"
    shared, own = tasks.values()
    with contextlib.closing(Repository(place)) as repository:
        repository.put("both", task_to_bytes(dataclasses.replace(shared, id="both")))
        repository.put("both", task_to_bytes(dataclasses.replace(own, id="both")), tenant="acme")
        repository.put("shared", task_to_bytes(dataclasses.replace(shared, id="shared")))
        repository.put("private", task_to_bytes(dataclasses.replace(own, id="private")), tenant="acme")
    for who, ids in (((), ["both", "shared"]), (("--tenant", "acme"), ["both", "private", "shared"])):
        assert score([{"text": "a text"}], *who, place=place, out=out).exit_code == 0
        (answer,) = written(out)
        assert list(answer["results"]) == ids
        assert (answer["results"]["both"] == answer["results"]["shared"]) == (not who)
        out.unlink()
        out.with_name("out.run.json").unlink()
    assert "tenant 'other' has no tasks" in score([], "--tenant", "other", place=place, out=out).stderr


def test_tasks_that_cannot_be_used(score: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = score([], place=tmp_path / "empty")
    assert (result.exit_code, "holds no tasks" in result.stderr) == (1, True)
    (tmp_path / "empty" / "broken.safetensors").write_bytes(b"nothing")
    result = score([], place=tmp_path / "empty")
    assert (result.exit_code, result.stderr.startswith("error: task broken: ")) == (1, True)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_that_exists_is_refused(score: Run, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("somebody's\n")
    for options, why in (((), "exists already"), (("--resume",), "does not say what made it")):
        result = score([{"text": "a"}], *options)
        assert result.exit_code == 1
        assert why in result.stderr
    assert (tmp_path / "out.jsonl").read_text() == "somebody's\n"


def test_resuming(score: Run, tmp_path: Path) -> None:
    """After any break: lines missing, a torn line, all there, nothing there."""
    lines = [{"task": "mood", "text": text, "id": text} for text in TEXTS] + [{"task": "nobody", "text": "a"}]
    out = tmp_path / "out.jsonl"
    assert score(lines, "--resume").exit_code == 1
    whole = out.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, ends[0], ends[1] + 5, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:cut])
        result = score(None, "--resume")
        assert (result.exit_code, out.read_bytes()) == (1, whole)
        assert result.stderr.startswith("4 lines, 1 failed;")
        there = sum(end <= cut for end in ends)
        assert (f"{there} were there" in result.stderr) == (there > 0)


def test_resuming_something_else_is_refused(score: Run, task_folder: Path, tmp_path: Path) -> None:
    lines = [{"task": "mood", "text": text} for text in TEXTS]
    out = tmp_path / "out.jsonl"
    score(lines)
    whole = out.read_bytes()
    for changed, options, how, why in (
        ([*lines, lines[0]], (), {}, "another input"),
        (lines, ("--top-k", 1), {}, "another top_k"),
        (lines, (), {"place": task_folder / "mood.safetensors"}, "another tasks"),
    ):
        result = score(changed, "--resume", *options, **how)
        assert result.exit_code == 1
        assert why in result.stderr
        assert out.read_bytes() == whole
    swapped = whole.splitlines(keepends=True)[::-1]
    out.write_bytes(b"".join(swapped))
    result = score(lines, "--resume")
    assert "line 1 of" in result.stderr
    assert out.read_bytes() == b"".join(swapped)


KILLED = """
import os, signal, sys
from jpets import cli
from jpets.app.commands.offline.output import Output
from jpets.engine.batch import bucket
from jpets.engine.batch.bucket import Bucket

bucket.steady_menu = lambda max_length, max_tokens: (Bucket(16, ((1, 16),)), Bucket(1024, ((8, 128),)))
write, after = Output.write, int(sys.argv.pop(1))

def write_and_die(self, document):
    write(self, document)
    if self.lines == after:
        self._file.write(b'{"line": %d, "la' % (after + 1))
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

Output.write = write_and_die
cli.main()
"""


def test_a_killed_run_goes_on_to_the_same_file(
    shallow_folder: Path, task_folder: Path, cache: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    names = ["mood", "tags", None]
    lines = [{"task": names[n % 3], "text": " ".join(["word"] * int(rng.integers(1, 28)))} for n in range(90)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}

    def score(out: str, die_after: int, *options: str) -> int:
        arguments = ["run", task_folder, "in.jsonl", "-o", out, "--backbone", shallow_folder, *options]
        command = [sys.executable, "-c", KILLED, die_after, *arguments, "--cache-dir", cache]
        return subprocess.run([str(each) for each in command], cwd=tmp_path, env=environment, check=False).returncode

    assert score("broken", 37) == -signal.SIGKILL
    assert (tmp_path / "broken").read_bytes().count(b"\n") == 37
    assert score("broken", 38, "--resume") == -signal.SIGKILL  # again, after a single line
    assert score("broken", 0, "--resume") == 0
    assert score("whole", 0) == 0
    assert (tmp_path / "broken").read_bytes() == (tmp_path / "whole").read_bytes()
    assert len(written(tmp_path / "whole")) == 90


def test_answers_do_not_depend_on_what_waits_beside_them(engine: Engine) -> None:
    rng = np.random.default_rng(1)
    queries = [
        Query(["mood", "tags", None][n % 3], input_ids=rng.integers(5, 800, int(rng.integers(3, 33))).tolist())
        for n in range(40)
    ]
    together = engine.infer(queries)
    for query, result in zip(queries, together, strict=True):
        (alone,) = engine.infer([query])
        name = "embedding" if query.task is None else "logits"
        assert getattr(alone, name).tobytes() == getattr(result, name).tobytes()
        assert alone.timing is not None and result.timing is not None
        assert alone.timing.program == result.timing.program
        assert alone.timing.bucket == str(MENU[len(query.input_ids or ()) > 16])


def test_memory_is_bounded_by_what_is_in_flight(
    engine: Engine, tasks: dict[str, Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_scoring, "IN_FLIGHT", 6)
    taken = 0

    def lines() -> Iterator[Asked]:
        nonlocal taken
        for number in range(1, 41):
            taken += 1
            every = ("mood", "tags") * (number % 2) or (None,)
            yield asked_line(number, every) if number % 5 else Asked(number, {}, error=EngineFailure("made up"))

    scorer = Scorer(engine, top_k=None, truncate=False)
    for done, document in enumerate(scorer.answers(lines()), 1):
        assert document["line"] == done
        assert taken - done <= 6
    assert (done, taken) == (40, 40)


def asked_line(number: int, every: tuple[str | None, ...]) -> Asked:
    return Asked(number, {}, TEXTS[number % 3], None, every)


def test_the_answer_to_a_question_is_written() -> None:
    class Answering:
        live = True

        def submit(self, queries: list[Query]) -> list[Future[Span]]:
            (query,) = queries
            future: Future[Span] = Future()
            assert query.text_pair is not None
            answer = Answer(query.text_pair[2:7], 2, 7)
            logits = np.zeros((9, 2), np.float32)
            future.set_result(Span(task=query.task, tokens=9, logits=logits, start=4, end=5, score=0.5, answer=answer))
            return [future]

    line = Asked(1, {}, "which game?", TEXTS[0], ("questions",), alone=True)
    (document,) = Scorer(cast("Any", Answering()), top_k=None, truncate=False).answers([line])
    assert document == {"line": 1, "answer": "chess", "score": 0.5, "start": 2, "end": 7}


def test_a_dead_engine_ends_the_run(backbone: Backbone, cache: Path) -> None:
    own = Engine(backbone, [], STEADY, cache_dir=cache, buckets=MENU)  # never started: nothing answers
    with pytest.raises(EngineFailure, match="--resume"):
        list(Scorer(own, top_k=None, truncate=False).answers([asked_line(1, (None,))]))


def test_lines_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_input, "LONGEST_LINE", 40)
    good = b'{"task": "mood", "text": "a"}'
    source = b"\xef\xbb\xbf" + good + b"\r\n" + b"x" * 100 + b"\n" + good + b"\n" + b"y" * 40 + b"\n" + good
    found = list(asked(io.BytesIO(source), ("mood",)))
    assert [each.number for each in found] == [1, 2, 3, 4, 5]
    codes = [each.error.code if each.error else None for each in found]
    assert codes == [None, "too_large", None, "too_large", None]
    assert [each.number for each in asked(io.BytesIO(source), ("mood",), skip=3)] == [4, 5]


@pytest.mark.parametrize(("content", "lines"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\n\nb", 3)])
def test_lines_are_counted_as_they_are_read(tmp_path: Path, content: bytes, lines: int) -> None:
    (tmp_path / "in").write_bytes(content)
    assert contents(tmp_path / "in").lines == lines == len(list(asked(io.BytesIO(content), ())))
