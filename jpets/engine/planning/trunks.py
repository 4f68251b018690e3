"""Batches of one text and many tasks: the lower layers, in which the tasks do not differ, are computed once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jpets.config import EngineSettings
from jpets.engine.batch.bucket import FULL, LONE_STEPS, Bucket, Trunk
from jpets.engine.batch.layout import Layout
from jpets.engine.device.replica import Replica
from jpets.engine.planning.menu import Menu
from jpets.engine.planning.needs import Needs
from jpets.engine.planning.placing import COARSE_LEVELS, WORTHWHILE, Compiling
from jpets.engine.planning.plan import Plan
from jpets.engine.planning.predictions import Predictions
from jpets.engine.planning.ready_programs import ReadyPrograms
from jpets.engine.programs.program import Program, ProgramKey
from jpets.engine.queue.pending import Pending, SharedText

ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Tasks that programs have room for: at most half as many again as there are."""


def shares_trunks(replica: Replica, settings: EngineSettings) -> bool:
    """Whether texts with several tasks get batches of their own. The papers' policies know of none."""
    return settings.policy == "auto" and replica.family.network.has_trunk and len(replica.mesh.devices) == 1


class Trunks:
    """For one replica. ``menu`` bounds texts, ``settings`` batches; ``compiling`` is told of programs that texts with
    several tasks miss."""

    def __init__(
        self,
        replica: Replica,
        ready: ReadyPrograms,
        predictions: Predictions,
        menu: Menu,
        settings: EngineSettings,
        compiling: Compiling | None,
    ) -> None:
        self._replica = replica
        self._ready = ready
        self._predictions = predictions
        self._longest = max(bucket.longest for bucket in menu.buckets)
        self._most_tokens = max(bucket.tokens for bucket in menu.buckets)
        self._most_rows = settings.max_batch_rows
        self._compiling = compiling

    def plan(self, waiting: Sequence[Pending]) -> Plan | None:
        """The batch of the most urgent query's text, if its tasks take less time that way."""
        text = waiting[0].text
        return None if text is None else self._of_text(text, [own for own in waiting if own.text is text])

    def without_texts(self, waiting: Sequence[Pending]) -> Sequence[Pending]:
        """``waiting`` without the queries that take less time in a batch of their text; the first one has none."""
        if len(self._replica.programs) == len(self._replica.for_mixtures):
            return waiting
        texts: dict[SharedText, list[Pending]] = {}
        for pending in waiting:
            if pending.text is not None and pending.text is not waiting[0].text:
                texts.setdefault(pending.text, []).append(pending)
        own = {text for text, members in texts.items() if len(members) > 1 and self._pays(text, members)}
        return [pending for pending in waiting if pending.text not in own] if own else waiting

    def _pays(self, text: SharedText, members: Sequence[Pending]) -> bool:
        """Whether a text's queries take less time in a batch of their own; found anew only with other programs."""
        if text.pays is None or text.pays[0] is not self._replica.programs:
            text.pays = self._replica.programs, self._of_text(text, members) is not None
        return text.pays[1]

    def _of_text(self, text: SharedText, members: Sequence[Pending]) -> Plan | None:
        members = self._together(members)
        if len(members) < 2:
            return None
        needs = Needs([pending.row for pending in members])
        apart = self._apart(needs)
        program, seconds = self._fastest(needs, text)
        if self._compiling is not None and not text.asked:
            self._ask_for(self._compiling, needs, text, min(seconds, apart))
        if program is None or program.key.trunk is None or seconds >= apart:
            return None
        below = Layout([dataclasses.replace(members[0].row, slots={})], program.key.trunk.bucket)
        return Plan(members, needs.layout(program.key.bucket), program, seconds, below=below)

    def ideal(self, pendings: Sequence[Pending]) -> ProgramKey | None:
        """The best program for as many of these as it takes, compiled or not; None if they do not share a text."""
        text = pendings[0].text
        if text is None or any(pending.text is not text for pending in pendings):
            return None
        return self._key(Needs([pending.row for pending in self._together(pendings)]), text)

    def _together(self, members: Sequence[Pending]) -> Sequence[Pending]:
        return members[: max(1, min(self._most_rows, self._most_tokens // self._step(members[0].row.length)))]

    def _step(self, length: int) -> int:
        return next((step for step in LONE_STEPS if length <= step <= self._longest), self._longest)

    def _apart(self, needs: Needs) -> float:
        """Seconds of these rows in full batches of whole rows."""
        rate = self._ready.rate
        return float(needs.lengths.sum()) / rate + self._predictions.added(needs.rows) if rate else math.inf

    def _fastest(self, needs: Needs, text: SharedText) -> tuple[Program | None, float]:
        best, least = None, math.inf
        for program in self._replica.programs:
            trunk = program.key.trunk
            if trunk is None or trunk.layers > text.layers or not trunk.bucket.holds(needs.lengths[:1]):
                continue
            if needs.met_by(program.key) and (seconds := self._predictions.seconds(needs.table, program)) < least:
                best, least = program, seconds
        return best, least

    def _ask_for(self, compiling: Compiling, needs: Needs, text: SharedText, seconds: float) -> None:
        """Tells of the best program for these rows, once for each text, if they would be clearly faster in it."""
        text.asked = True
        key = self._key(needs, text)
        if self._replica.has_program(key) or compiling.barred(key):
            return
        best = self._predictions.of_key(needs.table, key)
        if best < WORTHWHILE * seconds:
            compiling.want(key, seconds - best)

    def _key(self, needs: Needs, text: SharedText) -> ProgramKey:
        length = self._step(int(needs.lengths[0]))
        count = next((rows for rows in ROWS if rows >= len(needs.rows)), len(needs.rows))
        bucket = Bucket(count * length, ((count, length),))
        static_runs = self._replica.family.operators.static_runs
        levels = (FULL,) if needs.heavy and not static_runs else COARSE_LEVELS
        variant = needs.variant(bucket, levels, static_runs=static_runs)
        return ProgramKey(bucket, variant, Trunk(Bucket(length, ((1, length),)), text.layers))
