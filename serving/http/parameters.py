"""The query of a URL: a parameter that no route reads is refused, as an ignored option gives a wrong answer."""

from __future__ import annotations

from fastapi import Request
from pydantic import BaseModel

from jpets.errors import InvalidInput

PROBED = "/v2/health/"
"""Paths of probes, which may add any parameters: a process must not be ended for them."""


async def check_parameters(request: Request) -> None:
    """Raises ``InvalidInput`` for parameters that the route does not know, and for a repeated one."""
    if not request.scope["query_string"] or request.url.path.startswith(PROBED):
        return
    given = request.query_params
    fields = request.scope["route"].dependant.query_params
    known = [name for field in fields for name in _names(field.alias, field.field_info.annotation)]
    if unknown := [name[:40] for name in given if name not in known]:
        expected = f"expected some of {', '.join(known)}" if known else "this path takes no parameters"
        raise InvalidInput(f"query.{', query.'.join(unknown[:4])}: unknown; {expected}")
    if twice := [name for name in given if len(given.getlist(name)) > 1]:
        raise InvalidInput(f"query.{', query.'.join(twice[:4])}: given more than once; send one value")


def _names(alias: str, annotation: object) -> list[str]:
    """The parameter's name, or those of a model's fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list(annotation.model_fields)
    return [alias]
