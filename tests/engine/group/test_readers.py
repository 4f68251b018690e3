"""A change of a table waits for the readers of the old one."""

from __future__ import annotations

import threading
import time

from jpets.engine.group.readers import Readers


def test_readers_are_waited_for_and_never_wait() -> None:
    readers, order, inside, go_on = Readers(), list[str](), threading.Event(), threading.Event()

    def read() -> None:
        with readers.reading():
            inside.set()
            go_on.wait(30)
            order.append("read")

    reader = threading.Thread(target=read)
    reader.start()
    inside.wait(30)

    def settle() -> None:
        readers.settle()
        order.append("settled")

    settler = threading.Thread(target=settle)
    settler.start()
    time.sleep(0.05)
    with readers.reading():
        order.append("late")
    go_on.set()
    settler.join()
    reader.join()
    assert order == ["late", "read", "settled"]
    readers.settle()
