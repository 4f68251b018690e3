"""Options that several commands read alike."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import typer

from jpets.config import DType, EngineSettings
from jpets.errors import Conflict

OUTPUT, SUFFIX = "--output", ".safetensors"
TextColumn = Annotated[str, typer.Option(help="column of the texts")]
TextPair = Annotated[str | None, typer.Option(help="column of second texts")]
TrainingDType = Annotated[DType, typer.Option(help="of the forward pass")]
Kept = Annotated[
    Path | None, typer.Option("--checkpoints", file_okay=False, help="folder that a killed run goes on from")
]
Seed = Annotated[int, typer.Option(min=0, max=(1 << 31) - 1)]
Model = TypeVar("Model", bound=pydantic.BaseModel)
SETTINGS = {each.name: each for each in dataclasses.fields(EngineSettings)}


def given_path(text: str) -> Path:
    """The ``parser`` of an option for a path. An empty one would be the working folder: the variable of a script may
    not have been set."""
    if not text:
        raise typer.BadParameter("expected a path")
    return Path(text)


def engine_option(name: str, **how: Any) -> Any:
    """The ``typer.Option`` of a setting, with its help and bounds. ``how`` is what else it gets."""
    about = SETTINGS[name].metadata
    limits = {"ge": "min", "le": "max"}
    bounds = {limits[each]: limit for each, limit in about["bounds"].items()}
    return typer.Option(help=about["help"], **bounds, **how)


def check_task_output(path: Path) -> None:
    """What would keep a task from being written in the end. Raises ``typer.BadParameter``."""
    check_output(OUTPUT, path, (SUFFIX,))


def check_tasks_output(folder: Path, ids: Sequence[str]) -> None:
    """What would keep tasks from being written into ``folder``, which may be made. Raises ``typer.BadParameter``."""
    if folder.suffix == SUFFIX or (folder.exists() and not folder.is_dir()):
        raise typer.BadParameter(f"--output must be a folder for several files of texts, found {folder.name!r}")
    _check_folder(folder if folder.is_dir() else folder.parent)
    for id in ids:
        _check_file(folder / f"{id}{SUFFIX}")


def check_output(option: str, path: Path, endings: Sequence[str] = ()) -> None:
    """What would keep a file from being written in the end. Raises ``typer.BadParameter``."""
    if endings and path.suffix not in endings:
        raise typer.BadParameter(f"{option} must be a file that ends in {' or '.join(endings)}, found {path.name!r}")
    _check_folder(path.parent, option)
    _check_file(path, option)


def check_new_folder(folder: Path) -> None:
    """What would keep a folder from being made in the end. Raises ``Conflict``, ``typer.BadParameter``."""
    if folder.exists():
        raise Conflict(f"{folder} exists already; remove it or choose another folder")
    above = next(each for each in folder.absolute().parents if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise typer.BadParameter(f"nothing may be written into {above.name!r}, where {folder.name!r} is to be")


def _check_folder(folder: Path, option: str = OUTPUT) -> None:
    if not folder.is_dir():
        raise typer.BadParameter(f"{option}: there is no folder {folder.name!r}")
    if not os.access(folder, os.W_OK):
        raise typer.BadParameter(f"{option}: nothing may be written into the folder {folder.name!r}")


def _check_file(path: Path, option: str = OUTPUT) -> None:
    if path.is_dir():
        raise typer.BadParameter(f"{option}: {path.name!r} is a folder")


def on_command_line(context: typer.Context, name: str) -> bool:
    """Whether an option was given there, and not by a variable or a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_options(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raises ``typer.BadParameter`` for the first of these parameters that the command line gives: beside others it
    would do nothing."""
    for name in filter(partial(on_command_line, context), names):
        option = next(each.opts[0] for each in context.command.params if each.name == name)
        raise typer.BadParameter(f"{option}: {why}")


def named(given: Sequence[str]) -> dict[str, str]:
    """What ``--set NAME=VALUE`` gave, the last of a name. Raises ``typer.BadParameter``."""
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--set must be NAME=VALUE, found {each!r}")
        found[name] = value
    return found


def parsed(model: type[Model], given: Mapping[str, Any]) -> Model:
    """Options as a job's request has them. Raises ``typer.BadParameter`` naming those that it does not take."""
    try:
        return model.model_validate(given)
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        places = ["".join(f"--{part}: ".replace("_", "-") for part in each["loc"][:1]) for each in problems]
        told = [each["msg"].removeprefix("Value error, ") for each in problems]
        raise typer.BadParameter("; ".join(map(str.__add__, places, told))) from error
