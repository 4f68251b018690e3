"""``jpets``: the command line. Each command lives in ``jpets.app.commands`` and imports what it needs when it runs."""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperGroup

from jpets.app.commands.app import App, named_by_origin, take_any_encoding
from jpets.app.commands.backbones import commands as backbone
from jpets.app.commands.client import jobs, query
from jpets.app.commands.doctor import command as doctor
from jpets.app.commands.offline import command as run
from jpets.app.commands.output import VersionOption, report_error
from jpets.app.commands.profile import command as profile
from jpets.app.commands.repositories import commands as repositories
from jpets.app.commands.serve import serve_command
from jpets.app.commands.students import commands as students
from jpets.app.commands.tables import commands as plot
from jpets.app.commands.tasks import commands as task
from jpets.app.commands.tenants import commands as tenants
from jpets.app.commands.training import command as train
from jpets.errors import JpetsError, one_line
from jpets.failures import TELLING, problem_of
from serving.options.options import Options
from serving.options.sources import check_environment

ARGUMENTS = "jpets.arguments"


class Commands(TyperGroup):
    """An error that a user can do something about is one line on standard error, and exit code 1."""

    def main(self, *args: Any, **how: Any) -> Any:
        take_any_encoding()
        return super().main(*args, **how)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = [*args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            check_environment(os.environ)
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of a pipe has enough; typer ends quietly
            raise
        except typer.BadParameter as error:
            error.message = self._named(error.message, ctx)
            raise
        except (JpetsError, OSError, *TELLING) as error:
            if (problem := problem_of(error)) is None:
                raise
            report_error(self._named(one_line(problem), ctx))
            raise typer.Exit(1) from None

    def _named(self, message: str, ctx: Any) -> str:
        """A message in which options that the command had from the environment are called by their variables."""
        command: Any = self
        for each in ctx.meta[ARGUMENTS]:
            command = getattr(command, "get_command", lambda *_: None)(ctx, each) or command
        read = [each.opts[0] for each in command.params if each.envvar is not None]
        return named_by_origin(message, ctx.meta[ARGUMENTS], read)


app = App(
    name="jpets",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve many fine-tuned encoder tasks over one shared backbone.",
)


@app.callback()
def every_command(version: VersionOption = False) -> None:
    del version


def _run_server(options: Options) -> None:
    from jpets.app.server import run

    run(options)


app.add_typer(backbone.app, name="backbone")
app.add_typer(task.app, name="task")
app.add_typer(plot.app, name="plot")
app.add_typer(students.app, name="students")
app.add_typer(jobs.app, name="jobs")
app.add_typer(repositories.app, name="repository")
app.add_typer(tenants.keys, name="key")
app.add_typer(tenants.tenants, name="tenant")
app.command("serve")(serve_command(_run_server))
app.command("query")(query.query)
app.command("run")(run.run)
app.command("train", cls=train.TrainCommand)(train.train)
app.command("profile")(profile.profile)
app.command("doctor")(doctor.doctor)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
