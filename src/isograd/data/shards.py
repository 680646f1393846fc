"""One shard: documents of its parts, tokenised, assigned to the splits, written, and recorded.

A document goes to validation by a hash of its text: the same text is always on the same side, wherever it stands and
however often, so nothing that is validated was trained on. The record is written after the files it speaks of; what
has a record is done, and is not done again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from re import Match
from typing import ClassVar

import numpy as np

from isograd.data.files import Writer, settle, write_whole
from isograd.data.manifest import LARGEST, STRICT, Count, Recipe, Shard, Split, encode, file_names
from isograd.data.texts import Part, read
from isograd.data.tokenizer import Ids, Tokenizer
from isograd.errors import DataError
from isograd.outside import FileError, read_typed

TOGETHER = 1 << 20  # characters given to the tokenizer at once


@dataclass(frozen=True)
class Record:
    """A finished shard: its part of each split, and how many documents had no text."""

    shards: tuple[Shard, ...]
    empty: Count
    __pydantic_config__: ClassVar = STRICT


def record_of(folder: Path, number: int) -> Path:
    """The file of a shard's record."""
    return folder / f"building-{number:05d}.json"


def done(folder: Path, number: int, recipe: Recipe) -> Record | None:
    """The record of a shard that was finished before."""
    width = int(recipe.vocabulary.dtype[-1])
    try:
        found = read_typed(Record, record_of(folder, number), LARGEST)
        sizes = {folder / s.tokens_file: s.tokens * width for s in found.shards}
        sizes |= {folder / s.ends_file: s.documents * 8 for s in found.shards}
        whole = all(path.stat().st_size == size for path, size in sizes.items())
    except (OSError, FileError):
        return None
    return found if whole and all(s.number == number for s in found.shards) else None


def make(folder: Path, number: int, parts: list[Part], recipe: Recipe, tokenizer: Tokenizer) -> Record:
    """Tokenise and write one shard, then its record."""
    sides: dict[Split, _Side] = {}
    empty = 0
    try:
        for texts in _batches(recipe, parts, tokenizer):
            for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
                if not len(ids):
                    empty += 1
                    continue
                split = split_of(text, recipe.validation)
                if split not in sides:
                    sides[split] = _Side(folder, split, number, recipe)
                sides[split].add(ids)
            for side in sides.values():
                side.flush()
        shards = tuple(sides[split].keep() for split in sorted(sides))
    finally:
        for side in sides.values():
            side.discard()
    settle(folder)
    record = Record(shards, empty)
    write_whole(record_of(folder, number), encode(asdict(record)))
    return record


def split_of(text: str, validation: float) -> Split:
    """The split of a document: a function of its text alone."""
    place = int.from_bytes(blake2b(text.encode(), digest_size=8, person=b"isograd split").digest())
    return "validation" if place < int(validation * 2**64) else "train"


def _batches(recipe: Recipe, parts: list[Part], tokenizer: Tokenizer) -> Iterator[list[str]]:
    """Documents, some together, so that a tokenizer can work on many at once and memory stays bounded."""
    held, size = list[str](), 0
    refused = tokenizer.special if recipe.special_tokens == "refuse" else None
    for part in parts:
        for index, text in enumerate(read(recipe, part)):
            if refused is not None and (found := refused.search(text)):
                raise _spells(recipe, part, index, found)
            held.append(text)
            size += len(text)
            if size >= TOGETHER:
                yield held
                held, size = [], 0
    if held:
        yield held


def _spells(recipe: Recipe, part: Part, index: int, found: Match[str]) -> DataError:
    """The refusal of document `index` of a part; its number in the file is counted by reading what is before it."""
    before = sum(1 for _ in read(recipe, replace(part, start=0, stop=part.start))) if part.start else 0
    around = found.string[max(0, found.start() - 20) : found.end() + 20]
    return DataError(
        "IG929",
        f"{recipe.inputs[part.input].path}, document {before + index + 1}: "
        f"the text spells the special token {found[0]!r}",
        seen=repr(around),
        expected="text without special tokens, or a decision what they are",
        fix="--special-tokens keep: they become their ids, as chats need that a template has rendered; "
        "--special-tokens text: they are ordinary text",
    )


class _Side:
    """The documents of a shard that belong to one split."""

    def __init__(self, folder: Path, split: Split, number: int, recipe: Recipe) -> None:
        self.split, self.number = split, number
        self.dtype = np.dtype(recipe.vocabulary.dtype)
        end = recipe.vocabulary.end_of_document
        self.end = np.array([] if end is None else [end], self.dtype)
        tokens, ends = file_names(split, number)
        self.tokens, self.ends = Writer(folder / tokens), Writer(folder / ends)
        self.held: list[Ids] = []
        self.lengths: list[int] = []
        self.count = self.documents = 0

    def add(self, ids: Ids) -> None:
        self.held += [ids, self.end]
        self.lengths.append(len(ids) + len(self.end))

    def flush(self) -> None:
        if self.lengths:
            ends = self.count + np.cumsum(self.lengths)
            self.tokens.write(np.concatenate(self.held, dtype=self.dtype, casting="unsafe").tobytes())
            self.ends.write(ends.astype("<u8").tobytes())
            self.count, self.documents = int(ends[-1]), self.documents + len(ends)
            self.held, self.lengths = [], []

    def keep(self) -> Shard:
        return Shard(self.split, self.number, self.count, self.documents, self.tokens.keep(), self.ends.keep())

    def discard(self) -> None:
        self.tokens.discard()
        self.ends.discard()
