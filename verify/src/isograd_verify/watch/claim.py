"""One directory per rank, one process per directory: who may write, when a rank is started twice.

A launcher that restarts its workers, or a script that trains twice, starts a rank again after the first one is gone:
the earlier part of the recording is set aside and the last start counts. A second process that calls itself the same
rank while the first one lives (two trainings side by side) leaves a note and is not watched.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def claim(directory: Path, rank: int) -> bool:
    """Whether this process may write rank `rank`'s part of the recording."""
    home = directory / f"rank-{rank:04d}"
    try:
        owner = int(json.loads((home / "rank.json").read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return True
    if owner == os.getpid():
        return True
    if alive(owner):
        (directory / f"second-{os.getpid()}-rank-{rank:04d}").touch()
        return False
    count = len(list(directory.glob(f"earlier-*-{home.name}")))
    os.replace(home, directory / f"earlier-{count}-{home.name}")
    return True


def alive(pid: int) -> bool:
    """Whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
