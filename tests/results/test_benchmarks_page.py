"""The tables of ``docs/benchmarks.md``."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from results.documents import RESULTS, bench_commands, read_documents
from results.page import PAGE, fill_page

COMMAND = re.compile(r"`python scripts/bench\.py (.*?)`")


def test_the_tables_are_what_the_script_makes_of_the_results() -> None:
    page = PAGE.read_text()
    assert fill_page(page) == page, "run python scripts/figures.py docs/results/cpu-2core --page docs/benchmarks.md"


def test_every_result_has_its_place_on_the_page() -> None:
    page = PAGE.read_text()
    files = [path.relative_to(RESULTS.parent).as_posix() for path in RESULTS.rglob("*") if path.is_file()]
    assert [file for file in files if f"({file})" not in page] == []


def test_every_command_on_the_page_is_one_that_the_benchmarks_take() -> None:
    commands = bench_commands()
    found = COMMAND.findall(PAGE.read_text())
    assert len(found) >= 30
    for text in found:
        name, *arguments = shlex.split(text)
        commands[name].make_context(name, arguments)


def test_a_page_without_a_block_is_refused() -> None:
    page = PAGE.read_text().replace("<!-- figures: jobs -->", "")
    with pytest.raises(ValueError, match=r"expected blocks for .*jobs"):
        fill_page(page)


def test_documents_are_reports_only() -> None:
    for document in read_documents(RESULTS):
        assert document.systems == json.loads(document.path.read_text())["systems"]
