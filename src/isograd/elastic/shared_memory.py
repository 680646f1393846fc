"""Memory that outlives the process that fills it, as long as another process of the machine has it open, too.

It is a file in memory that has no name (Linux: memfd_create). Its owner fills it; a neighbour opens it through the
owner's entry in /proc and keeps it open. Nothing is copied for that, and when the last process that has it open ends,
the system frees it: no file is ever left behind. Elsewhere it is memory of one process.

    first    step + 1 (0: being filled), length of the note, where the rows begin, size of it all, a random number
    then     the note, as JSON; rows, each at a multiple of ALIGNED

A process may be killed at any instruction. So `fill` first says that the memory is being filled, and says the step
last.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isograd.checkpoint.files import DTYPES, TORCH
from isograd.checkpoint.write import Copied
from isograd.comm.fingerprint import fingerprint
from isograd.engine.state import Part

ALIGNED = 16  # bytes: rows of any dtype begin at a multiple of it
HEAD = 5  # numbers of 8 bytes at the beginning


@dataclass(frozen=True)
class CopiedRows:
    """What one rank writes of a step: a note that says what lies where, and the bytes."""

    note: dict[str, Any]
    flat: Tensor

    def copied(self) -> list[Copied]:
        """The rows as a checkpoint's writer takes them."""
        found = []
        for key, shape, box, dtype, rows, start in self.note["rows"]:
            kind = TORCH[dtype]
            count = torch.Size(rows).numel() * kind.itemsize
            tensor = self.flat[start : start + count].view(kind).view(rows)
            found.append(Copied(key, tuple(shape), tuple((a, b) for a, b in box), tensor))
        return found

    @property
    def damaged(self) -> bool:
        """Whether they are no longer what was copied."""
        return bool(fingerprint(self.flat) != self.note["sum"])


class SharedMemory:
    """The memory of one copy."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: of a memory that exists already."""
        opened = fd is not None
        if not opened and hasattr(os, "memfd_create"):
            with suppress(OSError):  # not allowed here
                fd = os.memfd_create("isograd copies")
        if fd is not None:
            weakref.finalize(self, os.close, fd)
        self.fd = fd
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._listed: list[Any] = []  # of the last copy, to which _begin and _views belong
        self._begin, self._views = 0, list[Tensor]()
        if not opened:
            self.grow(mmap.PAGESIZE)
            self._head()[4] = secrets.randbits(62)

    @classmethod
    def of(cls, process: int, fd: int, token: int) -> SharedMemory | None:
        """The memory that another process of this machine has open as `fd`; None: it cannot be opened here."""
        with suppress(OSError, ValueError):
            memory = cls(os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR))
            if os.fstat(memory.fd or 0).st_size >= 8 * HEAD and memory.token == token:
                return memory
        return None

    @property
    def token(self) -> int:
        """By which a neighbour knows this memory from any other."""
        return int(self._head()[4])

    @property
    def step(self) -> int | None:
        """Of which step it has a whole copy."""
        return int(self._head()[0]) - 1 if self._head()[0] else None

    @property
    def size(self) -> int:
        """Bytes of the copy, as its head says."""
        return int(self._head()[3])

    def filling(self) -> None:
        """From here on it has no whole copy."""
        self._head()[0] = 0

    def filled(self, step: int) -> None:
        """Now it has."""
        self._head()[0] = step + 1

    def grow(self, size: int) -> None:
        """Make it at least this large."""
        if len(self.bytes) >= size:
            return
        before, self._listed = self.bytes, []
        if self.fd is None:
            self.bytes = torch.zeros(size, dtype=torch.uint8)
            self.bytes[: len(before)] = before
        else:
            os.ftruncate(self.fd, size)
            self._map()

    @torch.no_grad()
    def fill(self, step: int, parts: Sequence[Part], note: Mapping[str, Any]) -> None:
        """Copy what this rank writes of these parts."""
        listed, total = [], 0
        for part in parts:
            box, tensor = part.written
            listed.append((part.key, part.shape, box, DTYPES[tensor.dtype], tuple(tensor.shape), total))
            total += _aligned(tensor.numel() * tensor.itemsize, ALIGNED)
        if self._listed != listed:
            length = 2 * len(json.dumps([listed, note]))  # the note's numbers may become longer
            begin = _aligned(8 * HEAD + length, mmap.PAGESIZE)
            self.grow(begin + total)
            self._listed, self._begin = listed, begin
            views = CopiedRows({"rows": listed}, self.bytes[begin : begin + total]).copied()
            self._views = [copy.tensor for copy in views]
        begin = self._begin
        self.filling()
        torch._foreach_copy_(self._views, [part.written[1] for part in parts])
        found = int(fingerprint(self.bytes[begin : begin + total]))
        text = json.dumps({"rows": listed, "sum": found, **note}).encode()
        assert 8 * HEAD + len(text) <= begin, "the note has become twice as long"
        self.bytes[8 * HEAD : 8 * HEAD + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._head()[1:4] = torch.tensor([len(text), begin, begin + total])
        self.filled(step)

    def rows(self) -> CopiedRows:
        """What it holds; to be asked when `step` is not None."""
        _, length, begin, total, _ = self._head().tolist()
        self._map()
        return CopiedRows(json.loads(bytes(self.bytes[8 * HEAD : 8 * HEAD + length].numpy())), self.bytes[begin:total])

    def _head(self) -> Tensor:
        if not len(self.bytes):
            self._map()
        return self.bytes[: 8 * HEAD].view(torch.int64)

    def _map(self) -> None:
        """All of the file, which its owner may have made larger."""
        if self.fd is not None and os.fstat(self.fd).st_size > len(self.bytes):
            self.bytes = torch.frombuffer(mmap.mmap(self.fd, 0), dtype=torch.uint8)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
