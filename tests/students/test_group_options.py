"""Options of a group's training, which the command and the job share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError
from support import shallow

from jpets.app.jobs.students import plan_of
from jpets.errors import InvalidInput
from jpets.students.boosting import GroupPlan
from jpets.students.depth import check_depths
from jpets.training.plan import TrainingPlan
from serving.jobs.request import GroupOptions, MakeStudents


def test_what_is_left_out_is_as_a_plan_has_it() -> None:
    assert plan_of(GroupOptions()) == GroupPlan()
    given = GroupOptions(most=3, stacking=0, pruning=False, copies=2, epochs=5, batch=8, dtype="float32", seed=4)
    training = TrainingPlan(5, 8, dtype="float32", seed=4)
    assert plan_of(given) == GroupPlan(training, 3, 0.0, pruning=False, copies=2)
    assert plan_of(GroupOptions(boosting=False)) == dataclasses.replace(GroupPlan(), boosting=False)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"boosting": False, "stacking": 0.5}, "stacking: without boosting .* found 0.5"),
        ({"most": 1, "stacking": 0.5}, "stacking: a single student has none before it"),
        ({"boosting": False, "most": 1}, "boosting: without it a group has two students or more, found most=1"),
        ({"pruning": False, "most": 1}, "pruning: without it a group has two students or more"),
    ],
)
def test_options_that_do_not_go_together_are_named(given: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        GroupOptions(**given)
    with pytest.raises(ValidationError, match=part):
        MakeStudents(task="group", teacher="topic", **given)
    GroupOptions(**given | {"most": 2, "stacking": 0})


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"other_backbones": "two"}, "name the first one by backbone"),
        ({"backbone": "one", "other_backbones": "two,one"}, "each once, found 'two,one'"),
        ({"backbone": "one", "other_backbones": "two,"}, "expected names by commas"),
    ],
)
def test_backbones_of_a_job_are_named_once(given: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        MakeStudents(task="group", teacher="topic", **given)
    asked = MakeStudents(task="group", teacher="topic", backbone="one", other_backbones="two,three")
    assert asked.shallow == ("one", "two", "three")


def test_backbones_have_depths_of_their_own() -> None:
    one, two = shallow(layers=1).config, shallow(layers=2).config
    check_depths([two, one], stacked=True)
    check_depths([one], stacked=False)
    with pytest.raises(InvalidInput, match=r"backbones: expected each of another number of layers, found \[1, 2, 2\]"):
        check_depths([two, one, two], stacked=False)
    with pytest.raises(InvalidInput, match="stacking: students of one layer"):
        check_depths([one], stacked=True)
