"""Options of a server that are not settings of its engines. A field declares an option completely: its variable
(``JPETS_...``), its key in a TOML file, its limits and its help follow from it (``serving.options.sources``,
``jpets.app.commands.serve``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from jpets.config import SizingRule
from jpets.files import user_path
from serving.http.descriptors import most_connections
from serving.http.settings import MIB, ConnectionLimits, ServingSettings

MOST_TASK_MB = 512
"""Of a task file that is read (``checkpoints.task_file``)."""
MOST_BODY_MB = 2047
"""What gRPC counts the bytes of a message in has 31 bits."""

if TYPE_CHECKING:
    from jpets.engine.batch.bucket import Bucket
    from jpets.scheduling.balancing.rounds import AdaptiveInterval

LogLevel = Literal["debug", "info", "warning", "error"]
Reserve = Literal["auto", "always", "never"]
StudentsRule = Literal["load", "all"]


class ServerOptions(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """The options of a server that are not settings of an engine."""

    backbone: str | None = Field(None, description="folder, installed package or hub id of the backbone")
    backbones: Path | None = Field(
        None, description="folder whose backbones may be loaded while it runs, by PUT /v1/backbones/NAME"
    )
    repository: Path | None = Field(None, description="folder of the tasks; a temporary one by default")
    catalogue: str | None = Field(
        None, repr=False, description="URL of the database of tasks, SQLite's or PostgreSQL's, if not in the repository"
    )
    blobs: str | None = Field(
        None, repr=False, description="URL of the storage of task files, as fsspec takes it, if not in the repository"
    )
    demo: bool = Field(False, description="the packaged MiniLM and the demo tasks")
    host: str = Field("127.0.0.1", description="address to listen on")
    insecure: bool = Field(False, description="let other machines in without keys")
    tls_certificate: Path | None = Field(
        None, description="PEM file of the certificate, and those that vouch for it: HTTPS, and gRPC over TLS"
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on, 0 for any")
    grpc: bool = Field(True, description="the Open Inference Protocol over gRPC too")
    grpc_port: int | None = Field(
        None, ge=0, le=65535, description="port for gRPC, 0 for any; by default the one after --port, if it is free"
    )
    cache_dir: Path | None = Field(None, description="folder of compiled programs")
    buckets: list[str] = Field(
        [], description="a static shape instead of the menu: 8x32 (padded), 1024:32x32+8x128 (packed)"
    )
    devices: str = Field("all", description="all, how many, or a list of numbers like 0,2")
    tensor_parallel: int = Field(1, ge=1, description="devices that compute each batch together")
    migrate: bool = Field(True, description="move tasks between devices while they serve")
    balance_start: float = Field(10.0, gt=0, description="seconds until devices are compared for the first time")
    balance_least: float = Field(0.2, gt=0, description="shortest time between two comparisons")
    balance_most: float = Field(20.0, gt=0, le=3600, description="longest time between two comparisons")
    balance_step: float = Field(0.5, ge=0, description="seconds added while devices are balanced")
    balance_threshold: float = Field(
        0.9, ge=0, le=1, description="least over most loaded device, below which the time is halved"
    )
    reserve: Reserve = Field(
        "auto", description="room for shapes of tasks that are not there yet; auto: when they come"
    )
    students: StudentsRule = Field(
        "load",
        description="how many students of a group answer: as the load allows, or all (always, by the policy steady)",
    )
    students_window: float = Field(120.0, gt=0, description="quiet seconds after which one more student answers again")
    students_groups: int = Field(2, ge=1, description="groups of all students that run side by side on a device")
    students_together: int = Field(
        0,
        ge=0,
        description="texts that a group of students computes at a time; 0: by the device's costs",
    )
    default_task: str | None = Field(None, description="task that answers POST /classify where none is named")
    max_inputs: int = Field(1024, ge=1, description="most texts in a request")
    max_body_mb: int = Field(2, ge=1, le=MOST_BODY_MB, description="largest JSON body in MiB")
    max_task_mb: int = Field(512, ge=1, description="largest task file in MiB; no more than 512 are read")
    max_data_mb: int = Field(512, ge=1, description="largest file to train on in MiB")
    max_bodies_mb: int = Field(64, ge=1, description="most MiB of JSON bodies in memory at a time; more get 503")
    max_connections: int = Field(1024, ge=1, description="most open connections; more get 503")
    keep_alive: int = Field(75, ge=1, le=86400, description="seconds that idle connections are kept")
    job_platform: str = Field("cpu", description="where JAX trains tasks: cpu, cuda ...")
    request_timeout: float = Field(60.0, gt=0, le=3600, description="seconds until 504")
    grace: float = Field(10.0, ge=0, description="seconds that requests get to finish at the end")
    log_level: LogLevel = Field("info", description="least level of the log's lines")
    log_json: bool = Field(False, description="one JSON object a log line")

    @field_validator("backbones", "repository", "cache_dir", "tls_certificate", "tls_key", mode="before")
    @classmethod
    def _is_no_empty_path(cls, given: Any) -> Any:
        """It would be the working folder; a variable of a script may have been empty."""
        if given == "":
            raise ValueError("expected a path")
        return given

    @field_validator("backbones", "repository", "cache_dir", "tls_certificate", "tls_key")
    @classmethod
    def _without_tilde(cls, given: Path | None) -> Path | None:
        return given if given is None else user_path(given)

    @field_validator("backbone")
    @classmethod
    def _source_without_tilde(cls, given: str | None) -> str | None:
        return str(user_path(given)) if given is not None and given.startswith("~") else given

    @field_validator("buckets")
    @classmethod
    def _are_buckets(cls, given: list[str]) -> list[str]:
        if given:
            from jpets.engine.batch.bucket import parse_bucket

            for text in given:
                parse_bucket(text)
        return given

    @model_validator(mode="after")
    def _something_to_serve(self) -> Self:
        if not self.demo and self.backbone is None:
            raise ValueError("give --backbone PATH|NAME, or --demo")
        return self

    @model_validator(mode="after")
    def _has_both_of_tls(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("give both --tls-certificate and --tls-key, or neither")
        return self

    @model_validator(mode="after")
    def _has_two_ports(self) -> Self:
        if self.port and self.grpc_port == self.port:
            raise ValueError(f"expected another --grpc-port than --port, found {self.port} for both")
        return self

    @model_validator(mode="after")
    def _has_an_interval(self) -> Self:
        if not self.balance_least <= self.balance_start <= self.balance_most:
            raise ValueError(
                "expected least <= start <= most of --balance-least, --balance-start and --balance-most, "
                f"found {self.balance_least:g}, {self.balance_start:g} and {self.balance_most:g} s"
            )
        return self

    def bucket_menu(self) -> list[Bucket] | None:
        """The buckets that were asked for; None leaves the choice to the engine."""
        from jpets.engine.batch.bucket import parse_bucket

        return [parse_bucket(text) for text in self.buckets] or None

    def balance_interval(self) -> AdaptiveInterval:
        from jpets.scheduling.balancing.rounds import AdaptiveInterval

        return AdaptiveInterval(
            least=self.balance_least,
            most=self.balance_most,
            threshold=self.balance_threshold,
            step=self.balance_step,
            start=self.balance_start,
        )

    def sizing_rule(self, policy: str) -> SizingRule:
        """For engines of this ``policy``: answers by ``steady`` never depend on the traffic."""
        fixed = self.students == "all" or policy == "steady"
        return SizingRule(self.students_groups, self.students_together or None, self.students_window, fixed=fixed)

    def serving_settings(self) -> ServingSettings:
        return ServingSettings(
            request_timeout=self.request_timeout,
            max_inputs=self.max_inputs,
            default_task=self.default_task,
            max_body_bytes=self.max_body_mb * MIB,
            max_task_bytes=min(self.max_task_mb, MOST_TASK_MB) * MIB,
            max_data_bytes=self.max_data_mb * MIB,
            max_bodies_bytes=self.max_bodies_mb * MIB,
        )

    def connection_limits(self) -> ConnectionLimits:
        return ConnectionLimits(most=most_connections(self.max_connections), keep_alive=self.keep_alive)
