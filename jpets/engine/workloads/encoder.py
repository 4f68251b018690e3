"""Encoders: rows from texts, and results from poolings and heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jpets.config import BackboneConfig
from jpets.deltas.protocol import NO_LEAD
from jpets.engine.batch.rows import Row, TokenInput, led
from jpets.engine.programs.network import Network
from jpets.engine.results.results import row_result
from jpets.engine.tasks.entries import Resident
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.engine.workloads.workload import Again, Place, Workload
from jpets.errors import InvalidInput
from jpets.model.batch import POOLINGS
from jpets.model.forward import Outputs
from jpets.model.positions import text_positions
from jpets.tokenizing import Tokens
from jpets.types import LoadedBackbone, Query, Result, Task, Timing


class EncoderWorkload(Workload):
    def __init__(self, backbone: LoadedBackbone, longest: int) -> None:
        super().__init__(backbone, longest)
        self.network: Network = self.make_network(backbone.config)
        self._embeds = backbone.embeds
        self._uncut = dataclasses.replace(self._embeds.preprocessing, max_length=None, truncation=False)
        self._inputs = {**self.network.inputs, "ids": TokenInput(fill=self.text.pad_id)}

    @classmethod
    def make_network(cls, config: BackboneConfig) -> Network:
        return EncoderNetwork(config)

    @property
    def inputs(self) -> Mapping[str, TokenInput]:
        return self._inputs

    def row(self, query: Query, resident: Resident | None) -> Row:
        if resident is None:
            tokens, pooling = self._plain(query), POOLINGS.index(self._embeds.pooling)
            return self._placed(Row.of_tokens(tokens.ids, tokens.types, {}, pooling, normalize=self._embeds.normalize))
        if not resident.slots and resident.task.id == resident.task.backbone.name:  # the plain form of the backbone
            tokens = self._plain(query)
            return self._placed(Row.of_tokens(tokens.ids, tokens.types, {}, POOLINGS.index(resident.pooling)))
        task, pooling = resident.task, POOLINGS.index(resident.pooling)
        asks, labels = task.head.type == "question-answering", task.head.type == "token-classification"
        if asks and query.text is not None and query.text_pair is None:
            raise InvalidInput(
                "the task answers questions about a text, found a question alone; send the text to find the answer in "
                "as text_pair, beside the question as text"
            )
        tokens = self.text.encode(query, task.preprocessing, resident.longest, passage=asks, of_text=labels)
        row = Row.of_tokens(
            tokens.ids, tokens.types, resident.slots, pooling, passage=tokens.passage, of_text=tokens.of_text
        )
        return self._placed(row if resident.lead == NO_LEAD else led(row, resident.lead, self.inputs))

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
            row.of_text,
            normalize=row.normalize,
        )

    def _placed(self, row: Row) -> Row:
        """``row`` with positions for a text that contains the padding token, if its family skips it.

        Behind virtual tokens, which models take as vectors, all tokens are counted: without ids they cannot be told
        apart.
        """
        config, ids = self.network.config, row.ids
        if row.lead.tokens or not config.skips_padding or not (ids == config.padding_id).any():
            return row
        places = text_positions(ids, config, np)
        places[ids != config.padding_id] += row.lead.first_position
        return dataclasses.replace(row, places=places)

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
