"""``jpets query``: texts to a running server, answers in a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, BinaryIO

import pydantic
import typer

from jpets.app.commands.client.client import DEFAULT_SERVER, Server, ServerUrl
from jpets.app.commands.output import JsonOption, print_json, print_table, report_error, reporting
from jpets.errors import InvalidInput, TooLarge
from serving.protocols.schemas import ClassifyItem

PER_REQUEST, BYTES_PER_REQUEST = 256, 1 << 20
"""Texts, and bytes of texts: half of what a server takes by default, as JSON may spell them longer."""
SHOWN_WORDS = 5
"""Words for a mask."""
SHOWN_LABELS = 100
"""Labels of a text that are asked for where no number is given: a head with words for masks gives no more."""
SHOWN_TEXT = 60
STDIN = "-"


class Answer(pydantic.BaseModel):
    data: list[ClassifyItem]


def query(
    task: Annotated[str, typer.Argument(help="a task's id, or the backbone's name for plain embeddings")],
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT...", help="texts; - reads one a line from standard input")
    ],
    server: ServerUrl = DEFAULT_SERVER,
    text_pair: Annotated[
        str | None, typer.Option(help="second text of each pair; of a question the context, which has the answer")
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="which of the model's prompts stands before each text")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="show this many labels of each text")] = None,
    aggregation: Annotated[
        str, typer.Option(help="how labelled tokens become entities: none, simple, first, average or max")
    ] = "simple",
    truncate: Annotated[
        bool | None, typer.Option(help="cut texts that are too long; by default as the task says")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a running server. Exit code 1 where a text could not be answered."""
    asked = list(_expanded(texts))
    if not asked:
        raise InvalidInput("standard input has no text; write one a line")
    shown = top_k if top_k is not None or as_json else SHOWN_LABELS
    options = {"top_k": shown, "truncate": truncate, "aggregation": aggregation}
    own = {"model": task, "text_pair": text_pair, "prompt_name": prompt_name}
    items = _answers(Server(server), asked, own, options)
    if as_json:
        documents = [item.model_dump(exclude_unset=True) for item in items]
        print_json([{"text": text, **document} for text, document in zip(asked, documents, strict=True)])
    else:
        of_groups = any(item.students is not None for item in items)
        columns = ("text", "answer", "score", *(("students",) if of_groups else ()))
        rows = [
            (*row, item.students or "")[: len(columns)]
            for text, item in zip(asked, items, strict=True)
            for row in _rows(text, item, top_k)
        ]
        print_table(columns, rows, numbers=("score", "students"))
    failed = sum(item.error is not None for item in items)
    if failed:
        report_error(f"{failed} of {len(items)} texts could not be answered")
        raise typer.Exit(1)


def _expanded(texts: Sequence[str]) -> Iterator[str]:
    """``-`` stands for the lines of standard input that are not blank."""
    for text in texts:
        if text == STDIN:
            yield from (line.rstrip("\r\n") for line in _lines(sys.stdin.buffer) if line.strip())
        else:
            yield text


def _lines(source: BinaryIO) -> Iterator[str]:
    """Lines of UTF-8, whatever the terminal's encoding. Raises ``InvalidInput`` naming one that is not."""
    for number, line in enumerate(source, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"line {number} of standard input is not UTF-8 (byte {error.start + 1}); convert it, as iconv does"
            ) from None


def _answers(
    server: Server, texts: Sequence[str], own: Mapping[str, str | None], options: Mapping[str, Any]
) -> list[ClassifyItem]:
    """One item a text, which is asked for with ``own``. The mixed form of the request takes every kind of head, and
    gives each text its own error."""
    items: list[ClassifyItem] = []
    own, more = ({name: value for name, value in each.items() if value is not None} for each in (own, options))
    pair = len((own.get("text_pair") or "").encode(errors="replace"))

    def ask(part: Sequence[str]) -> list[ClassifyItem]:
        body = {"inputs": [{**own, "text": text} for text in part], **more}
        try:
            data = server.ask(Answer, "POST", "/v1/classify", body).data
        except TooLarge:  # a server may take less than is usual
            if len(part) == 1:
                raise
            middle = len(part) // 2
            return ask(part[:middle]) + ask(part[middle:])
        if len(data) != len(part):
            raise server.strange()
        return data

    with reporting() as report:
        for part in _parts(texts, pair):
            report("texts", len(items), len(texts))
            items += [item.model_copy(update={"index": len(items) + at}) for at, item in enumerate(ask(part))]
    return items


def _parts(texts: Sequence[str], pair: int) -> Iterator[Sequence[str]]:
    """The texts of each request: not too many, and not too long together with ``pair`` bytes beside each."""
    start, size = 0, 0
    for at, text in enumerate(texts):
        own = len(text.encode(errors="replace")) + pair
        if at > start and (at - start == PER_REQUEST or size + own > BYTES_PER_REQUEST):
            yield texts[start:at]
            start, size = at, 0
        size += own
    yield texts[start:]


def _rows(text: str, item: ClassifyItem, top_k: int | None) -> Iterator[tuple[str, str, str]]:
    """A row for each thing that is said about a text; the text stands in the first."""
    brief = text if len(text) <= SHOWN_TEXT else text[: SHOWN_TEXT - 1] + "…"
    for at, (answer, score) in enumerate(_said(item, top_k)):
        yield "" if at else brief, answer, f"{score:.4f}" if score is not None else ""


def _said(item: ClassifyItem, top_k: int | None) -> list[tuple[str, float | None]]:
    if item.error is not None:
        return [(f"error: {item.error.message}", None)]
    if item.embedding is not None:
        return [(f"embedding [{len(item.embedding)}]", None)]
    if item.values is not None:
        if item.label is not None and item.score is not None:
            return [(item.label, item.score)]
        return [("value", value) for value in item.values]
    if item.answer is not None and item.start is not None and item.end is not None:
        return [(f"{item.answer} (characters {item.start} to {item.end - 1})", item.score)]
    if item.entities is not None:
        found = [
            (f"{each.label}: {each.text} (characters {each.start} to {(each.end or 1) - 1})", each.score)
            for each in item.entities
        ]
        return [*found] or [("no entities", None)]
    if item.fills is not None:
        return [(each.sequence, each.score) for mask in item.fills for each in mask[: top_k or SHOWN_WORDS]]
    best = [(each.label, each.prob) for each in item.top or ()]
    if top_k is not None:
        return [*best]
    if item.labels is not None:
        scores = dict(best)
        return [(name, scores.get(name)) for name in item.labels] or [("no label over its threshold", None)]
    return [*best[:1]]
