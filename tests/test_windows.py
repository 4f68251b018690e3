"""Windows of long texts are those of ``transformers``' tokenizers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast

from jpets.errors import InputTooLong, InvalidInput
from jpets.tokenizing import TextEncoder
from jpets.types import Preprocessing, Query

WORDS = ("the", "library", "reads", "naïve", "中文的词", "שלום", "🙂", "a-b", "sparse", "matrices,", "\r\n")
PLAIN = Preprocessing()


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-roberta"])
@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=80).filter(lambda own: any(map(str.strip, own))),
    question=st.none() | st.lists(st.sampled_from(WORDS[:3]), min_size=1, max_size=4),
    size=st.integers(20, 48),
    stride=st.integers(0, 6),
)
def test_windows_are_those_of_the_tokenizer(
    name: str, words: list[str], question: list[str] | None, size: int, stride: int
) -> None:
    backbone = tiny(name)
    encoder, context = TextEncoder.of(backbone), " ".join(words)
    asked = " ".join(question) if question is not None else None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=encoder.tokenizer)
    texts = (context,) if asked is None else (asked, context)
    expected = tokenizer(
        *texts, truncation="only_first" if asked is None else "only_second", max_length=size, stride=stride,
        return_overflowing_tokens=True,
    )  # fmt: skip
    query = Query(None, *texts)
    found = encoder.windows(query, PLAIN, size, stride, passage=asked is not None)

    def may_hold_an_answer(window: Encoding) -> bool:
        places = zip(window.offsets, window.sequence_ids, strict=True)
        return asked is None or any(context[begin:end].strip() for (begin, end), of in places if of == 1)

    kept = [each.ids for each in expected.encodings if may_hold_an_answer(each)]
    assert [own.ids.tolist() for own in found] == kept
    covered = np.zeros(len(context), np.bool_)
    for own in found:
        assert len(own.ids) <= size
        if own.passage is not None:
            assert own.passage.offsets is not None and own.passage.text == context
            places = own.passage.offsets.tolist()
        else:
            assert own.spelling is not None and own.spelling.written is not None
            places = own.spelling.written.offsets[own.spelling.of_text == 0].tolist()
        for begin, end in places:
            covered[begin:end] = True
    (whole,) = encoder.tokenizer.encode_batch([context], add_special_tokens=False)
    for begin, end in whole.offsets:
        piece = context[begin:end]
        assert covered[begin:end].any() or not piece.strip(), "every token is in a window"


def test_what_cannot_be_cut_is_refused() -> None:
    encoder = TextEncoder.of(tiny("tiny-bert"))
    long = "the library " * 50
    for rule in (Preprocessing(template="in {text} it"), Preprocessing(prefix="in ")):
        with pytest.raises(InvalidInput, match="sets nothing around it"):
            encoder.windows(Query(None, long), rule, 32, 4)
    assert len(encoder.windows(Query(None, "what", long), Preprocessing(prefix="in "), 32, 4, passage=True)) > 1
    with pytest.raises(InputTooLong, match="leave room for 0"):
        encoder.windows(Query(None, long, "b"), PLAIN, 32, 4, passage=True)
    with pytest.raises(InputTooLong, match="neighbours share 30"):
        encoder.windows(Query(None, long), PLAIN, 32, 30)
    with pytest.raises(InvalidInput, match="empty"):
        encoder.windows(Query(None, " "), PLAIN, 32, 4)
    with pytest.raises(InvalidInput, match="Unicode"):
        encoder.windows(Query(None, "a\ud800"), PLAIN, 32, 4)


def test_what_fits_one_window_needs_no_room_for_a_stride() -> None:
    encoder = TextEncoder.of(tiny("tiny-bert"))
    query = Query(None, "the library " * 9, "a day")
    (found,) = encoder.windows(query, PLAIN, 32, 16)
    assert found.ids.tolist() == encoder.encode(query, PLAIN).ids.tolist()
    with pytest.raises(InputTooLong, match="neighbours share 16"):
        encoder.windows(Query(None, query.text, "a day " * 20), PLAIN, 32, 16)
