"""The folder of a run's checkpoints: who may write, how one gets its name (`commit`), what is there, what is pruned.

lock                          held by rank 0 of the one job that may write here
step-00000100/                a checkpoint: its name is given last, so one that has it is complete
best                          the step of the best checkpoint so far, which is not pruned
.step-00000200.partial-JOB/   being written
.step-00000100.replaced/      a checkpoint whose successor with the same step is being put in its place
aside-step-00000300/          of another course of training: saved before a job went back and saved a smaller step

In an object store, which has no rename and no lock:

step-00000100.JOB_0001/       a checkpoint when its manifest.json is there, which is written last: else being written.
                              Of two of one step the later counts; aside-manifest.json: of another course of training
lock                          names the job that came last. Another one is told so before it gives a name to anything
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from isograd.errors import CheckpointError
from isograd.io.atomic import flush, flush_folder, write_bytes
from isograd.io.no_follow import not_there, open_to_write
from isograd.io.store import Place, StorePath
from isograd.io.untrusted import FileError, read_typed

LOCK, BEST = "lock", "best"
MANIFEST, ASIDE = "manifest.json", "aside-manifest.json"
QUIET_S = 5.0  # a writer that is alive has written a chunk within this: it flushes and reads again in small blocks
STORE_QUIET_S, STORE_POLL_S = 30.0, 0.5  # of a store, whose objects do not grow but appear
_NAME = re.compile(r"step-([0-9]{8,18})")  # not \d, which other scripts' digits match
_LEFT = re.compile(r"\.step-[0-9]{8,18}\.(partial-\w+|removed)")
_REPLACED = re.compile(r"\.(step-[0-9]{8,18})\.replaced")


def name_of(step: int) -> str:
    """The name of a complete checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(place: Place) -> int | None:
    """The step that a folder's name says; None: it is not the name of a checkpoint."""
    name = place.name.partition(".")[0] if isinstance(place, StorePath) else place.name
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def checkpoints(folder: Place) -> list[tuple[int, Any]]:
    """(step, place) of every complete one, oldest first; a place is of the same kind as the folder."""
    if isinstance(folder, StorePath):
        return sorted(dict(_takes(folder)).items())
    found = [(step_of(place), place) for place in _entries(folder) if place.is_dir()]
    return sorted((step, place) for step, place in found if step is not None)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise
        return []


def job_name() -> str:
    """A name for a job that saves; names of later jobs come later."""
    return f"{int(time.time()):08x}{secrets.token_hex(4)}"


def partial(folder: Place, step: int, job: str) -> Any:
    """Where a checkpoint lies while a job is writing it."""
    if isinstance(folder, StorePath):
        return folder / f"{name_of(step)}.{job}"
    return folder / f".{name_of(step)}.partial-{job}"


@dataclass(frozen=True)
class _Best:
    """What the file `best` says."""

    step: int


def mark_best(folder: Place, step: int) -> None:
    """From now on the checkpoint of this step is the one that is not pruned."""
    if best(folder) == step:
        return
    write_bytes(folder / BEST, json.dumps({"step": step}).encode())


def best(folder: Place) -> int | None:
    """The step of the best checkpoint; None: the run keeps none, or the file cannot be read."""
    with suppress(FileError, OSError):
        return read_typed(_Best, folder / BEST, 1 << 12).step
    return None


@dataclass(frozen=True)
class _Holder:
    """What a lock says of the job that holds it."""

    job: str


def moves_in(place: Place) -> list[tuple[str, int, int]]:
    """What changes in a folder when a file in it grows, comes, goes, or is marked."""
    if isinstance(place, StorePath):
        return sorted((name, size, 0) for name, size in place.tree().items())
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

    def __init__(self, folder: Place) -> None:
        self._folder, self._before, self._since = folder, dict[str, Any](), time.monotonic()
        self._asked = -STORE_POLL_S

    def __call__(self) -> bool:
        """True while files of a partial checkpoint have grown within QUIET_S."""
        if isinstance(self._folder, StorePath):
            return self._in_store(self._folder)
        now = {place.name: moves_in(place) for place in _entries(self._folder) if ".partial-" in place.name}
        if now != self._before:
            self._before, self._since = now, time.monotonic()
        return bool(now) and time.monotonic() - self._since <= QUIET_S

    def _in_store(self, folder: StorePath) -> bool:
        if time.monotonic() - self._asked >= STORE_POLL_S:
            with suppress(CheckpointError):
                now = {name: there for name, there in _listing(folder).items() if not there.keys() & {MANIFEST, ASIDE}}
                if now != self._before:
                    self._before, self._since = now, time.monotonic()
            self._asked = time.monotonic()
        return bool(self._before) and time.monotonic() - self._since <= STORE_QUIET_S


class Lock:
    """Held until it is closed or its process ends, however it ends."""

    def __init__(self, folder: Place, job: str) -> None:
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started, "job": job}
        self._file: IO[str] | None = None
        if isinstance(folder, StorePath):
            write_bytes(folder / LOCK, json.dumps(holder).encode())
            return
        self._file = open_to_write(folder / LOCK, "a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            said = self._file.read(1 << 12).strip()
            self._file.close()
            raise CheckpointError("IG931", seen=said or "a lock without a name", folder=folder) from None
        self._file.truncate(0)
        json.dump(holder, self._file)
        flush(self._file)

    def close(self) -> None:
        """Let another job take the lock; that of a store is taken without leave."""
        if self._file is not None:
            self._file.close()


def job_in(folder: Place) -> str:
    """Which job the lock names, or why it cannot be read: what another rank sees of the folder of rank 0."""
    try:
        return read_typed(_Holder, folder / LOCK, 1 << 12).job
    except FileError as error:
        return error.brief


def sweep(folder: Place) -> None:
    """Remove what a kill has left, and finish what it interrupted. Only the holder of the lock calls this."""
    if isinstance(folder, StorePath):
        for name, there in _listing(folder).items():
            if not there.keys() & {MANIFEST, ASIDE}:
                (folder / name).remove()
        return
    for place in _entries(folder):
        if _LEFT.fullmatch(place.name):
            shutil.rmtree(place, ignore_errors=True)
        elif match := _REPLACED.fullmatch(place.name):
            if (folder / match[1]).exists():
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.rename(folder / match[1])


def before_manifest(folder: Place, written: Place, step: int) -> None:
    """In a store the manifest is the name: what has to be so before a name is given, is here."""
    if isinstance(folder, StorePath):
        job = job_in(folder)
        if not written.name.partition(".")[2].startswith(job):
            raise CheckpointError("IG931", seen=f"job {job!r} in its lock", folder=folder)
        for later, place in checkpoints(folder):
            if later > step:
                _set_aside(place)


def commit(folder: Place, written: Place, step: int) -> Place:
    """Give a complete checkpoint its name. What has a larger step belongs to another course of training, which this
    run has left: it goes first, so that a kill never leaves it as the newest beside this course."""
    if isinstance(folder, StorePath) or isinstance(written, StorePath):
        return written  # its manifest is there
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


def _set_aside(place: Place) -> None:
    if isinstance(place, StorePath):
        write_bytes(place / ASIDE, (place / MANIFEST).read_bytes())
        (place / MANIFEST).unlink()
        return
    target, times = place.with_name(f"aside-{place.name}"), 1
    while target.exists():
        times += 1
        target = place.with_name(f"aside-{place.name}-{times}")
    place.rename(target)


def prune(folder: Place, keep_last: int, keep_every: int | None) -> None:
    """Remove all but the newest `keep_last` (at least one), the multiples of `keep_every`, and the best."""
    kept = best(folder)
    found = checkpoints(folder)
    if isinstance(folder, StorePath):
        newest = {place for _, place in found}
        for _, place in _takes(folder):
            if place not in newest:
                _remove_take(place)
    for step, place in found[: -max(1, keep_last)]:
        if step != kept and (keep_every is None or step % keep_every):
            if isinstance(place, StorePath):
                _remove_take(place)
            else:
                hidden = place.with_name(f".{place.name}.removed")  # so that a kill leaves no half of it under its name
                place.rename(hidden)
                shutil.rmtree(hidden, ignore_errors=True)


def discard(place: Place) -> None:
    """Remove what a save that has failed has written, unless it is whole: the store may have done what it denied."""
    if isinstance(place, Path):
        shutil.rmtree(place, ignore_errors=True)
        return
    with suppress(CheckpointError, OSError):
        if not is_named(place) or hashlib.sha256((place / MANIFEST).read_bytes()).hexdigest() not in str(
            (place / "manifest.sha256").read_bytes()
        ):
            _remove_take(place)


def is_named(written: Place) -> bool:
    """Whether what was written here has got its name, or is gone."""
    return not written.exists() if isinstance(written, Path) else (written / MANIFEST).is_file()


def one_of(path: Place) -> Any:
    """A checkpoint's own folder, or the newest in a folder of checkpoints, which may be a run's own."""
    if (path / "manifest.json").is_file() or step_of(path) is not None:
        found = [path] if path.is_dir() else []
    else:
        found = [place for home in (path / "checkpoints", path) for _, place in checkpoints(home)][-1:]
    if not found:
        seen: Any = not_there(path, "folder")
        if path.is_dir():
            entries: Any = path.iterdir() if isinstance(path, StorePath) else _entries(path)
            seen = sorted(place.name for place in entries)[:10]
        raise CheckpointError("IG935", seen=seen, path=path)
    return found[0]


def _listing(folder: StorePath) -> dict[str, dict[str, int]]:
    """{folder of a checkpoint, complete or not: {object: bytes}}, by one listing."""
    found: dict[str, dict[str, int]] = {}
    for name, size in sorted(folder.tree().items()):
        home, _, rest = name.partition("/")
        if rest and step_of(folder / home) is not None:
            found.setdefault(home, {})[rest] = size
    return found


def _takes(folder: StorePath) -> list[tuple[int, StorePath]]:
    """(step, place) of every complete one, the takes of a step in the order in which they were saved."""
    named = [folder / name for name, there in sorted(_listing(folder).items()) if MANIFEST in there]
    return [(step, place) for place in named if (step := step_of(place)) is not None]


def _remove_take(place: StorePath) -> None:
    (place / MANIFEST).unlink(missing_ok=True)  # its name first: a kill leaves no half of it under one
    place.remove()
