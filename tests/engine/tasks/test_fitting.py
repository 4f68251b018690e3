"""The classes that take a task's deltas, while classes come."""

from __future__ import annotations

import pytest

from jpets.deltas.bank import tightest
from jpets.deltas.protocol import ClassKey
from jpets.engine.tasks import fitting
from jpets.engine.tasks.fitting import Fitting
from jpets.errors import UnknownClass

SMALL, WIDE = (ClassKey("lora", (("query", rank),), (0,)) for rank in (8, 16))


def test_an_answer_for_fewer_classes_is_not_kept_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class may open while somebody looks for it among those that there were."""
    own = Fitting([])

    def opens_meanwhile(key: ClassKey, classes: tuple[ClassKey, ...]) -> ClassKey | None:
        found = tightest(key, classes)
        if not own.classes:
            own.add([WIDE])
        return found

    monkeypatch.setattr(fitting, "tightest", opens_meanwhile)
    with pytest.raises(UnknownClass):
        own.fit([SMALL])
    assert own.fit([SMALL]) == [WIDE]
