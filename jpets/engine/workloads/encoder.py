"""Encoders: rows from texts, and results from poolings and heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from jpets.config import BackboneConfig
from jpets.deltas.protocol import NO_LEAD, ClassKey, Lead
from jpets.engine.batch.rows import Row, TokenInput, led
from jpets.engine.programs.network import Network
from jpets.engine.results.results import row_result
from jpets.engine.tasks.entries import Resident
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.engine.workloads.looking_up import looked_up
from jpets.engine.workloads.row_cache import RowCache, WriteRows
from jpets.engine.workloads.workload import Again, Place, Workload
from jpets.errors import InvalidInput
from jpets.fills import Vocabulary
from jpets.model.batch import POOLINGS
from jpets.model.forward import Outputs
from jpets.tokenizing import NO_ROW, Tokens
from jpets.types import LoadedBackbone, Query, Result, Task, Timing


class EncoderWorkload(Workload):
    def __init__(self, backbone: LoadedBackbone, longest: int, *, staged_rows: int = 0) -> None:
        super().__init__(backbone, longest, staged_rows=staged_rows)
        config = backbone.config
        own = dataclasses.replace(config, table_rows=staged_rows) if staged_rows else config
        self.network: Network = self.make_network(own)
        self._backbone = backbone
        self._embeds = backbone.embeds
        self._uncut = dataclasses.replace(self._embeds.preprocessing, max_length=None, truncation=False)
        fill = NO_ROW if config.looks_up else self.text.pad_id
        self._inputs = {**self.network.inputs, "ids": TokenInput(fill=fill)}

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self.text.tokenizer, self._backbone.params["word"], self._backbone.config.norm_eps)

    @classmethod
    def make_network(cls, config: BackboneConfig) -> Network:
        return EncoderNetwork(config)

    @property
    def params(self) -> Mapping[str, Any]:
        if not self.staged_rows:
            return self._backbone.params
        config = self.network.config
        return {**self._backbone.params, "table": np.zeros(config.table_shape, jnp.dtype(config.table_dtype))}

    @property
    def inputs(self) -> Mapping[str, TokenInput]:
        return self._inputs

    def attach(self, write: WriteRows) -> None:
        tables = self._backbone.tables
        if self.staged_rows and tables is not None:
            source = np.asarray(self._backbone.params["table"])
            self.row_cache = RowCache(source, lambda: tables.moved, self.staged_rows, write)

    def row(self, query: Query, resident: Resident | None) -> Row:
        if resident is None:
            tokens, pooling = self._plain(query), POOLINGS.index(self._embeds.pooling)
            return self._row(tokens, {}, pooling, normalize=self._embeds.normalize)
        if not resident.slots and resident.task.id == resident.task.backbone.name:  # the plain form of the backbone
            return self._row(self._plain(query), {}, POOLINGS.index(resident.pooling))
        task, pooling = resident.task, POOLINGS.index(resident.pooling)
        asks, labels = task.head.type == "question-answering", task.head.type == "token-classification"
        if asks and query.text is not None and query.text_pair is None:
            raise InvalidInput(
                "the task answers questions about a text, found a question alone; send the text to find the answer in "
                "as text_pair, beside the question as text"
            )
        query = self._whole(query, resident)
        tokens = self.text.encode(query, task.preprocessing, resident.longest, passage=asks, spelled=labels)
        row = self._row(tokens, resident.slots, pooling, task.preprocessing.domain)
        if task.head.type == "fill-mask":
            row = dataclasses.replace(row, masked=self._vocabulary.masked(tokens.ids))
        return row if resident.lead == NO_LEAD else led(self._behind(row, resident.lead), resident.lead, self.inputs)

    def gathered(self, rows: Sequence[Row]) -> Sequence[Row]:
        if not self._backbone.config.looks_up:
            return rows
        ids = looked_up(rows)
        if self.row_cache is not None:
            ids = self.row_cache.places(ids)
        given, end = [], 0
        for row in rows:
            begin, end = end, end + row.length
            given.append(dataclasses.replace(row, inputs={**row.inputs, "ids": ids[begin:end]}))
        return given

    def result(self, task: Task | None, row: Row, outputs: Outputs, place: Place, timing: Timing) -> Result | Again:
        logits = None
        if place.head is not None and task is not None:
            cells = outputs.logits[place.head.head][place.head.cells][:, : task.head.outputs]
            logits = np.array(cells if task.head.reads_tokens else cells[0])
        pooled, finite = np.asarray(outputs.pooled[place.row]), bool(outputs.finite[place.row])
        return row_result(
            task,
            row.text_tokens,
            timing,
            finite,
            pooled,
            logits,
            row.passage,
            row.masked,
            normalize=row.normalize,
        )

    def _row(
        self,
        tokens: Tokens,
        slots: Mapping[ClassKey, int],
        pooling: int,
        domain: str | None = None,
        *,
        normalize: bool = True,
    ) -> Row:
        tables = self._backbone.tables
        return Row.of_tokens(
            tokens.ids,
            tokens.types,
            slots,
            pooling,
            passage=tokens.passage,
            spelling=tokens.spelling,
            places=tokens.places,
            normalize=normalize,
            tables=None if tables is None else tables.opened(domain),
        )

    def _behind(self, row: Row, lead: Lead) -> Row:
        """``row`` with its tokens' positions behind ``lead``, where they are not simply counted.

        Behind virtual tokens, which models take as vectors, all tokens are counted: without ids they cannot be told
        apart.
        """
        if row.places is None:
            return row
        if lead.tokens:
            return dataclasses.replace(row, places=None)
        counted = row.places != self.network.config.max_positions
        return dataclasses.replace(row, places=row.places + lead.first_position * counted.astype(np.int32))

    def _whole(self, query: Query, resident: Resident) -> Query:
        """Not to be cut where this server takes shorter texts than the task does, and the backbone could take longer
        ones: the answer would be that of another text. Whoever wants that says so."""
        rule, places = resident.task.preprocessing, self.network.config.max_positions
        if query.truncate is not None or not rule.truncation:
            return query
        most = min(rule.max_length or 0, resident.lead.room(places, places))
        return dataclasses.replace(query, truncate=False) if resident.longest < most else query

    def _plain(self, query: Query) -> Tokens:
        """Tokens for the backbone itself. A text that its library would cut is cut in the same place, unless the query
        says no; token ids are never cut."""
        rule = self._embeds.preprocessing
        if query.input_ids is None and query.truncate:
            return self.text.encode(query, rule)
        tokens = self.text.encode(query, self._uncut)
        if query.input_ids is not None or len(tokens.ids) <= (rule.max_length or self.text.longest):
            return tokens
        return self.text.encode(query, rule)
