"""Bodies that cost their sender little and could cost a server much, each of about a given size."""

from __future__ import annotations

import gzip
import json
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import mul

JSON = {"Content-Type": "application/json"}
SOON = {"X-Request-Timeout": "3"}
"""Of bodies that are right, and would take long to compute."""
HEADER = (1 << 20) - 64
"""Bytes of a task file's header that is still read."""
CLASSIFY, EMBED, INFER = "/v1/classify", "/v1/embeddings", "/v2/models/{task}/infer"


@dataclass(frozen=True)
class Payload:
    """``path`` may name {task} and {backbone}. ``make`` gives the body of about so many bytes."""

    name: str
    path: str
    make: Callable[[int], bytes]
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)
    method: str = "POST"


def payloads() -> Iterator[Payload]:
    for kind in (_texts, _items, _ids, _tensors, _structures, _numbers, _no_json, _packed, _multiplied, _elsewhere):
        yield from kind()


def fill(before: str, item: str, after: str, size: int, between: str = ",") -> bytes:
    """``before``, ``item`` as often as ``size`` bytes hold it, and ``after``."""
    each = (item + between).encode()
    count = max(1, (size - len(before) - len(after)) // len(each))
    return before.encode() + (each * count).removesuffix(between.encode()) + after.encode()


def _always(body: bytes, size: int) -> bytes:
    """A payload that stays small, whatever the size of the others."""
    del size
    return body


def _filled(before: str, item: str, after: str, between: str = ",") -> Callable[[int], bytes]:
    return lambda size: fill(before, item, after, size, between)


def _texts() -> Iterator[Payload]:
    """Long texts, which are cut or refused."""
    pieces = {
        "words": "hello world, a chess engine ",
        "one word": "a",
        "CJK": "漢字仮名",
        "punctuation": "!?.;",
        "spaces": " ",
        "combining marks": "a\u0301\u0327",
        "one letter and marks": "\u0301",
        "unknown script": "\U00012000",
        "zeros": "\\u0000",
        "escaped": "\\n\\t\\u00e9",
        "pairs of surrogates": "\\ud83d\\ude00",
        "halves of surrogates": "\\ud800",
        "special tokens": "[SEP][MASK][PAD]",
    }
    for name, piece in pieces.items():
        for how in ("true", "false"):
            before = f'{{"model": "{{}}", "truncate": {how}, "input": "'
            text = _filled(before.replace("{}", TASK), piece, '"}', "")
            yield Payload(f"text of {name}" + (", truncated" if how == "true" else ""), CLASSIFY, text)
    wide = _filled(f'{{"model": "{TASK}", "truncate": true, "input": "😀', "a", '"}', "")
    yield Payload("text of letters and one emoji", CLASSIFY, wide)
    pair = '{"inputs": [{"model": "' + TASK + '", "text": "a '
    yield Payload("a pair of long texts", CLASSIFY, lambda size: _pair(pair, size))
    for name in ("words", "CJK", "punctuation", "one word"):
        yield Payload(f"1024 texts of {name}", CLASSIFY, _texts_of(pieces[name]), {**JSON, **SOON})
    yield Payload("1024 texts to embed", EMBED, _texts_of(pieces["words"], BACKBONE), {**JSON, **SOON})


BOMB = 16
"""How many times the size a packed body has once it is unpacked."""
TASK, BACKBONE = "TASKS-NAME", "BACKBONES-NAME"
"""Placeholders in bodies for a task and the backbone of the server."""


def _pair(before: str, size: int) -> bytes:
    half = "漢 " * (size // 10)
    return f'{before}{half}", "text_pair": "{half}"}}], "truncate": true}}'.encode()


def _texts_of(piece: str, model: str = TASK) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        text = piece * max(1, size // 1024 // len(piece.encode()) - 1)
        return json.dumps({"model": model, "truncate": True, "input": [text] * 1024}, ensure_ascii=False).encode()

    return make


def _items() -> Iterator[Payload]:
    one = f'{{"model": "{TASK}", '
    items = {
        "numbers for texts": (one + '"input": [', "1", "]}"),
        "texts": (one + '"input": [', '"a"', "]}"),
        "empty texts": (one + '"input": [', '""', "]}"),
        "numbers for inputs": ('{"inputs": [', "1", "]}"),
        "mixed inputs": ('{"inputs": [', '{"text":"a"}', "]}"),
        "empty inputs": ('{"inputs": [', "{}", "]}"),
        "inputs of a wrong kind": ('{"inputs": [', '{"text":1}', "]}"),
        "names of fields": ("{", '"":0', "}"),
        "names of fields of an input": ('{"inputs": [{', '"":0', "}]}"),
        "double names": ("{", f'"model":"{TASK}"', ', "input": "a"}'),
    }
    for name, parts in items.items():
        yield Payload(name, CLASSIFY, _filled(*parts))
    yield Payload("wrong inputs as many as fit", CLASSIFY, lambda size: fill(*items["inputs of a wrong kind"], 40_000))
    yield Payload("wrong names as many as fit", CLASSIFY, lambda size: fill(*items["names of fields"], 20_000))
    yield Payload("no inputs as many as fit", CLASSIFY, lambda size: fill(*items["numbers for inputs"], 1_000_000))
    yield Payload("a long name of a field", CLASSIFY, _filled('{"', "a", '": 1}', ""))


def _ids() -> Iterator[Payload]:
    before = f'{{"model": "{BACKBONE}", "input": ['
    items = {
        "token ids": "2023",
        "one-digit ids": "1",
        "ids of 64 bits": "9223372036854775808",
        "ids with fractions": "1.5",
        "nulls for ids": "null",
        "empty lists of ids": "[]",
        "lists of an id": "[101]",
        "lists of lists": "[[]]",
    }
    for name, item in items.items():
        yield Payload(name, EMBED, _filled(before, item, "]}"))
    yield Payload("ids as many as fit", EMBED, lambda size: fill(before, "2023", "]}", min(size, 2_600_000)))
    yield Payload("1024 lists of ids", EMBED, lambda size: _rows(before, size), {**JSON, **SOON})


def _rows(before: str, size: int) -> bytes:
    row = fill("[101,", "2023", ",102]", min(2000, max(40, size // 1024))).decode()
    return f"{before}{','.join([row] * 1024)}]}}".encode()


def _tensors() -> Iterator[Payload]:
    ids = '{"inputs":[{"name":"input_ids","shape":[1024,250],"datatype":"INT64","data":['
    text = '{"inputs":[{"name":"text","shape":[1],"datatype":"BYTES","data":["a"]}]'
    for name, item in {
        "empty lists": "[]",
        "ids": "2023",
        "nulls": "null",
        "objects": "{}",
        "texts": '"a"',
    }.items():
        yield Payload(f"tensor of {name}", INFER, _filled(ids, item, "]}]}"))
        count = 4000 if item in ("[]", "{}") else 256_000
        short = f"{ids}{','.join([item] * count)}]}}]}}".encode()
        yield Payload(f"tensor of {name}, as many as fit", INFER, partial(_always, short), {**JSON, **SOON})
    yield Payload("shape of many sizes", INFER, _filled('{"inputs":[{"name":"text","shape":[', "1", "]}]}"))
    large = str((1 << 63) - 1)
    yield Payload("shape of many large sizes", INFER, _filled('{"inputs":[{"name":"text","shape":[', large, "]}]}"))
    yield Payload("outputs", INFER, _filled(text + ',"outputs":[', '{"name":"logits"}', "]}"))
    yield Payload(
        "outputs as many as fit", INFER, lambda _: fill(text + ',"outputs":[', '{"name":"logits"}', "]}", 36_000)
    )
    yield Payload("tensors as many as fit", INFER, lambda _: fill('{"inputs":[', '{"name":"x"}', "]}", 36_000))
    yield Payload("parameters", INFER, _filled(text + ',"parameters":{', '"a":1', "}}"))
    yield Payload("a long id", INFER, _filled(text + ',"id":"', "a", '"}', ""))
    yield Payload("a long name of a tensor", INFER, _filled('{"inputs":[{"name":"', "a", '"}]}', ""))


def _structures() -> Iterator[Payload]:
    for path in (CLASSIFY, INFER):
        yield Payload("lists that nest", path, lambda size: b"[" * size)
        yield Payload("lists that nest and close", path, lambda size: b"[" * (size // 2) + b"]" * (size // 2))
        yield Payload("objects that nest", path, _filled("", '{"inputs":', "1", ""))
        yield Payload("lists that close", path, _filled('{"inputs": [', "]", "", ""))
        yield Payload("lists in a row", path, _filled('{"inputs": [', "[],[[]]", "]}"))


def _numbers() -> Iterator[Payload]:
    before = f'{{"model": "{TASK}", "input": "a", "top_k": '
    for name, number in {"digits": "9", "digits behind a point": "0.0", "digits of an exponent": "1e9"}.items():
        yield Payload(name, CLASSIFY, _filled(before + number, "9", "}", ""))
    yield Payload("numbers of 60 digits", EMBED, _filled(f'{{"model": "{BACKBONE}", "input": [', "9" * 60, "]}"))
    text = '{"inputs":[{"name":"text","shape":[%s],"datatype":"BYTES","data":["a"]}], "parameters": {"timeout": %s}}'
    yield Payload("a size of many digits", INFER, lambda size: (text % ("9" * size, 1)).encode())
    yield Payload("sizes of 3000 digits", INFER, lambda _: (text % (f"{'9' * 1500},{'9' * 1500}", 1)).encode())
    yield Payload("a timeout of 400 digits", INFER, lambda _: (text % (1, "9" * 400)).encode())
    yield Payload("a version of 400 digits", "/v1/tasks/{task}/rollback", lambda _: b'{"version": %s}' % (b"9" * 400))
    yield Payload("a long version", "/v1/tasks/{task}/rollback", _filled('{"version": "', "a", '"}', ""))


def _no_json() -> Iterator[Payload]:
    for name, byte in {
        "quotation marks": b'"',
        "backslashes": b"\\",
        "commas": b",",
        "colons": b":",
        "white space": b" ",
        "zero bytes": b"\0",
        "no UTF-8": b"\xff",
        "minus signs": b"-",
    }.items():
        yield Payload(f"nothing but {name}", CLASSIFY, partial(mul, byte))
    yield Payload("a text without end", CLASSIFY, _filled('{"input": "', "a", "", ""))
    yield Payload("a text of no UTF-8", CLASSIFY, lambda size: b'{"input": "' + b"\xff" * size + b'"}')
    yield Payload("JSON before white space", CLASSIFY, _filled(f'{{"model":"{TASK}","input":"a"}}', " ", "", ""))
    yield Payload("UTF-16", CLASSIFY, lambda size: ('{"input": "' + "a" * (size // 2) + '"}').encode("utf-16"))


def _packed() -> Iterator[Payload]:
    gzipped, deflated = {**JSON, "Content-Encoding": "gzip"}, {**JSON, "Content-Encoding": "deflate"}
    yield Payload("gzip of zeros", CLASSIFY, lambda size: gzip.compress(b"\0" * (BOMB * size)), gzipped)
    yield Payload(
        "gzip of numbers", CLASSIFY, lambda size: gzip.compress(b'{"inputs": [' + b"1," * (BOMB * size)), gzipped
    )
    yield Payload("deflated zeros", INFER, lambda size: zlib.compress(b"\0" * (BOMB * size)), deflated)
    members = gzip.compress(b"")
    yield Payload(
        "gzip of many parts",
        CLASSIFY,
        lambda size: members * (size // len(members)),
        gzipped,
    )
    yield Payload("no gzip", CLASSIFY, lambda size: b"a" * size, gzipped)


def _multiplied() -> Iterator[Payload]:
    """Bodies in which one text is asked many times, or filled into another one."""
    many = json.dumps(["b"] * 1024)
    soon = {**JSON, **SOON}
    for name, path, before, after in (
        (
            "a query beside 1024 documents",
            "/v1/rerank",
            f'{{"model": "{TASK}", "query": "',
            f'", "documents": {many}}}',
        ),
        ("a text for 1024 tasks", "/v1/fanout", f'{{"tasks": {json.dumps([TASK] * 1024)}, "text": "', '"}'),
        ("a text beside 1024 others", "/v1/score", f'{{"model": "{TASK}", "text_1": "', f'", "text_2": {many}}}'),
    ):
        yield Payload(name, path, _filled(before, "a", after, ""), soon)
    told = '{"inputs": "a", "parameters": {"candidate_labels": '
    yield Payload(
        "places for a label", "/hf/{task}", _filled(told + '["b"], "hypothesis_template": "', "{}", '"}}', "")
    )
    yield Payload("labels of one's own", "/hf/{task}", _filled(told + "[", '""', "]}}"))
    window = '{"parameters": {"stride": 60}, "inputs": ['
    yield Payload("texts of many windows", "/hf/{task}", _filled(window, f'"{"a " * 800}"', "]}"), soon)


def _elsewhere() -> Iterator[Payload]:
    """Bodies where none belongs, and files that are no task files."""
    yield Payload(
        "a form", CLASSIFY, lambda size: b"a=1&" * (size // 4), {"Content-Type": "application/x-www-form-urlencoded"}
    )
    yield Payload("a body of no use", "/v1/tasks", lambda size: b"a" * size, method="GET")
    yield Payload("a body for no path", "/nothing", lambda size: b"a" * size)
    files = {"Content-Type": "application/octet-stream"}
    upload = "/v1/tasks/hostile"
    yield Payload("a file of zeros", upload, lambda size: b"\0" * size, files, "PUT")
    yield Payload("a file of spaces", upload, lambda size: b" " * size, files, "PUT")
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'

    def header(item: Callable[[int], str], most: int = HEADER) -> Callable[[int], bytes]:
        def make(size: int) -> bytes:
            count = max(1, min(size, most) // (len(item(10**6)) + 1))
            return _task_file("{" + ",".join(map(item, range(count))) + "}")

        return make

    yield Payload("a file of many tensors", upload, header(lambda at: entry % at), files, "PUT")
    yield Payload("a file of too many tensors", upload, header(lambda at: entry % at, sys.maxsize), files, "PUT")
    nested = header(lambda at: f'"{at}":{{"dtype":"F32","shape":[{"1," * 1000}1],"data_offsets":[0,4]}}')
    yield Payload("a file of long shapes", upload, nested, files, "PUT")
    digits = header(lambda at: f'"{at}":{{"dtype":"F32","shape":[{"9" * 5000}],"data_offsets":[0,4]}}')
    yield Payload("a file of long numbers", upload, digits, files, "PUT")
    deep = '{"__metadata__":{"jpets":"%s"}}'
    yield Payload("a file whose text nests", upload, lambda s: _task_file(deep % ("[" * min(s, HEADER))), files, "PUT")
    yield Payload("a file that nests", upload, lambda s: _task_file("[" * min(s, HEADER)), files, "PUT")


def _task_file(header: str) -> bytes:
    data = header.encode()
    return struct.pack("<Q", len(data)) + data
