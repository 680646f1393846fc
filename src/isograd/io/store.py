"""Folders of an object store, or of another file system that fsspec knows, by their URL: s3://bucket/run, memory://run.

A store has no rename, no lock and no file that grows while it is written; an object is there whole or not at all.
StorePath has those of pathlib's methods that checkpoints use. Objects are streamed up in blocks and read by ranges, so
memory is bounded by BLOCK and STREAMS. What the store refuses is one error (IG951), in which credentials are masked.
Credentials come from the environment or fsspec's own config files, never from a URL.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isograd.errors import CheckpointError

BLOCK = 16 << 20  # bytes that are sent or asked for at once
STREAMS = 4  # objects or ranges that one rank has under way at once
BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "az", "adl"}  # where a folder needs no making, and must not make a bucket
_SECRET = r"(?:access.?key|secret|token|password|signature|credential)"  # in the name of a value that nobody may see
_VALUES = re.compile(rf"(?i)([\w.-]*{_SECRET}s?(?:.?id)?['\"]?\s*[=:]\s*['\"]?)[^\s'\"&,;<>)}}]+")
_USER = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass(frozen=True)
class StorePath:
    """A folder or an object of a store."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """All but the last part."""
        return StorePath(self.url.rstrip("/").rpartition("/")[0])

    @contextmanager
    def _asked(self, doing: str) -> Iterator[tuple[Any, str]]:
        """fsspec's file system, and the path in it. Made by the process that uses it: none of them survives a fork."""
        import fsspec

        values: list[object] = []
        try:
            kind = fsspec.utils.get_protocol(self.url)
            options = {"auto_mkdir": True} if kind in ("file", "local") else {}
            system, path = fsspec.url_to_fs(self.url, use_listings_cache=False, **options)
            values = [value for name, value in system.storage_options.items() if re.search(f"(?i)key|{_SECRET}", name)]
            yield system, path
        except (FileNotFoundError, CheckpointError):
            raise
        except Exception as error:
            seen = masked(f"{type(error).__name__}: {error}", values)
            raise CheckpointError("IG951", seen=seen, doing=doing, path=self) from None  # a cause is not masked

    def tree(self) -> dict[str, int]:
        """Every object below, by its name relative to this folder, with its size; empty: there is no such folder."""
        with self._asked("listed") as (system, path):
            found = system.find(path, detail=True)
            return {name[len(path.rstrip("/")) + 1 :]: int(about["size"]) for name, about in found.items()}

    def size(self) -> int | None:
        """Bytes of an object; None: there is none."""
        try:
            with self._asked("looked at") as (system, path):
                about = system.info(path)
                return int(about["size"]) if about["type"] == "file" else None
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        """Whether there is an object of this name, or one below it."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self.size() is not None

    def is_dir(self) -> bool:
        """Whether there is an object below it."""
        return bool(self.tree())

    def iterdir(self) -> Iterator[StorePath]:
        """What is directly below."""
        yield from (self / name for name in dict.fromkeys(name.partition("/")[0] for name in self.tree()))

    @contextmanager
    def open_to_read(self) -> Iterator[Any]:
        """The object as a file."""
        with self._asked("read") as (system, path), system.open(path, "rb", block_size=BLOCK, cache_type="bytes") as it:
            yield it

    def read_bytes(self) -> bytes:
        """The whole object."""
        with self._asked("read") as (system, path):
            return bytes(system.cat_file(path))

    def fill(self, memory: memoryview, start: int) -> None:
        """Bytes of the object from `start`, as many as the memory has, by several ranges at once."""

        def one(at: int) -> None:
            end = min(at + BLOCK, len(memory))
            with self._asked("read") as (system, path):
                memory[at:end] = system.cat_file(path, start=start + at, end=start + end)

        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(one, range(0, len(memory), BLOCK)))

    def mkdir(self, **_: object) -> None:
        """A store has no empty folders; another file system gets one."""
        with self._asked("made") as (system, path):
            kinds = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
            if not kinds & BUCKETS:
                system.makedirs(path, exist_ok=True)

    def open_to_write(self) -> Upload:
        """A stream that becomes the object when it is closed, and nothing after an error."""
        return Upload(self)

    def write_whole(self, data: bytes) -> None:
        """An object with these bytes, read again."""
        with self._asked("written") as (system, path):
            system.pipe_file(path, data)
        landed = self.read_bytes()
        if landed != data:
            raise CheckpointError("IG945", seen=f"{len(landed):,} bytes that differ from what was written", path=self)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object."""
        try:
            with self._asked("removed") as (system, path):
                system.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Remove everything below."""
        with suppress(FileNotFoundError), self._asked("removed") as (system, path):
            system.rm(path, recursive=True)


class Upload:
    """An object while it is written, block by block."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        with path._asked("written") as (system, key):
            self._file = system.open(key, "wb", block_size=BLOCK)

    def write(self, data: Any) -> int:
        """Append bytes; a block that is full is sent."""
        with self._path._asked("written"):
            return int(self._file.write(data))

    def tell(self) -> int:
        """How many bytes were appended."""
        return int(self._file.tell())

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            with self._path._asked("written"):
                self._file.close()
            return
        with suppress(Exception):  # its own is not the first; closing would make an object of the half
            self._file.discard()
        self._file.buffer, self._file.closed = io.BytesIO(), True


Place = Path | StorePath


def place_of(text: str | Place) -> Place:
    """A path of this machine, or a StorePath where a URL is given; one with credentials in it is refused."""
    if not isinstance(text, str) or "://" not in text:
        return text if isinstance(text, StorePath) else Path(text)
    if _USER.search(text):
        raise CheckpointError("IG952", seen=masked(text))
    return StorePath(text.rstrip("/"))


def masked(text: str, values: list[object] | None = None) -> str:
    """A text without the credentials that stand in it: those of URLs, named ones, `values`, and the environment's."""
    secrets = [value for name, value in os.environ.items() if re.search(f"(?i){_SECRET}|(?:^|_)key", name)]
    for value in [*(values or []), *secrets]:
        if isinstance(value, str) and len(value) >= 6:
            text = text.replace(value, "***")
    return _USER.sub("***@", _VALUES.sub(r"\1***", text))
