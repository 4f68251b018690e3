"""What a request of the Open Inference Protocol says beside its tensors, over HTTP and gRPC alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from jpets.errors import InvalidInput
from jpets.types import Aggregation
from serving.http.errors import worded
from serving.http.fields import Int64, Text


class Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid")
    truncate: StrictBool | None = None
    """Cut texts that are too long, whatever the task's own rule."""
    prompt_name: Text | None = None
    """Which of the model's prompts stands before each text."""
    timeout: Annotated[Int64, Field(gt=0)] | None = None
    """Microseconds from the request's head to its deadline."""
    top_k: Annotated[Int64, Field(ge=1)] | None = None
    """In the output `json`: so many of the best labels, or words for a mask."""
    aggregation: Aggregation | None = None
    """In the output `json`: how labelled tokens become entities."""
    windows: StrictBool | None = None
    """Where `json` is the only output: read long texts in overlapping windows, and answer for each whole."""
    dimensions: Annotated[Int64, Field(ge=1)] | None = None
    """So many of the first numbers of each embedding, with the length that the whole one had."""
    binary_data_output: StrictBool | None = None
    """Over HTTP, send outputs as bytes behind the JSON, those that do not say otherwise."""
    priority: Literal[0] | None = None
    sequence_id: Literal[0, ""] | None = None
    sequence_start: Literal[False] | None = None
    sequence_end: Literal[False] | None = None
    """Values that Triton takes for not given; others are refused."""


class _Beside(BaseModel):
    """So that errors name the parameter as they do over HTTP."""

    parameters: Parameters


def parameters_in(given: Mapping[str, object]) -> Parameters:
    """Raises ``InvalidInput`` for unknown ones, and for other values."""
    try:
        return _Beside.model_validate({"parameters": dict(given)}).parameters
    except ValidationError as error:
        raise InvalidInput(worded(error.errors(include_url=False, include_input=False))) from error
