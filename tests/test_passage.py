"""Where the context of a question stands among its tokens, for every way in which questions come."""

from __future__ import annotations

import pytest
from support import tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jpets.errors import InvalidInput
from jpets.passage import Passage
from jpets.tokenizing import TextEncoder
from jpets.types import Answer, Preprocessing, Query

CLS, SEP, PAD = 2, 3, 0
QUESTION, CONTEXT = "Who plays?", "Änna  and her brother play Chess."
PAIR = Query("questions", QUESTION, CONTEXT)
PLAIN = Preprocessing()


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return TextEncoder(tiny().tokenizer_json, 800, 2, 64)


def found(encoder: TextEncoder, query: Query, rule: Preprocessing = PLAIN) -> tuple[list[int], Passage]:
    """A query's token ids and its passage."""
    tokens = encoder.encode(query, rule, passage=True)
    assert tokens.passage is not None
    assert encoder.encode(query, rule).ids.tolist() == tokens.ids.tolist()
    return tokens.ids.tolist(), tokens.passage


def words(encoder: TextEncoder, text: str) -> list[int]:
    """The ids of a text without special tokens."""
    return encoder.encode(Query(None, text), PLAIN).ids.tolist()[1:-1]


@pytest.mark.parametrize(
    ("query", "rule"),
    [
        (PAIR, PLAIN),
        (PAIR, Preprocessing(prefix="query: ")),
        (PAIR, Preprocessing(template="question {text} context {text_pair} or {text_pair}")),
        (PAIR, Preprocessing(template="{text_pair} | {text}")),
        (Query("questions", CONTEXT), PLAIN),
        (Query("questions", CONTEXT), Preprocessing(prefix="query: ")),
        (Query("questions", CONTEXT), Preprocessing(template="question {text} context {text_pair}")),
    ],
)
def test_the_context_is_found_in_what_is_tokenised(encoder: TextEncoder, query: Query, rule: Preprocessing) -> None:
    ids, passage = found(encoder, query, rule)
    assert ids[passage.start : passage.end] == words(encoder, CONTEXT)
    assert passage.null
    assert passage.answer(passage.start, passage.end) == Answer(CONTEXT, 0, len(CONTEXT))
    assert passage.offsets is not None
    for at, (first, last) in enumerate(passage.offsets.tolist(), passage.start):
        assert passage.answer(at, at + 1) == Answer(CONTEXT[first:last], first, last)
        if first == 0 or CONTEXT[first - 1] == " ":  # a word's later pieces have other ids than its whole
            assert words(encoder, CONTEXT[first:last])[0] == ids[at]


def test_no_token_of_a_prefix_answers(encoder: TextEncoder) -> None:
    """Nor one that it shares with the text, where no space stands between them."""
    ids, passage = found(encoder, Query("questions", "b c"), Preprocessing(prefix="a"))
    assert ids[passage.start : passage.end] == words(encoder, "c")
    assert passage.answer(passage.start, passage.end) == Answer("c", 2, 3)


def metaspace() -> str:
    """Words of a tokenizer that counts the space before a word to it, as sentencepiece does."""
    names = ("<s>", "</s>", "<unk>", "\u2581who?", "\u2581she", "\u2581plays", "\u2581chess", "\u2581in:")
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer.to_str()


@pytest.mark.parametrize("kind", ["metaspace", "bytes"])
@pytest.mark.parametrize("rule", [PLAIN, Preprocessing(template="{text} in: {text_pair}")])
def test_spaces_are_part_of_no_answer(kind: str, rule: Preprocessing) -> None:
    """Byte-level tokenizers trim them off offsets, and once more when texts are put together; others leave them."""
    tokenizer = metaspace() if kind == "metaspace" else tiny("tiny-roberta").tokenizer_json
    encoder = TextEncoder(tokenizer, 10_000, 1, 64)
    context = "she plays chess"
    _, passage = found(encoder, Query("questions", "who?", context), rule)
    assert passage.offsets is not None
    pieces = [context[first:last] for first, last in passage.offsets.tolist()]
    assert "".join(pieces) == context.replace(" ", "")
    assert passage.answer(passage.start, passage.end) == Answer(context, 0, len(context))


def test_without_an_answer_nothing_is_looked_for(encoder: TextEncoder) -> None:
    assert encoder.encode(PAIR, PLAIN).passage is None


def test_a_cut_context_keeps_its_offsets(encoder: TextEncoder) -> None:
    rule = Preprocessing(max_length=16, truncation=True)
    ids, passage = found(encoder, PAIR, rule)
    assert (len(ids), passage.end) == (16, 15)
    answer = passage.answer(passage.start, passage.end)
    assert answer is not None
    assert CONTEXT.startswith(answer.text)
    assert 0 < answer.end < len(CONTEXT)


def test_token_ids_are_a_pair_where_special_ones_divide_them(encoder: TextEncoder) -> None:
    ids, passage = found(encoder, PAIR)
    again, same = found(encoder, Query("questions", input_ids=ids))
    assert (again, same.place) == (ids, passage.place)
    assert same.answer(same.start, same.end) is None
    for given, place in (
        ([CLS, 7, 8, SEP], (1, 3, True)),
        ([CLS, 7, 8, SEP, PAD, PAD], (1, 3, True)),
        ([7, 8], (0, 2, False)),
        ([7, 8, SEP, 9], (3, 4, False)),
        ([CLS, 7, SEP, SEP, 8, 9, SEP, 10, SEP], (4, 6, True)),
    ):
        assert found(encoder, Query("questions", input_ids=given))[1].place == place


@pytest.mark.parametrize(
    "query",
    [
        Query("questions", QUESTION, ""),
        Query("questions", QUESTION, " \n"),
        Query("questions", input_ids=[CLS, SEP]),
    ],
)
def test_a_question_needs_a_context(encoder: TextEncoder, query: Query) -> None:
    with pytest.raises(InvalidInput, match="context"):
        found(encoder, query)


def test_a_word_behind_a_prefix_does_not_begin_before_its_text() -> None:
    """The space before it is counted to it, and belongs to the prefix."""
    own = TextEncoder(metaspace(), 10_000, 1, 64)
    for rule in (Preprocessing(prefix="who? "), Preprocessing(template="who? {text} in:"), Preprocessing()):
        spelling = own.encode(Query(None, "she plays"), rule, spelled=True).spelling
        assert spelling is not None and spelling.written is not None
        offsets = spelling.written.offsets[spelling.of_text == 0].tolist()
        assert offsets[0][0] == 0 and offsets[-1][1] == len("she plays")


def test_a_second_text_without_a_place_is_refused(encoder: TextEncoder) -> None:
    with pytest.raises(InvalidInput, match="no place for a second text"):
        encoder.encode(Query("questions", "b", "c"), Preprocessing(template="a {text}"))
