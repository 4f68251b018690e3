"""Each number of an engine's report is the metric of its name, added up over devices and backbones."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any
from unittest import mock

from jpets.config import SizingRule
from jpets.deltas.protocol import ClassKey
from jpets.engine.device.memory import DeviceUse
from jpets.engine.interface import Serves
from jpets.engine.report import (
    BalanceReport,
    ClassReport,
    CostsReport,
    DeviceReport,
    EngineReport,
    ProgramsReport,
    ResponsesReport,
    RowsReport,
    StudentsReport,
    TasksReport,
)
from jpets.engine.tasks.entries import Tier
from serving.hosted.engine_metrics import counted, engine_metrics

TIERS: tuple[Tier, ...] = ("device", "host", "repository")
KEY = ClassKey("bias", (("size", 64),))


def device(first: int, limit: float = math.inf) -> DeviceReport:
    """Every number is another one."""
    number = itertools.count(first)

    def of(kind: type[Any], **more: Any) -> Any:
        names = [each.name for each in dataclasses.fields(kind) if each.name not in more]
        return kind(**{name: next(number) for name in names}, **more)

    tasks = of(
        TasksReport,
        tiers={"device": next(number), "host": next(number), "repository": next(number)},
        brought={"host": next(number), "repository": next(number)},
    )
    found: DeviceReport = of(
        DeviceReport,
        answers={"ok": next(number), "not_found": next(number)},
        busy=True,
        programs=of(ProgramsReport),
        costs=of(CostsReport),
        responses=of(ResponsesReport),
        rows=of(RowsReport),
        tasks=tasks,
        classes={KEY: ClassReport(next(number), next(number), next(number))},
        kernels=(("", "bias", "reference"),),
        memory=DeviceUse(next(number), next(number), next(number), next(number)),
        limit=limit,
    )
    return found


def serves(*devices: DeviceReport, **more: Any) -> Serves:
    return mock.Mock(report=lambda: EngineReport(devices, **more))


def values(*engines: Serves, gone: Any = None) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for metric in engine_metrics(engines, gone or Counter()):
        for sample in metric.samples:
            name = sample.name.removeprefix("jpets_"), *sample.labels.values()
            assert name not in found, "each once"
            found[name] = sample.value
    return found


def test_every_number_has_its_metric() -> None:
    one, other = device(100, limit=7.0), device(1000)
    balance = BalanceReport({"moved": 1, "copied": 2, "failed": 3, "rescued": 4}, 5, 6, 7, 0.5)
    students = StudentsReport(SizingRule(), 8, 2, 9, 10, 4, 11, 12, {1: 13, 4: 14}, {1: 0.9, 4: 1.0})
    found = values(serves(one, other, balance=balance, students=students))
    both = {
        "batches_total": "batches",
        "fallbacks_total": "fallbacks",
        "missed_seconds_total": "missed_seconds",
        "computing_seconds_total": "computing_seconds",
        "predicted_seconds_total": "predicted_seconds",
        "real_tokens_total": "real_tokens",
        "computed_tokens_total": "computed_tokens",
        "request_path_compiles_total": "request_path_compiles",
        "out_of_device_memory_total": "out_of_memory",
        "background_compiles_total": "programs.compiled",
        "background_compile_failures_total": "programs.failed",
        "background_compiles_waiting": "programs.waiting",
        "programs_evicted_total": "programs.evicted",
        "program_bytes": "programs.host_bytes",
        "cost_classes_measured": "costs.measured",
        "cost_classes_coarse": "costs.coarse",
        "response_cache_hits_total": "responses.hits",
        "response_cache_misses_total": "responses.misses",
        "response_cache_bytes": "responses.bytes",
        "staged_row_hits_total": "rows.hits",
        "staged_row_misses_total": "rows.misses",
        "tasks_brought_bytes_total": "tasks.brought_bytes",
        "tasks_failed_total": "tasks.failed",
        "tasks_evicted_total": "tasks.evicted",
        "host_bytes": "tasks.host_bytes",
        "merged_tasks": "tasks.merged",
        "queue_depth": "waiting",
    }
    for name, path in both.items():
        first, *rest = path.split(".")
        parts = [getattr(own, first) if not rest else getattr(getattr(own, first), rest[0]) for own in (one, other)]
        assert found.pop((name,)) == sum(parts), name
    for part in DeviceUse._fields:
        assert found.pop(("device_bytes", "0", part)) == getattr(one.memory, part)
        assert found.pop(("device_bytes", "1", part)) == getattr(other.memory, part)
    for number, own in enumerate((one, other)):
        assert found.pop(("device_bytes_in_use", str(number))) == own.bytes_in_use
        assert found.pop(("device_tasks", str(number))) == own.tasks.known
        assert found.pop(("device_queue_depth", str(number))) == own.waiting
        assert found.pop(("device_batches_total", str(number))) == own.batches
    for outcome in ("ok", "not_found"):
        assert found.pop(("answers_total", outcome)) == one.answers[outcome] + other.answers[outcome]
    assert found.pop(("residency_queries_total", "hit")) == one.tasks.hits + other.tasks.hits
    assert found.pop(("residency_queries_total", "miss")) == one.tasks.misses + other.tasks.misses
    for tier in TIERS:
        assert found.pop(("tasks", tier)) == one.tasks.tiers[tier] + other.tasks.tiers[tier]
    for tier in TIERS[1:]:
        assert found.pop(("tasks_brought_total", tier)) == one.tasks.brought[tier] + other.tasks.brought[tier]
    for name, part in (("slots_used", "used"), ("slots", "slots"), ("bank_bytes", "bytes")):
        assert found.pop((name, str(KEY))) == getattr(one.classes[KEY], part) + getattr(other.classes[KEY], part)
    assert found == {
        ("device_limit_bytes", "0"): 7.0,
        ("kernel_choice", "", "bias", "reference"): 2,
        ("migrations_total", "moved"): 1,
        ("migrations_total", "copied"): 2,
        ("migrations_total", "failed"): 3,
        ("migrations_total", "rescued"): 4,
        ("migrated_bytes_total",): 5,
        ("migrations_leaving",): 6,
        ("balance_rounds_total",): 7,
        ("balance",): 0.5,
        ("students_groups",): 9,
        ("students_answering",): 4,
        ("students_drops_total",): 11,
        ("students_additions_total",): 12,
        ("students_answers_total", "1"): 13,
        ("students_answers_total", "4"): 14,
        ("students_kept_score", "1"): 0.9,
        ("students_kept_score", "4"): 1.0,
    }


def test_counters_go_on_when_an_engine_has_gone_and_gauges_do_not() -> None:
    gone, stays = serves(device(100)), serves(device(1000))
    before, alone = values(gone, stays), values(stays)
    after = values(stays, gone=counted(gone))
    for name, value in before.items():
        if name[0].endswith("_total"):
            assert after[name] == value, name
        else:
            assert after[name] == alone[name], name


def test_what_a_device_does_not_say_is_no_metric() -> None:
    found = values(serves(dataclasses.replace(device(100), bytes_in_use=None)))
    assert not any(name[0] == "device_bytes_in_use" for name in found)
