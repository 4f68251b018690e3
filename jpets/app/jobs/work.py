"""What jobs do: fine-tune a task, extract one, train a backbone further, make a domain of tables."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jpets.errors import InvalidInput
from serving.jobs.folder import JobFolder, JobResult
from serving.jobs.request import Extract, FineTune, FurtherPretrain, MakeDomain, MakeStudents

if TYPE_CHECKING:
    from jpets.training.data import Columns, Example
    from jpets.training.plan import Training
    from jpets.training.run import UpdateReport
    from jpets.types import Task

    Report = Callable[[UpdateReport], None]

log = logging.getLogger("jpets.job")

TRAIN, VALIDATION, TEXTS = "train", "validation", "texts"
"""Files of an archive: labelled texts, held-out ones, and texts without labels."""


def do(job: JobFolder, places: Sequence[str], report: Report) -> JobResult:
    """Makes what the job asks for, and writes it to its folder. ``places`` are the source and name of its backbone, of
    several each, and then those of a teacher's, or of the backbone that a root was made of.

    Raises ``JpetsError`` for what the job asks and cannot have.
    """
    request = job.request
    source, name, *others = places
    log.info(request.kind, extra={**request.model_dump(include={"method"}), "attempt": job.state.attempts})
    if isinstance(request, FineTune):
        return _fine_tune(job, request, source, name, report)
    if isinstance(request, Extract):
        return _extract(job, request, source, name)
    if isinstance(request, MakeDomain):
        return _make_domain(job, request, Path(source), others, report)
    if isinstance(request, MakeStudents):
        return _make_students(job, request, list(zip(places[::2], places[1::2], strict=True)), report)
    return _further_pretrain(job, request, source, name, report)


def training_of(request: FineTune) -> Training:
    """A job's request as ``jpets.training`` takes it."""
    from jpets.training.plan import Training, TrainingPlan

    assert request.method is not None
    plan = TrainingPlan(
        request.epochs,
        request.batch,
        request.accumulate,
        request.rate,
        request.head_rate,
        request.warm_up,
        patience=request.patience,
        dtype=request.dtype,
        seed=request.seed,
    )
    return Training(
        request.method,
        request.settings,
        plan,
        request.held_out,
        request.max_length,
        request.pooling or Training.pooling,
        request.balanced,
        request.problem,
        request.head,
        request.domain,
        request.truncation_strategy,
    )


def _fine_tune(job: JobFolder, request: FineTune, source: str, name: str, report: Report) -> JobResult:
    from jpets.training.data import Columns, contradictions, label_column

    columns = Columns(request.text, request.text_pair, label_column(request.label, request.head))
    sides = texts_of(job.data, {TRAIN: columns, VALIDATION: columns})
    examples, held_out = sides[TRAIN], sides.get(VALIDATION, [])
    _check_held_out(request, held_out)
    log.info("read", extra={"texts": len(examples), "held_out": len(held_out)})

    from checkpoints.source import load_backbone  # these take seconds: bad data are refused before
    from checkpoints.task_file import read_task, write_task
    from checkpoints.validation import validate
    from jpets.training.plan import rates_of
    from jpets.training.summary import IDLE, chosen, held_against
    from jpets.training.sweep import best_of

    training = training_of(request)
    rates = rates_of(request.sweep, request.rate)
    backbone = load_backbone(source, name)

    def begin(task: Task) -> None:
        validate(task, backbone.config, backbone.ref())
        write_task(task, job.outline_file)

    start = None
    if request.start is not None:
        start = read_task(job.start_file, id=request.start, config=backbone.config, backbone=backbone.ref())

    def told(rate: float | None, step: UpdateReport) -> None:
        report(step.within(f"rate {rate:g}") if rate is not None and len(rates) > 1 else step)

    result, rate = best_of(
        rates,
        request.task,
        backbone,
        training,
        examples,
        held_out,
        start=start,
        folder=job.checkpoints,
        report=told,
        begin=begin,
    )
    validate(result.task, backbone.config, backbone.ref())
    write_task(result.task, job.task_file)
    scores = _finite({**result.scores, **({"rate": rate} if request.sweep is not None and rate is not None else {})})
    warnings = [IDLE] if not result.gained else []
    if count := contradictions(examples):
        warnings.append(f"{count} rows have the text of an earlier row with another label")
    for warning in warnings:
        log.warning("%s", warning)
    log.info("trained", extra={"held_out_loss": result.held_out, **{f"score_{name}": scores[name] for name in scores}})
    updates = len(result.losses) // request.accumulate
    return JobResult(
        held_out_loss=result.held_out,
        scores=scores,
        updates=updates,
        chosen=chosen(result, training.method),
        held_against=_finite(held_against(result)),
        warnings=warnings,
    )


def _check_held_out(request: FineTune | MakeStudents, given: Sequence[Example]) -> None:
    """Raises ``InvalidInput`` where both a share and a file say what is held out."""
    if given and request.held_out != type(request).model_fields["held_out"].default:
        raise InvalidInput(f"held_out: the archive's {VALIDATION} gives all that are held out; leave one of them out")


def texts_of(data: Path, sides: Mapping[str, Columns]) -> dict[str, list[Example]]:
    """The texts of each of the ``sides``: of a single file those of the first one; an archive has a file of each name,
    the first at least. Raises ``InvalidInput``, ``InvalidTask``."""
    from checkpoints.imports.archive import open_folder
    from jpets.training.data import read_examples

    first, *others = sides
    if data.suffix != ".zip":
        return {first: read_examples(data, sides[first])}
    with open_folder(data) as folder:
        files = sorted(folder.iterdir())
        names = [path.stem if path.is_file() else "" for path in files]  # folders could name files of others
        if first not in names or len(set(names)) < len(names) or not set(names) <= sides.keys():
            found, may_have = [path.name for path in files][:20], " and ".join(f"{name}.csv" for name in others)
            raise InvalidInput(f"expected an archive of {first}.csv (or another format) and {may_have}, found {found}")
        return {name: read_examples(path, sides[name]) for name, path in zip(names, files, strict=True)}


def _extract(job: JobFolder, request: Extract, source: str, name: str) -> JobResult:
    from checkpoints.imports.archive import open_folder
    from checkpoints.imports.extract import Extraction
    from checkpoints.imports.heads import Wishes
    from checkpoints.imports.task import make_task
    from checkpoints.source import load_backbone
    from checkpoints.task_file import write_task
    from jpets.app.jobs.extraction import extracted_model
    from jpets.training.data import Columns, read_examples

    labels = tuple(each.strip() for each in request.labels.split(",")) if request.labels else ()
    wishes = Wishes(
        request.head,
        request.problem,
        labels,
        request.pooling,
        request.normalize,
        request.max_length,
        request.truncation_strategy,
    )
    how = None
    if request.method != "auto":
        how = Extraction(
            request.method, request.density, request.per_matrix, request.block, request.rank, request.energy
        )
    with open_folder(job.data) as folder:
        texts = []
        if request.texts is not None:
            if not (folder / request.texts).is_file():
                raise InvalidInput(f"texts: expected a file {request.texts} in the archive, found none")
            texts = read_examples(folder / request.texts, Columns(request.text, request.text_pair, None))
        backbone = load_backbone(source, name)
        imported, chosen = extracted_model(folder, backbone, wishes, how, texts, request.agreement)
        write_task(make_task(request.task, imported, backbone), job.task_file)
    scores = {"most_lost": max(chosen.losses.values(), default=0.0)}
    if chosen.agreement is not None:
        scores["agreement"] = chosen.agreement
    for note in imported.notes:
        log.warning(note)
    log.info("extracted", extra={"how": str(chosen.how), **scores})
    return JobResult(scores=_finite(scores), extracted=str(chosen.how))


def _further_pretrain(job: JobFolder, request: FurtherPretrain, source: str, name: str, report: Report) -> JobResult:
    from jpets.training.data import Columns, read_examples

    examples = read_examples(job.data, Columns(request.text, None, None))

    from checkpoints.native import write_native
    from checkpoints.source import load_backbone
    from jpets.app.jobs.further import chosen_layers, first_and_last, further_pretrained
    from jpets.training.plan import TrainingPlan

    backbone = load_backbone(source, name)
    plan = TrainingPlan(request.epochs, request.batch, rate=request.rate, dtype=request.dtype, seed=request.seed)
    layers = chosen_layers(request.layers, backbone.config.layers)
    made, losses = further_pretrained(
        backbone, request.name, examples, layers, request.max_length, plan, folder=job.checkpoints, report=report
    )
    if not job.backbone.exists():
        write_native(made, job.backbone)
    first, last = first_and_last(losses)
    scores = {"first_loss": first, "last_loss": last}
    log.info("trained", extra=scores)
    return JobResult(scores=_finite(scores), updates=len(losses))


def _make_domain(
    job: JobFolder, request: MakeDomain, folder: Path, of_whole: Sequence[str], report: Report
) -> JobResult:
    from jpets.training.data import Columns, read_examples

    examples = read_examples(job.data, Columns(request.text, request.text_pair, None))

    from checkpoints.native import PLOT
    from checkpoints.source import load_backbone
    from jpets.app.jobs.tables import Making, build_domain
    from jpets.plot.holds import hold
    from jpets.training.plan import TrainingPlan
    from jpets.training.run import UpdateReport

    def counted(what: str, done: int, of: int | None) -> None:
        report(UpdateReport(done, of or done, math.nan, what))

    plan = TrainingPlan(request.epochs, request.batch, rate=request.rate, dtype=request.dtype, seed=request.seed)
    making = Making(
        plan, request.share, request.max_length, request.guesses, request.sample, report=counted, step=report
    )
    whole = load_backbone(*of_whole) if of_whole else None
    made = build_domain(folder, request.domain, examples, making, job.checkpoints, whole)
    hold(folder / PLOT, made.branch.files, job.data)  # its backbone may not be loaded for days
    scores = {"entries": float(made.branch.details["entries"])}
    if made.losses is not None:
        scores |= {"first_loss": made.losses[0], "last_loss": made.losses[1]}
    log.info("made", extra=scores)
    return JobResult(scores=_finite(scores), branch=dataclasses.asdict(made.branch))


def _make_students(
    job: JobFolder, request: MakeStudents, places: Sequence[tuple[str, str]], report: Report
) -> JobResult:
    from jpets.training.data import Columns

    labelled, plain = (Columns(request.text, request.text_pair, label) for label in (request.label, None))
    sides = texts_of(job.data, {TRAIN: labelled, VALIDATION: labelled, TEXTS: plain})
    _check_held_out(request, sides.get(VALIDATION, ()))

    from checkpoints.source import load_backbone
    from checkpoints.task_file import read_task
    from jpets.app.jobs.students import GroupTexts, make_group
    from jpets.students.teacher import Teacher

    *shallow, deep = [load_backbone(*place) for place in places]
    teacher = Teacher(read_task(job.start_file, id=request.teacher, config=deep.config, backbone=deep.ref()), deep)
    made = make_group(
        request.task,
        shallow,
        teacher,
        GroupTexts(sides[TRAIN], sides.get(VALIDATION, ()), sides.get(TEXTS, ())),
        request,
        job.task_file,
        folder=job.checkpoints,
        report=lambda what, step: report(step.within(what)),
    )
    scores = {**made.scores[made.best - 1], "students": float(made.best)}
    log.info("trained", extra=scores)
    against = {f"teacher's {name}": value for name, value in made.teacher.items()}
    own = made.task.backbone.name
    chosen = f"{made.best} students on {own}"
    return JobResult(scores=_finite(scores), held_against=_finite(against), chosen=chosen, backbone=own)


def _finite(scores: Mapping[str, float]) -> dict[str, float | None]:
    return {name: score if math.isfinite(score) else None for name, score in scores.items()}
