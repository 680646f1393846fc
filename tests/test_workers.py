"""`make test` has two workers: what they share."""

from __future__ import annotations

import threading
from pathlib import Path

from .conftest import Turns


def test_worlds_of_two_workers_take_turns(tmp_path: Path) -> None:
    order: list[str] = []
    waits = threading.Event()

    def other() -> None:
        waits.set()
        for _ in range(2):
            with Turns(tmp_path).mine():
                order.extend(("other", "other ended"))

    with Turns(tmp_path).mine():
        worker = threading.Thread(target=other)
        worker.start()
        waits.wait(10)
        order.append("first ended")
    worker.join(10)
    assert order == ["first ended", *["other", "other ended"] * 2]
