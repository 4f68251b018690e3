"""Pages that follow from the code."""

from __future__ import annotations

import pathlib
import re

import pytest
from manual.api import ROOMS, write_api
from manual.pages import PAGES, fill_page

from serving.options.options import Options

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_tables_are_what_the_code_says(path: pathlib.Path) -> None:
    assert fill_page(path) == path.read_text(), "run scripts/docs"


def test_every_option_has_its_line() -> None:
    page = next(path for path in PAGES if path.stem == "options").read_text()
    assert all(f"`JPETS_{name.upper()}`" in page for name in Options.model_fields)


def test_metrics_have_the_labels_that_are_scraped() -> None:
    page = next(path for path in PAGES if path.stem == "metrics").read_text()
    assert "| `jpets_http_requests_total` | counter | `route`, `status` |" in page
    assert "| `jpets_device_bytes` | gauge | `device`, `part` |" in page


def test_metrics_that_pages_name_are_there() -> None:
    """Also in rules and queries to be copied."""
    known = set(re.findall(r"^\| `(jpets_\w+)`", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    assert len(known) > 50
    for path in DOCS.glob("*.md"):
        for name in re.findall(r"\bjpets_[a-z_]+\b(?!\.)", path.read_text()):
            assert {name, re.sub(r"_(bucket|sum|count)$", "", name)} & known, f"{path.name}: {name}"


def test_a_page_of_the_api_names_every_module_of_its_room(tmp_path: pathlib.Path) -> None:
    (tmp_path / "gone.md").write_text("# Of a room that was there")
    pages = write_api(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(ROOMS)
    text = "".join(path.read_text() for path in pages)
    for module in ("jpets.types", "jpets.deltas.protocol", "jpets.model.forward", "pallas_kernels.low_rank.api"):
        assert f".. automodule:: {module}\n" in text
