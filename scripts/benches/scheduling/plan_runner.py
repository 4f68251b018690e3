"""Runs offline plans: a policy's batches, each in a program of exactly its shape."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from benches.shared import RandomBackbone, usual_family
from jpets.deltas import class_method
from jpets.deltas.bank import lower_task, slot_arrays
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import HEAVY_RUNS, Bucket, make_variant
from jpets.engine.batch.layout import Layout, all_replaced, best_run
from jpets.engine.batch.rows import Row
from jpets.engine.device.replica import Replica
from jpets.engine.programs.mesh import first_device
from jpets.engine.programs.program import Program, ProgramKey, chained_on, compile_programs
from jpets.model.forward import Outputs
from jpets.scheduling.queue import Batch, Batches
from jpets.types import Task

IN_FLIGHT = 2
"""Batches dispatched but not yet fetched, as in the host loop."""
PreparedBatch = tuple[Program, list[Row]]
Shape = tuple[Bucket, int, bool]
"""A bucket, the length of its heavy runs (0: none), and whether every row has weights of its own."""


class PlanRunner:
    """One replica with all tasks loaded. ``kinds[i]`` are the delta classes of task i, as a cost profile names them."""

    def __init__(self, backbone: RandomBackbone, tasks: Sequence[Task]) -> None:
        config = backbone.config
        parts = [lower_task(task, config) for task in tasks]
        counts: dict[ClassKey, int] = defaultdict(lambda: 1)
        self.slots: list[dict[ClassKey, int]] = []
        for own in parts:
            self.slots.append({part.key: counts[part.key] for part in own})
            for part in own:
                counts[part.key] += 1
        self.mesh = first_device()
        self.family = usual_family(config, counts, chained=chained_on(self.mesh))
        self.replica = Replica(self.family, backbone.params, self.mesh)
        base_bias = np.asarray(backbone.params["bias"], np.float32)
        for own, slots in zip(parts, self.slots, strict=True):
            arrays = {part.key: slot_arrays(part, part.key, config, self.family.dtype, base_bias) for part in own}
            self.replica.write({key: (slots[key], arrays[key]) for key in arrays})
        self.kinds = [tuple(str(key) for key in slots if key.method != "head") for slots in self.slots]
        self._programs: dict[ProgramKey, Program] = {}

    def rows(self, lengths: Sequence[int], tasks: Sequence[int], seed: int = 0) -> list[Row]:
        rng = np.random.default_rng(seed)
        ids = [rng.integers(5, self.family.config.vocab_size, n).astype(np.int32) for n in lengths]
        return [Row.of_tokens(i, np.zeros_like(i), self.slots[task], 0) for i, task in zip(ids, tasks, strict=True)]

    def prepare(self, plan: Batches, rows: Sequence[Row]) -> list[PreparedBatch]:
        """Compiles what the plan needs: a program for each shape and length of heavy runs (none, short, long), and as
        much room for classes as any of its batches needs."""
        needs: dict[Shape, dict[ClassKey, int]] = defaultdict(dict)
        kept: list[tuple[Shape, Batch]] = []
        for batch in plan:
            bucket = Bucket(batch.tokens, batch.groups)
            members = [rows[q] for q in batch.queries]
            layout = Layout(members, bucket)
            heavy = any(class_method(key.method).kind == "heavy" for key in layout.needs)
            shape = bucket, best_run(layout.run_work) if heavy else 0, all_replaced(members)
            static = heavy and self.family.operators.static_runs  # then all runs that there is room for are computed
            for key, level in {**layout.needs, **(layout.run_levels(shape[1]) if static else {})}.items():
                needs[shape][key] = max(level, needs[shape].get(key, 0))
            kept.append((shape, batch))
        keys = {
            (bucket, run, replaced): ProgramKey(bucket, make_variant(found, run or HEAVY_RUNS[0], replaced=replaced))
            for (bucket, run, replaced), found in needs.items()
        }
        missing = [key for key in dict.fromkeys(keys.values()) if key not in self._programs]
        self._programs.update((program.key, program) for program in compile_programs(self.family, missing))
        return [(self._programs[keys[shape]], [rows[q] for q in batch.queries]) for shape, batch in kept]

    def forget_programs(self) -> None:
        """Frees the memory of all programs that nobody holds."""
        self._programs.clear()

    def run(self, steps: Sequence[PreparedBatch]) -> list[np.ndarray]:
        """Logits of every batch, in the order of the steps; the next batch is assembled while one computes."""
        flying: deque[Outputs] = deque()
        found: list[np.ndarray] = []
        for program, rows in steps:
            if len(flying) == IN_FLIGHT:
                found.append(np.asarray(flying.popleft().logits[0]))
            flying.append(self.replica.dispatch(program, self.replica.assemble(rows, program)))
        found += [np.asarray(outputs.logits[0]) for outputs in flying]
        return found
