"""What the front end needs of a task repository."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from jpets.types import DEFAULT_TENANT, Task, TaskName
from jpets.watch import Watch

Validator = Callable[[bytes | memoryview, str], Task]
"""(file's bytes, id) -> the task; raises ``InvalidTask`` for a file that cannot be served."""


class StoredTask(Protocol):
    """One version of a task. ``metadata`` is the task file's JSON document."""

    @property
    def name(self) -> TaskName: ...
    @property
    def tenant(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def created(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def served(self) -> bool: ...
    @property
    def state(self) -> Literal["uploaded", "active", "withdrawn"]: ...


class IndexedTask(Protocol):
    """A served task. ``backbone`` is its backbone's fingerprint, ``layout`` what a reader kept of its file."""

    @property
    def name(self) -> TaskName: ...
    @property
    def id(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def backbone(self) -> str: ...
    @property
    def layout(self) -> str | None: ...


class TaskRepository(Protocol):
    """Versions of task files by tenant and id. Every method raises ``NotFound`` for what is not there.

    It has more than 20 methods, as one repository keeps tasks, their use and which backbones are served.
    """

    def put(
        self,
        id: str,
        data: Path | memoryview,
        *,
        tenant: str = DEFAULT_TENANT,
        if_match: int | None = None,
        validator: Validator | None = None,
        retain: bool = True,
        layout: tuple[str, str] | None = None,
    ) -> StoredTask:
        """Stores a new version, which is then the served one. On any error nothing has changed.

        ``retain=False``: versions that are too old stay until ``retain`` is called. ``validator`` replaces the
        repository's own. ``layout``: what ``keep_layouts`` keeps of the file, behind its maker.
        Raises ``InvalidTask``, ``Conflict``, ``OutOfSpace``.
        """
        ...

    def get(self, id: str, tenant: str = DEFAULT_TENANT, version: int | str | None = None) -> StoredTask:
        """A version by number or alias, by default the served one."""
        ...

    def tenants(self) -> Sequence[str]:
        """Those that have tasks."""
        ...

    def private(self) -> Sequence[TaskName]:
        """All tasks of other tenants than the default one."""
        ...

    def list(
        self, tenant: str = DEFAULT_TENANT, limit: int = 100, after: str | None = None, *, beside: str | None = None
    ) -> tuple[Sequence[StoredTask], str | None]:
        """Up to ``limit`` tasks by id, past ``after``, and the next ``after`` or None. ``beside``: also that tenant's,
        except those with ids that ``tenant`` has too."""
        ...

    def read(self, stored: Any) -> bytes:
        """The task file."""
        ...

    def file(self, stored: Any) -> BinaryIO:
        """The task file, to be read in pieces."""
        ...

    def task(self, stored: Any) -> Task:
        """The task, checked. Raises ``InvalidTask``."""
        ...

    def outline(self, stored: Any) -> Task | None:
        """The task without its numbers, which is cheaper than reading it; None where the file must be read."""
        ...

    def index(self, maker: str) -> Sequence[IndexedTask]:
        """Every served task with the layout that ``maker`` kept of its file, the most used first."""
        ...

    def indexed(self, name: TaskName, maker: str) -> IndexedTask | None:
        """One task as ``index`` has it; None where it is not there."""
        ...

    def last_change(self) -> int:
        """The number of the last change by anyone."""
        ...

    def changes(self, since: int) -> tuple[int, Sequence[TaskName]]:
        """The number of the last change by anyone, and the tasks, also deleted ones, that changed after ``since``."""
        ...

    def watch(self) -> Watch:
        """A watch for ``changes``; it is told of them where the repository can tell."""
        ...

    def keep_layouts(self, maker: str, layouts: Mapping[str, str]) -> None:
        """Keeps a text for each of these files, by digest."""
        ...

    def add_uses(self, queries: Mapping[TaskName, float]) -> None:
        """Adds to the count of queries of each of these tasks."""
        ...

    def age_uses(self, share: float) -> None:
        """Multiplies every count until now by ``share``."""
        ...

    def backbones(self) -> Sequence[str]:
        """Names of the further backbones to be served."""
        ...

    def keep_backbone(self, name: str) -> None:
        """Adds a backbone to ``backbones``."""
        ...

    def forget_backbone(self, name: str) -> None:
        """Takes a backbone out of ``backbones``."""
        ...

    def every(self, tenant: str | None = None) -> Iterator[StoredTask]:
        """All tasks, or those of one tenant."""
        ...

    def versions(self, id: str, tenant: str = DEFAULT_TENANT) -> Sequence[StoredTask]:
        """Every kept version, the oldest first."""
        ...

    def alias(self, id: str, name: str, version: int | str | None, tenant: str = DEFAULT_TENANT) -> None:
        """Points an alias at a version, given by number or alias; None: it is none any more. Raises ``NotFound``,
        ``InvalidTask`` for an invalid name."""
        ...

    def aliases(self, id: str, tenant: str = DEFAULT_TENANT) -> Mapping[str, int]:
        """Alias -> version, with ``latest``, the one that is served."""
        ...

    def before_served(self, id: str, tenant: str = DEFAULT_TENANT) -> int:
        """The version to which ``rollback`` goes by default. Raises ``NotFound``."""
        ...

    def retain(self, id: str, tenant: str, newest: int) -> None:
        """Forgets the versions of a task that are too old, if it can have some: its ``newest`` one has this number."""
        ...

    def rolled_back(
        self, id: str, to: int | str | None, tenant: str, if_match: int | None = None
    ) -> tuple[StoredTask, Sequence[Any]]:
        """Serves version ``to``, by default the one served before, and withdraws the newer ones; also what ``undo``
        takes. Raises ``Conflict``."""
        ...

    def undo(self, id: str, target: int, changes: Sequence[Any], tenant: str) -> None:
        """Takes back a rollback to ``target``, but for what others changed meanwhile."""
        ...

    def discard(self, id: str, version: int, tenant: str = DEFAULT_TENANT) -> None:
        """Forgets one version, if it is there, and changes nothing else."""
        ...

    def delete(self, id: str, tenant: str = DEFAULT_TENANT, if_match: int | None = None) -> None:
        """Also frees its space, now or at ``collect``. Raises ``Conflict``."""
        ...

    def collect(self) -> int:
        """Frees the space of versions that were replaced, and what else no task has."""
        ...
