"""Options that are settings of an engine: all that ``EngineSettings`` declares, as fields of a pydantic model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, Field, create_model

from jpets.config import EngineSettings


class _Settings(BaseModel, frozen=True):
    """Turns the options into settings."""

    def engine_settings(self) -> EngineSettings:
        return EngineSettings(**{each.name: getattr(self, each.name) for each in dataclasses.fields(EngineSettings)})


def no_truth_value(given: Any) -> Any:
    """The value, unless it is true or false, which pydantic would take for a number: then raises ``ValueError``."""
    if isinstance(given, bool):
        raise ValueError("expected a value, not true or false")
    return given


def _of_pairs(given: Any) -> Any:
    """A mapping from a list of ``NAME=NUMBER``; the last of a name counts. Raises ``ValueError``."""
    if not isinstance(given, list):
        return given
    found = {}
    for each in given:
        name, _, value = str(each).rpartition("=")
        if not name:
            raise ValueError("expected NAME=NUMBER, as in default=3")
        found[name] = value
    return found


def _field(setting: dataclasses.Field[Any], kind: Any) -> tuple[Any, Any]:
    """Type and ``Field`` of a setting. The bounds of a mapping are those of its values."""
    about, bounds = setting.metadata["help"], setting.metadata["bounds"]
    default = getattr(EngineSettings(), setting.name)
    if (mapping := get_origin(kind)) is not Mapping:
        return kind, Field(default, description=about, **bounds)
    name, value = get_args(kind)
    value = Annotated[value, Field(**bounds), BeforeValidator(no_truth_value)]
    return Annotated[mapping[name, value], BeforeValidator(_of_pairs)], Field(default, description=about)


if TYPE_CHECKING:

    class EngineOptions(_Settings, EngineSettings, frozen=True):
        """Has the fields of ``EngineSettings``."""

else:
    _kinds = get_type_hints(EngineSettings)
    EngineOptions = create_model(
        "EngineOptions",
        __base__=_Settings,
        **{each.name: _field(each, _kinds[each.name]) for each in dataclasses.fields(EngineSettings)},
    )
