"""A server that keeps every message of the bodies it reads, to show that ``soak.py`` would find a leak."""

from __future__ import annotations

from starlette.types import Message

from jpets.serve import main
from serving.http.body_budget import Body

KEPT: list[Message] = []
receive = Body.receive


async def keep(self: Body) -> Message:
    message = await receive(self)
    KEPT.append(message)
    return message


if __name__ == "__main__":
    Body.receive = keep  # type: ignore[method-assign]
    main()
