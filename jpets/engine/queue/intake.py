"""From a query to what waits for a batch: its tokens, and a hold on its task."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sized
from concurrent.futures import Future

import numpy as np

from jpets.config import BackboneConfig
from jpets.deltas.protocol import NO_LEAD
from jpets.engine.batch.assembly import Row, led
from jpets.engine.queue.pending import Pending
from jpets.engine.results.results import as_refusal, failure
from jpets.engine.results.stats import Stats
from jpets.engine.tasks.entries import Entry, Resident
from jpets.engine.tasks.table import TaskTable
from jpets.errors import InvalidInput
from jpets.model.batch import POOLINGS
from jpets.model.positions import text_positions
from jpets.tokenizing import TextEncoder, Tokens
from jpets.types import EmbeddingRule, Query, Result

LETTERS = 4
"""Of a token, about."""


def stand_in(query: Query, longest: int) -> Row:
    """About as many tokens as a query will have; its own row takes its task to be known."""
    given, each = (query.text, LETTERS) if query.input_ids is None else (query.input_ids, 1)
    size = len(given) // each if isinstance(given, Sized) else 1
    blank = np.zeros(min(max(1, size), longest), np.int32)
    return Row(blank, blank, {}, 0)


class Intake:
    """Prepares the queries of one engine, in whatever thread submits them."""

    def __init__(
        self, text: TextEncoder, embeds: EmbeddingRule, tasks: TaskTable, stats: Stats, config: BackboneConfig
    ) -> None:
        self._text = text
        self._embeds = embeds
        self._uncut = dataclasses.replace(embeds.preprocessing, max_length=None, truncation=False)
        self._config = config
        self._tasks = tasks
        self._stats = stats

    def prepare(self, query: Query, deadline: float | None, priority: int, tenant: str) -> Pending | Future[Result]:
        """What waits, or the answer where something is wrong with the query."""
        found: Resident | Entry | None = None
        try:
            if query.task is not None:
                found = self._tasks.acquire(tenant, query.task)
            if isinstance(found, Entry):
                row = stand_in(query, self._text.longest)
                return Pending(query.task, None, row, deadline, priority, tenant, absent=found, query=query)
            return Pending(query.task, found, self.row(query, found), deadline, priority, tenant)
        except Exception as error:  # noqa: BLE001 (whatever is wrong with one query, the others run)
            if isinstance(found, Resident):
                self._tasks.done(found)
            told = as_refusal(error)
            future: Future[Result] = Future()
            future.set_result(failure(query.task, told))
            self._stats.answered(told.code)
            return future

    def give_back(self, prepared: Iterable[Pending | Future[Result]]) -> None:
        """Lets go of the tasks of queries that will not run."""
        for item in prepared:
            if isinstance(item, Pending) and item.resident is not None:
                self._tasks.done(item.resident)

    def row(self, query: Query, resident: Resident | None) -> Row:
        """Raises what is wrong with the query."""
        if resident is None:
            tokens, pooling = self._plain(query), POOLINGS.index(self._embeds.pooling)
            return self._placed(Row(tokens.ids, tokens.types, {}, pooling, normalize=self._embeds.normalize))
        if not resident.slots and resident.task.id == resident.task.backbone.name:  # the plain form of the backbone
            tokens = self._plain(query)
            return self._placed(Row(tokens.ids, tokens.types, {}, POOLINGS.index(resident.pooling)))
        task, pooling = resident.task, POOLINGS.index(resident.pooling)
        asks, labels = task.head.type == "question-answering", task.head.type == "token-classification"
        if asks and query.text is not None and query.text_pair is None:
            raise InvalidInput(
                "the task answers questions about a text, found a question alone; send the text to find the answer in "
                "as text_pair, beside the question as text"
            )
        tokens = self._text.encode(query, task.preprocessing, resident.longest, passage=asks, of_text=labels)
        row = Row(tokens.ids, tokens.types, resident.slots, pooling, passage=tokens.passage, of_text=tokens.of_text)
        return self._placed(row if resident.lead == NO_LEAD else led(row, resident.lead, self._text.pad_id))

    def _placed(self, row: Row) -> Row:
        """``row`` with the positions of a text that spells the padding token, where its family skips it.

        Behind virtual tokens, which models take as vectors, all are counted: there are no ids to tell them apart.
        """
        config = self._config
        if row.lead.tokens or not config.skips_padding or not (row.ids == config.padding_id).any():
            return row
        places = text_positions(row.ids, config, np)
        places[row.ids != config.padding_id] += row.lead.first_position
        return dataclasses.replace(row, places=places)

    def _plain(self, query: Query) -> Tokens:
        """Tokens for the backbone itself. A text that the model takes is cut to where its library cuts texts, unless
        the query says no; token ids are not."""
        rule = self._embeds.preprocessing
        if query.input_ids is None and query.truncate:
            return self._text.encode(query, rule)
        tokens = self._text.encode(query, self._uncut)
        if query.input_ids is not None or len(tokens.ids) <= (rule.max_length or self._text.longest):
            return tokens
        return self._text.encode(query, rule)
