"""``jpets train`` on this machine: a task from one file of labelled texts, or from each of several."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from jpets.app.commands.options import SUFFIX, check_task_output, check_tasks_output
from jpets.app.commands.output import busy, print_fields, print_json, print_table, print_warning, progress_bars, size
from jpets.errors import InvalidInput, JpetsError

if TYPE_CHECKING:
    import jax

    from checkpoints.backbone import Backbone
    from jpets.training.data import Columns
    from jpets.training.plan import Training
    from jpets.training.session import Result


def train_one(
    data: Path,
    validation: Path | None,
    output: Path,
    backbone: str,
    columns: Columns,
    training: Training,
    *,
    goes_by_start: bool,
    sweep: str | None,
    start: str | None,
    checkpoints: Path | None,
    devices: int,
    as_json: bool,
) -> None:
    """Writes one task file. ``goes_by_start``: by the method of the task to go on from, if there is one."""
    from checkpoints.ids import check_id
    from checkpoints.source import load_backbone
    from checkpoints.task_file import read_task
    from jpets.training.data import contradictions, read_examples
    from jpets.training.plan import check_rates, rates_of
    from jpets.training.summary import chosen, held_against
    from jpets.training.sweep import best_of

    check_task_output(output)
    id = check_id(output.stem.lower())
    check_rates(sweep, training.plan.rate, training.method)
    rates = rates_of(sweep, training.plan.rate)
    with busy("read texts"):
        examples = read_examples(data, columns)
        others = read_examples(validation, columns) if validation is not None else []
    with busy("read backbone"):
        loaded = load_backbone(backbone)
    earlier = None
    if start is not None:
        if not Path(start).is_file():
            raise typer.BadParameter(f"--from must be a task file, found {start!r}")
        earlier = read_task(Path(start), config=loaded.config, backbone=loaded.ref())
        if goes_by_start and earlier.deltas:
            training = dataclasses.replace(training, method=cast("Any", earlier.deltas[0].method))
    method = training.method
    with progress_bars() as bars:
        shown = {own: bars.add_task(method if own is None else f"{method} at {own:.1e}", total=None) for own in rates}
        best, _ = best_of(
            rates,
            id,
            loaded,
            training,
            examples,
            others,
            start=earlier,
            folder=checkpoints,
            devices=_found_devices(devices),
            report=lambda own, step: bars.update(
                shown[own], completed=step.number, total=step.of, description=f"{method}, loss {step.loss:.3f}"
            ),
        )
    summary = _written(best, output, loaded, training, contradictions(examples))
    if as_json:
        print_json(summary | {"settings": dataclasses.asdict(training), "losses": list(best.losses)})
        return
    rows = [(name, f"{value:.4f}") for name, value in best.scores.items()]
    print_fields(
        [
            ("file", output.name),
            ("size", size(summary["bytes"])),
            ("texts", f"{best.texts[0]} to train on, {best.texts[1]} held out"),
            ("chosen", chosen(best, training.method)),
            ("held-out loss", f"{best.held_out:.4f}"),
            *rows,
            *((name, f"{value:.4f}") for name, value in held_against(best).items()),
        ]
    )
    _warn({id: best}, {id: summary["contradictions"]})


def train_each(
    data: Sequence[Path], output: Path, backbone: str, columns: Columns, training: Training, *, as_json: bool
) -> None:
    """Writes a task file of each file's name into the folder ``output``; the tasks are trained together.

    Raises ``InvalidInput`` in the end for tasks that diverged or could not be written; the others are kept.
    """
    from checkpoints.ids import check_id
    from checkpoints.source import load_backbone
    from jpets.training.data import contradictions, read_examples
    from jpets.training.many import check_method, train_many
    from jpets.training.plan import check_rates
    from jpets.training.run import DIVERGED

    check_method(training.method)
    check_rates(None, training.plan.rate, training.method)
    ids = [check_id(path.stem.lower()) for path in data]
    if twice := next((id for id in ids if ids.count(id) > 1), None):
        raise typer.BadParameter(f"each file makes a task of its own name, found {twice!r} more than once")
    check_tasks_output(output, ids)
    with busy("read texts"):
        examples = {id: read_examples(path, columns) for id, path in zip(ids, data, strict=True)}
    with busy("read backbone"):
        loaded = load_backbone(backbone)
    with progress_bars() as bars:
        bar = bars.add_task(training.method, total=None)
        found = train_many(
            loaded,
            training,
            examples,
            report=lambda step: bars.update(
                bar, completed=step.number, total=step.of, description=f"{training.method}, mean loss {step.loss:.3f}"
            ),
        )
    summaries, problems = [], {}
    for id, result in found.items():
        try:
            if not math.isfinite(result.held_out):
                raise InvalidInput(DIVERGED)
            output.mkdir(exist_ok=True)
            summaries.append(_written(result, output / f"{id}{SUFFIX}", loaded, training, contradictions(examples[id])))
        except (JpetsError, OSError) as error:
            problems[id] = str(error)
    if as_json:
        print_json({"settings": dataclasses.asdict(training), "tasks": summaries})
    elif summaries:
        _print_tasks(summaries)
        _warn(found, {each["file"].removesuffix(SUFFIX): each["contradictions"] for each in summaries})
    if problems:
        told = "; ".join(f"{id}: {problem}" for id, problem in problems.items())
        raise InvalidInput(told + ("; the other tasks are written" if summaries else ""))


def _print_tasks(summaries: Sequence[dict[str, Any]]) -> None:
    scores = [each["scores"] | each["held_against"] for each in summaries]
    names = list(dict.fromkeys(name for own in scores for name in own))
    rows = [
        (each["file"], size(each["bytes"]), f"{each['held_out_loss']:.4f}", *_scores(own, names))
        for each, own in zip(summaries, scores, strict=True)
    ]
    print_table(("file", "size", "held-out loss", *names), rows, numbers=("size", "held-out loss", *names))


def _warn(found: Mapping[str, Result], contradictions: Mapping[str, int]) -> None:
    """Names the tasks that training did not improve, and texts that contradict each other."""
    from jpets.training.summary import IDLE

    if idle := [id for id in contradictions if not found[id].gained]:
        print_warning(f"{IDLE}: {_named(idle)}. Give more texts, or try --sweep rate=LOW..HIGH or another --method")
    if unsure := [id for id, count in contradictions.items() if count]:
        count = sum(contradictions.values())
        print_warning(f"{count} rows have the text of an earlier row with another label: {_named(unsure)}")


def _named(ids: Sequence[str]) -> str:
    return ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")


def _written(result: Result, path: Path, backbone: Backbone, training: Training, contradictions: int) -> dict[str, Any]:
    """Writes a trained task, and returns what there is to say about it."""
    from checkpoints.task_file import write_task
    from checkpoints.validation import validate
    from jpets.training.summary import held_against

    validate(result.task, backbone.config, backbone.ref())
    write_task(result.task, path)
    return {
        "file": path.name,
        "method": training.method,
        "rate": result.outcome.rate,
        "epochs": result.plan.epochs,
        "batch": result.plan.batch,
        "texts": {"trained": result.texts[0], "held_out": result.texts[1]},
        "contradictions": contradictions,
        "held_out_loss": result.held_out,
        "scores": dict(result.scores),
        "held_against": dict(held_against(result)),
        "gained": result.gained,
        "updates": len(result.losses) // training.plan.accumulate,
        "bytes": path.stat().st_size,
    }


def _scores(found: Mapping[str, float], names: Sequence[str]) -> list[str]:
    """A task's scores under the ``names`` of all tasks, empty where it has none of that name."""
    return [f"{found[name]:.4f}" if name in found else "" for name in names]


def _found_devices(count: int) -> list[jax.Device]:
    """The first ``count`` devices. Raises ``InvalidInput`` where there are fewer."""
    import jax

    found = jax.local_devices()
    if count > len(found):
        raise InvalidInput(f"--devices: expected at most {len(found)}, which this machine has, found {count}")
    return found[:count]
