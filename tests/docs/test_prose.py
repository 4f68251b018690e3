"""Pages can be read, and their changes reviewed, in a terminal."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WIDTH = 130
GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->|^```.*?^```", re.DOTALL | re.MULTILINE)
OTHERWISE = re.compile(r"^(?:\||\* |- |    |!\[|#)|https?://", re.MULTILINE)
"""Tables, lists, code, pictures, headings and addresses."""


def long_lines(text: str) -> Iterator[str]:
    kept = GENERATED.sub(lambda block: "\n" * block.group().count("\n"), text)
    for number, line in enumerate(kept.splitlines(), 1):
        if len(line) > WIDTH and not OTHERWISE.search(line):
            yield f"{number}: {len(line)} characters"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_of_prose_fit(page: pathlib.Path) -> None:
    assert not list(long_lines(page.read_text()))


def test_a_long_line_is_found() -> None:
    assert list(long_lines("short\n" + "word " * 30)) == ["2: 150 characters"]
    assert not list(long_lines("| " + "cell | " * 30))
