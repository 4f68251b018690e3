"""Where options come from: the command line, then the environment (``JPETS_...``), then a TOML file.

Every message about an option names the place that it came from.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from pydantic import ValidationError

from jpets.errors import InvalidInput
from jpets.files import user_path
from serving.options.options import Options

PREFIX = "JPETS_"
SYNONYMS = {"bucket": "buckets"}
"""Option -> setting, if their names differ."""
OF_COMMANDS = ("config", "server", "key")
"""Variables that commands read and that are not settings of a server."""
SERVICE_VARIABLE = re.compile(
    r"JPETS(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S*")
"""Kubernetes tells every pod about the services in its namespace: one named ``jpets`` makes JPETS_PORT=tcp://IP:PORT,
JPETS_SERVICE_HOST and others, one named ``jpets-x`` JPETS_X_PORT and others."""
LONGEST_SHOWN = 80
PASSWORD = re.compile(r"(://[^:/@\s]*:)[^@\s]*@")
"""Parts of a URL that no message shows."""


class Given(NamedTuple):
    value: Any
    origin: str
    """The origin as messages name it: ``--port``, ``JPETS_PORT``, ``jpets.toml line 3: port``."""


class Sources(NamedTuple):
    """Options, where each one that was given came from, and what the log should say about them."""

    options: Options
    origins: Mapping[str, str]
    notes: Sequence[str]

    def told(self, message: str) -> str:
        """A message about ``--options`` that names the places where these were given."""
        return named_by(message, {option_of(name): origin for name, origin in self.origins.items()})


def read_sources(given: Mapping[str, Any], config: Path | None = None) -> Sources:
    """Options from what the command line gave (``None``: not given), the environment and the file ``config``.

    Raises ``InvalidInput`` naming every invalid option, and variables and keys that are not options.
    """
    found = _of_file(user_path(config)) if config is not None else {}
    of_environment, notes = _of_environment(os.environ)
    found |= of_environment
    found |= {name: Given(value, option_of(name)) for name, value in given.items() if value not in (None, [])}
    origins = {name: each.origin for name, each in found.items()}
    try:
        options = Options.model_validate({name: each.value for name, each in found.items()})
    except ValidationError as error:
        raise InvalidInput("; ".join(_problems(error, origins))) from error
    return Sources(options, origins, notes)


def option_of(name: str) -> str:
    """The option of a setting: ``--max-length`` for ``max_length``."""
    own = next((option for option, setting in SYNONYMS.items() if setting == name), name)
    return f"--{own.replace('_', '-')}"


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises ``InvalidInput`` for a variable with the prefix that nothing reads: it must be a mistake."""
    wrong = [name for name in environment if _is_ours(name, environment) and _setting(name) is None]
    if wrong:
        known = [PREFIX + name.upper() for name in (*Options.model_fields, *OF_COMMANDS)]
        raise InvalidInput(
            "; ".join(f"{name}: there is no such variable{_hint(name.upper(), known)}" for name in wrong)
        )


def _of_environment(environment: Mapping[str, str]) -> tuple[dict[str, Given], list[str]]:
    """The settings that variables give, and notes on ignored variables."""
    check_environment(environment)
    found: dict[str, Given] = {}
    notes = []
    for name, text in environment.items():
        setting = _setting(name) if text and _is_ours(name, environment) else None
        if setting is None or setting in OF_COMMANDS:
            continue
        if _is_service_address(name, text):
            option = option_of(setting)
            notes.append(
                f"{name} is not taken for {option}: it holds the address of a Kubernetes service; give {option}, "
                "rename the service, or set enableServiceLinks: false for the pod"
            )
            continue
        found[setting] = Given(_list_of(text) if _takes_many(setting) else text, name)
    return found, notes


def _is_ours(name: str, environment: Mapping[str, str]) -> bool:
    """Whether a variable is meant for jpets, not for a service with a similar name."""
    upper = name.upper()
    if not upper.startswith(PREFIX) or SERVICE_VARIABLE.fullmatch(upper):
        return False
    return not _is_service_address(name, environment[name]) or _setting(name) is not None


def _is_service_address(name: str, text: str) -> bool:
    return name.upper().endswith("_PORT") and SERVICE_ADDRESS.fullmatch(text) is not None


def _setting(variable: str) -> str | None:
    """The setting that a variable sets."""
    name = variable[len(PREFIX) :].lower()
    name = SYNONYMS.get(name, name)
    return name if name in Options.model_fields or name in OF_COMMANDS else None


def _takes_many(setting: str) -> bool:
    return get_origin(Options.model_fields[setting].annotation) in (list, Mapping)


def _list_of(text: str) -> Any:
    """``8x32, 16x32``, or a JSON list."""
    return [part for part in re.split(r"[\s,\[\]\"']+", text) if part]


def _of_file(config: Path) -> dict[str, Given]:
    if not config.is_file():
        raise InvalidInput(f"--config: there is no such file as {config.name!r}")
    try:
        text = config.read_text(encoding="utf-8-sig")
        document = tomllib.loads(text)
    except OSError as error:
        raise InvalidInput(f"--config: {config.name} cannot be read: {error.strerror}") from error
    except ValueError as error:  # also bytes that are not UTF-8
        raise InvalidInput(f"--config: {config.name} is not valid TOML, {error}") from error
    found, wrong = {}, []
    for key, value in document.items():
        name = SYNONYMS.get(key, key)
        origin = f"{config.name}{_line(text, key)}: {key}"
        if name in Options.model_fields:
            found[name] = Given(value, origin)
        else:
            wrong.append(f"{origin}: there is no such option{_hint(key.replace('-', '_'), Options.model_fields)}")
    if wrong:
        raise InvalidInput("; ".join(wrong))
    return found


def _line(text: str, key: str) -> str:
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*[=.\]]", line):
            return f" line {number}"
    return ""


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else "; python -m jpets.serve --help lists them"


def named_by(message: str, origins: Mapping[str, str]) -> str:
    """A message about ``--options`` in which each option of ``origins`` is called by its name at that place."""
    return re.sub(r"--[a-z][a-z-]*", lambda found: origins.get(found[0], found[0]), message)


def _problems(error: ValidationError, origins: Mapping[str, str]) -> Iterable[str]:
    named = {option_of(name): origin for name, origin in origins.items()}
    for each in error.errors(include_url=False):
        message = named_by(each["msg"].removeprefix("Value error, "), named)
        if not each["loc"]:
            yield message
            continue
        name = str(each["loc"][0])
        shown = PASSWORD.sub(r"\1***@", repr(each["input"]))
        yield f"{origins.get(name, option_of(name))}: {message}, found {shown[:LONGEST_SHOWN]}"
