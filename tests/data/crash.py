"""A build that is killed before each thing it does to the disk, gone on with, and compared. No torch: it forks.

python -m tests.data.crash FOLDER     prints how many kills there were
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isograd.data import build
from tests.data.toys import content, lines_file

TOUCHES = ("replace", "fsync", "unlink", "mkdir")


def kill_at(number: int) -> None:
    """End this process, as kill -9 does, before the number-th of these calls."""
    count = 0

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def touched(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return touched

    for name in TOUCHES:
        setattr(os, name, counting(getattr(os, name)))


def main(home: Path) -> int:
    os.fsync = lambda descriptor: None  # counted, not done: a kill loses nothing that the system already has
    source = lines_file(home / "source.txt")
    recipe: dict[str, Any] = {"documents": "line", "validation": 0.3, "shard_bytes": 1800}
    build(home / "whole", [source], **recipe)
    expected = content(home / "whole")
    out = home / "killed"
    kills = 0
    while True:
        shutil.rmtree(out, ignore_errors=True)
        child = os.fork()
        if not child:
            kill_at(kills + 1)
            build(out, [source], **recipe)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return kills
        kills += 1
        build(out, [source], **recipe)
        assert content(out) == expected, f"after a kill at touch {kills}"


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
