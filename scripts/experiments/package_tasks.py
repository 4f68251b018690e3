"""Fourteen tasks over the descriptions of Debian packages: one label, several labels, and tags of words."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from experiments.debian_packages import QUESTIONS, Package, Split, read_packages, split
from experiments.package_mentions import TAGS, Mentions
from jpets.training.data import Example

TaskKind = Literal["single-label", "multi-label", "tags"]
SECTION, TEXT = "section", "text"
SHARE = 0.125
"""Texts to choose the best epoch by, over those to train on."""


@dataclasses.dataclass(frozen=True)
class Described:
    """What is known of one package. ``tags`` are the values of each Debtags facet."""

    name: str
    text: str
    section: str
    tags: Mapping[str, Sequence[str]]
    split: Split


@dataclasses.dataclass(frozen=True)
class PackageTask:
    """One task: what ``field`` says (the section, a facet, or the text itself), among ``labels``."""

    kind: TaskKind
    field: str
    labels: tuple[str, ...]

    @property
    def metric(self) -> str:
        """The score of the task."""
        return {"single-label": "accuracy", "multi-label": "f1_micro", "tags": "entity_f1"}[self.kind]


@dataclasses.dataclass(frozen=True)
class Data:
    """``chosen_by``: held out of the training side, to choose the best epoch."""

    train: list[Example]
    chosen_by: list[Example]
    test: list[Example]


def _several(field: str, labels: str) -> PackageTask:
    return PackageTask("multi-label", field, tuple(labels.split()))


def _one(field: str, labels: str) -> PackageTask:
    return PackageTask("single-label", field, tuple(labels.split()))


TASKS: Mapping[str, PackageTask] = {
    **{name: PackageTask("single-label", asked.field, asked.labels) for name, asked in QUESTIONS.items()},
    "suite": _one("suite", "apache debian emacs gnome gnu gnustep kde openstack xfce"),
    "material": _one("made-of", "dictionary font html icons"),
    "subject": _several(
        "field",
        "arts biology biology:bioinformatics chemistry electronics finance geography linguistics mathematics medicine "
        "physics statistics",
    ),
    "interface": _several("interface", "3d commandline daemon graphical shell text-mode web x11"),
    "purpose": _several(
        "use",
        "analysing browsing chatting checking compressing configuring converting downloading editing gameplaying "
        "learning login monitor organizing playing scanning searching storing synchronizing timekeeping viewing",
    ),
    "data": _several(
        "works-with",
        "archive audio db dictionary file image image:raster image:vector logfile mail network-traffic "
        "software:package software:running software:source text video",
    ),
    "development": _several(
        "devel",
        "buildtools doc ecma-cli examples interpreter lang:c lang:c++ lang:haskell lang:java lang:ocaml lang:perl "
        "lang:python library testing-qa",
    ),
    "administration": _several(
        "admin",
        "backup boot configuring filesystem hardware kernel login logging monitoring package-management "
        "user-management virtualization",
    ),
    "mentions": PackageTask("tags", TEXT, TAGS),
}
"""The five questions of the demo, then facets with enough packages in Debian 12: at least 50 for every label. Only
packages that carry the facet take part: others may just not have been tagged."""


def described(packages: Iterable[Package]) -> list[Described]:
    return [Described(p.name, p.text, p.section, p.tags, split(p)) for p in packages]


def read_described(path: pathlib.Path) -> list[Described]:
    """What ``debian_packages.py`` wrote. Files of before it kept all tags have the facets with one value only."""
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    return [_of_record(json.loads(line)) for line in lines]


def known_packages(path: pathlib.Path | None) -> list[Described]:
    """Packages of a file, or else of this machine's index."""
    return read_described(path) if path is not None else described(read_packages())


def _of_record(record: Mapping[str, Any]) -> Described:
    tags = record["tags"] if "tags" in record else {facet: [value] for facet, value in record["facets"].items()}
    return Described(record["name"], record["text"], record["section"], tags, record["split"])


def labelled(packages: Sequence[Described], task: PackageTask) -> list[tuple[Split, Example]]:
    """Every package that has an answer, on its side of the split."""
    if task.kind == "tags":
        return _tagged(packages)
    found = []
    for package in packages:
        values = [package.section] if task.field == SECTION else package.tags.get(task.field, ())
        known = [value for value in values if value in task.labels]
        if task.kind == "multi-label" and known:
            found.append((package.split, Example(package.text, None, known)))
        elif task.kind == "single-label" and known and len(values) == 1:
            found.append((package.split, Example(package.text, None, known[0])))
    return found


def _tagged(packages: Sequence[Described]) -> list[tuple[Split, Example]]:
    """Descriptions that mention a package; those that do not would be nine of ten."""
    mentions = Mentions((package.name, package.text) for package in packages)
    found = []
    for package in packages:
        words = package.text.split()
        tags = mentions.tags(words)
        if "B-PKG" in tags:
            found.append((package.split, Example(tuple(words), None, tags)))
    return found


def draw(
    packages: Sequence[Described], task: PackageTask, train: int, test: int, seed: int, share: float = SHARE
) -> Data:
    """At most so many texts; the test texts are the same for all seeds. Every label occurs in training.

    ``share`` is how many are held out of the training side, over those to train on.
    """
    every = labelled(packages, task)
    sides = {side: [example for own, example in every if own == side] for side in ("train", "test")}
    order = np.random.default_rng([seed, 1]).permutation(len(sides["train"]))
    pool = _all_labels_first([sides["train"][at] for at in order])
    chosen = np.random.default_rng(0).permutation(len(sides["test"]))[:test]
    count = min(train, round(len(pool) / (1 + share)))
    known = {label for example in pool[:count] for label in _labels(example)}
    others = [example for example in pool[count:] if _labels(example) <= known]
    tests = [sides["test"][at] for at in chosen]
    return Data(
        pool[:count],
        others[: max(1, round(share * count))],
        [example for example in tests if _labels(example) <= known],
    )


def _labels(example: Example) -> set[str]:
    return set(example.label) if isinstance(example.label, list) else {example.label}


def _all_labels_first(examples: Sequence[Example]) -> list[Example]:
    """The same examples, beginning with one that brings each label that none before had."""
    known: set[str] = set()
    first: list[Example] = []
    later: list[Example] = []
    for example in examples:
        (later if _labels(example) <= known else first).append(example)
        known |= _labels(example)
    return first + later
