"""``python -m jpets.serve``: one process with a backbone, a repository, an engine and the HTTP front end."""

from __future__ import annotations

import typer

from jpets.app.commands.serve import serve_command
from jpets.app.server import run


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(serve_command(run))
    app()


if __name__ == "__main__":
    main()
