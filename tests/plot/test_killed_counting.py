"""Making tables whose process is killed while n-grams are counted, or after that."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from support import tiny

from jpets.app.jobs.tables import Making, make_root
from jpets.config import TableFormat
from jpets.errors import InvalidInput
from jpets.files import TEMPORARY, temporary_sibling
from jpets.plot.choice import choose
from jpets.plot.ngrams import Window
from jpets.plot.tree import TABLES, TREE, Tree
from jpets.training.data import Example
from jpets.training.plan import TrainingPlan

SCRIPT = """
import pathlib, sys, time
import numpy as np
from jpets.plot.choice import choose
from jpets.plot.ngrams import Window

texts = list(np.load(sys.argv[1]))

def each(start):
    for number, ids in enumerate(texts[start:], start):
        print(number, flush=True)
        time.sleep(600 if number == start + 70 else 0.001)
        yield ids

choose(each, texts, Window.of(3), 0.5, pathlib.Path(sys.argv[2]), buffered=200)
"""
SENTENCES = ("the library reads files and writes files", "some words of the domain are read again")
EXAMPLES = [Example(f"{sentence} {number}") for number in range(12) for sentence in SENTENCES]
NOTHING_TRAINED = TrainingPlan(0, 16)


def test_counting_goes_on_behind_what_a_killed_process_had_counted(tmp_path: pathlib.Path) -> None:
    """To the same n-grams as without a kill."""
    texts = np.random.default_rng(0).integers(0, 40, (600, 20))
    np.save(tmp_path / "texts.npy", texts)
    folder, begun = tmp_path / "counts", list[int]()
    for _ in range(5):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "texts.npy"), str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            begun.append(int(process.stdout.readline()))
            while int(process.stdout.readline()) < begun[-1] + 60:
                pass
            process.kill()
        assert process.returncode == -signal.SIGKILL
    assert begun[0] == 0 and (np.diff(begun) >= 30).all()
    read: list[int] = []

    def each(start: int) -> np.ndarray:
        read.append(start)
        return texts[start:]

    found = choose(each, [*texts], Window.of(3), 0.5, folder)
    assert read[0] > begun[-1]
    whole = choose(lambda start: texts[start:], [*texts], Window.of(3), 0.5, tmp_path / "whole")
    for own, others in zip(found, whole, strict=True):
        np.testing.assert_array_equal(own, others)


def made(
    place: pathlib.Path,
    told: list[str],
    examples: Sequence[Example] = EXAMPLES,
    ngram: int = 3,
    kept_as: TableFormat = "bfloat16",
) -> pathlib.Path:
    """A root, and what its making reports; it is killed behind the counts where nothing was told before."""
    first = not told

    def report(what: str, done: int, of: int | None) -> None:
        told.append(what)
        if first and what == "n-grams":
            raise KeyboardInterrupt

    making = Making(NOTHING_TRAINED, max_length=16, kept_as=kept_as, report=report)
    make_root(tiny("tiny-bert"), "root", examples, place / "root", 1, ngram, making, place / "kept")
    return place / "root" / "plot" / TABLES


def test_a_root_that_was_killed_behind_its_counts_does_not_count_again(tmp_path: pathlib.Path) -> None:
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "killed", told)
    assert told == ["texts counted", "n-grams"]
    tables = made(tmp_path / "killed", told)
    assert told.count("texts counted") == 1
    whole = made(tmp_path / "whole", [""])
    assert [path.name for path in tables.iterdir()] == [path.name for path in whole.iterdir()]


def test_what_a_killed_run_left_is_in_no_other_backbone(tmp_path: pathlib.Path) -> None:
    """Where the next one stores vectors otherwise, it leaves that table alone."""
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, told)
    plot = made(tmp_path, told, kept_as="float8").parent
    found = {str(path.relative_to(plot)) for path in plot.rglob("*") if path.is_file()}
    assert found == {TREE, *Tree.read(plot).files}


def test_what_killed_processes_left_beside_a_root_is_swept(tmp_path: pathlib.Path) -> None:
    stale, young = temporary_sibling(tmp_path / "root"), temporary_sibling(tmp_path / "root")
    others = tmp_path / f"{TEMPORARY}of another program"
    for folder in (stale, young, others):
        folder.mkdir()
    for folder in (stale, others):
        os.utime(folder, (0, 0))
    made(tmp_path, [""])
    assert [folder.exists() for folder in (stale, young, others)] == [False, True, True]


def test_counts_of_other_texts_or_ngrams_are_not_gone_on_with(tmp_path: pathlib.Path) -> None:
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, told)
    changed = [*EXAMPLES[:-1], Example("another text at the end")]
    for examples, ngram in ((changed, 3), (EXAMPLES[:-1], 3), (EXAMPLES, 2)):
        with pytest.raises(InvalidInput, match="kept/counts: it holds the progress of a run with other texts"):
            made(tmp_path, told, examples, ngram)
    assert made(tmp_path, told).exists()
