"""A server that keeps every body it reads: what ``soak.py --leak`` shows is that its measurement would find a leak."""

from __future__ import annotations

from starlette.types import Message

from jpets.serve import main
from serving.body_budget import Body

KEPT: list[bytes] = []
receive = Body.receive


async def keep(self: Body) -> Message:
    message = await receive(self)
    KEPT.append(message.get("body", b""))
    return message


if __name__ == "__main__":
    Body.receive = keep  # type: ignore[method-assign]
    main()
