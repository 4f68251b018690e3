"""All options of a server: its own, and the settings of its engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationInfo, field_validator, model_validator

from serving.http.settings import ServingSettings
from serving.options.engine import EngineOptions, no_truth_value
from serving.options.server import ServerOptions


class Options(EngineOptions, ServerOptions, frozen=True):
    """All options of a server."""

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_truth_values(cls, given: Any, info: ValidationInfo) -> Any:
        return given if cls.model_fields[str(info.field_name)].annotation is bool else no_truth_value(given)

    @model_validator(mode="after")
    def _lets_requests_wait(self) -> Self:
        if "max_inputs" in self.model_fields_set and self.max_inputs > self.max_queue:
            raise ValueError(
                f"--max-inputs: expected at most {self.max_queue}, which may wait (--max-queue), "
                f"found {self.max_inputs}"
            )
        return self

    def serving_settings(self) -> ServingSettings:
        """No request may have more texts than may wait: it would never be taken."""
        settings = super().serving_settings()
        return dataclasses.replace(settings, max_inputs=min(self.max_inputs, self.max_queue))


def read_options(given: Mapping[str, Any], config: Path | None = None) -> Options:
    """``sources.read_sources``, without the places that the options came from."""
    from serving.options.sources import read_sources

    return read_sources(given, config).options
