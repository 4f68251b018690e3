"""How many students answer, by how many queries wait."""

from __future__ import annotations

from groups import Clock, answer, ask, sized


def test_students_are_dropped_while_queries_wait_and_come_back_after_quiet_windows() -> None:
    clock = Clock()
    size = sized(clock, groups=1, together=1, window=120)
    assert size.of(3) == 3 and size.of(2) == 2
    size.asked()
    assert size.of(3) == 3, "an idle group takes it"
    size.asked()
    assert size.of(3) == 2, "as many wait as there are groups: one"
    size.asked()
    assert size.of(3) == 1 and size.drops == 2
    ask(size, 50)
    assert size.of(3) == 1 and size.of(1) == 1, "one student always answers"
    clock.now = 1000
    assert size.of(3) == 1, "it was not quiet"
    answer(size, 53)
    clock.now = 1000 + 119.9
    assert size.of(3) == 1
    clock.now = 1000 + 120
    assert size.of(3) == 2
    clock.now = 1000 + 240
    assert size.of(3) == 3 and size.additions == 2
    clock.now = 5000
    assert size.of(3) == 3 and size.dropped == 0


def test_quiet_takes_more_idle_students_than_occupied_groups() -> None:
    """Three groups of one student run side by side: with two of them occupied one student is idle, which is too few."""
    clock = Clock()
    size = sized(clock, groups=1, together=1, window=10)
    ask(size, 9)
    answer(size, 7)
    clock.now = 100
    assert size.of(3) == 1
    size.answered()
    clock.now = 109
    assert size.of(3) == 1
    clock.now = 110
    assert size.of(3) == 2, "one group is occupied, and two students are idle"
    clock.now = 1000
    assert size.of(3) == 2, "there is one group of two students, and it is occupied"


def test_light_traffic_does_not_keep_students_away() -> None:
    """One group runs at a time, and some query is computed at almost any moment somebody looks."""
    clock = Clock()
    size = sized(clock, groups=1, together=1, window=120)
    ask(size, 2)
    answer(size, 2)
    assert size.answering == 2
    for second in range(121):  # the group is occupied for half of the time
        clock.now = second
        size.asked()
        clock.now = second + 0.5
        size.answered()
    assert size.answering == 3


def test_a_busy_group_stays_as_small_as_it_is() -> None:
    """Two students take 0.8 of the time: three would take more than there is."""
    clock = Clock()
    size = sized(clock, groups=1, together=1, window=10)
    ask(size, 2)
    answer(size, 2)
    for second in range(1000):
        clock.now = second
        size.asked()
        clock.now = second + 0.8
        size.answered()
    assert size.answering == 2 and size.additions == 0
    clock.now = 1010
    assert size.answering == 3


def test_two_queries_that_meet_now_and_then_keep_no_student_away() -> None:
    clock = Clock()
    size = sized(clock, groups=1, together=1, window=120)
    ask(size, 2)
    answer(size, 2)
    assert size.answering == 2
    for minute in range(2):
        clock.now = 60.0 * minute + 30
        ask(size, 2)
        assert size.answering == 2, "as many students run as before one was dropped: the second query waits less"
        clock.now += 0.1
        answer(size, 2)
    clock.now = 120
    assert size.answering == 3 and size.additions == 1


def test_texts_that_join_a_waiting_element_drop_no_student() -> None:
    size = sized(Clock(), groups=1, together=2)
    ask(size, 4)
    assert size.answering == 2 and size.drops == 1, "two elements, of which one waits"


def test_a_fixed_rule_and_more_room() -> None:
    fixed = sized(Clock(), groups=1, together=1, fixed=True)
    ask(fixed, 100)
    assert fixed.of(3) == 3 and fixed.drops == 0
    roomy = sized(Clock(), devices=2, groups=2, together=4)
    ask(roomy, 16 + 12)
    assert roomy.of(3) == 3, "four groups of four texts run, and three elements wait"
    roomy.asked()
    assert roomy.of(3) == 2, "as many elements wait as there are groups"
    ask(roomy, 15)
    assert roomy.of(3) == 2, "six groups of two run side by side"


def test_as_many_answer_when_groups_come_and_go() -> None:
    size = sized(Clock(), groups=1, together=1)
    ask(size, 3)
    assert size.of(3) == 1
    size.resize(5)
    assert size.of(5) == 1, "a larger group does not make the others larger in the middle of a burst"
    size.resize(2)
    assert size.of(2) == 1
    size.resize(1)
    assert size.of(1) == 1 and size.dropped == 0
    whole = sized(Clock())
    whole.resize(5)
    assert whole.of(5) == 5


def test_what_comes_together_to_an_idle_server_is_no_load() -> None:
    """A text of many windows, or a list of texts, must not make all groups small for minutes."""
    size = sized(Clock(), groups=1, together=1, window=120)
    size.asked(50)
    assert size.answering == 3 and size.drops == 0
    size.asked(50)
    assert size.answering == 2, "somebody else waits behind it now: one student fewer"
    size.answered(100)
    size.asked()
    assert size.drops == 1
