"""Which rows of a data set are held out, to judge by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np


def hold_out(texts: Sequence[Hashable], count: int, seed: int) -> tuple[list[int], list[int]]:
    """(rows to learn from, ``count`` rows held out, which is neither none nor all), in an order drawn by the seed.

    Rows of equal ``texts`` stay together, as a copy that was learnt from would be judged too well. So fewer may be held
    out. Where those would be less than half, or copies of one text alone, rows are drawn one by one: one text, of one
    label, tells too little of others.
    """
    order = np.random.default_rng([seed, len(texts)]).permutation(len(texts)).tolist()
    copies = Counter(texts[at] for at in order)
    held, room = set[Hashable](), count
    for text, own in copies.items():
        if own <= room:
            held.add(text)
            room -= own
    if room > count / 2 or len(held) < min(count, 2):
        return order[count:], order[:count]
    return [at for at in order if texts[at] not in held], [at for at in order if texts[at] in held]
