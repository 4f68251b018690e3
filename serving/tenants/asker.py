"""For whom a request is, and what it may do."""

from __future__ import annotations

from typing import NamedTuple

from jpets.access import SCOPES, Scope
from jpets.errors import Forbidden
from jpets.types import DEFAULT_TENANT
from serving.tenants.allowance import Allowance

ALL = Allowance()


class Asker(NamedTuple):
    """Names of tasks in a request are those of its ``tenant``, or shared ones. Queries of a higher ``priority`` are
    served before all others."""

    tenant: str = DEFAULT_TENANT
    priority: int = 0
    scopes: tuple[Scope, ...] = SCOPES
    default_task: str | None = None
    """The task of requests that name none."""
    allowance: Allowance = ALL
    key: str | None = None
    """The id of the key that was sent."""

    def may(self, scope: Scope | None) -> bool:
        return scope is None or scope in self.scopes or (scope == "metrics" and "admin" in self.scopes)

    def check(self, scope: Scope | None) -> None:
        """Raises ``Forbidden`` where it needs a scope that the key does not have."""
        if not self.may(scope):
            raise Forbidden(f"this needs a key of scope {scope}, found one of {', '.join(self.scopes)}")


NOBODY = Asker(scopes=())
"""Of requests that need no key, and may do nothing else."""
