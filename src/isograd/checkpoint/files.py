"""Tensors in a safetensors file, written as a stream and read again.

One tensor at a time is written from memory that already exists, so that neither a checkpoint nor an export ever needs
a second copy of what it writes. Every file is flushed and read again: a disk may say that a write succeeded of which
nothing landed. A thread does that with one block while the next one is hashed and written.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from isograd.errors import CheckpointError
from isograd.io.atomic import flush
from isograd.io.no_follow import open_to_write
from isograd.io.store import Place, StorePath
from isograd.io.untrusted import open_to_read

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH = {name: dtype for dtype, name in DTYPES.items()}
CHUNK = 1 << 18  # bytes that are hashed and written at a time
BEGUN = 1 << 22  # bytes that the disk is told to begin with, so that a flush has less to wait for
MOST = 1 << 25  # bytes that are flushed and read again at a time; on a slow disk fewer


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file, before it is written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * TORCH[self.dtype].itemsize


def entry(name: str, tensor: Tensor) -> TensorEntry:
    """The entry of a tensor; refuses dtypes that safetensors does not have."""
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            "IG941",
            f"{name!r} has a dtype that safetensors does not know",
            seen=str(tensor.dtype),
            expected=", ".join(DTYPES.values()),
        )
    return TensorEntry(name, DTYPES[tensor.dtype], tuple(tensor.shape))


def in_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The order inside a file: wide elements first, so that each tensor begins at a multiple of its element."""
    return sorted(entries, key=lambda e: (-TORCH[e.dtype].itemsize, e.name))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def chunks(content: memoryview) -> Iterator[memoryview]:
    """Bytes in pieces that the processor's cache holds; who reads or writes them gives a sign of life after each."""
    return (content[at : at + CHUNK] for at in range(0, len(content), CHUNK))


def write_tensors(
    path: Place,
    entries: Sequence[TensorEntry],
    tensors: Iterable[Tensor],
    note: dict[str, str],
    moved: Callable[[], None] = lambda: None,
) -> tuple[int, dict[str, str]]:
    """A safetensors file; `tensors` come in the order of `entries` (use in_order). Returns its size in bytes, and the
    XXH3-128 of each tensor's bytes.

    `moved` is called after each chunk that is written, flushed to the disk or read again. What is read again must be,
    byte by byte, what was hashed and written (IG945).
    """
    hashes: dict[str, str] = {}
    header: dict[str, Any] = {"__metadata__": note}
    at = 0
    for one in entries:
        header[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [at, at + one.size]}
        at += one.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    with open_to_write(path, "wb") as file, closing(_Again(path, file, moved)) as again:
        for chunk in chunks(memoryview(text)):
            again.write("another header", chunk)
        for one, tensor in zip(entries, tensors, strict=True):
            found = xxh3_128()
            for chunk in chunks(raw_bytes(tensor.contiguous())):
                again.write(f"other bytes of {one.name!r}", chunk)
                found.update(chunk)
            hashes[one.name] = found.hexdigest()
        flush(file)
    again.finish()
    return len(text) + at, hashes


class _Again:
    """Writes a file, and reads it again block by block, in a thread, while it is written; the rest of it, and an object
    of a store, when it is closed.

    A block is so small that it is flushed and read within about a second: a writer that is alive gives a sign of life
    every few seconds, on a disk of any speed.
    """

    def __init__(self, path: Place, file: IO[Any], moved: Callable[[], None]) -> None:
        self._path, self._file, self._moved = path, file, moved
        self._block: list[tuple[str, memoryview]] = []  # (what is said if another is read, what was written)
        self._start, self._end, self._begun, self._flushed, self._every = 0, 0, 0, 0, CHUNK  # bytes
        self._lately = 0.0, 1e-3  # bytes that were flushed, in seconds
        self._reading: Future[None] = Future()
        self._reading.set_result(None)
        self._room = bytearray(CHUNK)

    def write(self, unlike: str, data: memoryview) -> None:
        """Append bytes, which stay as they are until they were read again."""
        self._file.write(data)
        self._moved()
        self._end += len(data)
        if isinstance(self._path, Path) and self._end - self._begun >= BEGUN:
            self._file.flush()
            self._leave_memory(self._file, self._begun, self._end)
            self._begun = self._end
        rest = self._end % mmap.PAGESIZE  # a page that is still written cannot be read from the disk
        if isinstance(self._path, StorePath) or self._end - self._start < self._every or rest > len(data):
            self._block.append((unlike, data))
            return
        self._reading.result()
        block = [*self._block, (unlike, data[: len(data) - rest])]
        self._reading = Future()
        threading.Thread(target=self._behind, args=(self._reading, block, self._start), daemon=True).start()
        self._block, self._start = [(unlike, data[len(data) - rest :])], self._end - rest

    def finish(self) -> None:
        """Read what was written last; there must be nothing else in the file."""
        self._reading.result()
        self._read(self._block, self._start, last=True)

    def _behind(self, reading: Future[None], block: list[tuple[str, memoryview]], start: int) -> None:
        began, covered = time.monotonic(), self._end - self._flushed  # a flush takes what was written since along
        self._flushed += covered
        try:
            flush(self._file)
            self._moved()
            self._read(block, start)
        except BaseException as error:
            reading.set_exception(error)
            return
        count, seconds = 0.8 * self._lately[0] + covered, 0.8 * self._lately[1] + time.monotonic() - began
        self._lately = count, seconds
        self._every = max(CHUNK, min(MOST, 2 * self._every, int(0.25 * count / seconds)))
        reading.set_result(None)

    def _read(self, block: list[tuple[str, memoryview]], start: int, last: bool = False) -> None:
        """Raise IG945 unless the file holds this block."""
        end = start + sum(len(data) for _, data in block)
        with open_to_read(self._path) as file:
            size = file.seek(0, os.SEEK_END)
            if size < end or (last and size > end):
                raise CheckpointError("IG945", seen=f"{size:,} bytes instead of {end:,}", path=self._path)
            self._leave_memory(file, start, end)  # to be read from the disk, as far as the system allows
            file.seek(start)
            for unlike, data in block:
                count = file.readinto(memoryview(self._room)[: len(data)])
                if count != len(data) or not self._room.startswith(data):  # that compares as fast as memory is read
                    raise CheckpointError("IG945", seen=unlike, path=self._path)
                self._moved()

    def _leave_memory(self, file: IO[Any], start: int, end: int) -> None:
        """Ask the system to write these bytes to the disk, or, where they are there, to forget its copy of them."""
        if isinstance(self._path, Path) and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Let the thread end: before the file is closed that it flushes."""
        self._reading.exception()
