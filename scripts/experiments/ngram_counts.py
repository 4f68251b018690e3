"""How many trigrams make up a share of all occurrences, by the size of a corpus.

python -m experiments.ngram_counts AREAS/all.txt
"""

from __future__ import annotations

import pathlib
from typing import Annotated

import numpy as np
import typer
from results.markdown import markdown_table

from checkpoints.source import load_backbone
from experiments.debian_tasks import BACKBONE
from jpets.plot.ngrams import Window, keys_of, ngrams
from jpets.tokenizing import TextEncoder
from jpets.types import Preprocessing, Query

SIZES = (1000, 3000, 10_000, 30_000)
"""Texts; then all."""
SHARES = (0.3, 0.5, 0.7)


def main(
    path: Annotated[pathlib.Path, typer.Argument(exists=True, dir_okay=False, help="texts, one a line")],
    ngram: int = 3,
) -> None:
    """Print a table: of random texts, the part of the distinct n-grams that each share needs."""
    encoder, window = TextEncoder.of(load_backbone(BACKBONE)), Window.of(ngram)
    texts, rule = path.read_text(encoding="utf-8").splitlines(), Preprocessing(truncation=True)
    order = np.random.default_rng(0).permutation(len(texts))
    keys = [keys_of(ngrams(encoder.encode(Query(None, texts[at]), rule).ids, None, window)) for at in order]
    rows = []
    for size in (*(size for size in SIZES if size < len(texts)), len(texts)):
        _, counts = np.unique(np.concatenate(keys[:size]), return_counts=True)
        reached = np.cumsum(np.sort(counts)[::-1]) / counts.sum()
        needed = [(np.searchsorted(reached, share) + 1) / len(counts) for share in SHARES]
        rows.append([f"{size:,}", f"{counts.sum():,}", f"{len(counts):,}", *(f"{each:.1%}" for each in needed)])
    head = ["texts", "tokens", f"{ngram}-grams", *(f"for {share:.0%}" for share in SHARES)]
    typer.echo(markdown_table(head, rows, left=0))


if __name__ == "__main__":
    typer.run(main)
