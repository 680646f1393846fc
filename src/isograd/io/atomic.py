"""Files that are complete or absent.

AtomicFile and write_bytes    under another name, flushed to the disk, read again, renamed: survives a power cut, and a
                              disk that loses what it was given is an error (IG945). An object of a store is whole
                              or absent by itself: it is read again
replacing, replace_text       under another name, renamed: no reader, and no start after a kill, meets half of the file

All follow no link (io/no_follow.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from isograd.errors import CheckpointError, ConfigError
from isograd.io.no_follow import open_to_write
from isograd.io.store import Place, StorePath, Upload


class AtomicFile:
    """A file that gets its name by `commit`, once all of it is on the disk. Leaving the context discards the rest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._hash = hashlib.sha256()
        self._file = open_to_write(self._draft, "wb")

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self._hash.update(data)

    def digest(self) -> str:
        """The sha256 of what was written so far."""
        return self._hash.hexdigest()

    def commit(self) -> str:
        """Flush the file, read it again, and give it its name; its sha256."""
        flush(self._file)
        self._file.close()
        written = os.stat(self._draft)
        if sha256(self._draft) != self.digest():
            raise CheckpointError(
                "IG945", seen=f"{written.st_size:,} bytes that differ from what was written", path=self.path
            )
        self._draft.replace(self.path)
        if not os.path.samestat(written, os.stat(self.path)):
            raise CheckpointError("IG945", seen="the file that was there before", path=self.path)
        return self.digest()

    def discard(self) -> None:
        """Remove what has no name yet. An error at closing is dropped: on a full disk it is not the first."""
        with suppress(OSError):
            self._file.close()
        self._draft.unlink(missing_ok=True)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def write_bytes(path: Place, data: bytes) -> None:
    """A file with these bytes. It is on the disk, and its name is when `flush_folder` has returned."""
    if isinstance(path, StorePath):
        path.write_whole(data)
        return
    with AtomicFile(path) as file:
        file.write(data)
        file.commit()


@contextmanager
def replacing(path: Path, mode: str = "wb", **more: Any) -> Iterator[IO[Any]]:
    """A file open for writing that takes the place of `path` when the block ends without an error."""
    draft = path.with_name(f"{path.name}.partial")
    with open_to_write(draft, mode, **more) as file:
        yield file
    os.replace(draft, path)


def replace_text(path: Path, text: str) -> None:
    """A file with this text, in place of the one that is there."""
    with replacing(path, "w", encoding="utf-8") as file:
        file.write(text)


def flush(file: IO[Any]) -> None:
    """Return when everything written so far is on the disk; of an object, when it is closed."""
    if isinstance(file, Upload):
        return
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Place) -> None:
    """Bring the names in a folder to the disk."""
    if isinstance(folder, StorePath):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_new(to: Path, text: str, otherwise: str) -> Path:
    """Write a config that does not exist yet; `otherwise`: the command that writes it elsewhere."""
    try:
        with to.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise ConfigError("IG651", f"{to} exists already, and is not overwritten", fix=otherwise) from None
    except OSError as error:
        raise ConfigError(
            "IG651", f"{to} cannot be written: {error.strerror}", expected="a folder that exists and can be written",
            fix=otherwise,
        ) from error  # fmt: skip
    return to
