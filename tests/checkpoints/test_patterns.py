"""Patterns in checkpoints: ordinary ones match as in Python's ``re``, hostile ones cost neither time nor memory."""

from __future__ import annotations

import re
import tracemalloc

import pytest

from checkpoints.imports.patterns import Patterns, is_pattern
from jpets.errors import InvalidTask

NAME = "base_model.model.bert.encoder.layer.11.attention.self.query"


@pytest.mark.parametrize(
    "pattern",
    [
        r".*attention\.self\.(key|query)",
        r".*\.layer\.(?:[0-9]|1[01])\.attention\..*(query|value)$",
        r"(.*\.)?(layer\.\d{1,2}\.attention\.self\.query)",
        r"^(?:[a-z_]+\.)+layer\.(\d)+\.(attention|output)\.(self|dense)\.(?!value)\w+",
        r"(?i).*QUERY",
        r"(?P<start>\w+)\..*query",
        r"base_model\.(?:\w+\.){1,12}query",
        r"base_model\.(?:\w+\.){2}query",
        r".*[[q]uery",
        r".*\.(" + "|".join(f"layer.{at}.attention.self.query" for at in range(200)) + ")",
    ],
)
def test_ordinary_patterns_match_as_in_python(pattern: str, recwarn: pytest.WarningsRecorder) -> None:
    assert is_pattern(pattern)
    found = Patterns().matches(pattern, NAME)
    assert not recwarn
    assert found == (re.fullmatch(pattern.replace("[[", r"[\["), NAME) is not None)


@pytest.mark.parametrize("text", ["(", "(?R)", "(a|(?1))", "(?&name)", "[a--b]", "(" * 5000])
def test_what_is_no_pattern_in_python_fits_nothing(text: str) -> None:
    assert not is_pattern(text)
    assert not Patterns().matches(text, NAME)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:" * 12 + "a|b" + "){9}" * 12,
        "(?:" * 40 + "a|b" + ")+" * 40,
        "(?:" * 12 + "a|b" + "){9,}?" * 12,
        "(?x)" + "(?:" * 12 + "a|b" + ") { 9 }" * 12,
        "(?i-s:(?x:" + "(?:" * 12 + "a|b" + ") {9}" * 12 + "))",
        "(?:" * 12 + "a|b" + ")(?#and){9}" * 12,
        "a{1000000}",
        "a{" + "9" * 5000 + "}",
        "(?:query|value){e<=30}",
        "a|" * 100_000,
    ],
)
def test_patterns_that_fill_the_memory_are_refused(pattern: str) -> None:
    tracemalloc.start()
    for refuses in (is_pattern, lambda text: Patterns().matches(text, NAME)):
        with pytest.raises(InvalidTask, match="name the modules"):
            refuses(pattern)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20
