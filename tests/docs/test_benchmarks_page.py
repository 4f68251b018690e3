"""The tables of ``docs/benchmarks.md`` and the README."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shlex

import pytest
from results.documents import RESULTS, bench_commands, named, read_documents
from results.page import OF_FILES, OF_REPORTS, PAGES, fill_page, tables

COMMAND = re.compile(r"`python scripts/bench\.py (.*?)`")


BENCHMARKS, README = PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_are_what_the_script_makes_of_the_results(page: pathlib.Path) -> None:
    text = page.read_text()
    assert fill_page(text) == text, "run python scripts/figures.py docs/results/cpu-2core --pages"


def test_every_result_has_its_place_on_the_page() -> None:
    page = BENCHMARKS.read_text()
    assert [name for name in (*OF_REPORTS, *OF_FILES) if f"<!-- generated: {name} -->" not in page] == []
    files = [path.relative_to(RESULTS.parent).as_posix() for path in RESULTS.rglob("*") if path.is_file()]
    assert [file for file in files if f"({file})" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_on_a_page_is_one_that_the_benchmarks_take(page: pathlib.Path) -> None:
    commands = bench_commands()
    found = COMMAND.findall(page.read_text())
    assert len(found) >= 5
    for text in found:
        name, *arguments = shlex.split(text)
        commands[name].make_context(name, arguments)


def test_a_block_without_tables_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected blocks of .*jobs.*, found nonsense"):
        fill_page("<!-- generated: nonsense -->\n<!-- end -->\n")


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) < 900


def test_figures_of_a_gpu_stand_apart_from_those_of_cpus() -> None:
    own = named(read_documents(RESULTS), "operators")
    systems = {("fifo" if name == "fifo" else "streams-4"): figures for name, figures in own[0].systems.items()}
    gpu = dataclasses.replace(own[0], machine={**own[0].machine, "device": "NVIDIA H200"}, systems=systems)
    of_cpus, of_gpu = tables("operators", [gpu, *own]).split("\n\nOn an NVIDIA H200:\n\n")
    assert of_cpus == tables("operators", own) and "streams-4" in of_gpu
    assert tables("operators", [gpu]).startswith("On an NVIDIA H200:")


def test_documents_are_reports_only() -> None:
    for document in read_documents(RESULTS):
        assert document.systems == json.loads(document.path.read_text())["systems"]
