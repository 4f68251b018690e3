"""Virtual tokens of prefix and prompt tasks: the room that they take from the text."""

from __future__ import annotations

import dataclasses

import pytest
from support import method_tasks, random_delta, shallow

from jpets.deltas import METHODS, task_lead
from jpets.engine.engine import Engine
from jpets.errors import InputTooLong, InvalidTask
from jpets.types import Query, Task


def own_task(name: str) -> Task:
    return next(task for task in method_tasks(shallow()) if task.id == name)


def test_virtual_tokens_take_room_from_the_text_alone(engine: Engine) -> None:
    long = " ".join(["word"] * 200)
    lead = task_lead(own_task("led"))
    assert (lead.tokens, lead.first_position) == (1, 5)
    cut, whole, over = engine.infer(
        [
            Query("led", long, truncate=True),
            Query("led", input_ids=list(range(5, 68))),
            Query("led", input_ids=list(range(5, 69))),
        ]
    )
    assert cut.tokens == whole.tokens == 63
    assert cut.timing is not None and cut.timing.tokens == 64, "as many were computed"
    assert isinstance(over.error, InputTooLong)


def test_a_task_must_leave_room_for_a_text(engine: Engine) -> None:
    task, config = own_task("prompt"), shallow().config
    for greedy, left in (
        (random_delta("prompt", config, tokens=62), "2 are left"),
        (random_delta("prefix", config, tokens=4, first_position=config.max_positions - 2), "2 are left"),
    ):
        with pytest.raises(InvalidTask, match=left):
            engine.add_task(dataclasses.replace(task, id="greedy", deltas=(greedy,)))


@pytest.mark.parametrize("tokens", [0, -1, 2.5, None, 10**6])
@pytest.mark.parametrize("method", ["prefix", "prompt"])
def test_senseless_numbers_of_virtual_tokens(method: str, tokens: object) -> None:
    with pytest.raises(InvalidTask, match="tokens must be a whole number"):
        METHODS[method].tensors({"tokens": tokens}, shallow().config)
