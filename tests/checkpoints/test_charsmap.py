from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.charsmap import compiled
from jpets.errors import InvalidBackbone

CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(CHARACTERS, st.text(CHARACTERS, max_size=4)), st.text(CHARACTERS, max_size=8))
def test_a_table_replaces_its_characters_and_no_others(replacements: dict[str, str], others: str) -> None:
    table = tokenizers.normalizers.Precompiled(compiled(replacements))
    for character in [*replacements, *others]:
        assert table.normalize_str(character) == replacements.get(character, character)


def test_a_table_has_room_for_so_many() -> None:
    spread = {chr(0x10000 + 64 * number): "" for number in range(16000)}
    with pytest.raises(InvalidBackbone, match="16,000 that need"):
        compiled(spread)
