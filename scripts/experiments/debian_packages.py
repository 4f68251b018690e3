"""The Debian package index as real text with real labels, for the demo and its tests.

Every Debian package has a description written by its maintainer and is filed under one section; about half also carry
Debtags, tags of the form ``facet::value`` given by hand (https://wiki.debian.org/Debtags). So one body of short texts
comes with several labellings that people made for use, which is what many small tasks over one backbone need.

The index is the one apt keeps on any Debian machine:

- ``apt-cache dumpavail`` gives each package's section, tags and one-line description;
- the long descriptions are in the ``Translation-en`` lists, which ``apt-get -o Acquire::Languages=en update`` fetches.
  The two are joined on ``Description-md5`` (https://wiki.debian.org/DebianRepository/Format). Without those lists
  ``text`` is the one-line description alone.

The result therefore depends on the machine's Debian release and on its package sources.
"""

import functools
import gzip
import hashlib
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import typer

if TYPE_CHECKING:
    from debian.deb822 import Deb822

Split = Literal["train", "test"]

APT_LISTS = Path("/var/lib/apt/lists")
APT_HELPER = "/usr/lib/apt/apt-helper"
LONG_DESCRIPTION_WORDS = 200
"""Enough to keep the closing "This package contains ..." paragraph of most packages, and some texts past 256 tokens."""
MAIL_ADDRESS = re.compile(r"\w@\w+\S*\.\w")
"""Left out of the texts: a person's address is no use as a feature and should not be copied into test data."""


@dataclass(frozen=True)
class Package:
    """One binary package. Its name is kept for reference only: it would give many labels away, so ``text`` omits it."""

    name: str
    source: str
    section: str
    text: str
    tags: Mapping[str, tuple[str, ...]]
    """The values of each Debtags facet."""

    @functools.cached_property
    def facets(self) -> Mapping[str, str]:
        """The facets with exactly one value."""
        return {facet: values[0] for facet, values in self.tags.items() if len(values) == 1}


@dataclass(frozen=True)
class Question:
    """One classification task: predict ``field`` (``section`` or a Debtags facet) when it is one of ``labels``."""

    field: str
    labels: tuple[str, ...]
    description: str


QUESTIONS: Mapping[str, Question] = {
    "topic": Question(
        field="section",
        labels=("admin", "database", "editors", "fonts", "games", "graphics", "localization", "mail",
                "math", "net", "science", "sound", "text", "video", "web", "x11"),
        description="The subject of a package filed by its subject",
    ),
    "ecosystem": Question(
        field="section",
        labels=("cli-mono", "gnu-r", "golang", "haskell", "java", "javascript", "lisp",
                "ocaml", "perl", "php", "python", "ruby", "rust"),
        description="The programming language of a package filed by its language",
    ),
    "role": Question(
        field="role",
        labels=("app-data", "data", "debug-symbols", "devel-lib", "documentation",
                "metapackage", "plugin", "program", "shared-lib"),
        description="What the package installs: a program, a library, its headers, documentation ...",
    ),
    "language": Question(
        field="implemented-in",
        labels=("c", "c++", "java", "lisp", "ocaml", "perl", "python", "shell"),
        description="The programming language the software is written in",
    ),
    "toolkit": Question(
        field="uitoolkit",
        labels=("gtk", "ncurses", "qt", "sdl", "xlib"),
        description="The library the software draws its user interface with",
    ),
}  # fmt: skip
"""Five tasks over the same texts, each with over 4,000 packages in Debian 12 and over 100 for every label; rarer labels
are left out. ``section`` makes two questions with disjoint labels, because it files some packages by their subject and
others by their programming language. ``topic`` keeps the sixteen largest sections that name a subject (so not ``libs``,
``doc``, ``utils``, ``misc``, ``gnome`` ...)."""


def read_packages() -> list[Package]:
    """Every package of the index, in index order, the first of each group whose texts differ only in their digits.

    Parallel versions (``gcc-11``, ``gcc-12``) come from different sources, so ``split`` alone could put the same text
    on both sides.
    """
    long_descriptions = _long_descriptions()
    packages: dict[str, Package] = {}
    for entry in _paragraphs("apt-cache", "dumpavail"):
        name = entry["Package"]
        package = Package(
            name=name,
            source=entry.get("Source", name).split()[0],  # "Source: glibc (2.36-9)" names a version that differs
            section=entry.get("Section", "").rpartition("/")[2],  # "contrib/games" is section games of contrib
            text=_text(long_descriptions.get(entry.get("Description-md5", ""), str(entry["Description"]))),
            tags=_facet_values(entry.get("Tag", "")),
        )
        packages.setdefault(re.sub(r"\d+", "", package.text), package)
    return list(packages.values())


def split(package: Package) -> Split:
    """Train (80 %) or test, by a hash of the source package, so that its near-identical binaries stay together."""
    digest = hashlib.sha256(package.source.encode()).digest()
    return "train" if int.from_bytes(digest) % 10 < 8 else "test"


def examples(packages: Iterable[Package], question: str, part: Split) -> tuple[list[str], list[str]]:
    """The texts and labels of one question (a key of ``QUESTIONS``) on one side of the split."""
    asked = QUESTIONS[question]
    answered = [(package.text, label(package, asked)) for package in packages if split(package) == part]
    return [text for text, answer in answered if answer], [answer for _, answer in answered if answer]


def label(package: Package, question: Question) -> str | None:
    """The package's answer to the question, or None where it has none among the question's labels."""
    value = package.section if question.field == "section" else package.facets.get(question.field)
    return value if value in question.labels else None


def stratified_sample(packages: Sequence[Package], size: int = 2000, seed: int = 0) -> list[Package]:
    """``size`` packages drawn evenly over all labels of all questions, so that the rarest label is well represented."""
    shuffled = [packages[int(i)] for i in np.random.default_rng(seed).permutation(len(packages))]
    strata = [
        [package for package in shuffled if label(package, question) == answer]
        for question in QUESTIONS.values()
        for answer in question.labels
    ]
    drawn = {package.name: package for turn in zip_longest(*strata) for package in turn if package is not None}
    return sorted(list(drawn.values())[:size], key=lambda package: package.name)


def _long_descriptions() -> dict[str, str]:
    """Whole English descriptions by their MD5; ``apt-helper`` undoes whichever compression apt keeps its lists in."""
    lists = [*APT_LISTS.glob("*_Translation-en"), *APT_LISTS.glob("*_Translation-en.*")]  # and not Translation-en_GB
    return {
        entry["Description-md5"]: entry["Description-en"]
        for path in lists
        for entry in _paragraphs(APT_HELPER, "cat-file", str(path))
    }


def _paragraphs(*command: str) -> "Iterator[Deb822]":
    """The entries of the Debian control data that a command prints."""
    from debian.deb822 import Deb822  # here, so that what is made of the packages does without it

    return Deb822.iter_paragraphs(subprocess.run(command, check=True, capture_output=True).stdout)


def _text(description: str) -> str:
    """One line: the short description, then the first words of the long one (where a lone "." is an empty line)."""
    short, _, long = description.partition("\n")
    lines = [line for line in long.splitlines() if line.strip() != "."]
    words = [word for line in lines for word in line.split() if not MAIL_ADDRESS.search(word)]
    sentences = [" ".join(short.split()), " ".join(words[:LONG_DESCRIPTION_WORDS])]
    return ". ".join(sentence for sentence in sentences if sentence)


def _facet_values(tags: str) -> dict[str, tuple[str, ...]]:
    """Each facet's values; ``TODO`` is Debtags' mark for a value still to be chosen, so not a label."""
    values: defaultdict[str, list[str]] = defaultdict(list)
    for tag in tags.replace("\n", " ").split(","):
        facet, _, value = tag.strip().partition("::")
        if value and value != "TODO":
            values[facet].append(value)
    return {facet: tuple(found) for facet, found in values.items()}


def main(rows: Literal["all", "sample"], out: Path) -> None:
    """Write all packages, or the fixed sample that the tests use, as JSON lines (gzipped where OUT ends in .gz)."""
    packages = read_packages()
    chosen = packages if rows == "all" else stratified_sample(packages)
    records = (
        {
            "name": p.name,
            "section": p.section,
            "text": p.text,
            "facets": dict(p.facets),
            "tags": p.tags,
            "split": split(p),
        }
        for p in chosen
    )
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    out.write_bytes(gzip.compress(data, mtime=0) if out.suffix == ".gz" else data)


if __name__ == "__main__":
    typer.run(main)
