"""What a job is to do: the query of ``POST /v1/jobs`` and its kinds, kept in the job's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from jpets.config import DType
from jpets.kinds import EXTRACTION_OPTIONS, ExtractionChoice, HeadType, Pooling, Problem, TruncationStrategy
from serving.http.fields import Text

DEFAULT_METHOD = "lora"
DataFormat = Literal["csv", "tsv", "jsonl", "parquet"]
Id = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,127}$")]
Column = Annotated[Text, Field(min_length=1, max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Rate = Annotated[Number, Field(ge=0)]
MOST_SETTINGS = 4096
"""Characters of a method's settings."""
DEEPEST = 4
"""Most levels of nesting in them."""


def job_methods() -> Sequence[str]:
    """Names of the methods that a job may train a task with."""
    from jpets.deltas import trainable  # takes long to import: a command's help must not wait for it
    from jpets.deltas.recipe import FROZEN

    return (*trainable(), FROZEN)


class _OfJobMethods:
    """Validates a method's name like a literal, against the methods that are installed at that time."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls._known, handler(source))

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(core), "enum": list(job_methods())}

    @staticmethod
    def _known(name: str) -> str:
        *names, last = map(repr, job_methods())
        if repr(name) not in (*names, last):
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names)} or {last}"})
        return name


JobMethod = Annotated[str, _OfJobMethods]


def settings_object(given: object) -> object:
    """A method's settings; a query holds the object as text. Raises ``ValueError``."""
    if not isinstance(given, str):
        return given
    if len(given) > MOST_SETTINGS:
        raise ValueError(f"expected at most {MOST_SETTINGS} characters")
    try:
        found = json.loads(given)
        fits = isinstance(found, dict) and _depth(found) <= DEEPEST
    except (ValueError, RecursionError):
        fits = False
    if not fits:
        raise ValueError('expected a JSON object such as {"rank": 16}')
    return found


def _depth(value: object) -> int:
    """Levels of objects and lists that are not empty."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inside)) if inside else 0


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Asked(_Strict):
    """Without ``backbone`` a job is for the first one."""

    backbone: Annotated[Text, Field(max_length=128)] | None = None


STORED_BEFORE = {"stored": True}
"""The context in which a request is read that was taken in already."""


class FineTune(_Asked):
    """A task to be trained on labelled texts, with the options of ``jpets train``. ``settings``, a JSON object, are the
    method's. ``start`` names a task: training continues its served version; without ``method`` it uses that
    task's, and a new task is trained by lora. ``sweep`` is LOW..HIGH, of which the best of four rates is kept.
    ``pooling`` is mean by default; with ``start`` it is that of the task, and another one is refused. A zip archive
    holds ``train.csv`` (or another format) and, with held-out texts, ``validation.csv``."""

    kind: Literal["fine-tune"] = "fine-tune"
    task: Id
    start: Id | None = None
    format: DataFormat | Literal["zip"] = "csv"
    text: Column = "text"
    text_pair: Column | None = None
    label: Column | None = None
    head: Literal["embedding"] | None = None
    method: JobMethod | None = None
    settings: Annotated[dict[str, Any], BeforeValidator(settings_object)] = {}
    held_out: Annotated[Number, Field(ge=0.001, le=0.9)] = 0.1
    problem: Literal["regression"] | None = None
    epochs: Annotated[int, Field(ge=1, le=1000)] | None = None
    batch: Annotated[int, Field(ge=1, le=4096)] | None = None
    accumulate: Annotated[int, Field(ge=1, le=4096)] = 1
    rate: Rate | None = None
    sweep: Annotated[str, Field(max_length=64)] | None = None
    head_rate: Rate = 5e-3
    warm_up: Annotated[Number, Field(ge=0, le=1)] = 0.1
    patience: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    balanced: bool = False
    max_length: Annotated[int, Field(ge=2, le=8192)] | None = None
    truncation_strategy: TruncationStrategy | None = None
    pooling: Pooling | None = None
    domain: Annotated[Text, Field(max_length=256)] | None = None
    dtype: DType = "bfloat16"
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0

    @model_validator(mode="before")
    @classmethod
    def _has_method(cls, given: Any, info: ValidationInfo) -> Any:
        """Whether the method is known. That of ``start``'s task is known only to the server that has the task. A job
        that was stored before may have a pooling beside it, which was ignored."""
        if not isinstance(given, dict):
            return given
        if given.get("start") is None:
            return given if given.get("method") is not None else {**given, "method": DEFAULT_METHOD}
        if info.context == STORED_BEFORE:
            return {name: each for name, each in given.items() if name != "pooling"}
        return given

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.head == "embedding" and self.text_pair is None:
            raise ValueError("an embedding head is trained on pairs: name the column of second texts by text_pair")
        return self


class Extract(_Asked):
    """A task to be extracted from a fully fine-tuned checkpoint, with the options of ``jpets task import``. ``texts``
    names a file in its archive with texts on which answers are compared."""

    kind: Literal["extract"] = "extract"
    task: Id
    format: Literal["zip"] = "zip"
    method: ExtractionChoice
    density: Annotated[Number, Field(gt=0, le=1)] = 0.005
    per_matrix: bool = False
    block: Annotated[int, Field(ge=1, le=4096)] = 1
    rank: Annotated[int, Field(ge=1, le=128)] = 8
    energy: Annotated[Number, Field(gt=0, le=1)] | None = None
    texts: Annotated[Text, Field(pattern=r"^[A-Za-z0-9_-]+\.[a-z]+$", max_length=128)] | None = None
    text: Column = "text"
    text_pair: Column | None = None
    agreement: Annotated[Number, Field(ge=0, le=1)] = 0.99
    head: HeadType | None = None
    problem: Problem | None = None
    labels: Annotated[Text, Field(max_length=65536)] | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    max_length: Annotated[int, Field(ge=2, le=8192)] | None = None
    truncation_strategy: TruncationStrategy | None = None

    @model_validator(mode="after")
    def _has_texts(self) -> Extract:
        if self.method == "auto" and self.texts is None:
            raise ValueError("method auto compares answers: put texts into the archive and name their file by texts")
        return self

    @model_validator(mode="after")
    def _has_options_of_its_method(self, info: ValidationInfo) -> Extract:
        if info.context == STORED_BEFORE:
            return self
        for method, options in EXTRACTION_OPTIONS.items():
            for name in options:
                if self.method != method and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is an option of method {method}, found {self.method}; leave it out")
        if self.energy is not None and self.rank != type(self).model_fields["rank"].default:
            raise ValueError("give rank or energy, not both")
        return self


class FurtherPretrain(_Asked):
    """Layers (by default the lower half) to be trained further on texts without labels, as a new backbone ``name``."""

    kind: Literal["further-pretrain"] = "further-pretrain"
    name: Id
    format: DataFormat | Literal["txt"] = "txt"
    text: Column = "text"
    layers: Annotated[str, Field(pattern=r"^\d{1,3}(,\d{1,3}){0,99}$")] | None = None
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    batch: Annotated[int, Field(ge=1, le=4096)] = 32
    rate: Rate = 1e-4
    max_length: Annotated[int, Field(ge=2, le=8192)] = 128
    dtype: DType = "bfloat16"
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0


class MakeDomain(_Asked):
    """A domain of a backbone's tables, from texts without labels, with the options of ``jpets plot domain``. Without
    epochs a domain that is there keeps its n-gram layers, and gets a table of these texts. ``whole`` names a backbone
    of the server: the one that the root was made of, where that is not where it was then, or that with its lower layers
    trained further."""

    kind: Literal["make-domain"] = "make-domain"
    domain: Id
    whole: Annotated[Text, Field(max_length=128)] | None = None
    format: DataFormat | Literal["txt"] = "txt"
    text: Column = "text"
    text_pair: Column | None = None
    share: Annotated[Number, Field(ge=0, le=1)] = 0.5
    epochs: Annotated[int, Field(ge=0, le=1000)] = 1
    batch: Annotated[int, Field(ge=1, le=4096)] = 32
    rate: Rate | None = None
    guesses: Rate = 0
    sample: Annotated[int, Field(ge=1)] | None = None
    max_length: Annotated[int, Field(ge=2, le=8192)] = 128
    dtype: DType = "bfloat16"
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0


class GroupOptions(_Strict):
    """How a group of students is trained, by ``jpets students train`` or by a job. ``stacking`` is 1 by default; 0: no
    student imitates those before it. Without ``boosting`` each learns the teacher itself on texts of its own (bagging),
    without ``pruning`` only all together learn to answer."""

    text: Column = "text"
    text_pair: Column | None = None
    label: Column = "label"
    held_out: Annotated[Number, Field(ge=0.01, le=0.9)] = 0.1
    most: Annotated[int, Field(ge=1, le=8)] = 4
    method: JobMethod = DEFAULT_METHOD
    settings: Annotated[dict[str, Any], BeforeValidator(settings_object)] = {}
    stacking: Rate | None = None
    boosting: bool = True
    pruning: bool = True
    copies: Annotated[int, Field(ge=0, le=16)] = 1
    epochs: Annotated[int, Field(ge=1, le=1000)] | None = None
    batch: Annotated[int, Field(ge=1, le=4096)] | None = None
    rate: Rate | None = None
    max_length: Annotated[int, Field(ge=2, le=8192)] = 128
    dtype: DType = "bfloat16"
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0

    @model_validator(mode="after")
    def _go_together(self, info: ValidationInfo) -> Self:
        if not self.boosting and self.stacking:
            raise ValueError(
                f"stacking: without boosting no student follows others that it could imitate, found {self.stacking:g}; "
                "leave it out"
            )
        if self.most == 1 and self.stacking and info.context != STORED_BEFORE:
            raise ValueError("stacking: a single student has none before it that it could imitate; leave it out")
        for name, given in (("boosting", self.boosting), ("pruning", self.pruning)):
            if not given and self.most == 1:
                raise ValueError(f"{name}: without it a group has two students or more, found most=1")
        return self


class MakeStudents(_Asked, GroupOptions):
    """A group of students on a shallow backbone that the server has loaded, from labelled texts and a served task, the
    ``teacher``, with the options of ``jpets students train``. ``other_backbones`` are further names by commas: of all
    the one of fewest layers is taken that is enough. A zip archive holds ``train.csv`` (or another format) and, where
    there are some, held-out texts as ``validation.csv`` and texts without labels as ``texts.csv`` or ``texts.txt``.
    ``teacher_backbone`` is the one of the teacher, which the server fills in."""

    kind: Literal["make-students"] = "make-students"
    task: Id
    teacher: Id
    teacher_backbone: Annotated[Text, Field(max_length=128)] | None = None
    other_backbones: Annotated[Text, Field(max_length=1024)] | None = None
    format: DataFormat | Literal["zip"] = "csv"

    @property
    def shallow(self) -> Sequence[str | None]:
        """The backbones to choose from."""
        return self.backbone, *(self.other_backbones.split(",") if self.other_backbones is not None else ())

    @model_validator(mode="after")
    def _has_backbones(self) -> Self:
        if self.other_backbones is None:
            return self
        if self.backbone is None:
            raise ValueError("other_backbones: name the first one by backbone")
        if "" in self.shallow or len(set(self.shallow)) < len(self.shallow):
            raise ValueError(f"other_backbones: expected names by commas, each once, found {self.other_backbones!r}")
        return self


JobRequest = FineTune | Extract | FurtherPretrain | MakeDomain | MakeStudents
STORED: TypeAdapter[JobRequest] = TypeAdapter(Annotated[JobRequest, Field(discriminator="kind")])
"""Reads a stored request."""
