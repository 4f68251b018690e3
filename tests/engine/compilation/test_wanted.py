"""Programs that batches miss, and those that are remembered."""

from __future__ import annotations

import pathlib
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest

from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.compilation import wanted
from jpets.engine.compilation.remembered import ENOUGH, RememberedPrograms
from jpets.engine.compilation.wanted import MOST_WANTED, RATE_SECONDS, Wanted
from jpets.engine.programs.program import Program, ProgramKey

LORA = ClassKey("lora", (("query", 8),), (0, 1))


def key(tokens: int, *classes: ClassKey) -> ProgramKey:
    return ProgramKey(Bucket(tokens, ((1, tokens),)), Variant(tuple((each, 8) for each in classes)))


def test_what_is_missed_most_comes_first() -> None:
    own = Wanted()
    assert own.most(0.0) is None
    for tokens, seconds in ((10, 0.5), (12, 0.4), (12, 0.4), (11, 0.1)):
        own.miss(key(tokens), seconds)
    assert own.most(0.6) == key(12) and own.most(0.9) is None and own.count(0.5) == 2
    own.bring(key(12))
    own.miss(key(12), 9.0)
    assert own.most(0.0) == key(10), "the other one is being brought"
    own.brought(key(12))
    assert own.most(0.0) is None, "what was lost without it says little about others that it has room for"


def test_what_other_batches_lost_stays_when_a_program_comes_that_they_cannot_run_in() -> None:
    own = Wanted()
    for other in (key(10), key(12, LORA), key(13), key(4)):
        own.miss(other, 0.4)
    own.brought(key(12))
    assert set(own.foremost()) == {key(12, LORA), key(13), key(4)}, "of other classes, larger, and much smaller"
    own.brought(key(12, LORA))
    assert set(own.foremost()) == {key(13), key(4)} and own.total == pytest.approx(0.8)
    own.brought(key(13, LORA))
    assert own.foremost() == [key(4)]


def test_the_foremost_are_few_and_in_order() -> None:
    own = Wanted()
    assert own.foremost() == [] and own.total == 0
    for tokens in range(1, 13):
        own.miss(key(tokens), tokens / 10)
    assert own.foremost() == [key(tokens) for tokens in range(12, 4, -1)]
    assert own.total == pytest.approx(7.8)
    own.put_off([key(12)], 60)
    own.bring(key(11))
    assert own.barred(key(12)) and not own.barred(key(11)) and not own.barred(key(10))
    assert own.foremost()[0] == key(10)


def test_what_could_not_be_had_is_asked_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Wanted()
    own.bring(key(1))
    own.put_off([key(1)], 30.0)
    own.miss(key(1), 1.0)
    assert own.most(0.0) is None
    monkeypatch.setattr(wanted, "time", mock.Mock(monotonic=lambda: float("inf")))
    own.miss(key(1), 1.0)
    assert own.most(1.0) == key(1)


@hypothesis.given(
    st.lists(
        st.one_of(
            st.tuples(st.just("miss"), st.integers(1, 12), st.floats(0.0, 1.0)),
            st.tuples(st.sampled_from(["bring", "put_off", "brought"]), st.integers(1, 12), st.just(0.0)),
        ),
        max_size=60,
    )
)
def test_the_most_and_the_total_are_those_of_a_plain_search(steps: list[tuple[str, int, float]]) -> None:
    with mock.patch.object(wanted, "MOST_WANTED", 8):
        own, lost, brought = Wanted(), dict[ProgramKey, float](), set[ProgramKey]()
        for what, tokens, seconds in steps:
            one = key(tokens)
            if what == "miss":
                own.miss(one, seconds)
                if one not in brought:
                    if len(lost) > 8:
                        lost = dict(sorted(lost.items(), key=lambda each: -each[1])[:4])
                    lost[one] = lost.get(one, 0.0) + seconds
            elif what == "bring":
                own.bring(one)
                brought.add(one)
                lost.pop(one, None)
            elif what == "put_off":
                own.put_off([one], 60.0)
                brought.add(one)
                lost.pop(one, None)
            else:
                own.brought(one)
                lost = {k: v for k, v in lost.items() if not k.bucket.tokens <= tokens <= 1.5 * k.bucket.tokens}
            assert own.total == pytest.approx(sum(lost.values()), abs=1e-9)
            most = own.most(0.0)
            assert (most is None) == (not lost)
            if most is not None:
                assert lost[most] == pytest.approx(max(lost.values()))


def test_memory_is_bounded() -> None:
    own = Wanted()
    for tokens in range(1, 3 * MOST_WANTED):
        own.miss(key(tokens), float(tokens))
    assert own.count(0.0) <= MOST_WANTED + 1
    assert own.most(0.0) == key(3 * MOST_WANTED - 1)


def program(of: ProgramKey, used: float, *, followed: int = 1) -> Program:
    return Program(of, mock.Mock(), followed=followed, last_used=used)


def test_the_next_start_knows_the_programs_that_had_batches(tmp_path: pathlib.Path) -> None:
    file = RememberedPrograms(tmp_path / "costs" / "programs.json")
    assert file.read([LORA]) == []
    core, early, late, unused, other = key(1), key(2), key(3, LORA), key(4), key(5, LORA)
    programs = [program(core, 9.0), program(early, 1.0), program(late, 2.0), program(unused, 3.0, followed=0)]
    file.write([*programs, program(other, 0.5)], [core])
    assert file.read([LORA]) == [late, early, other]
    assert file.read([]) == [early]


def test_a_quiet_start_forgets_nothing(tmp_path: pathlib.Path) -> None:
    path, early, late, later = tmp_path / "programs.json", key(2), key(3), key(4)
    RememberedPrograms(path).write([program(early, 1.0), program(late, 2.0)], [])
    second = RememberedPrograms(path)
    assert second.read([]) == [late, early]
    second.write([program(later, 1.0, followed=1)], [])
    assert second.read([]) == [later, late, early]
    second.write([program(later, 1.0, followed=ENOUGH)], [])
    assert second.read([]) == [later], "its traffic never had the others"


def test_what_another_server_writes_stays(tmp_path: pathlib.Path) -> None:
    path, own, theirs, of_class = tmp_path / "programs.json", key(2), key(3), key(4, LORA)
    first, second = RememberedPrograms(path), RememberedPrograms(path)
    first.read([])
    second.write([program(theirs, 1.0, followed=ENOUGH), program(of_class, 0.5)], [])
    first.write([program(own, 1.0, followed=ENOUGH)], [])
    assert first.read([]) == [own, theirs]
    assert first.read([LORA]) == [own, theirs, of_class], "tasks come and go"


def test_two_servers_that_began_alike_keep_what_one_of_them_has(tmp_path: pathlib.Path) -> None:
    path, alike = tmp_path / "programs.json", key(2)
    RememberedPrograms(path).write([program(alike, 1.0)], [])
    first, second = RememberedPrograms(path), RememberedPrograms(path)
    assert first.read([]) == second.read([]) == [alike]
    busy = program(key(3), 2.0, followed=ENOUGH)
    second.write([busy], [])
    first.write([program(alike, 3.0, followed=ENOUGH)], [])
    second.write([busy], [])
    assert second.read([]) == [busy.key, alike]


def test_what_this_server_does_not_allow_is_not_its_own(tmp_path: pathlib.Path) -> None:
    path, large = tmp_path / "programs.json", key(512)
    RememberedPrograms(path).write([program(large, 1.0)], [])
    small = RememberedPrograms(path)
    assert small.read([], lambda key: key.bucket.tokens < 512) == []
    small.write([program(key(3), 2.0, followed=ENOUGH)], [])
    assert RememberedPrograms(path).read([]) == [key(3), large]


@pytest.mark.parametrize("text", ["", "[{]", '{"bucket": 1}', "7"])
def test_a_damaged_file_is_left_out(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "programs.json"
    path.write_text(text)
    assert RememberedPrograms(path).read([LORA]) == []
    assert not path.exists()
    RememberedPrograms(path).write([program(key(2), 1.0)], [])
    assert RememberedPrograms(path).read([LORA]) == [key(2)]


@pytest.mark.parametrize("entry", ['{"bucket": {}}', "1", "null", '{"bucket": {"tokens": "a", "groups": []}}'])
def test_an_entry_that_cannot_be_read_costs_no_other(tmp_path: pathlib.Path, entry: str) -> None:
    path = tmp_path / "programs.json"
    RememberedPrograms(path).write([program(key(2), 1.0)], [])
    path.write_text(f"[{entry}, {path.read_text()[1:]}")
    assert RememberedPrograms(path).read([]) == [key(2)]


def test_what_batches_lose_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = mock.Mock(monotonic=mock.Mock(return_value=100.0))
    monkeypatch.setattr(wanted, "time", clock)
    own = Wanted()
    assert own.rate == 0.0
    for _ in range(1000):  # a tenth of the time, for 100 seconds
        clock.monotonic.return_value += 0.1
        own.miss(key(1), 0.01)
    assert own.rate == pytest.approx(0.1, rel=0.02)
    own.bring(key(1))
    own.brought(key(1))
    assert own.rate == pytest.approx(0.1, rel=0.02), "it has not become faster yet"
    clock.monotonic.return_value += 10 * RATE_SECONDS
    assert own.rate < 1e-4
