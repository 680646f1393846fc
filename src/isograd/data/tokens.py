"""One split of a folder of tokens, read by place: token i of the stream, and where documents end.

The sizes of all files are checked when the folder is opened, so a truncated one is refused before a run starts.
Flipped bits are what `isograd data verify` finds: hashing a terabyte at each start would cost more than it saves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.data.files import FileReader
from isograd.data.manifest import SPLITS, file_names, read
from isograd.errors import DataError
from isograd.io.no_follow import not_there

Numbers = NDArray[np.int64]


def check_sizes(folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Refuse a folder in which one of a manifest's `files` is missing or has another size than it says."""
    for name, (expected, _) in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected:
            raise DataError(
                "IG902", seen=not_there(path) if size is None else f"{size} bytes", path=path, size=expected
            )


class Tokens:
    """One split of a folder, opened for reading."""

    def __init__(self, folder: str | Path, split: str = "train") -> None:
        self.folder, self.split = Path(folder), split
        self.manifest = read(self.folder)
        self.shards = self.manifest.of(split)
        check_sizes(self.folder, self.manifest.files(split))
        names = [file_names(shard.split, shard.number) for shard in self.shards]
        self._files = [[str(self.folder / name) for name in each] for each in names]
        self._dtype = np.dtype(self.manifest.recipe.vocabulary.dtype)
        self._starts = [0, *accumulate(shard.tokens for shard in self.shards)]  # of each shard in the stream
        self._places = FileReader()
        if not self.shards:
            there = [s for s in SPLITS if self.manifest.of(s)]
            raise DataError(
                "IG905",
                f"{folder} has no {split!r} split",
                seen=f"splits: {', '.join(there)}",
                expected="at least one document in it",
                fix="build with --validation above 0; with few documents, cut them smaller: --documents blank",
            )

    @property
    def tokens(self) -> int:
        """The number of tokens in the split."""
        return self._starts[-1]

    @property
    def documents(self) -> int:
        """The number of documents in the split."""
        return sum(shard.documents for shard in self.shards)

    @property
    def vocab(self) -> int:
        """The number of token ids."""
        return self.manifest.recipe.vocabulary.size

    def read(self, start: int, stop: int) -> Numbers:
        """Tokens start to stop of the stream."""
        width = self._dtype.itemsize
        found = np.empty(stop - start, np.int64)
        for number, a, b in self._parts(start, stop):
            raw = self._places.read(self._files[number][0], a * width, (b - a) * width)
            at = self._starts[number] + a - start
            found[at : at + b - a] = np.frombuffer(raw, self._dtype)
        if len(found) and found.max() >= self.vocab:
            raise DataError(
                "IG928", seen=f"token {found.max()} between places {start} and {stop} of {self.split}", path=self.folder
            )
        return found

    def counted(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which tokens from start to stop count as labels: of conversations, those that the assistant writes."""
        parts = [np.ones(0, np.bool_)]
        for number, a, b in self._parts(start, stop):
            there = self.shards[number].counted_sha256
            raw = self._places.read(self._files[number][2], a, b - a) if there else None
            parts.append(np.ones(b - a, np.bool_) if raw is None else np.frombuffer(raw, np.bool_))
        return np.concatenate(parts)

    def ends(self, start: int, stop: int) -> Numbers:
        """The places in (start, stop] at which a document has just ended."""
        found = [np.empty(0, np.int64)]
        for number, a, b in self._parts(start, stop):
            path = self._files[number][1]
            ends = _Ends(self._places, path, self.shards[number].documents)
            first, last = bisect_right(ends, a), bisect_right(ends, b)
            raw = self._places.read(path, first * 8, (last - first) * 8)
            inside = np.frombuffer(raw, "<u8").astype(np.int64)
            if len(inside) and not (a < inside[0] and inside[-1] <= b and (np.diff(inside) > 0).all()):
                raise DataError("IG928", seen=f"ends of documents that do not ascend from {a} to {b}", path=path)
            found.append(inside + self._starts[number])
        return np.concatenate(found)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(shard, from, to) of the shards that hold tokens start to stop, places counted from the shard's start."""
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            first, last = self._starts[number], min(stop, self._starts[number + 1])
            yield number, start - first, last - first
            number, start = number + 1, last


class _Ends(Sequence[int]):
    """The document ends of a shard, each read when asked for: what bisect needs."""

    def __init__(self, places: FileReader, path: str, count: int) -> None:
        self._places, self._path, self._count = places, path, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return int.from_bytes(self._places.read(self._path, index * 8, 8), "little")
