"""The folder of a run's checkpoints: which are there, who may write, what a kill left behind, what is pruned.

lock                          held by rank 0 of the one job that may write here
step-00000100/                a checkpoint: its name is given last, so one that has it is complete
best                          the step of the best checkpoint so far, which is not pruned
.step-00000200.partial-JOB/   being written
.step-00000100.replaced/      a checkpoint whose successor with the same step is being put in its place
aside-step-00000300/          of another course of training: saved before a job went back and saved a smaller step
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from isograd.errors import CheckpointError
from isograd.io.atomic import flush, flush_folder, replace_text
from isograd.io.no_follow import not_there, open_to_write
from isograd.io.untrusted import FileError, read_typed

LOCK, BEST = "lock", "best"
QUIET_S = 5.0  # a writer that is alive has written a chunk, flushed, or marked a file that it reads again, within this
_NAME = re.compile(r"step-([0-9]{8,18})")  # not \d, which other scripts' digits match
_LEFT = re.compile(r"\.step-[0-9]{8,18}\.(partial-\w+|removed)")
_REPLACED = re.compile(r"\.(step-[0-9]{8,18})\.replaced")


def name_of(step: int) -> str:
    """The name of a complete checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(place: Path) -> int | None:
    """The step that a folder's name says; None: it is not the name of a checkpoint."""
    match = _NAME.fullmatch(place.name)
    return None if match is None else int(match[1])


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, place) of every complete one, oldest first."""
    found = [(step_of(place), place) for place in _entries(folder) if place.is_dir()]
    return sorted((step, place) for step, place in found if step is not None)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def partial(folder: Path, step: int, job: str) -> Path:
    """Where a checkpoint lies while a job is writing it."""
    return folder / f".{name_of(step)}.partial-{job}"


@dataclass(frozen=True)
class _Best:
    """What the file `best` says."""

    step: int


def mark_best(folder: Path, step: int) -> None:
    """From now on the checkpoint of this step is the one that is not pruned."""
    if best(folder) != step:
        replace_text(folder / BEST, json.dumps({"step": step}))


def best(folder: Path) -> int | None:
    """The step of the best checkpoint; None: the run keeps none, or the file cannot be read."""
    with suppress(FileError, OSError):
        return read_typed(_Best, folder / BEST, 1 << 12).step
    return None


@dataclass(frozen=True)
class _Holder:
    """What a lock says of the job that holds it."""

    job: str


def moves_in(place: Path) -> list[tuple[str, int, int]]:
    """What changes in a folder when a file in it grows, comes, goes, or is marked."""
    found = []
    for file in _entries(place):
        with suppress(OSError):
            about = file.stat()
            found.append((file.name, about.st_size, about.st_mtime_ns))
    return sorted(found)


class Growing:
    """Whether a checkpoint in a folder is being written: for one who asks again and again before it ends the writers.

    A save that waits for the part of a rank that has died grows no more.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._before, self._since = folder, dict[str, Any](), time.monotonic()

    def __call__(self) -> bool:
        """True while files of a partial checkpoint have grown, or were marked, within QUIET_S."""
        now = {place.name: moves_in(place) for place in _entries(self._folder) if ".partial-" in place.name}
        if now != self._before:
            self._before, self._since = now, time.monotonic()
        return bool(now) and time.monotonic() - self._since <= QUIET_S


class Lock:
    """Held until it is closed or its process ends, however it ends."""

    def __init__(self, folder: Path, job: str) -> None:
        self._file: IO[str] = open_to_write(folder / LOCK, "a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read(1 << 12).strip()
            self._file.close()
            raise CheckpointError("IG931", seen=holder or "a lock without a name", folder=folder) from None
        self._file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "started": started, "job": job}, self._file)
        flush(self._file)

    def close(self) -> None:
        """Let another job take the lock."""
        self._file.close()


def job_in(folder: Path) -> str:
    """Which job the lock names: what another rank sees of the folder of rank 0."""
    return read_typed(_Holder, folder / LOCK, 1 << 12).job


def sweep(folder: Path) -> None:
    """Remove what a kill has left, and finish what it interrupted. Only the holder of the lock calls this."""
    for place in _entries(folder):
        if _LEFT.fullmatch(place.name):
            shutil.rmtree(place, ignore_errors=True)
        elif match := _REPLACED.fullmatch(place.name):
            if (folder / match[1]).exists():
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.rename(folder / match[1])


def commit(folder: Path, written: Path, step: int) -> Path:
    """Give a complete checkpoint its name. What has a larger step belongs to another course of training, which this
    run has left: it goes first, so that a kill never leaves it as the newest beside this course."""
    target, replaced = folder / name_of(step), folder / f".{name_of(step)}.replaced"
    flush_folder(written)
    listed = [move[:2] for move in moves_in(written)]
    for later, place in checkpoints(folder):
        if later > step:
            _set_aside(place)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    written.rename(target)
    flush_folder(folder)
    if [move[:2] for move in moves_in(target)] != listed:  # the name is not there: what it replaces is good
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise CheckpointError("IG945", seen="not the files that were given this name", path=target)
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def _set_aside(place: Path) -> None:
    target, times = place.with_name(f"aside-{place.name}"), 1
    while target.exists():
        times += 1
        target = place.with_name(f"aside-{place.name}-{times}")
    place.rename(target)


def prune(folder: Path, keep_last: int, keep_every: int | None) -> None:
    """Remove all but the newest `keep_last` (at least one), the multiples of `keep_every`, and the best."""
    kept = best(folder)
    for step, place in checkpoints(folder)[: -max(1, keep_last)]:
        if step != kept and (keep_every is None or step % keep_every):
            hidden = folder / f".{place.name}.removed"  # so that a kill leaves no half of it under its name
            place.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def one_of(path: Path) -> Path:
    """A checkpoint's own folder, or the newest in a folder of checkpoints, which may be a run's own."""
    if (path / "manifest.json").is_file() or step_of(path) is not None:
        found = [path] if path.is_dir() else []
    else:
        found = [place for home in (path / "checkpoints", path) for _, place in checkpoints(home)][-1:]
    if not found:
        raise CheckpointError(
            "IG935",
            seen=sorted(place.name for place in _entries(path))[:10] if path.is_dir() else not_there(path, "folder"),
            path=path,
        )
    return found[0]
