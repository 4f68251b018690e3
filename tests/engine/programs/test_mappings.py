"""Memory mappings that a process may still make, and what happens when they run out."""

from __future__ import annotations

import dataclasses
import mmap
import pathlib
import sys

import pytest
from support import ENGINE_SETTINGS, shallow, wait_until

from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.compilation import background, program_memory
from jpets.engine.engine import Engine
from jpets.engine.programs import mappings
from jpets.engine.programs.mappings import SPARE_MAPPINGS, mappings_left, spare_mappings
from jpets.engine.programs.program import ProgramKey
from jpets.errors import OutOfSpace
from jpets.types import Query

PAGE = mmap.PAGESIZE
needs_figures = pytest.mark.skipif(not mappings.MAPPINGS.exists(), reason="the system does not say what is mapped")


@needs_figures
def test_each_mapping_counts(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    with path.open("rb") as file:
        before = mappings_left()
        held = [mmap.mmap(file.fileno(), PAGE, prot=mmap.PROT_READ) for _ in range(500)]
        assert 490 <= before - mappings_left() <= 510
    for each in held:
        each.close()
    assert abs(before - mappings_left()) <= 10


def test_a_system_that_does_not_count_them_has_no_end_of_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings, "MAPPINGS", tmp_path / "none")
    assert mappings_left() == spare_mappings() == sys.maxsize


@pytest.fixture
def limit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The file that names the most mappings a process may have; a test may write a number."""
    path = tmp_path / "max_map_count"
    path.write_text(mappings.MOST_MAPPINGS.read_text())
    monkeypatch.setattr(mappings, "MOST_MAPPINGS", path)
    return path


@needs_figures
def test_an_engine_that_needs_more_does_not_start(tmp_path: pathlib.Path, limit: pathlib.Path) -> None:
    """It is refused with a message: XLA itself would end the process."""
    limit.write_text(str(SPARE_MAPPINGS))
    with pytest.raises(OutOfSpace, match=r"8,192 must be free .* vm\.max_map_count"):
        Engine(shallow(), [], ENGINE_SETTINGS, cache_dir=tmp_path).start()


@needs_figures
def test_a_program_waits_for_them(tmp_path: pathlib.Path, limit: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(program_memory, "COUNTED_SECONDS", 0.0)  # the limit changes at once
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=16, max_batch_tokens=64)
    unlisted = ProgramKey(Bucket(12, ((1, 12),)), Variant())
    plenty = limit.read_text()
    with Engine(shallow(), [], settings, cache_dir=tmp_path).start() as own:
        compiler = own.compiler
        wait_until(lambda: not compiler.waiting)
        before = compiler.compiled
        for most, found in ((str(SPARE_MAPPINGS), False), (plenty, True)):
            limit.write_text(most)
            compiler.want(unlisted, compiler.compile_seconds)
            wait_until(lambda: not compiler.waiting)
            assert own.replica.has_program(unlisted) is found
            (result,) = own.infer([Query(None, "some text")])
            assert result.error is None
        assert (compiler.compiled, compiler.failed) == (before + 1, 0)
