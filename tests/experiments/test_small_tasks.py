"""Thirty small tasks: which they are, and how their table is made."""

from __future__ import annotations

from pathlib import Path

from experiments.package_tasks import TASKS, read_described
from experiments.small_tasks import COUNT, LABELS, QUESTIONS, TRAIN, WORDS, small_task, table, texts_of, words_score

SAMPLE = Path(__file__).parents[1] / "data" / "debian_packages.jsonl.gz"


def test_each_task_has_some_labels_of_a_question() -> None:
    tasks = [small_task(number) for number in range(COUNT)]
    assert tasks == [small_task(number) for number in range(COUNT)] and len({task.labels for task in tasks}) > 20
    for number, task in enumerate(tasks):
        asked = TASKS[QUESTIONS[number % len(QUESTIONS)]]
        assert task.field == asked.field and set(task.labels) <= set(asked.labels)
        assert LABELS[0] <= len(set(task.labels)) <= LABELS[1]


def test_texts_to_test_on_have_labels_that_were_trained_on() -> None:
    train, test = texts_of(read_described(SAMPLE), 0)
    assert 0 < len(train) <= TRAIN and {each.label for each in test} <= {each.label for each in train}
    assert 0.2 < words_score(train, test) <= 1


def test_means_are_of_the_tasks_that_both_have() -> None:
    lines = [
        {"task": 0, "method": WORDS, "accuracy": 0.5},
        {"task": 1, "method": WORDS, "accuracy": 0.7},
        {"task": 0, "method": "lora", "accuracy": 0.75},
    ]
    assert "| lora | 1 | 75.0 | 50.0 | +25.0 | 1 |" in table(lines)
