"""The server's options: from the command line, the environment (``JPETS_...``) or a TOML file, in this order."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from jpets.config import DType, EngineSettings, Policy, Trigger
from jpets.engine.bucket import Bucket, parse_bucket
from jpets.errors import InvalidInput
from jpets.scheduling.rounds import AdaptiveInterval
from serving.settings import MIB, ServingSettings

LogLevel = Literal["debug", "info", "warning", "error"]
Reserve = Literal["auto", "always", "never"]


class Options(BaseSettings):
    """Everything that ``python -m jpets.serve`` can be told."""

    model_config = SettingsConfigDict(env_prefix="JPETS_", extra="forbid", frozen=True, env_ignore_empty=True)

    backbone: str | None = None
    backbones: Path | None = None
    repository: Path | None = None
    demo: bool = False
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    dtype: DType = "bfloat16"
    cache_dir: Path | None = None
    max_length: int = Field(512, ge=8)
    max_batch_tokens: int = Field(1024, ge=64)
    max_batch_rows: int = Field(32, ge=1)
    max_queue: int = Field(4096, ge=1)
    slots: int = Field(32, ge=1)
    max_slots: int = Field(1023, ge=1)
    policy: Policy = "auto"
    fixed_batch: int = Field(16, ge=1)
    trigger: Trigger = "hungry"
    lazy_wait: float = Field(0.005, ge=0, le=60)
    latency_target: float = Field(0.1, gt=0)
    buckets: list[str] = []
    devices: str = "all"
    tensor_parallel: int = Field(1, ge=1)
    migrate: bool = True
    balance_start: float = Field(AdaptiveInterval.start, gt=0)
    balance_least: float = Field(AdaptiveInterval.least, gt=0)
    balance_most: float = Field(AdaptiveInterval.most, gt=0, le=3600)
    balance_step: float = Field(AdaptiveInterval.step, ge=0)
    balance_threshold: float = Field(AdaptiveInterval.threshold, ge=0, le=1)
    device_memory_gb: float = Field(0.0, ge=0)
    host_memory_gb: float = Field(1.0, ge=0)
    merged_memory_gb: float = Field(0.0, ge=0)
    program_memory_mb: int = Field(896, ge=0)
    response_cache_mb: int = Field(0, ge=0)
    reserve: Reserve = "auto"
    max_inputs: int = Field(1024, ge=1)
    max_body_mb: int = Field(16, ge=1)
    max_task_mb: int = Field(512, ge=1)
    max_data_mb: int = Field(512, ge=1)
    job_platform: str = "cpu"
    request_timeout: float = Field(60.0, gt=0, le=3600)
    grace: float = Field(10.0, ge=0)
    log_level: LogLevel = "info"
    log_json: bool = False

    @model_validator(mode="after")
    def _something_to_serve(self) -> Self:
        if not self.demo and self.backbone is None:
            raise ValueError("give --backbone PATH|NAME, or --demo")
        return self

    @model_validator(mode="after")
    def _has_an_interval(self) -> Self:
        self.balance_interval()
        return self

    @field_validator("buckets")
    @classmethod
    def _are_buckets(cls, given: list[str]) -> list[str]:
        for text in given:
            parse_bucket(text)
        return given

    def bucket_menu(self) -> list[Bucket] | None:
        """The buckets that were asked for; None leaves the choice to the engine."""
        return [parse_bucket(text) for text in self.buckets] or None

    def balance_interval(self) -> AdaptiveInterval:
        return AdaptiveInterval(
            least=self.balance_least,
            most=self.balance_most,
            threshold=self.balance_threshold,
            step=self.balance_step,
            start=self.balance_start,
        )

    def engine_settings(self) -> EngineSettings:
        return EngineSettings(
            dtype=self.dtype,
            max_length=self.max_length,
            max_batch_tokens=self.max_batch_tokens,
            max_batch_rows=self.max_batch_rows,
            max_queue=self.max_queue,
            slots=self.slots,
            max_slots=self.max_slots,
            policy=self.policy,
            fixed_batch=self.fixed_batch,
            trigger=self.trigger,
            lazy_wait=self.lazy_wait,
            latency_target=self.latency_target,
            device_memory_gb=self.device_memory_gb,
            host_memory_gb=self.host_memory_gb,
            merged_memory_gb=self.merged_memory_gb,
            program_memory_mb=self.program_memory_mb,
            response_cache_mb=self.response_cache_mb,
        )

    def serving_settings(self) -> ServingSettings:
        return ServingSettings(
            request_timeout=self.request_timeout,
            max_inputs=self.max_inputs,
            max_body_bytes=self.max_body_mb * MIB,
            max_task_bytes=self.max_task_mb * MIB,
            max_data_bytes=self.max_data_mb * MIB,
        )


def read_options(given: dict[str, Any], config: Path | None = None) -> Options:
    """Options from what the command line gave (``None``: not given), the environment and the file ``config``.

    Raises ``InvalidInput`` naming every option that cannot be.
    """

    class WithFile(Options):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config)

    if config is not None and not config.is_file():
        raise InvalidInput("--config: there is no such file")
    try:
        return WithFile(**{name: value for name, value in given.items() if value not in (None, [])})
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"--config: not valid TOML, {error}") from error
    except ValidationError as error:
        lines = []
        for each in error.errors(include_url=False):
            name = ".".join(map(str, each["loc"]))
            lines.append((f"{name}: " if name else "") + each["msg"].removeprefix("Value error, "))
        raise InvalidInput("; ".join(lines)) from error
