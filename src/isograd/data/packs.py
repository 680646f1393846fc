"""Whole documents packed into windows: no answer is in another window than its question.

Best fit, the longest first: each document goes to the window whose free space is the smallest that is enough. The
result is a function of the lengths alone. A document that is longer than a window is left out, and counted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from isograd.data.tokens import Tokens
from isograd.errors import DataError


class Packs:
    """The windows of one source, each a list of documents."""

    def __init__(self, source: Tokens, length: int) -> None:
        self._ends = source.ends(0, source.tokens)
        lengths = np.diff(self._ends, prepend=0)
        self.number, self.longest, self.left_out = len(lengths), int(lengths.max()), int((lengths > length).sum())
        self._windows = pack(lengths.tolist(), length)
        if not self._windows:
            raise DataError(
                "IG905", f"no document of the {source.split} split of {source.folder} fits into a sequence",
                seen=f"{self.number} documents of {int(lengths.min())} to {self.longest} tokens",
                expected=f"documents of at most {length} tokens",
                fix=f"--data.length {self.longest} (isograd data show: --length)",
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self._windows)

    def documents(self, window: int) -> Iterator[tuple[int, int]]:
        """The first and the last token, in the stream, of each document of a window."""
        for document in self._windows[window]:
            yield int(self._ends[document - 1]) if document else 0, int(self._ends[document])


def pack(lengths: list[int], room: int) -> list[list[int]]:
    """Documents by number in windows of `room` tokens, in the order of the stream within each."""
    windows: list[list[int]] = []
    free: dict[int, list[int]] = {}  # free tokens -> windows
    sizes: list[int] = []  # the keys of `free`, ascending
    for document in sorted(range(len(lengths)), key=lambda d: (-lengths[d], d)):
        need = lengths[document]
        if need > room:
            continue
        at = bisect_left(sizes, need)
        if at < len(sizes):
            left = sizes[at]
            window = free[left].pop()
            if not free[left]:
                del free[left], sizes[at]
        else:
            left, window = room, len(windows)
            windows.append([])
        windows[window].append(document)
        left -= need
        if left:
            if left not in free:
                free[left] = []
                insort(sizes, left)
            free[left].append(window)
    return [sorted(window) for window in windows]
