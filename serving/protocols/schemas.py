"""The answers of the HTTP API, as the server builds them and the command line reads them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel

from jpets.access import DEFAULT_TENANT, Key, Limits, Scope
from serving.jobs.states import JobProgress, JobStateName

if TYPE_CHECKING:  # the command line starts faster without these imports
    from serving.hosted.repository import StoredTask
    from serving.jobs.folder import JobFolder


MOST_VERSIONS = (1 << 31) - 1
"""Of a task: what a column of the catalogue holds."""


class DeltaSummary(BaseModel):
    method: str


class TaskSummary(BaseModel):
    """``tenant`` owns the task; those of tenant ``default`` are shared with all."""

    id: str
    tenant: str = DEFAULT_TENANT
    version: int
    backbone: str
    deltas: list[DeltaSummary]
    head: str
    labels: list[str]
    bytes: int

    @property
    def methods(self) -> str:
        return ", ".join(delta.method for delta in self.deltas)

    @classmethod
    def of(cls, stored: StoredTask, **more: Any) -> Self:
        """``more`` are the fields that a subclass adds."""
        document = stored.metadata
        return cls(
            id=stored.id,
            tenant=stored.tenant,
            version=stored.version,
            backbone=document["backbone"]["name"],
            deltas=[DeltaSummary(method=delta["method"]) for delta in document["deltas"]],
            head=document["head"]["type"],
            labels=list(document.get("labels", ())),
            bytes=stored.bytes,
            **more,
        )


class TaskDetail(TaskSummary):
    """``metadata`` is the task file's own document; ``loaded`` is the version that queries get now, if any, and
    ``tier`` where it is: on the ``device``, in ``host`` memory, or in the ``repository`` only. ``devices`` are the
    numbers of those that serve it. ``versions`` are those that are kept, and ``served`` the one of them that a server
    gives to queries, if any; ``aliases`` name some of them, ``latest`` the served one. ``state`` is ``preparing`` while
    the newest one waits for the programs of its shape, with the ``problem`` of the last try if there was one, and
    ``failed``, with the ``problem``, where they cannot be had."""

    created: str
    digest: str
    loaded: int | None
    served: int | None = None
    versions: list[int] = []
    aliases: dict[str, int] = {}
    state: Literal["ready", "preparing", "failed"] = "ready"
    problem: str | None = None
    tier: Literal["device", "host", "repository"] | None = None
    devices: list[int] = []
    metadata: dict[str, Any]

    @classmethod
    def of(cls, stored: StoredTask, *, kept: Sequence[StoredTask] = (), **more: Any) -> Self:
        """``kept`` are all versions of the task."""
        known = {
            "created": stored.created,
            "digest": stored.digest,
            "metadata": dict(stored.metadata),
            "versions": [each.version for each in kept],
            "served": next((each.version for each in kept if each.served), None),
        }
        return super().of(stored, **known, **more)


class TaskVersion(TaskSummary):
    """One version of a task. ``state``: queries get the newest ``active`` one (``served``); ``uploaded`` is not active
    yet, and ``withdrawn`` was rolled back."""

    created: str
    digest: str
    state: Literal["uploaded", "active", "withdrawn"]
    served: bool

    @classmethod
    def of(cls, stored: StoredTask, **more: Any) -> Self:
        known = {"created": stored.created, "digest": stored.digest, "state": stored.state, "served": stored.served}
        return super().of(stored, **known, **more)


class VersionPage(BaseModel):
    """The oldest first; ``next`` is the ``after`` of the next page, null on the last one."""

    versions: list[TaskVersion]
    next: int | None


class TaskPage(BaseModel):
    """``next`` is the ``after`` of the next page, null on the last one."""

    tasks: list[TaskSummary]
    next: str | None


class LabelProb(BaseModel):
    label: str
    prob: float


class EntityItem(BaseModel):
    """What carries a label: ``text``, which stands at characters ``start`` to ``end`` (exclusive) of the input, of a
    pair's second text where ``in_pair`` is set. ``tokens`` are the positions of its tokens, except in a text that was
    read in windows, and ``word`` is what they spell."""

    label: str
    score: float
    start: int | None
    end: int | None
    text: str | None
    word: str | None
    in_pair: bool
    tokens: tuple[int, int] | None = None


class ItemError(BaseModel):
    code: str
    message: str


class FillItem(BaseModel):
    """A token in a mask's place, and the whole text with it."""

    token: int
    text: str
    score: float
    sequence: str


class ClassifyItem(BaseModel):
    """Which fields there are depends on the task's head; ``error``, in the mixed form only, replaces all others.

    ``values`` are a regression's outputs; its ``probs`` are the same, and its ``label`` the name of the largest one, if
    it has names. Where the only output stands for a probability, ``probs`` and ``score`` are its sigmoid.

    ``start`` and ``end`` (exclusive) are the characters of the context where ``answer`` stands. ``students``: how many
    of a group made the answer. ``shared_layers``: lower layers that were computed once for several tasks.
    """

    index: int
    model: str | None = None
    label: str | None = None
    probs: list[float] | None = None
    num_classes: int | None = None
    top: list[LabelProb] | None = None
    labels: list[str] | None = None
    values: list[float] | None = None
    entities: list[EntityItem] | None = None
    fills: list[list[FillItem]] | None = None
    answer: str | None = None
    score: float | None = None
    start: int | None = None
    end: int | None = None
    embedding: list[float] | None = None
    students: int | None = None
    shared_layers: int | None = None
    error: ItemError | None = None


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class ClassifyResponse(BaseModel):
    id: str
    object: str = "list"
    created: int
    model: str | None
    data: list[ClassifyItem]
    usage: Usage


class BackboneItem(BaseModel):
    """``state``: available (it may be loaded), starting, ready, draining or failed; ``problem`` says why it failed.
    ``progress`` is what a start is doing. ``tasks`` and ``device_bytes`` tell of all tenants: they are null for keys
    that do not administer."""

    name: str
    state: Literal["available", "starting", "ready", "draining", "failed"]
    default: bool
    problem: str | None = None
    progress: str | None = None
    fingerprint: str | None = None
    family: str | None = None
    hidden_size: int | None = None
    layers: int | None = None
    tasks: int | None = None
    device_bytes: int | None = None


class BackboneList(BaseModel):
    backbones: list[BackboneItem]


class StudentsItem(BaseModel):
    """How the groups of students on a backbone answer: of the largest one's students so many are ``answering`` now.
    ``drops`` and ``additions`` count changes since the start, ``answers`` answers by the number of students that made
    them; ``kept`` is by that number the mean share of the teacher's score that groups keep, as far as they say. The
    other fields are the rule: see the options ``--students...``."""

    backbone: str
    groups: int
    largest: int
    answering: int
    drops: int
    additions: int
    answers: dict[int, int]
    kept: dict[int, float] = {}
    fixed: bool
    side_by_side: int
    together: int
    window: float


class StudentsList(BaseModel):
    students: list[StudentsItem]


class DomainItem(BaseModel):
    """A domain's table, or that of the root, which has no name. ``found`` are the shares of the ``tokens`` that were
    looked up since the start, by where they were found; ``problem`` says why a table cannot be used. Without the scope
    for the whole server's figures ``tasks`` and ``tokens`` are None, and ``found`` is empty."""

    backbone: str
    name: str | None
    full_name: str | None
    entries: int
    bytes: int
    tasks: int | None
    tokens: int | None
    found: dict[str, float]
    problem: str | None = None


class DomainList(BaseModel):
    domains: list[DomainItem]


class JobItem(BaseModel):
    """``version`` of ``task``, ``new_backbone`` or ``domain`` is what a job that succeeded published (a task's
    ``domain`` is where its texts are looked up); ``problem`` says why one failed, or that one which was cancelled may
    have been published. ``attempts`` are the processes that it took; ``scores`` are those on held-out texts;
    ``extracted`` says what an extraction kept."""

    id: str
    tenant: str = DEFAULT_TENANT
    kind: str
    state: JobStateName
    task: str | None = None
    new_backbone: str | None
    domain: str | None = None
    backbone: str | None
    method: str | None = None
    created: str
    started: str | None
    finished: str | None
    attempts: int
    progress: JobProgress | None
    held_out_loss: float | None
    scores: dict[str, float | None]
    extracted: str | None
    chosen: str | None = None
    held_against: dict[str, float | None] = {}
    warnings: list[str] = []
    version: int | None
    problem: str | None

    @classmethod
    def of(cls, job: JobFolder) -> Self:
        """Raises ``NotFound`` if it is removed meanwhile."""
        asked, state, result = job.request, job.state, job.result
        return cls(
            id=job.id,
            **asked.model_dump(include={"kind", "task", "domain", "backbone", "method"}),
            new_backbone=asked.name if asked.kind == "further-pretrain" else None,
            progress=job.progress,
            held_out_loss=result.held_out_loss if result else None,
            scores=result.scores if result else {},
            extracted=result.extracted if result else None,
            **(result.model_dump(include={"chosen", "held_against", "warnings"}) if result else {}),
            **state.model_dump(exclude={"publishing", "above"}),
        )

    @property
    def is_finished(self) -> bool:
        return self.state not in ("queued", "running")

    @property
    def makes(self) -> str:
        """The task's, the backbone's or the domain's name."""
        return self.task or self.new_backbone or self.domain or ""


class JobPage(BaseModel):
    """The newest first; ``next`` is the ``after`` of the next page, null on the last one."""

    jobs: list[JobItem]
    next: str | None


class KeyItem(BaseModel):
    """A key without its secret."""

    id: str
    tenant: str
    scopes: list[Scope]
    default_task: str | None
    created: str
    expires: str | None
    revoked: str | None
    note: str

    @classmethod
    def of(cls, key: Key) -> Self:
        return cls.model_validate(key, from_attributes=True)


class NewKey(KeyItem):
    """``key`` is what requests send; it cannot be read again."""

    key: str

    @classmethod
    def made(cls, key: Key, text: str) -> Self:
        return cls(**KeyItem.of(key).model_dump(), key=text)


class KeyList(BaseModel):
    keys: list[KeyItem]


class TenantItem(BaseModel):
    """Limits of each server, null for none; ``keys`` are those that are not revoked."""

    name: str
    requests_per_minute: float | None
    tokens_per_minute: float | None
    priority: int
    keys: int | None = None

    @classmethod
    def of(cls, name: str, limits: Limits, keys: int | None = None) -> Self:
        return cls(name=name, keys=keys, **dataclasses.asdict(limits))


class TenantList(BaseModel):
    tenants: list[TenantItem]

    @classmethod
    def of(cls, keys: Sequence[Key], limits: Mapping[str, Limits], others: Iterable[str] = ()) -> Self:
        """Those that have keys, revoked ones too, or limits, and ``others``, by name."""
        counts = Counter(key.tenant for key in keys if key.revoked is None)
        names = sorted({*(key.tenant for key in keys), *limits, *others})
        return cls(tenants=[TenantItem.of(name, limits.get(name, Limits()), counts[name]) for name in names])
