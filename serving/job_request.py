"""What a training job is asked for: the query of ``POST /v1/jobs``, kept in the job's folder."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from serving.fields import Text

JobMethod = Literal["adapter", "lora", "bitfit", "ia3", "prefix", "prompt", "mask", "diff", "onebit", "frozen"]
DataFormat = Literal["csv", "tsv", "jsonl", "parquet"]
Column = Annotated[Text, Field(min_length=1, max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=False)]
MOST_SETTINGS = 4096
"""Characters of a method's settings."""


class FineTune(BaseModel):
    """A task to be trained on labelled texts, with the options of ``jpets train``. ``settings``, a JSON object, are the
    method's. Without ``backbone`` it is trained for the first one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["fine-tune"] = "fine-tune"
    task: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,127}$")]
    backbone: Annotated[Text, Field(max_length=128)] | None = None
    format: DataFormat = "csv"
    text: Column = "text"
    text_pair: Column | None = None
    label: Column = "label"
    method: JobMethod = "lora"
    settings: dict[str, Any] = {}
    held_out: Annotated[Number, Field(ge=0.001, le=0.9)] = 0.1
    problem: Literal["regression"] | None = None
    epochs: Annotated[int, Field(ge=1, le=1000)] = 3
    batch: Annotated[int, Field(ge=1, le=4096)] = 32
    accumulate: Annotated[int, Field(ge=1, le=4096)] = 1
    rate: Annotated[Number, Field(ge=0)] | None = None
    head_rate: Annotated[Number, Field(ge=0)] = 1e-3
    warm_up: Annotated[Number, Field(ge=0, le=1)] = 0.1
    patience: Annotated[int, Field(ge=0)] | None = None
    balanced: bool = False
    max_length: Annotated[int, Field(ge=2, le=8192)] = 128
    pooling: Literal["mean", "cls", "pooler"] = "mean"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0

    @field_validator("settings", mode="before")
    @classmethod
    def _is_object(cls, given: object) -> object:
        """A query holds the object as text."""
        if not isinstance(given, str):
            return given
        if len(given) > MOST_SETTINGS:
            raise ValueError(f"expected at most {MOST_SETTINGS} characters")
        try:
            return json.loads(given)
        except (ValueError, RecursionError):
            raise ValueError('expected a JSON object such as {"rank": 16}') from None
