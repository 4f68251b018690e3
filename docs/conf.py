"""The site that ``scripts/docs`` builds of these pages."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

import jpets

project = "jpets"
author = "the jpets authors"
release = jpets.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["results"]
highlight_language = "none"
html_theme = "furo"
html_title = f"jpets {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]

myst_heading_anchors = 3
"""Headings of these levels can be linked to (``tasks.md#jobs``), as on GitHub."""
suppress_warnings = ["ref.python"]
"""The type ``bytes`` is not the field ``bytes`` of one of our classes, which Sphinx also finds."""

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", keep_indented)
    app.connect("autodoc-process-signature", name_arrays)
    app.connect("autodoc-skip-member", skip_aliases)


def keep_indented(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Code, formulas and trees that are indented in a docstring stay as they are."""
    shown: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside and not (shown and shown[-1]):
            shown += ["::", ""]
        inside = indented or (inside and not line)
        shown.append(line)
    lines[:] = shown


def name_arrays(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Shapes as they stand in the code: ``Float[Array, 't d']``."""
    shown = [text.replace("jaxlib._jax.Array", "Array") if text else text for text in (signature, result)]
    return shown[0], shown[1]


def skip_aliases(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Fields of named tuples without a text of their own: the class says what they are."""
    return True if (getattr(thing, "__doc__", None) or "").startswith("Alias for field number") else None
