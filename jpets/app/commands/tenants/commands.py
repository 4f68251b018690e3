"""``jpets key``: make, list and revoke keys. ``jpets tenant``: list tenants, and limit them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from jpets.access import DEFAULT_TENANT, SCOPES, Limits, Scope
from jpets.app.commands.app import App
from jpets.app.commands.output import JsonOption, print_json, print_table, print_warning
from jpets.app.commands.tasks.store import RepositoryOption, ServerOption
from jpets.errors import InvalidInput
from serving.protocols.schemas import KeyItem

if TYPE_CHECKING:
    from jpets.app.commands.tenants.access import AccessStore

keys = App(
    no_args_is_help=True,
    help="Keys of a repository's folder or of a running server. Servers with keys accept no request without one.",
)
tenants = App(no_args_is_help=True, help="Tenants of a repository's folder or of a running server.")
TenantOption = Annotated[str, typer.Option(help="whose key; tasks of tenant default are shared with all")]


@keys.command()
def create(
    context: typer.Context,
    tenant: TenantOption = DEFAULT_TENANT,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="infer: queries; manage: the tenant's tasks and jobs; metrics: the server's figures; admin: the whole "
            "server (repeatable)"
        ),
    ] = None,
    default_task: Annotated[str | None, typer.Option(help="task of requests that name none")] = None,
    days: Annotated[float | None, typer.Option(help="days until it expires; never by default")] = None,
    note: Annotated[str, typer.Option(help="what it is for")] = "",
    repository: RepositoryOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key, and print it: it cannot be read again. By default it is for queries only."""
    scopes = scope or ["infer"]
    if unknown := [each for each in scopes if each not in SCOPES]:
        raise InvalidInput(f"--scope: expected some of {', '.join(SCOPES)}, found {', '.join(unknown)}")
    with _opened(context, repository, server, create=True) as store:
        first = not store.keys()
        made = store.create(tenant, cast(list[Scope], scopes), default_task=default_task, days=days, note=note)
    if first:
        print_warning("this is the first key: from now on every request needs one")
        if "admin" not in scopes:
            print_warning("no key is of scope admin, which changes of keys by a server need")
    if as_json:
        print_json(made.model_dump())
    else:
        typer.echo(made.key)


@keys.command("list")
def list_keys(
    context: typer.Context,
    repository: RepositoryOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List every key, without its secret."""
    with _opened(context, repository, server) as store:
        found = store.keys()
    if as_json:
        print_json([key.model_dump() for key in found])
        return
    rows = [
        (key.id, key.tenant, ", ".join(key.scopes), key.default_task or "", key.created, _state(key), key.note)
        for key in found
    ]
    print_table(("id", "tenant", "scopes", "default task", "created", "", "note"), rows)


@keys.command()
def revoke(
    context: typer.Context,
    id: Annotated[str, typer.Argument(help="the key's id, as the list shows it")],
    repository: RepositoryOption = None,
    server: ServerOption = None,
) -> None:
    """Revoke a key. Servers refuse it within a second."""
    with _opened(context, repository, server) as store:
        key = store.revoke(id)
    typer.echo(f"{key.id} of tenant {key.tenant} is revoked")


@tenants.command("list")
def list_tenants(
    context: typer.Context,
    repository: RepositoryOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tenants with keys or limits."""
    with _opened(context, repository, server) as store:
        found = store.tenants()
    if as_json:
        print_json([tenant.model_dump() for tenant in found])
        return
    columns = ("tenant", "keys", "requests/min", "tokens/min", "priority")
    rows = [
        (each.name, each.keys, _limit(each.requests_per_minute), _limit(each.tokens_per_minute), each.priority)
        for each in found
    ]
    print_table(columns, rows, numbers=columns[1:])


@tenants.command()
def limit(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(help="its name")],
    requests: Annotated[float | None, typer.Option(help="most requests a minute; no limit by default")] = None,
    tokens: Annotated[float | None, typer.Option(help="most tokens a minute; no limit by default")] = None,
    priority: Annotated[int, typer.Option(help="its queries go before those of lower priority")] = 0,
    repository: RepositoryOption = None,
    server: ServerOption = None,
) -> None:
    """Replace all limits of a tenant, which are of each server. Two seconds' worth may be asked at once."""
    limits = Limits(requests, tokens, priority)
    with _opened(context, repository, server, create=True) as store:
        made = store.limit(tenant, limits)
    typer.echo(
        f"{made.name}: {_limit(made.requests_per_minute)} requests a minute, "
        f"{_limit(made.tokens_per_minute)} tokens a minute, priority {made.priority}"
    )


def _opened(
    context: typer.Context, repository: Path | None, server: str | None, *, create: bool = False
) -> AbstractContextManager[AccessStore]:
    from jpets.app.commands.tenants.access import open_access  # a command's help must not wait for it

    return open_access(context, repository, server, create=create)


def _state(key: KeyItem) -> str:
    if key.revoked is not None:
        return f"revoked {key.revoked}"
    return f"until {key.expires}" if key.expires is not None else ""


def _limit(number: float | None) -> str:
    return "any" if number is None else f"{number:,g}"
