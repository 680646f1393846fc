"""Files that are whole or absent, and files read by place.

Writing goes to a temporary name, reaches the disk, and is then renamed: no reader ever sees half a file. Reading asks
the system for so many bytes at such a place (pread) instead of mapping the file into memory: pages are cached just the
same, but a file that was cut short or a disk that fails is then an error with the file's name, not a process killed by
SIGBUS, and a thousand shards need neither a thousand maps nor a thousand open files.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isograd.errors import DataError
from isograd.inside import opened

OPEN = 64  # files held open by one reader
BLOCK = 1 << 20


class Places:
    """Bytes of files by place. The files read last stay open."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: str, start: int, size: int) -> bytes:
        """`size` bytes of a file from place `start` on; a file that ends before is an error."""
        try:
            with self._lock:
                found = self._pread(self._descriptor(path), start, size)
        except OSError as error:
            raise _unreadable(path, str(error)) from error
        if len(found) != size:
            raise _unreadable(path, f"it ends {size - len(found)} bytes before place {start + size}")
        return found

    @staticmethod
    def _pread(descriptor: int, start: int, size: int) -> bytes:
        parts = []
        while size > 0 and (part := os.pread(descriptor, size, start)):
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return b"".join(parts)

    def _descriptor(self, path: str) -> int:
        if path not in self._open:
            while len(self._open) >= OPEN:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open.move_to_end(path)
        return self._open[path]

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def _unreadable(path: str | Path, seen: str) -> DataError:
    return DataError(
        "IG904",
        f"{path} could not be read",
        seen=seen,
        expected="the file as it was when its folder was opened",
        fix=f"isograd data verify {Path(path).parent}",
    )


def damaged(path: str | Path, seen: str) -> DataError:
    """A file whose numbers cannot be what was built, met while it is read."""
    return DataError(
        "IG928",
        f"{path} holds numbers that no build writes",
        seen=seen,
        expected="ids of the vocabulary; ends of documents in ascending order",
        fix="isograd data verify names the damaged files; copy them again, or build the folder again",
    )


class Writer:
    """A file under a temporary name, hashed as it is written; `keep` gives it its own name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._hash = hashlib.sha256()
        with writing(path):
            self._file = opened(self._temporary, "wb")

    def write(self, data: bytes) -> None:
        """Append bytes."""
        with writing(self.path):
            self._file.write(data)
        self._hash.update(data)

    def keep(self) -> str:
        """Bring it to the disk and to its name; its sha256."""
        with writing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self.path)
        return self._hash.hexdigest()

    def discard(self) -> None:
        """Throw away what was not kept. An error at closing is dropped: on a full disk it is not the first."""
        with suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> str:
    """A small file, whole or not at all; its sha256."""
    writer = Writer(path)
    try:
        writer.write(data)
        found = writer.keep()
    finally:
        writer.discard()
    settle(path.parent)
    return found


def write_text(file: Path, text: str) -> Path:
    """A file with this text. One that holds it already keeps its date, by which a build knows its inputs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        write_whole(file, text.encode())
    return file


def settle(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sha256(path: Path) -> str:
    """The sha256 of a file."""
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                found.update(block)
    except OSError as error:
        raise _unreadable(path, str(error)) from error
    return found.hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system says when it cannot write, in words."""
    try:
        yield
    except OSError as error:
        raise DataError(
            "IG918",
            f"{path} cannot be written",
            seen=error.strerror or str(error),
            expected="a folder that may be written, with room left",
            fix="make room or choose another folder; the same command then resumes where it was",
        ) from error
