"""Where temporary files of a process lie: one folder, removed at its end, and by the next process if it was killed.

Its process keeps a file in it locked, and the lock goes with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from multiprocessing.util import Finalize

NAME = re.compile(r"isograd-[a-z0-9_]{8}")
ALIVE = "alive"  # the locked file

_mine: tuple[int, str, int] | None = None  # process, folder, descriptor of the locked file


def home() -> str:
    """This process's folder. The first call makes it, and removes those of processes that are gone."""
    global _mine  # noqa: PLW0603  (one for each process)
    if _mine is None or _mine[0] != os.getpid():
        sweep()
        while True:
            folder = tempfile.mkdtemp(prefix="isograd-")
            file = os.path.join(folder, ALIVE)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for a sweeper, which has removed the file when it lets go
            if os.path.exists(file):
                break
            os.close(descriptor)  # another process has swept it before this one had locked its file
        _mine = (os.getpid(), folder, descriptor)
        # After multiprocessing has removed its own folder in it, which has the priority -100.
        Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)
    return _mine[1]


def sweep() -> None:
    """Remove this user's folders whose process is gone."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                        _remove_if_left(entry.path)


def _remove_if_left(folder: str) -> None:
    descriptor = os.open(os.path.join(folder, ALIVE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the process lives
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
