"""What the rows of a batch need of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import HEAVY_RUNS, LEVELS, Bucket, Variant, make_variant, replaces_weights
from jpets.engine.batch.layout import Layout, best_run
from jpets.engine.batch.row_table import RowTable
from jpets.engine.batch.rows import Row
from jpets.engine.programs.program import ProgramKey


class Needs:
    """Rows are made a table once, and laid out in a bucket when it is first asked for, and only once."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.table = RowTable(rows)
        self.lengths = self.table.lengths
        self.heavy = len(self.table.columns.heavy) > 0
        self._layouts: dict[Bucket, Layout] = {}

    def layout(self, bucket: Bucket) -> Layout:
        if bucket not in self._layouts:
            self._layouts[bucket] = Layout(self.table, bucket)
        return self._layouts[bucket]

    def run(self, bucket: Bucket) -> int:
        """The length of heavy runs with the least work."""
        return best_run(self.layout(bucket).run_work) if self.heavy else HEAVY_RUNS[0]

    def met_by(self, key: ProgramKey) -> bool:
        bucket, variant = key.bucket, key.variant
        if not bucket.holds(self.lengths) or (variant.replaced and not self._all_have(variant)):
            return False
        return variant.has_room(self._levels(bucket, variant.run if variant.runs else None))

    def _levels(self, bucket: Bucket, run: int | None) -> Mapping[ClassKey, int]:
        """The level of room that each class needs: of heavy ones for runs of this length, all there is for None."""
        layout = self.layout(bucket)
        return layout.needs if run is None else {**layout.needs, **layout.run_levels(run)}

    def _all_have(self, variant: Variant) -> bool:
        """Whether every row has the variant's classes that replace weights."""
        return all(self.table.all_use(key) for key in variant.classes() if replaces_weights(key))

    def variant(self, bucket: Bucket, levels: Sequence[int] = LEVELS, *, static_runs: bool = False) -> Variant:
        """The tightest variant for the rows, with room in steps of ``levels``; with ``static_runs``, which are computed
        whether they are taken or not, for no more runs of heavy classes than there are."""
        run = self.run(bucket)
        found = self._levels(bucket, run if static_runs else None)
        needs = {key: next(step for step in levels if step >= level) for key, level in found.items()}
        return make_variant(needs, run, replaced=self.table.replaced)
