"""Files of token folders: read by place, and written with errors of this package.

Reading asks the system for so many bytes at such a place (pread) instead of mapping the file into memory: pages are
cached just the same, but a file that was cut short or a disk that fails is then an error with the file's name, not a
process killed by SIGBUS, and a thousand shards need neither a thousand maps nor a thousand open files.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isograd.errors import DataError
from isograd.io import atomic

OPEN = 64  # files held open by one reader


class FileReader:
    """Bytes of files by place. The files read last stay open."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: str, start: int, size: int) -> bytes:
        """`size` bytes of a file from place `start` on; a file that ends before is an error."""
        try:
            with self._lock:
                found, descriptor = b"", self._descriptor(path)
                while len(found) < size and (part := os.pread(descriptor, size - len(found), start + len(found))):
                    found += part
        except OSError as error:
            raise DataError("IG904", seen=str(error), path=path) from error
        if len(found) != size:
            raise DataError("IG904", seen=f"it ends {size - len(found)} bytes before place {start + size}", path=path)
        return found

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


def write_whole(path: Path, data: bytes) -> None:
    """A small file, complete or absent."""
    with writing(path):
        atomic.write_bytes(path, data)
        atomic.flush_folder(path.parent)


def write_text(file: Path, text: str) -> Path:
    """A file with this text. One that holds it already keeps its date, by which a build knows its inputs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        write_whole(file, text.encode())
    return file


def hashes_of_weights(folder: Path) -> list[str]:
    """The sha256 of each file of a model's weights."""
    return [sha256(file) for file in sorted(folder.glob("*.safetensors"))]


def sha256(path: Path) -> str:
    """The sha256 of a file."""
    try:
        return atomic.sha256(path)
    except OSError as error:
        raise DataError("IG904", seen=str(error), path=path) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system says when it cannot write, in words."""
    try:
        yield
    except OSError as error:
        raise DataError("IG918", seen=error.strerror or str(error), doing=f"writing {path}") from error
