"""``python -m jpets``: the command line."""

from __future__ import annotations

from jpets.cli import main

main()
