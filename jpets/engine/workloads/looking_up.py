"""The rows of a batch's tokens in tables of n-gram vectors, looked up for all of its texts at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from jpets.engine.batch.rows import Ints, Row
from jpets.engine.workloads.workload import RowFailures
from jpets.errors import JpetsError
from jpets.tokenizing import NO_ROW
from jpets.types import OpenTables


def looked_up(rows: Sequence[Row]) -> Ints:
    """The rows of all tokens of a batch, one text after the other, each text in its own tables; ``NO_ROW`` for virtual
    tokens.

    Raises ``RowFailures`` for texts that cannot be looked up; then no token is counted, for the others are looked up
    again without them.
    """
    ids, lengths = np.concatenate([row.ids for row in rows]), [row.length for row in rows]
    numbers = {tables: number for number, tables in enumerate({row.tables for row in rows})}
    text_of_token = np.arange(len(rows)).repeat(lengths)
    tables_of_token = np.array([numbers[row.tables] for row in rows]).repeat(lengths)
    found, errors, counts = np.full(len(ids), NO_ROW, np.int32), dict[int, JpetsError](), list[Callable[[], None]]()

    def look_up(tables: OpenTables, own: npt.NDArray[np.bool_], texts: Ints | None = None) -> None:
        found[own], count = tables.found(ids[own], texts)
        counts.append(count)

    for tables, number in numbers.items():
        assert tables is not None
        own = (tables_of_token == number) & (ids != NO_ROW)
        try:
            look_up(tables, own, text_of_token[own])
        except JpetsError:  # perhaps of one text only
            for text in np.unique(text_of_token[own]).tolist():
                each = own & (text_of_token == text)
                try:
                    look_up(tables, each)
                except JpetsError as error:
                    errors[text] = error
    if errors:
        raise RowFailures(errors)
    for count in counts:
        count()
    return found
