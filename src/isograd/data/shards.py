"""One shard: documents of its parts, tokenised, assigned to the splits, written, and recorded.

A document goes to validation by a hash of its text: the same text is always on the same side, wherever it stands and
however often, so nothing that is validated was trained on. The record is written after the files it speaks of; what
has a record is done, and is not done again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import numpy as np

from isograd.data.files import write_whole, writing
from isograd.data.manifest import LARGEST, Count, Recipe, Split, TokenShard, encode, file_names
from isograd.data.texts import InputPart, place_of, read
from isograd.data.tokenizer import ChatEncoder, Ids, Tokenizer
from isograd.errors import DataError
from isograd.io.atomic import AtomicFile, flush_folder
from isograd.io.untrusted import FileError, Strict, read_typed

T = TypeVar("T")
TOGETHER = 1 << 20  # characters given to the tokenizer at once
SHOWN = 3  # lines that were skipped, by name
REASONS = {"IG929": "a special token spelled in a message", "IG992": "an answer whose tokens are not certain"}


@dataclass(frozen=True)
class ShardRecord(Strict):
    """A finished shard: its part of each split, and how many documents had no text."""

    shards: tuple[TokenShard, ...]
    empty: Count
    markers: dict[str, Count] = field(default_factory=dict)  # of a chat template, as text
    left_out: dict[str, Count] = field(default_factory=dict)  # lines that were skipped, by reason
    skipped: tuple[tuple[Count, Count, Count], ...] = ()  # the first of them: input, where its part begins, place in it


def record_of(folder: Path, number: int) -> Path:
    """The file of a shard's record."""
    return folder / f"building-{number:05d}.json"


def done(folder: Path, number: int, recipe: Recipe) -> ShardRecord | None:
    """The record of a shard that was finished before."""
    try:
        found = read_typed(ShardRecord, record_of(folder, number), LARGEST)
        files = [file for shard in found.shards for file in shard.files(recipe.vocabulary).items()]
        whole = all((folder / name).stat().st_size == size for name, (size, _) in files)
    except (OSError, FileError):
        return None
    return found if whole and all(s.number == number for s in found.shards) else None


def make(folder: Path, number: int, parts: list[InputPart], recipe: Recipe, tokenizer: Tokenizer) -> ShardRecord:
    """Tokenise and write one shard, then its record."""
    sides: dict[Split, _Side] = {}
    empty, left_out = 0, list[Skipped]()
    if tokenizer.chat is not None:
        tokenizer.chat.markers = {}
    try:
        for batch in _tokenized(recipe, parts, tokenizer, left_out):
            empty += _assign(batch, sides, folder, number, recipe)
            del batch  # the last one is not held while its tokens are written
        for side in sides.values():
            side.flush()
        shards = tuple(sides[split].keep() for split in sorted(sides))
    finally:
        for side in sides.values():
            side.discard()
    with writing(folder):
        flush_folder(folder)
    markers = tokenizer.chat.markers if tokenizer.chat is not None else {}
    reasons = dict(Counter(reason for reason, _, _ in left_out))
    first = tuple((part.input, part.start, index) for _, part, index in left_out[:SHOWN])
    record = ShardRecord(shards, empty, markers, reasons, first)
    write_whole(record_of(folder, number), encode(asdict(record)))
    return record


def _assign(batch: list[Document], sides: dict[Split, _Side], folder: Path, number: int, recipe: Recipe) -> int:
    """Each document to its split; how many are empty."""
    empty = 0
    for text, ids, counted in batch:
        if not len(ids):
            empty += 1
            continue
        split = split_of(text, recipe.validation)
        if split not in sides:
            sides[split] = _Side(folder, split, number, recipe)
        sides[split].add(ids, counted)
    return empty


def split_of(text: str, validation: float) -> Split:
    """The split of a document: a function of its text alone."""
    place = int.from_bytes(blake2b(text.encode(), digest_size=8, person=b"isograd split").digest())
    return "validation" if place < int(validation * 2**64) else "train"


Document = tuple[str, Ids, Ids | None]  # its text, its tokens, and which of them count; None: all
Skipped = tuple[str, InputPart, int]  # why a line is left out, the part that it stands in, and its place there


def _tokenized(
    recipe: Recipe, parts: list[InputPart], tokenizer: Tokenizer, left_out: list[Skipped]
) -> Iterator[list[Document]]:
    """Documents, some together. left_out: takes the lines that are skipped."""
    if tokenizer.chat is not None:
        yield from _together(_chats(recipe, parts, tokenizer.chat, left_out), lambda document: len(document[0]))
        return
    for texts in _together(_texts(recipe, parts, tokenizer), len):
        yield [(text, ids, None) for text, ids in zip(texts, tokenizer.encode(texts), strict=True)]


def _together(parts: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Some of them together, so that a tokenizer can work on many at once and memory stays bounded."""
    held, total = list[T](), 0
    for part in parts:
        held.append(part)
        total += size(part)
        if total >= TOGETHER:
            yield held
            held, total = [], 0
    if held:
        yield held


def _chats(recipe: Recipe, parts: list[InputPart], encode: ChatEncoder, left_out: list[Skipped]) -> Iterator[Document]:
    for part in parts:
        for index, text in enumerate(read(recipe, part)):
            try:
                yield (text, *encode(text))
            except DataError as error:
                reason = error.reason or REASONS.get(error.code)
                if recipe.on_bad_lines != "skip" or not reason:
                    error.where = place_of(recipe, part, index)
                    raise
                left_out.append((reason, part, index))


def _texts(recipe: Recipe, parts: list[InputPart], tokenizer: Tokenizer) -> Iterator[str]:
    refused = tokenizer.special if recipe.special_tokens == "refuse" else None
    for part in parts:
        for index, text in enumerate(read(recipe, part)):
            if refused is not None and (found := refused.search(text)):
                raise DataError(
                    "IG929",
                    f"{place_of(recipe, part, index)}: the text spells the special token {found[0]!r}",
                    seen=repr(text[max(0, found.start() - 20) : found.end() + 20]),
                    expected="text without special tokens, or a decision what they are",
                    fix="--special-tokens keep: they become their ids, as chats need that a template has rendered; "
                    "--special-tokens text: they are ordinary text",
                )
            yield text


def _blocks(held: list[Ids]) -> Iterator[list[Ids]]:
    """Arrays, some together and large ones in parts: what is written at once takes little memory."""
    return _together((ids[at : at + TOGETHER] for ids in held for at in range(0, len(ids), TOGETHER)), len)


class _Side:
    """The documents of a shard that belong to one split."""

    def __init__(self, folder: Path, split: Split, number: int, recipe: Recipe) -> None:
        self.folder, self.split, self.number = folder, split, number
        self.dtype = np.dtype(recipe.vocabulary.dtype)
        end = recipe.vocabulary.end_of_document
        self.end = np.array([] if end is None else [end], self.dtype)
        tokens, ends, counted = file_names(split, number)
        with writing(folder):
            self.tokens, self.ends = AtomicFile(folder / tokens), AtomicFile(folder / ends)
            self.counted = AtomicFile(folder / counted) if recipe.template else None
        self.held: list[Ids] = []
        self.held_counted: list[Ids] = []
        self.lengths: list[int] = []
        self.count = self.documents = 0

    def add(self, ids: Ids, counted: Ids | None) -> None:
        self.held += [ids, self.end]
        self.held_counted += [] if counted is None else [counted]
        self.lengths.append(len(ids) + len(self.end))

    def flush(self) -> None:
        if not self.lengths:
            return
        with writing(self.folder):
            ends = self.count + np.cumsum(self.lengths)
            for block in _blocks(self.held):
                self.tokens.write(np.concatenate(block, dtype=self.dtype, casting="unsafe").tobytes())
            self.ends.write(ends.astype("<u8").tobytes())
            if self.counted is not None:
                for block in _blocks(self.held_counted):
                    self.counted.write(np.concatenate(block).tobytes())
            self.count, self.documents = int(ends[-1]), self.documents + len(ends)
            self.held, self.held_counted, self.lengths = [], [], []

    def keep(self) -> TokenShard:
        with writing(self.folder):
            counted = None if self.counted is None else self.counted.commit()
            hashes = self.tokens.commit(), self.ends.commit(), counted
        return TokenShard(self.split, self.number, self.count, self.documents, *hashes)

    def discard(self) -> None:
        self.tokens.discard()
        self.ends.discard()
        if self.counted is not None:
            self.counted.discard()
