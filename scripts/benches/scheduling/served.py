"""Passes of a queue through engines as they serve: menu, planner and owner thread by default."""

from __future__ import annotations

import pathlib
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from benches.shared import RandomBackbone, console
from jpets.config import EngineSettings
from jpets.engine.engine import Engine
from jpets.scheduling.costs.batch_costs import Limits
from jpets.types import Query, Result, Task

WINDOWS_AHEAD = 2
"""Windows that are submitted and not yet answered."""


class ServedEngine:
    """An engine with one policy, and its counters over the passes since ``warm_up``."""

    def __init__(
        self,
        backbone: RandomBackbone,
        tasks: Sequence[Task],
        policy: str,
        cache: pathlib.Path,
        window: int | None,
        limits: Limits,
    ) -> None:
        settings = EngineSettings(
            policy=policy,  # type: ignore[arg-type]
            slots=len(tasks),
            max_batch_rows=limits.rows,
            max_batch_tokens=limits.tokens,
        )
        self._tasks = tasks
        self._window = window
        self._vocabulary = backbone.config.vocab_size
        self.engine = Engine(backbone, tasks, settings, cache_dir=cache)
        self.engine.start(lambda what, done, total: None)
        self._passes = 0
        self._before = (0, 0, 0, 0)

    def queries(self, lengths: Sequence[int], owners: Sequence[int], seed: int = 0) -> list[Query]:
        rng = np.random.default_rng(seed)
        ids = [rng.integers(5, self._vocabulary, n).tolist() for n in lengths]
        return [Query(self._tasks[task].id, input_ids=tokens) for task, tokens in zip(owners, ids, strict=True)]

    def warm_up(self, lengths: np.ndarray, owners: np.ndarray, seconds: float) -> None:
        """Passes over other orders of the same lengths and tasks, for so many seconds. Then nothing is compiled any
        more: it would take cores from the systems that are timed beside this one."""
        until, rng = time.perf_counter() + seconds, np.random.default_rng(7)
        while time.perf_counter() < until:
            self.run(self.queries(rng.permutation(lengths).tolist(), rng.permutation(owners).tolist()))
        self.engine.compiler.close()
        report = self.engine.report().devices[0]
        console.log(
            f"{self.engine.settings.policy}: {len(self.engine.replica.programs)} programs after {seconds:.0f} s, "
            f"{report.fallbacks} of {report.batches} batches in fallbacks"
        )
        self._passes = 0
        self._before = self._counters()

    def run(self, queries: Sequence[Query]) -> None:
        """One pass: all queries at once, or window by window."""
        self._passes += 1
        size = self._window or len(queries)
        flying: deque[list[Future[Result]]] = deque()
        for first in range(0, len(queries), size):
            if len(flying) == WINDOWS_AHEAD:
                wait(flying.popleft())
            flying.append(self.engine.submit(queries[first : first + size]))
        for futures in flying:
            wait(futures)
            for future in futures:
                if (error := future.result().error) is not None:
                    raise error

    def figures(self) -> dict[str, Any]:
        batches, fallbacks, real, computed = np.subtract(self._counters(), self._before).tolist()
        return {
            "batches": batches / self._passes,
            "fallback_share": fallbacks / batches,
            "linear_padding": computed / real - 1,
            "programs": len(self.engine.replica.programs),
        }

    def _counters(self) -> tuple[int, int, int, int]:
        (device,) = self.engine.report().devices
        return device.batches, device.fallbacks, device.real_tokens, device.computed_tokens
