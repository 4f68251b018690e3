from __future__ import annotations

import json
from typing import Any

import pytest
from runs import Run

from jpets.app.commands.client import query
from jpets.app.commands.client.client import Server
from jpets.engine.results import fills as fills_of
from jpets.errors import TooLarge
from serving.protocols.schemas import ClassifyItem


def answers(run: Run, server: str, *arguments: str, **how: str) -> list[dict]:
    result = run("query", *arguments, "--server", server, "--json", **how)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def rows(run: Run, server: str, *arguments: str) -> list[list[str]]:
    """The table's cells, without its head."""
    result = run("query", *arguments, "--server", server)
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    return [line.split() for line in lines[2:]]


def test_labels_and_scores(run: Run, server: str) -> None:
    first, second = answers(run, server, "mood", "a day", "another")
    assert (first["text"], second["text"]) == ("a day", "another")
    table = rows(run, server, "mood", "one", "two")
    assert [row[0] for row in table] == ["one", "two"]
    for row, item in zip(table, answers(run, server, "mood", "one", "two"), strict=True):
        assert row[1] == item["label"]
        assert float(row[2]) == pytest.approx(max(item["probs"]), abs=1e-4)


def test_top_k_gives_a_row_a_label(run: Run, server: str) -> None:
    table = rows(run, server, "mood", "one", "--top-k", "2")
    assert len(table) == 2
    assert float(table[0][2]) >= float(table[1][1])
    (item,) = answers(run, server, "mood", "one", "--top-k", "2")
    assert [each["label"] for each in item["top"]] == [table[0][1], table[1][0]]


def test_multi_label_shows_what_is_over_its_threshold(run: Run, server: str) -> None:
    texts = [f"text {number}" for number in range(8)]
    result = run("query", "tags", *texts, "--server", server)
    items = answers(run, server, "tags", *texts)
    assert result.exit_code == 0
    expected = sum(max(1, len(item["labels"])) for item in items)
    assert len([line for line in result.stdout.splitlines() if line.strip()]) == 2 + expected


def test_regression_shows_its_value(run: Run, server: str) -> None:
    (row,) = rows(run, server, "price", "cheap")
    (item,) = answers(run, server, "price", "cheap")
    assert row[1] == "value"
    assert float(row[2]) == pytest.approx(item["values"][0], abs=1e-4)


def test_a_prompt_is_named_with_the_texts(run: Run, server: str) -> None:
    result = run("query", "mood", "a day", "--prompt-name", "passage", "--server", server, "--json")
    assert result.exit_code == 1
    (item,) = json.loads(result.stdout)
    assert "there are no prompts" in item["error"]["message"]


def test_token_tasks_show_entities(run: Run, server: str) -> None:
    result = run("query", "names", "one two three", "--server", server)
    (item,) = answers(run, server, "names", "one two three")
    assert result.exit_code == 0
    for entity in item["entities"]:
        said = f"{entity['label']}: {entity['text']} (characters {entity['start']} to {entity['end'] - 1})"
        assert said in result.stdout


def test_questions_show_the_words_of_their_context(run: Run, server: str) -> None:
    asked = ("questions", "who plays?", "--text-pair", "Anna and her brother play chess")
    (item,) = answers(run, server, *asked)
    result = run("query", *asked, "--server", server)
    assert item["answer"] == asked[-1][item["start"] : item["end"]]
    assert f"{item['answer']} (characters {item['start']} to {item['end'] - 1})" in result.stdout
    assert f"{item['score']:.4f}" in result.stdout


@pytest.mark.parametrize("model", ["vectors", "tiny-bert"])
def test_embeddings_show_their_shape(run: Run, server: str, model: str) -> None:
    assert rows(run, server, model, "hello") == [["hello", "embedding", "[64]"]]


def test_masks_show_texts_with_their_words() -> None:
    fills = [[{"token": at, "text": "w", "score": 0.5 - at / 100, "sequence": f"w{at}"} for at in range(9)]]
    item = ClassifyItem.model_validate({"index": 0, "fills": fills})
    assert query._said(item, None) == [(f"w{at}", 0.5 - at / 100) for at in range(5)]
    assert [each for each, _ in query._said(item, 7)] == [f"w{at}" for at in range(7)]
    assert query.SHOWN_LABELS <= fills_of.MOST


def test_a_value_that_stands_for_a_score_shows_that() -> None:
    item = {"index": 0, "label": "toxic", "score": 0.88, "values": [2.0], "probs": [0.88], "num_classes": 1}
    assert query._said(ClassifyItem.model_validate(item), None) == [("toxic", 0.88)]


def test_standard_input_is_read_by_lines(run: Run, server: str) -> None:
    items = answers(run, server, "mood", "first", "-", input="second\n\nthird\n")
    assert [item["text"] for item in items] == ["first", "second", "third"]


def test_many_texts_go_in_several_requests(run: Run, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "PER_REQUEST", 2)
    texts = [f"text {number}" for number in range(5)]
    items = answers(run, server, "mood", *texts)
    assert [(item["index"], item["text"]) for item in items] == list(enumerate(texts))


def test_no_text_at_all(run: Run, server: str) -> None:
    result = run("query", "mood", "-", "--server", server, input="\n")
    assert result.exit_code == 1
    assert "no text" in result.stderr


def test_an_unknown_task(run: Run, server: str) -> None:
    result = run("query", "nobody", "text", "--server", server)
    assert result.exit_code == 1
    assert "error: unknown task" in result.stdout
    assert "1 of 1 texts could not be answered" in result.stderr


def test_one_bad_text_keeps_the_others(run: Run, server: str) -> None:
    result = run("query", "mood", "good", "word " * 200, "--server", server)
    assert result.exit_code == 1
    assert "label-" in result.stdout
    assert "1 of 2 texts could not be answered" in result.stderr


def test_answers_cannot_steer_a_terminal(run: Run, server: str) -> None:
    result = run("query", "mood", "\x1b[31m[bold]red", "--server", server)
    assert "\x1b" not in result.stdout
    assert "[bold]red" in result.stdout


def test_the_server_comes_from_a_variable(run: Run, server: str) -> None:
    assert run("query", "mood", "text", env={"JPETS_SERVER": server}).exit_code == 0


def test_texts_are_sent_in_requests_that_a_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their bytes, not only by their number; a smaller limit of a server halves what is sent."""
    sent: list[list[str]] = []

    class Small(Server):
        def ask(self, model: Any, method: str, path: str, body: Any = None) -> Any:
            texts = [each["text"] for each in body["inputs"]]
            if sum(map(len, texts)) > 100_000:
                raise TooLarge("the body is too large")
            sent.append(texts)
            return model.model_validate({"data": [{"index": at, "label": text[-1:]} for at, text in enumerate(texts)]})

    texts = [f"{'x' * 9_000} {number % 10}" for number in range(300)]
    found = query._answers(Small("http://127.0.0.1:1"), texts, {"model": "topic"}, {})
    assert [item.index for item in found] == list(range(300))
    assert [item.label for item in found] == [str(number % 10) for number in range(300)]
    assert [text for part in sent for text in part] == texts
    with pytest.raises(TooLarge):
        query._answers(Small("http://127.0.0.1:1"), ["y" * 200_000], {"model": "topic"}, {})
    assert [len(part) for part in query._parts(["a"] * 600, 0)] == [256, 256, 88]
    assert [len(part) for part in query._parts(["é" * 400_000] * 3, 0)] == [1, 1, 1]
