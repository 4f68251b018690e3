"""Merged copies: dense weights of hot tasks, kept within a budget of device memory (PetS section 7)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from jpets.config import BackboneConfig
from jpets.deltas import METHODS, in_merge_order
from jpets.engine.device_memory import DeviceMemory, tree_bytes
from jpets.engine.replica import Replica
from jpets.engine.tasks import Resident
from jpets.model.encoder import Params, cast_params
from jpets.types import Task

log = logging.getLogger(__name__)

HALF_LIFE = 30.0
"""Seconds in which half of what a copy could have saved is forgotten."""
PAYS_WITHIN = 600.0
"""Seconds in which a copy must save what it takes to make it, at the rate of the latest traffic."""
CLEARLY = 2.0
"""A copy leaves for another one that would have saved so many times as much."""


def merged_layers(task: Task, config: BackboneConfig, params: Params, dtype: str) -> Params:
    """The layers' weights with the heavy deltas of ``task`` folded in; its others act as before, beside them."""
    heavy = [delta for delta in task.deltas if METHODS[delta.method].kind == "heavy"]
    params = jax.tree.map(jnp.asarray, params)
    for delta in in_merge_order(heavy):
        params = METHODS[delta.method].merge(delta, config, params)
    layers: Params = cast_params({"layers": params["layers"]}, dtype)["layers"]
    return layers


class MergedCopies:
    """One replica's copies. ``saves`` hears what copies would save or do save; a thread makes those that save most.

    Who reads ``copies`` gets a mapping that never changes.
    """

    def __init__(
        self, replica: Replica, params: Params, budget: float, memory: DeviceMemory, half_life: float = HALF_LIFE
    ) -> None:
        self.copies: Mapping[Resident, Params] = MappingProxyType({})
        self._replica = replica
        self._host = params
        self._memory = memory
        self._half_life = half_life
        self._size = tree_bytes(replica.params["layers"])
        self.most = int(budget // self._size)
        self._saved: dict[Resident, tuple[float, float]] = {}
        """(seconds, when): halved with every half-life since."""
        self._failed: set[Resident] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._making = 0.0
        """Seconds that the last copy took to make."""
        self._thread = threading.Thread(target=self._work, name="jpets-merge", daemon=True)

    @property
    def enabled(self) -> bool:
        return self.most > 0

    def start(self) -> None:
        if self.enabled:
            self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def saves(self, seconds: Mapping[Resident, float]) -> None:
        """A batch was, or would have been, so much faster with copies of these tasks."""
        now = time.monotonic()
        with self._changed:
            for resident, saved in seconds.items():
                self._saved[resident] = (self._hotness(resident, now) + saved, now)
            self._changed.notify()

    def clear(self) -> None:
        """Gives all their memory back: something else needs it more."""
        with self._changed:
            self._keep({})
            self._saved.clear()

    def _hotness(self, resident: Resident, now: float) -> float:
        saved, since = self._saved.get(resident, (0.0, now))
        return saved * math.pow(0.5, (now - since) / self._half_life)

    def _keep(self, copies: Mapping[Resident, Params]) -> None:
        self.copies = MappingProxyType(dict(copies))
        self._memory.merged = len(copies) * self._size

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (chosen := self._next()) is None:
                    self._changed.wait()
                if self._closed:
                    return
            assert chosen is not None
            start = time.monotonic()
            try:
                copy = self._make(chosen)
            except Exception:  # its task is served by its delta, as before
                log.exception("a task could not be merged")
                self._failed.add(chosen)
                continue
            self._making = time.monotonic() - start
            with self._changed:
                if not chosen.removed:
                    self._keep({**self._leave_room(), chosen: copy})

    def _make(self, resident: Resident) -> Params:
        family = self._replica.family
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            host = jax.tree.map(np.asarray, merged_layers(resident.task, family.config, self._host, family.dtype))
        layers = jax.block_until_ready(jax.device_put(host, self._replica.sharding))
        return {**self._replica.params, "layers": layers}

    def _next(self) -> Resident | None:
        """The hottest task without a copy, if one is worth its making and the place of another one."""
        now = time.monotonic()
        gone = [resident for resident in {*self._saved, *self.copies} if resident.removed]
        for resident in gone:
            self._saved.pop(resident, None)
        if any(resident in self.copies for resident in gone):
            self._keep({resident: copy for resident, copy in self.copies.items() if not resident.removed})
        hot = {r: self._hotness(r, now) for r in self._saved if r not in self.copies and r not in self._failed}
        if not hot:
            return None
        best = max(hot, key=lambda resident: hot[resident])
        rate = hot[best] * math.log(2) / self._half_life
        if rate <= 0 or self._making > rate * PAYS_WITHIN:
            return None
        if not self._full:
            return best
        coldest = min((self._hotness(resident, now) for resident in self.copies), default=math.inf)
        return best if hot[best] > CLEARLY * coldest else None

    @property
    def _full(self) -> bool:
        use = self._memory.use(self._replica.programs)
        return len(self.copies) >= self.most or use.total + self._size > self._memory.limit

    def _leave_room(self) -> dict[Resident, Params]:
        """The copies that stay when one more comes."""
        now, staying = time.monotonic(), dict(self.copies)
        if self._full and staying:
            del staying[min(staying, key=lambda resident: self._hotness(resident, now))]
        return staying
