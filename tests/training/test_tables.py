"""A file is read as it is written, row by row; rows that could be read in two ways are refused with their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from jpets.errors import InvalidInput
from jpets.training import tables
from jpets.training.data import Columns, Example, read_examples
from jpets.training.labels import kind_of, label_names

GOOD, BAD = "positive", "negative"


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows(folder: Path, name: str, content: str | bytes) -> list[tuple[str, str]]:
    return [(each.plain, each.label) for each in read_examples(written(folder, name, content), Columns())]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (  # a later text ends with a mark
            "x.tsv",
            'text\tlabel\n"Oh no\tnegative\nlovely day\tpositive\nwhat a day!"\tpositive\nfine\tnegative\n',
            [('"Oh no', BAD), ("lovely day", GOOD), ('what a day!"', GOOD), ("fine", BAD)],
        ),
        ("x.tsv", 'text\tlabel\n"Oh" he said\tnegative\n"\tpositive\n', [('"Oh" he said', BAD), ('"', GOOD)]),
        ("x.tsv", 'text\tlabel\r\n"no\tnegative\r\n\r\n5" disk\tpositive\r\n', [('"no', BAD), ('5" disk', GOOD)]),
        ("x.tsv", 'text\tlabel\n"a ""good""\tday"\tpositive\n', [('a "good"\tday', GOOD)]),  # as spreadsheets write
        ("x.tsv", 'text\tlabel\n"two\nlines"\tpositive\nfine\tnegative\n', [("two\nlines", GOOD), ("fine", BAD)]),
        ("x.tsv", '"text"\t"label"\n"fine"\t"positive"\n', [("fine", GOOD)]),
        ("x.csv", '\ufefftext,label\r\n"a, b",positive\r\n\r\nc,negative\r\n', [("a, b", GOOD), ("c", BAD)]),
        ("x.csv", 'text,label\n"Dear all, hi\n\nbye, you",positive\n', [("Dear all, hi\n\nbye, you", GOOD)]),
        ("x.csv", 'label,text\npositive,"one\ntwo, three"\nnegative,c\n', [("one\ntwo, three", GOOD), ("c", BAD)]),
        ("x.jsonl", '\ufeff{"text": "a", "label": "x"}\r\n\r\n{"text": "b", "label": "y"}', [("a", "x"), ("b", "y")]),
        ("x.csv", "text,label\na\u2028b\x85c,positive\n", [("a\u2028b\x85c", GOOD)]),
    ],
)
def test_rows_are_as_they_stand_in_the_file(
    name: str, content: str, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    assert rows(tmp_path, name, content) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.csv",
            'text,label\nfine,negative\n"Oh no,negative\nlovely day,positive\nwhat!",positive\n',
            "x.csv, line 3: a quotation mark makes one text of the rows up to line 5",
        ),
        (
            "x.csv",
            'label,text\nnegative,"Oh no\npositive,lovely day\npositive,what!"\npositive,fine\n',
            "line 2: a quotation mark makes one text of the rows up to line 4",
        ),
        (
            "x.tsv",
            'text\tlabel\n"Oh no\tnegative\nlovely\tpositive\nwhat!"\tpositive\nragged\n',
            "line 5, row 2: expected as many fields",
        ),
        ("x.csv", 'text,label\na,b\n"Oh no,negative\nc,d\n', "line 3: expected CSV in UTF-8"),
        ("x.csv", 'text,label\n"a" b,c\n', "line 2: expected CSV"),
        (
            "x.csv",
            "text,label\na,b\n\nc,d,e\n",
            "line 4, row 2: expected as many fields as the first line has, 2, found 3",
        ),
        ("x.tsv", "text\tlabel\na\tb\nc\n", "line 3, row 2: expected as many fields"),
        ("x.csv", "text,label\na\0b,c\n", "line 2: expected CSV in UTF-8, found a NUL byte"),
        ("x.jsonl", '{"text": "a\0", "label": "b"}\n', "line 1: expected JSON lines in UTF-8, found a NUL byte"),
        ("x.csv", "text,label\na,b\n".encode("utf-16"), "expected CSV in UTF-8, found UTF-16"),
        ("x.tsv", "text\tlabel\na\tb\n".encode("utf-32"), "expected TSV in UTF-8, found UTF-32"),
        ("x.jsonl", '{"text": "a", "label": "b"}\n'.encode("utf-16"), "in UTF-8, found UTF-16"),
        ("x.csv", "text,label\nfine,b\ncafé,b\n".encode("latin-1"), "line 3: expected CSV in UTF-8, found other bytes"),
        ("x.csv", "text,label\n" + "a" * 200 + ",b\n", "line 2: expected CSV with lines of at most 100 bytes"),
        ("x.jsonl", '{"text": "' + "a" * 200 + '"}\n', "line 1: expected JSON lines with lines of at most 100 bytes"),
        ("x.csv", "text,label\na,b\nc,\n", "line 3, row 2: expected 'label' to be a label, found none"),
        ("x.csv", "text,label\na,b\nc, b\n", "line 3, row 2: expected 'label' to be a label, found spaces around ' b'"),
        ("x.csv", "text,label\na,0.5\nc,NaN\n", "line 3, row 2: expected 'label' to be a label, found 'NaN'"),
        ("x.jsonl", '{"text": "a", "label": 1}\n\n{"text": "b", "label": null}\n', "line 3, row 2: expected 'label'"),
        ("x.jsonl", '{"text": "a", "label": NaN}\n', "found nan, which says that it is missing"),
        ("x.jsonl", '{"text": "a", "label": ["b", " "]}\n', "expected 'label' to be a label, found none"),
        ("x.jsonl", '{"text": "a", "label": "b", "text": "c"}\n', "expected each name once, found 'text'"),
        ("x.jsonl", '{"text": null, "label": "b"}\n', "row 1: expected 'text' to be a text"),
        ("x.jsonl", '{"text": "\\ud800", "label": "b"}\n', "row 1: expected texts in Unicode"),
        ("x.csv", "text,label,label\na,b,c\n", "expected each column once, found ['label']"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(
    name: str, content: str | bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "LONGEST_FIELD", 100)
    with pytest.raises(InvalidInput) as refused:
        rows(tmp_path, name, content)
    assert message in refused.value.message


def test_a_pair_has_two_texts(tmp_path: Path) -> None:
    for content in ('{"text": "a", "other": null}', '{"text": "a", "other": " "}'):
        with pytest.raises(InvalidInput, match=r"row 1: expected 'other' to be a text that is not empty"):
            read_examples(written(tmp_path, "x.jsonl", content), Columns("text", "other", None))


def test_texts_of_several_lines_without_labels(tmp_path: Path) -> None:
    """Here only the shape of lines tells whether they are rows."""
    columns = Columns("text", "other", None)
    content = 'text,other\n"one\ntwo, three",four\n'
    assert read_examples(written(tmp_path, "x.csv", content), columns) == [Example("one\ntwo, three", "four")]
    with pytest.raises(InvalidInput, match="line 2: a quotation mark makes one text of the rows up to line 4"):
        read_examples(written(tmp_path, "x.csv", 'text,other\n"one,a\ntwo,b\nthree",c\n'), columns)


def test_a_number_is_one_label_however_it_is_written() -> None:
    for names in (["1", "1.0"], ["01", "2", "1"], ["1e1", "10"]):
        examples = [Example("a text", None, name) for name in names]
        with pytest.raises(InvalidInput, match="expected each number written in one way"):
            label_names(examples, *kind_of(examples))
