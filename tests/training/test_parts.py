"""The parts of training that are functions: order, rates, losses, data, labels."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_task import task_logits
from seqeval import metrics as seqeval
from support import random_delta, shallow

from jpets.errors import InvalidInput, NotFound
from jpets.model.encoder import split
from jpets.tokenizing import TextEncoder
from jpets.training import data
from jpets.training.batches import batch_order
from jpets.training.data import Columns, Example, read_examples
from jpets.training.fit import rate_at
from jpets.training.forward import TaskOutputs, TextRows
from jpets.training.heads import new_head
from jpets.training.labels import kind_of, label_names, make_rows
from jpets.training.losses import IGNORED, Labels, mean_loss
from jpets.training.metrics import scores
from jpets.training.plan import SettledPlan, TrainingPlan
from jpets.types import Head, Preprocessing

RULE = Preprocessing(max_length=16, truncation=True)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=300), st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_takes_every_row_once(lengths: list[int], batch: int, epoch: int) -> None:
    plan = SettledPlan(batch=batch, seed=4)
    found = batch_order(lengths, plan, epoch)
    assert sorted(int(at) for own in found for at in own) == list(range(len(lengths)))
    assert all(len(own) <= batch for own in found)
    again = batch_order(lengths, plan, epoch)
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))


def test_batches_hold_rows_of_like_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 640).tolist()
    spans = [np.ptp([lengths[at] for at in own]) for own in batch_order(lengths, SettledPlan(batch=32), 0)]
    assert np.mean(spans) < 8  # 97 if batches are drawn at random
    firsts = [own[0] for own in batch_order(lengths, SettledPlan(batch=32), 0)]
    assert firsts != sorted(firsts, key=lambda at: lengths[at])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rates_rise_and_fall_as_optax_has_it(accumulate: int) -> None:
    steps, plan = 60, TrainingPlan(warm_up=0.2, accumulate=accumulate)
    updates = steps // accumulate
    expected = optax.warmup_cosine_decay_schedule(0.0, 1.0, round(0.2 * updates) + 1, updates + 1)
    for step in range(steps):
        found = float(rate_at(jnp.int32(step), jnp.int32(steps), plan))
        assert found == pytest.approx(float(expected(step // accumulate + 1)), abs=1e-6)


@pytest.mark.parametrize(("steps", "warm_up"), [(1, 0.1), (1, 0.0), (9, 0.0)])
def test_the_first_update_counts(steps: int, warm_up: float) -> None:
    assert float(rate_at(jnp.int32(0), jnp.int32(steps), TrainingPlan(warm_up=warm_up))) == 1


def softmax_loss(logits: np.ndarray, target: int) -> float:
    return float(np.log(np.exp(logits).sum()) - logits[target])


def test_losses_by_hand() -> None:
    rng = np.random.default_rng(3)
    kernel = {"kernel": np.zeros((4, 3), np.float32), "bias": np.zeros(3, np.float32)}

    def found(head: Head, logits: np.ndarray, targets: Any, weights: list[float]) -> float:
        outputs = TaskOutputs(jnp.zeros((2, 4)), jnp.asarray(logits, jnp.float32))
        labels = Labels(jnp.asarray(targets), jnp.asarray(weights, jnp.float32))
        return float(jax.jit(partial(mean_loss, head))(outputs, labels))

    flat, tokens = rng.normal(size=(2, 3)), rng.normal(size=(2, 5, 3))
    single = Head("sequence-classification", kernel)
    expected = (softmax_loss(flat[0], 2) * 3 + softmax_loss(flat[1], 0)) / 4
    assert found(single, flat, np.array([2, 0], np.int32), [3, 1]) == pytest.approx(expected, rel=1e-5)
    assert found(single, flat, np.array([2, 0], np.int32), [1, 0]) == pytest.approx(softmax_loss(flat[0], 2), rel=1e-5)
    sets = np.array([[1, 0, 1], [0, 0, 0]], np.float32)
    each = np.log1p(np.exp(flat)) - sets * flat
    multi = Head("sequence-classification", kernel, problem="multi-label")
    assert found(multi, flat, sets, [1, 1]) == pytest.approx(each.mean(), rel=1e-5)
    value = Head("sequence-classification", kernel, problem="regression")
    assert found(value, flat, sets, [1, 1]) == pytest.approx(((flat - sets) ** 2).mean(), rel=1e-5)
    tags = np.array([[0, IGNORED, 2, IGNORED, IGNORED], [IGNORED] * 5], np.int32)
    row = (softmax_loss(tokens[0, 0], 0) + softmax_loss(tokens[0, 2], 2)) / 2
    assert found(Head("token-classification", kernel), tokens, tags, [1, 1]) == pytest.approx(row / 2, rel=1e-5)
    answers = Head("question-answering", kernel)
    spans = np.array([[1, 4], [0, 0]], np.int32)
    both = [softmax_loss(tokens[r, :, c], spans[r, c]) for r in range(2) for c in range(2)]
    assert found(answers, tokens[..., :2], spans, [1, 1]) == pytest.approx(np.mean(both), rel=1e-5)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_every_format_gives_the_same_examples(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    records = [{"text": "one, two", "label": "a"}, {"text": 'says "three"', "label": "b"}]
    expected = [Example(each["text"], None, each["label"]) for each in records]
    parquet.write_table(Table.from_pylist(records), tmp_path / "x.parquet")
    files = [
        write(tmp_path / "x.csv", '\ufefftext,label\n"one, two",a\n"says ""three""",b\n'),
        write(tmp_path / "x.tsv", 'text\tlabel\none, two\ta\n"says ""three"""\tb\n'),
        write(tmp_path / "x.jsonl", "".join(json.dumps(each) + "\n\n" for each in records)),
        tmp_path / "x.parquet",
    ]
    for file in files:
        assert read_examples(file, Columns()) == expected


def test_datasets_of_the_library_are_read(tmp_path: Path) -> None:
    import datasets  # type: ignore[import-untyped]

    labels = datasets.ClassLabel(names=["fun", "code"])
    features = {"text": datasets.List(datasets.Value("string")), "label": datasets.List(labels)}
    words = [["a", "library"], ["one", "game"]]
    data = datasets.Dataset.from_dict({"text": words, "label": [[0, 1], [0, 0]]}, datasets.Features(features))
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "saved")
    found = read_examples(tmp_path / "saved" / "train", Columns())
    assert found == [Example(("a", "library"), None, ["fun", "code"]), Example(("one", "game"), None, ["fun", "fun"])]
    plain = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, datasets.Features(
        {"text": datasets.Value("string"), "label": labels}
    ))  # fmt: skip
    plain.save_to_disk(tmp_path / "plain")
    assert read_examples(tmp_path / "plain", Columns()) == [Example("a", None, "code"), Example("b", None, "fun")]
    with pytest.raises(InvalidInput, match=r"give the folder of one of \['test', 'train'\]"):
        read_examples(tmp_path / "saved", Columns())
    state = json.loads((tmp_path / "plain" / "state.json").read_text())
    shutil.copytree(tmp_path / "plain", tmp_path / "climbing")
    for name in ("../plain/data-00000-of-00001.arrow", str(tmp_path / "plain" / "data-00000-of-00001.arrow"), 3):
        (tmp_path / "climbing" / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": name}]}))
        with pytest.raises(InvalidInput, match="expected names of files in the folder"):
            read_examples(tmp_path / "climbing", Columns())
    unlabelled = plain.map(lambda row: {"label": -1}, features=plain.features)
    unlabelled.save_to_disk(tmp_path / "unlabelled")
    assert [each.label for each in read_examples(tmp_path / "unlabelled", Columns())] == [-1, -1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="that datasets' save_to_disk wrote"):
        read_examples(tmp_path / "empty", Columns())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "text,label\na\n", "row 1: expected as many fields"),
        ("x.csv", "text,kind\na,b\n", "row 1: expected a column 'label', found ['kind', 'text']"),
        ("x.csv", "text,label\n", "at least one row"),
        ("x.csv", "text,label,text\na,b,c\n", "expected each column once, found ['text']"),
        ("x.csv", b"text,label\n\xff\xfe,b\n", "expected CSV in UTF-8"),
        ("x.csv", "text,label\n ,b\n", "row 1: expected 'text' to be a text that is not empty"),
        ("x.jsonl", '{"text": 1}\n', "row 1: expected a column 'label'"),
        ("x.jsonl", "[1]\n", "line 1: expected a JSON object, found list"),
        ("x.jsonl", "{\n", "line 1: expected a JSON object"),
        ("x.parquet", "no parquet", "expected a Parquet file"),
        ("x.xml", "<a/>", "expected a file that ends in one of"),
    ],
)
def test_bad_data_is_named(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_examples(write(tmp_path / name, content), Columns())
    assert message in refused.value.message
    with pytest.raises(NotFound):
        read_examples(tmp_path / "nowhere.csv", Columns())


def test_no_more_rows_are_read_than_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MOST_ROWS", 2)
    assert len(read_examples(write(tmp_path / "x.csv", "text,label\na,b\nc,d\n"), Columns())) == 2
    with pytest.raises(InvalidInput, match="at most 2 rows"):
        read_examples(write(tmp_path / "x.csv", "text,label\na,b\nc,d\ne,f\n"), Columns())


def text() -> TextEncoder:
    config = shallow().config
    return TextEncoder(shallow().tokenizer_json, config.vocab_size, config.type_vocab_size, config.max_positions)


def test_labels_become_targets() -> None:
    examples = [Example("a library", None, "x"), Example("a game", None, "y"), Example("a file", None, "x")]
    names = label_names(examples, *kind_of(examples))
    rows = make_rows(examples, new_head(*kind_of(examples), 2, 64), names, text(), RULE, balanced=True)
    assert (names, [int(each) for each in rows.targets], rows.weights.tolist()) == (
        ("x", "y"),
        [0, 1, 0],
        [0.75, 1.5, 0.75],
    )
    sets = [Example("a", None, ["p", "q"]), Example("b", None, [])]
    assert kind_of(sets) == ("sequence-classification", "multi-label")
    rows = make_rows(sets, new_head(*kind_of(sets), 2, 64), label_names(sets, *kind_of(sets)), text(), RULE)
    assert [each.tolist() for each in rows.targets] == [[1, 1], [0, 0]]
    values = [Example("a", None, 0.5), Example("b", None, 2)]
    assert kind_of(values) == ("sequence-classification", "regression")
    rows = make_rows(values, new_head(*kind_of(values), 1, 64), (), text(), RULE)
    assert [each.tolist() for each in rows.targets] == [[0.5], [2.0]]


def test_the_first_token_of_a_word_has_its_tag() -> None:
    words = ("library", "for", "unusually", "long-named", "files")
    example = Example(words, None, ["B-X", "O", "O", "B-Y", "I-Y"])
    names = label_names([example], "token-classification", "single-label")
    rows = make_rows([example], new_head("token-classification", "single-label", 4, 64), names, text(), RULE)
    tokenizer = text().tokenizer
    encoded = tokenizer.encode(" ".join(words))
    firsts = {sum(len(w) + 1 for w in words[:at]): names.index(tag) for at, tag in enumerate(example.label)}
    expected = [
        firsts.get(start, IGNORED) if end > start else IGNORED
        for (start, end) in encoded.offsets[: len(rows.targets[0])]
    ]
    assert rows.tags and rows.targets[0].tolist() == expected
    assert sum(each != IGNORED for each in expected) == 5


def test_words_that_were_cut_off_count_as_found_to_be_nothing() -> None:
    tags = ["B-X" if at % 20 == 0 else "O" for at in range(40)]
    example = Example(("library",) * 40, None, tags)
    names = label_names([example], "token-classification", "single-label")
    head = new_head("token-classification", "single-label", 2, 64)
    rows = make_rows([example], head, names, text(), RULE)
    assert rows.cut[0] and rows.take([0]).cut == rows.cut
    right = np.zeros((len(rows.targets[0]), 2), np.float32)
    right[np.arange(len(right)), np.maximum(rows.targets[0], 0)] = 1
    found = scores(head, names, [right], rows.targets, cut=rows.cut)
    seen = [tags[at] for at in range(40 - len(rows.cut[0]))]
    assert found["entity_f1"] == seqeval.f1_score([tags], [[*seen, *["O"] * len(rows.cut[0])]]) < 1
    assert found["accuracy"] == pytest.approx(
        np.mean([a == b for a, b in zip(tags, [*seen, *["O"] * len(rows.cut[0])], strict=True)])
    )


def test_a_text_that_cannot_be_encoded_is_named_by_its_row() -> None:
    given = [Example("a", None, "x"), Example("\ud800", None, "y")]
    head = new_head("sequence-classification", "single-label", 2, 64)
    with pytest.raises(InvalidInput, match=r"row 2: .*Unicode"):
        make_rows(given, head, ("x", "y"), text(), RULE)


def test_answers_become_the_tokens_they_lie_in() -> None:
    context = "the library reads files and writes files"
    found = []
    for answer in ("reads files", "reads files ", "library", "writes files", ""):
        start = context.index(answer)
        examples = [Example("what?", context, {"text": [answer], "answer_start": [start]})]
        assert kind_of(examples) == ("question-answering", "single-label")
        head = new_head("question-answering", "single-label", 2, 64)
        rows = make_rows(examples, head, (), text(), Preprocessing(max_length=64, truncation=True))
        first, last = (int(at) for at in rows.targets[0])
        words = text().tokenizer.decode([int(each) for each in rows.tokens[0].ids[first : last + 1]])
        found.append(words)
    assert found[:4] == ["reads files", "reads files", "library", "writes files"] and rows.targets[0].tolist() == [0, 0]
    cut = make_rows(
        [Example("what?", context, {"text": "writes files", "answer_start": context.index("writes")})],
        head, (), text(), Preprocessing(max_length=10, truncation=True),
    )  # fmt: skip
    assert cut.targets[0].tolist() == [0, 0]
    for each, right in ((cut, 0.0), (rows, 1.0)):
        logits = np.zeros((len(each.tokens[0].ids), 2), np.float32)
        logits[0] = 1
        found_right = scores(head, (), [logits], each.targets, cut=each.cut, passages=each.passages)["exact"]
        assert found_right == right, "no answer is right only where there is none"
    for answer, peaks, right in (("library", (2, -1), 1.0), ("files", (2, -1), 0.0)):
        asked = Example("what?", context, {"text": answer, "answer_start": context.index(answer)})
        each = make_rows([asked], head, (), text(), Preprocessing(max_length=64))
        logits = np.zeros((len(each.tokens[0].ids), 2), np.float32)
        first, last = (int(at) for at in each.targets[0])
        if right:
            logits[first, 0], logits[last, 1], logits[first - 1, 1] = 9, 8, 9  # an end before the start is none
        else:
            logits[peaks[0], 0] = logits[peaks[1], 1] = 9
        assert scores(head, (), [logits], each.targets, passages=each.passages)["exact"] == right, answer
    inside = {"text": "library", "answer_start": 4.7}
    for label in ({"text": "x", "answer_start": 0}, {"text": "x"}, {"answer_start": 1}, inside):
        with pytest.raises(InvalidInput, match="row 1: expected"):
            make_rows([Example("what?", context, label)], head, (), text(), RULE)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([Example("a", None, "x"), Example("b", None, "x")], "at least two labels"),
        ([Example(("a", "b"), None, ["O"])], "at least two labels"),
        ([Example("a", None, "x" * (1 << 19)), Example("b", None, "y")], "names of labels of at most"),
    ],
)
def test_one_class_only_is_refused(examples: list[Example], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        label_names(examples, *kind_of(examples))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["x", None], "row 2: expected a label that is a text or a number, found None"),
        (["x", " "], "row 2: expected a label that is a text"),
        (["x", "\ud800"], "row 2: expected a label that is a text"),
        (["x", ["x", "y"]], "row 2: expected one label"),
        ([["x"], None], "row 2: expected a list of labels"),
        ([["x"], ["y", None]], "row 2: expected a label that is a text"),
        (["x", 1, True], r"labels of one type, found \['bool', 'int', 'str'\]"),
        ([["x"], [1]], r"labels of one type, found \['int', 'str'\]"),
    ],
)
def test_labels_that_are_none_are_refused_by_their_row(labels: list[Any], message: str) -> None:
    given = [Example("a", None, label) for label in labels]
    with pytest.raises(InvalidInput, match=message):
        label_names(given, *kind_of(given))


def test_fractions_are_values_in_files_without_types_too() -> None:
    def kind(*labels: Any) -> str:
        return kind_of([Example("a", None, label) for label in labels])[1]

    assert kind("0.5", "1.25", "3") == kind(0.5, 2) == "regression"
    assert kind("1", "2.0") == kind("0.5", "many") == kind("0.5", None) == kind("nan", "0.5") == "single-label"
    for labels, row in ((["0.5", "2", "bad"], 3), (["nan", "0.5", "1.5"], 1), ([0.5, 1.5, math.inf], 3)):
        with pytest.raises(InvalidInput, match=f"row {row}: expected a number like most other labels"):
            kind(*labels)
    assert kind("1e300", "2.5e299", "1") == "regression"
    given = [Example("a", None, [0.5, 1.5]), Example("b", None, [0.5])]
    with pytest.raises(InvalidInput, match="row 2: expected 2 numbers as label"):
        make_rows(given, new_head("sequence-classification", "regression", 2, 64), (), text(), RULE)


def test_unseen_labels_are_refused() -> None:
    head = new_head("sequence-classification", "single-label", 2, 64)
    with pytest.raises(InvalidInput, match=r"row 2: expected one of \['x', 'y'\] as label, found 'z'"):
        make_rows([Example("a", None, "x"), Example("b", None, "z")], head, ("x", "y"), text(), RULE)
    tagger = new_head("token-classification", "single-label", 2, 64)
    with pytest.raises(InvalidInput, match="row 1: expected a list of words and a list of as many tags"):
        make_rows([Example(("a", "b"), None, ["x"])], tagger, ("x", "y"), text(), RULE)


@pytest.mark.parametrize("methods", [("diff", "mask"), ("mask", "diff"), ("lora", "mask"), ("bitfit", "diff")])
def test_deltas_of_a_task_act_in_one_order_whatever_order_they_are_listed_in(methods: tuple[str, str]) -> None:
    """As a server merges them: first the bias, then the weights, then the sums."""
    backbone = shallow()
    config, params = backbone.config, jax.tree.map(jnp.asarray, dict(backbone.params))
    deltas = [random_delta(method, config, seed) for seed, method in enumerate(methods)]
    head = new_head("sequence-classification", "single-label", 2, config.hidden_size, seed=1)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(5, 100, (2, 8)), jnp.int32)
    rows = TextRows(ids, jnp.zeros_like(ids), jnp.array([8, 5]))
    found = [task_logits(split(config), params, own, head, rows) for own in (deltas, deltas[::-1])]
    np.testing.assert_array_equal(found[0], found[1])
