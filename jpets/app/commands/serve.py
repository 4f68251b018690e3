"""The command that serves, ``jpets serve`` or ``python -m jpets.serve``: its options are the fields of ``Options``."""

from __future__ import annotations

import inspect
import logging
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from jpets.app.commands.app import named_by_origin, take_any_encoding
from jpets.app.commands.options import given_path
from jpets.app.commands.output import VersionOption
from jpets.errors import JpetsError, one_line
from jpets.failures import TELLING, problem_of
from serving.http.logs import set_up_logging
from serving.options.options import Options
from serving.options.sources import option_of, read_sources

log = logging.getLogger("jpets.serve")

ConfigOption = Annotated[Path | None, typer.Option(envvar="JPETS_CONFIG", help="TOML file with options")]


def serve_command(run: Callable[[Options], None]) -> Callable[..., None]:
    """The command, where ``run`` serves; what keeps it from serving is one line on standard error, and exit code 1."""

    def serve(config: Path | None = None, version: bool = False, **given: Any) -> None:
        """Serve many fine-tuned tasks over one shared backbone.

        Every option can also be an environment variable (--max-length: JPETS_MAX_LENGTH) or a line in a TOML file
        (max_length = 256); the command line wins over the environment, and that over the file.
        """
        del version
        take_any_encoding()
        told: Callable[[str], str] = partial(named_by_origin, arguments=sys.argv[1:], options=("--config",))
        try:
            sources = read_sources(given, config)
            told = sources.told
            set_up_logging(sources.options.log_level, sources.options.log_json)
            for note in sources.notes:
                log.warning(note)
            run(sources.options)
        except (JpetsError, OSError, *TELLING) as error:
            if (problem := problem_of(error)) is None:
                raise
            typer.echo(f"jpets: {told(one_line(problem))}", err=True)
            raise typer.Exit(1) from None

    parameters = [_parameter(name, field) for name, field in Options.model_fields.items()]
    parameters.append(_keyword("config", ConfigOption))
    parameters.append(_keyword("version", VersionOption, False))
    command: Any = serve
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return serve


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """A setting on the command line, where None is what was not given."""
    kind, option = field.annotation, option_of(name)
    if isinstance(kind, types.UnionType):  # with None
        kind = get_args(kind)[0]
    about, metavar = field.description or "", None
    if get_origin(kind) is Literal:
        about += f": {', '.join(get_args(kind)[:-1])} or {get_args(kind)[-1]}"
        kind = str
    elif get_origin(kind) in (list, Mapping):
        kind, metavar = list[str], "<str>..."  # Typer's own would cut options' names short
    if kind is bool:
        option += f"/--no-{option[2:]}" * bool(field.default)
    elif field.default not in (None, [], {}):
        shown = f"{field.default:g}" if isinstance(field.default, float) else field.default
        about += f" (default {shown})"
    shape: Any = kind
    how: dict[str, Any] = {"parser": given_path, "metavar": "<path>"} if kind is Path else {"metavar": metavar}
    return _keyword(name, Annotated[shape | None, typer.Option(option, help=about, **how)])
