"""Every setting of an engine can be set on a server, and is declared only in ``EngineSettings``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from typer.testing import CliRunner

from jpets.app.commands.options import engine_option
from jpets.cli import app
from jpets.config import EngineSettings
from jpets.errors import InvalidInput
from serving.options.engine import EngineOptions
from serving.options.options import Options, read_options
from serving.options.server import ServerOptions
from serving.options.sources import option_of

DEMO = {"demo": True}
FIELDS = {field.name: field for field in dataclasses.fields(EngineSettings)}
KINDS = get_type_hints(EngineSettings)
EACH = pytest.mark.parametrize("name", FIELDS)
BOUNDED = [(name, way, limit) for name, field in FIELDS.items() for way, limit in field.metadata["bounds"].items()]


def other(name: str) -> Any:
    """A value of a setting that is not its default."""
    kind, default = KINDS[name], getattr(EngineSettings(), name)
    if get_origin(kind) is Literal:
        return next(each for each in get_args(kind) if each != default)
    if get_origin(kind) is Mapping:
        return {"default": 3, "else": 2}
    return not default if kind is bool else default + 1


def spelled(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {each}" for key, each in value.items()) + " }"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def shown(command: str) -> str:
    return CliRunner().invoke(app, [command, "--help"], terminal_width=200, env={"COLUMNS": "200"}).stdout


def test_every_setting_has_an_option_and_a_help_text() -> None:
    text = shown("serve")
    for name, field in FIELDS.items():
        assert re.search(rf"{option_of(name)}\b", text)
        assert field.metadata["help"][:40] in text
    assert "--no-background-compile" in text and "--no-prefetch" in text


def test_no_setting_is_declared_twice() -> None:
    assert list(EngineOptions.model_fields) == list(FIELDS)
    assert not ServerOptions.model_fields.keys() & FIELDS.keys()
    assert Options.model_fields.keys() == ServerOptions.model_fields.keys() | FIELDS.keys()
    assert not {name for name in FIELDS if name in Options.__annotations__}


def test_a_server_that_is_told_nothing_has_the_settings_of_an_engine() -> None:
    assert read_options(DEMO).engine_settings() == EngineSettings()


@EACH
def test_a_key_and_a_variable_reach_the_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = dataclasses.replace(EngineSettings(), **{name: other(name)})
    file = tmp_path / "jpets.toml"
    file.write_text(f"{name} = {spelled(other(name))}\n")
    assert read_options(DEMO, file).engine_settings() == wanted
    value = other(name)
    text = " ".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, dict) else str(value)
    monkeypatch.setenv(f"JPETS_{name.upper()}", text)
    assert read_options(DEMO).engine_settings() == wanted


@pytest.mark.parametrize("name, way, limit", BOUNDED)
def test_a_value_beyond_its_bounds_is_refused_by_its_place(
    name: str, way: str, limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"ge": limit - 1, "gt": limit, "le": limit + 1}[way]
    file = tmp_path / "jpets.toml"
    file.write_text(f"\n{name} = {spelled({'a': wrong} if name == 'reserved_tasks' else wrong)}\n")
    with pytest.raises(InvalidInput, match=rf"jpets\.toml line 2: {name}: .*{limit:g}, found {wrong}"):
        read_options(DEMO, file)
    variable = f"JPETS_{name.upper()}"
    monkeypatch.setenv(variable, f"a={wrong}" if name == "reserved_tasks" else str(wrong))
    with pytest.raises(InvalidInput, match=f"{variable}: .*{limit:g}, found '{wrong}'"):
        read_options(DEMO)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind is bool or get_origin(kind) is Literal])
def test_a_value_of_no_choice_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=rf"{option_of(name)}: .*, found 'maybe'"):
        read_options(DEMO | {name: "maybe"})


def test_reserved_tasks_are_pairs_of_a_tenant_and_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = read_options(DEMO | {"reserved_tasks": ["default=3", "a=b=2", "default=4"]})
    assert given.reserved_tasks == {"default": 4, "a=b": 2}
    monkeypatch.setenv("JPETS_RESERVED_TASKS", "default=1, else=2")
    file = tmp_path / "jpets.toml"
    file.write_text("[reserved_tasks]\ndefault = 7\n")
    assert read_options(DEMO, file).reserved_tasks == {"default": 1, "else": 2}
    monkeypatch.delenv("JPETS_RESERVED_TASKS")
    assert read_options(DEMO, file).reserved_tasks == {"default": 7}


@pytest.mark.parametrize(
    "value, told",
    [
        (["default"], "expected NAME=NUMBER.*found .*default"),
        (["=3"], "expected NAME=NUMBER"),
        (["default=few"], "integer.*'few'"),
        ({"default": True}, "not true or false"),
        (3, "mapping.*found 3|dictionary.*found 3"),
    ],
)
def test_reserved_tasks_that_are_none_are_refused(value: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=f"--reserved-tasks: .*{told}"):
        read_options(DEMO | {"reserved_tasks": value})


def test_commands_take_help_and_bounds_of_a_setting() -> None:
    option = engine_option("max_batch_tokens")
    assert (option.help, option.min, option.max) == (
        "most tokens in a batch, 0 for as many as make a token cheaper",
        0,
        None,
    )
    for command in ("run", "profile"):
        assert FIELDS["dtype"].metadata["help"] in shown(command)
