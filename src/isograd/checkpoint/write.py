"""One save on one rank, in a thread beside the training. No collective is called here: ranks meet in the folder.

    every rank    rank-00003.safetensors, then rank-00003.json: what is in it, with hashes
    rank 0        when all records are there: manifest.json, then the name step-00000100, then pruning

In an object store a rank writes several such files side by side, and the manifest, which comes last, is the name.
Everything is flushed to the disk, and read again, before the next thing depends on it. Whatever moment a process is
killed at, either the new name does not exist yet and the checkpoints before are untouched, or it exists and all of it
is on the disk.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isograd.checkpoint import folder as folders
from isograd.checkpoint.files import TensorEntry, entry, in_order, write_tensors
from isograd.checkpoint.manifest import Box, merge
from isograd.errors import CheckpointError
from isograd.io.atomic import flush_folder, write_bytes
from isograd.io.store import STREAMS, Place, StorePath
from isograd.io.untrusted import open_to_read

PHASES = ("copied", "begun", "half written", "written", "recorded", "gathered", "listed", "named", "pruned")
POLL_S = 0.005
PART = 64 << 20  # bytes of each of the files that a rank writes into a store, STREAMS at a time
Phase = Callable[[str], None]


@dataclass(frozen=True)
class Copied:
    """A box of a global tensor, in host memory of its own."""

    key: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor


@dataclass(frozen=True)
class SaveJob:
    """What one rank has to write."""

    folder: Place
    place: Place  # the partial folder
    step: int
    rank: int
    ranks: int
    head: dict[str, Any]  # of the manifest
    copies: Sequence[Copied]
    counts: dict[str, dict[str, Any]]  # numbers per parameter
    keep_last: int
    keep_every: int | None
    phase: Phase
    best: int | None = None  # the step of the checkpoint that is not pruned


class _GivenUp(Exception):
    """Nothing more has to be written: another rank's part has failed."""


class Writing(threading.Thread):
    """The thread that writes this rank's part of a checkpoint; on rank 0 it also completes the checkpoint."""

    def __init__(self, job: SaveJob, pause_s: float = 0.0) -> None:
        super().__init__(name=f"isograd checkpoint {job.step}", daemon=True)
        self.job, self._pause_s = job, pause_s
        self.error: Exception | None = None
        self.given_up = threading.Event()  # another rank's part has failed: the record that rank 0 awaits never comes
        self.moves = 0  # grows as long as this writer is alive
        self.start()

    def moved(self) -> None:
        """A chunk was hashed, written, flushed or read again."""
        self.moves += 1
        if self.given_up.is_set():
            raise _GivenUp

    def run(self) -> None:
        """What the thread does; an exception is kept in `error` for `CheckpointManager.wait`."""
        if self.given_up.wait(self._pause_s):
            return
        try:
            write_own(self.job, self.moved)
            if self.job.rank == 0 and self._all_recorded():
                finish(self.job, self.moved)
        except _GivenUp:
            pass
        except Exception as error:
            self.error = error

    def _all_recorded(self) -> bool:
        place, awaited = self.job.place, {record_name(rank) for rank in range(self.job.ranks)}
        while not self.given_up.wait(folders.STORE_POLL_S if isinstance(place, StorePath) else POLL_S):
            awaited -= {file.name for file in place.iterdir()}
            if not awaited:
                return True
        return False


def file_name(rank: int, part: int = 0) -> str:
    """The file of a rank's tensors, or of some of them."""
    return f"rank-{rank:05d}{f'-{part:04d}' if part else ''}.safetensors"


def record_name(rank: int) -> str:
    """The file that says what a rank has written, until the manifest says it."""
    return f"rank-{rank:05d}.json"


def write_own(job: SaveJob, moved: Callable[[], None]) -> None:
    """Write this rank's tensors and its record."""
    job.place.mkdir(exist_ok=True)
    job.phase("begun")
    by_key = {copy.key: copy for copy in job.copies}
    parts = _parts(job, in_order(entry(copy.key, copy.tensor) for copy in job.copies))

    def write(part: int) -> dict[str, Any]:
        entries, name = parts[part], file_name(job.rank, part)

        def tensors() -> Iterator[Tensor]:
            for number, one in enumerate(entries):
                if number == len(entries) // 2 and part == 0:
                    job.phase("half written")
                yield by_key[one.name].tensor

        size, hashes = write_tensors(job.place / name, entries, tensors(), {"format": "isograd checkpoint"}, moved)
        listed = {e.name: (by_key[e.name].shape, e.dtype, by_key[e.name].box, hashes[e.name]) for e in entries}
        return {"file": name, "bytes": size, "tensors": listed, "counts": {} if part else job.counts}

    if len(parts) == 1:
        notes = [write(0)]
    else:
        with ThreadPoolExecutor(STREAMS) as pool:
            notes = list(pool.map(write, range(len(parts))))
    flush_folder(job.place)
    moved()
    job.phase("written")
    write_bytes(job.place / record_name(job.rank), json.dumps(notes, separators=(",", ":")).encode())
    job.phase("recorded")


def _parts(job: SaveJob, entries: list[TensorEntry]) -> list[list[TensorEntry]]:
    """The tensors of each file: on a disk there is one."""
    parts: list[list[TensorEntry]] = [[]]
    room = PART if isinstance(job.place, StorePath) else math.inf
    for one in entries:
        if parts[-1] and sum(other.size for other in parts[-1]) + one.size > room:
            parts.append([])
        parts[-1].append(one)
    return parts


def finish(job: SaveJob, moved: Callable[[], None]) -> None:
    """Rank 0: make the parts of all ranks one checkpoint, and give it its name."""
    records = [job.place / record_name(rank) for rank in range(job.ranks)]
    job.phase("gathered")
    notes = []
    for record in records:
        for note in json.loads(record.read_bytes()):
            notes.append(note)
            path, written = job.place / note["file"], note["bytes"]  # what another rank has written and read again
            with open_to_read(path) as file:
                size = file.seek(0, os.SEEK_END)
            if size != written:
                raise CheckpointError("IG945", seen=f"{size:,} bytes instead of {written:,}", path=path)
            moved()
    merged = merge(notes, job.head)
    folders.before_manifest(job.folder, job.place, job.step)
    merged.write(job.place)
    moved()
    for record in records:
        record.unlink()
    job.phase("listed")
    folders.commit(job.folder, job.place, job.step)
    moved()
    job.phase("named")
    if job.best is not None:
        folders.mark_best(job.folder, job.best)
    folders.prune(job.folder, job.keep_last, job.keep_every)
    job.phase("pruned")
