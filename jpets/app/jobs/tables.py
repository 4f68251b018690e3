"""Backbones whose lower layers are tables, and domains of them: the stages from texts to files (HMI section 5.1)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from checkpoints.backbone import Backbone
from checkpoints.canonical import from_params
from checkpoints.ids import check_id
from checkpoints.native import PLOT, read_native, write_native
from jpets.app.jobs.further import first_and_last, vocabulary_of
from jpets.app.jobs.whole import check_whole, digest_above, load_whole
from jpets.config import BackboneConfig, TableFormat
from jpets.errors import Conflict, InputTooLong, InvalidInput
from jpets.files import TEMPORARY, WEEK_SECONDS, sweep, sweep_siblings
from jpets.plot.build import build_table, read_layers, root_keys, write_layers
from jpets.plot.choice import Chosen, choose
from jpets.plot.forms import forms_of, write_forms
from jpets.plot.layers import NGramLayers
from jpets.plot.lookup import levels_of
from jpets.plot.ngrams import Window, ngrams
from jpets.plot.table import BUILDING, Table
from jpets.plot.tree import FORMS, LAYERS, TABLES, Branch, Tree, table_path
from jpets.plot.values import check_format
from jpets.templates import prepared
from jpets.tokenizing import TextEncoder, Tokens
from jpets.training.adapt import Hierarchical, adapt, train_domain
from jpets.training.checkpoints import Checkpoints, claimed
from jpets.training.data import Example
from jpets.training.plan import TrainingPlan
from jpets.training.run import Keeper, UpdateReport
from jpets.types import Preprocessing, Progress, Query

Given = tuple[str, str | None]
"""A text, or a pair."""
COUNTS = "counts"
"""Folder of counted n-grams, among what a killed run goes on from."""
MAKING = ".making-"
"""Prefix of folders that hold counts and checkpoints until tables are made."""
WHOLE = 1 << 16
"""Most tokens of a text whose n-grams are counted: texts that are read in windows look all of theirs up."""
LEAST_TOKENS = 20_000
"""Tokens of the texts of a domain, at least: fewer hardly say what its n-grams mean (HMI section 4.1)."""


@dataclasses.dataclass(frozen=True)
class Making:
    """How tables are made. ``share`` is the share of a corpus's occurrences whose n-grams are kept (HMI's alpha)."""

    plan: TrainingPlan
    """Without epochs nothing is trained."""
    share: float = 0.5
    max_length: int = 128
    """Tokens that texts are cut to in training; n-grams are counted in all of them."""
    guesses: float = 0.0
    """Weight of guessing hidden tokens, beside giving the hidden states of the whole backbone."""
    sample: int | None = None
    """Texts that are trained on, drawn at random: counts want all there are, layers are content with fewer."""
    kept_as: TableFormat = "bfloat16"
    """How a root's vectors are stored; those of its domains are stored alike."""
    normal_forms: bool = False
    """Whether a root's tables, and those of its domains, are looked up by the normal forms of tokens."""
    report: Progress = lambda what, done, of: None
    step: Callable[[UpdateReport], None] = lambda step: None


@dataclasses.dataclass(frozen=True)
class Made:
    """``losses`` are those of the first and the last tenth of the updates, if there were any."""

    branch: Branch
    losses: tuple[float, float] | None


def make_root(
    backbone: Backbone,
    name: str,
    examples: Sequence[Example],
    destination: Path,
    count: int,
    ngram: int,
    making: Making,
    checkpoints: Path | None = None,
    source: str | None = None,
) -> Made:
    """Writes a backbone folder whose tables of n-grams of ``ngram`` tokens stand for the first ``count`` layers.

    ``checkpoints`` keeps what a killed run goes on from; ``source`` is where ``backbone`` can be loaded from again, for
    domains. Raises ``Conflict`` where ``destination`` exists, ``InvalidInput``, ``OutOfSpace``.
    """
    if destination.exists():
        raise Conflict(f"{destination.name} exists already; remove it or choose another name")
    words = backbone.config.vocab_size
    forms = forms_of(backbone.tokenizer_json, words) if making.normal_forms else None
    layers = NGramLayers(backbone.config, Window.of(ngram), count, forms)
    check_format(making.kept_as, backbone.config.hidden_size)
    vocabulary = vocabulary_of(backbone.tokenizer_json) if making.guesses else None  # before anything is counted
    given = _given(examples, backbone.embeds.preprocessing)
    texts = _texts(backbone, given, making)
    sweep(destination.parent, MAKING, WEEK_SECONDS)
    sweep_siblings(destination.parent)
    with _kept(checkpoints, destination.parent) as folder:
        chosen = _chosen(backbone, given, texts, layers, folder, making)
        keys, found = (root_keys(own, layers.window, words, forms) for own in chosen)
        texts = [_at_levels(own, layers, found) for own in _drawn(texts, making)]
        tables, kept = folder / PLOT / TABLES, folder / PLOT / LAYERS
        for own in (tables, kept):
            own.mkdir(parents=True, exist_ok=True)
        base = dict(backbone.params)
        model, losses = Hierarchical(layers.start(base), layers.start_upper(base)), None
        if making.plan.epochs:
            with _keeping(folder / "root", backbone.fingerprint, layers, making.plan, making.guesses, texts) as keeper:
                model, each = adapt(
                    layers,
                    base,
                    texts,
                    vocabulary,
                    making.plan,
                    guesses=making.guesses,
                    keeper=keeper,
                    pad_id=TextEncoder.of(backbone).pad_id,
                    report=making.step,
                )
            losses = first_and_last(each)
        _check_finite(losses, model)
        digest = write_layers(kept, model.ngrams)
        table = build_table(tables, layers, model.ngrams, digest, keys, kept_as=making.kept_as, report=making.report)
        whole = {"source": source, "fingerprint": backbone.fingerprint, "above": digest_above(backbone, layers)}
        branch = Branch(table.stem, digest, {**_details(making, examples, keys), "whole": whole})
        width = backbone.config.hidden_size
        looked_up = None if forms is None else write_forms(folder / PLOT / FORMS, forms)
        tree = Tree(layers.window, width, count, branch, kept_as=making.kept_as, forms=looked_up)
        tree.write(folder / PLOT)
        upper = jax.tree.map(np.asarray, model.upper)
        tensors = from_params(upper, layers.upper)
        made = Backbone.of_tensors(name, layers.upper, tensors, backbone.tokenizer_json, backbone.embeds, tree.vectors)
        write_native(made, destination, folder / PLOT)
    return Made(branch, losses)


def make_domain(
    folder: Path,
    name: str,
    examples: Sequence[Example],
    making: Making,
    checkpoints: Path | None = None,
    whole: Backbone | None = None,
) -> Made:
    """Adds a domain to the tables of a backbone's ``folder``, or replaces it, as ``build_domain`` makes it.

    Servers take the new table without a stop. Raises ``InvalidInput``, ``OutOfSpace``, and ``Conflict`` where a domain
    of that name with other n-gram layers came meanwhile.
    """
    before = Tree.read(folder / PLOT).domains.get(name)
    made = build_domain(folder, name, examples, making, checkpoints, whole)

    def having(tree: Tree) -> Tree:
        present = tree.domains.get(name)
        if present is not None and present != before and present.layers != made.branch.layers:
            raise Conflict(f"another process made domain {name!r} meanwhile; choose another name, or make it again")
        return tree.having(name, made.branch)

    Tree.change(folder / PLOT, having)
    return made


def build_domain(
    folder: Path,
    name: str,
    examples: Sequence[Example],
    making: Making,
    checkpoints: Path | None = None,
    whole: Backbone | None = None,
) -> Made:
    """Writes what a domain needs beside the tables of a backbone's ``folder``, where nothing names it yet: its n-gram
    layers are the root's trained further on its texts, and its table has their most frequent n-grams. Without epochs a
    domain that is there keeps its layers.

    ``whole`` is the backbone that the root was made of; by default it is loaded from where it was then. Raises
    ``InvalidInput``, also for too few texts, ``OutOfSpace``.
    """
    check_id(name)
    if not os.access(folder / PLOT, os.W_OK):
        raise InvalidInput(f"folder {folder.name} of the backbone must be writable, to add a domain to its tables")
    for own, prefix in [(TABLES, BUILDING), (LAYERS, TEMPORARY), ("", TEMPORARY), ("", MAKING)]:
        sweep(folder / PLOT / own, prefix, WEEK_SECONDS)
    backbone = read_native(folder)
    tree = Tree.read(folder / PLOT)
    kept_layers = name if not making.plan.epochs and name in tree.domains else None
    layers, model = opened_layers(backbone, folder, kept_layers)
    plain = dataclasses.replace(backbone, tables=None)
    given = _given(examples, Preprocessing())  # which tasks are trained by
    texts = _texts(plain, given, making)
    if (found := sum(len(own.ids) for own in texts)) < LEAST_TOKENS:
        raise InvalidInput(
            f"a domain needs texts of at least {LEAST_TOKENS:,} tokens, found {found:,}, of each text the first "
            f"{making.max_length}; give more or shorter ones, or use the root"
        )
    lower, losses, vocabulary = model.ngrams, None, None
    if making.plan.epochs:  # before anything is counted, which takes long
        whole = whole or load_whole(tree)
        check_whole(whole, tree, layers)
        vocabulary = vocabulary_of(backbone.tokenizer_json) if making.guesses else None
    with _kept(checkpoints, folder / PLOT) as kept:
        keys, found_there = _chosen(plain, given, texts, layers, kept, making)
        known = Table(table_path(folder / PLOT, tree.root), tree.info(tree.root)).keys
        texts = [_at_levels(own, layers, known, found_there) for own in _drawn(texts, making)]
        if making.plan.epochs:
            assert whole is not None
            run = (backbone.fingerprint, whole.fingerprint, layers, making.plan, making.guesses, texts)
            with _keeping(kept / "domain", *run) as keeper:
                lower, each = train_domain(
                    layers,
                    model,
                    dict(whole.params),
                    texts,
                    vocabulary,
                    making.plan,
                    guesses=making.guesses,
                    keeper=keeper,
                    pad_id=TextEncoder.of(plain).pad_id,
                    report=making.step,
                )
            losses = first_and_last(each)
        _check_finite(losses, lower)
        digest = write_layers(folder / PLOT / LAYERS, lower)
        named = {own.table for own in (tree.root, *tree.domains.values())}
        table = build_table(
            folder / PLOT / TABLES,
            layers,
            lower,
            digest,
            keys,
            kept_as=tree.kept_as,
            report=making.report,
            named=named,
        )
    return Made(Branch(table.stem, digest, _details(making, examples, keys)), losses)


def opened_layers(backbone: Backbone, folder: Path, domain: str | None = None) -> tuple[NGramLayers, Hierarchical]:
    """The n-gram layers of a backbone's ``folder``, and the parameters of the root, or those of a ``domain``."""
    tree = Tree.read(folder / PLOT)
    branch = tree.root if domain is None else tree.branch(domain)
    whole = whole_config(backbone.config, tree.count)
    word = backbone.params["word"]
    upper = {name: own for name, own in backbone.params.items() if name != "table"}
    lower = read_layers(folder / PLOT / LAYERS, branch.layers, word)
    forms = tree.read_forms(folder / PLOT, whole.vocab_size)
    return NGramLayers(whole, tree.window, tree.count, forms), Hierarchical(lower, upper)


def whole_config(upper: BackboneConfig, count: int) -> BackboneConfig:
    """The shape of the backbone whose first ``count`` layers tables stand for."""
    layers = upper.layers + count
    return dataclasses.replace(upper, layers=layers, window=(0, 0), table_rows=0, table_format="bfloat16")


def _given(examples: Sequence[Example], rule: Preprocessing) -> list[Given]:
    """What ``rule`` makes of texts and pairs: as those will be that are looked up."""
    return [prepared(each.plain, each.text_pair, rule) for each in examples]


def _texts(backbone: Backbone, given: Sequence[Given], making: Making) -> list[Tokens]:
    """Tokens to train on."""
    rule = Preprocessing(max_length=min(making.max_length, backbone.config.max_positions), truncation=True)
    encoder = TextEncoder.of(backbone)
    return [encoder.encode(Query(None, *each), rule) for each in given]


def _drawn(texts: Sequence[Tokens], making: Making) -> Sequence[Tokens]:
    """The texts that are trained on, in their order."""
    if making.sample is None or making.sample >= len(texts):
        return texts
    drawn = np.random.default_rng(making.plan.seed).choice(len(texts), making.sample, replace=False)
    return [texts[at] for at in np.sort(drawn).tolist()]


def _at_levels(
    text: Tokens, layers: NGramLayers, root: Shaped[np.ndarray, " k"], domain: Shaped[np.ndarray, " d"] | None = None
) -> Tokens:
    """A text to train on as tables will hold it: what serves it is what learns from it."""
    grams = ngrams(layers.normal(text.ids), None, layers.window)
    return text._replace(levels=levels_of(grams, root, layers.window, domain))


def _chosen(
    backbone: Backbone,
    given: Sequence[Given],
    texts: Sequence[Tokens],
    layers: NGramLayers,
    folder: Path,
    making: Making,
) -> Chosen:
    """The n-grams of whole texts that a table holds, and those that are found while ``texts`` are trained on."""
    encoder, short = TextEncoder.for_length(backbone, WHOLE), backbone.config.max_positions

    def ids_of(text: Given, most: int = WHOLE) -> Any:
        try:
            return encoder.encode(Query(None, *text), Preprocessing(truncation=True, max_length=most), most).ids
        except InputTooLong:  # it has no place where it could be cut
            if most == short:
                raise
            return ids_of(text, short)

    def each(start: int) -> Iterator[Any]:
        for number, text in enumerate(given[start:], start + 1):
            yield layers.normal(ids_of(text))
            if number % 1000 == 0 or number == len(given):
                making.report("texts counted", number, len(given))

    trained = [layers.normal(own.ids) for own in texts]
    with claimed(folder / COUNTS, backbone.fingerprint, layers, making.share, making.max_length, given):
        return choose(each, trained, layers.window, making.share, folder / COUNTS)


def _details(making: Making, examples: Sequence[Example], keys: Shaped[np.ndarray, " k"]) -> dict[str, Any]:
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "texts": len(examples),
        "share": making.share,
        "entries": len(keys),
        "epochs": making.plan.epochs or 0,
    }


def _check_finite(losses: tuple[float, float] | None, params: Any) -> None:
    """Raises ``InvalidInput``."""
    found = all(map(math.isfinite, losses or ()))
    if not found or not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params)):
        raise InvalidInput("losses or weights are not finite: training diverged; try a lower rate")


@contextlib.contextmanager
def _kept(checkpoints: Path | None, parent: Path) -> Iterator[Path]:
    """The folder that a killed run goes on from; without one, a folder in ``parent`` that goes at the end."""
    if checkpoints is not None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        yield checkpoints
        return
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=MAKING, dir=parent) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _keeping(folder: Path, *run: Any) -> Iterator[Keeper]:
    with claimed(folder, *run), contextlib.closing(Checkpoints(folder)) as keeper:
        yield keeper
