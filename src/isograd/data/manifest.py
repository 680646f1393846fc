"""The manifest: what a folder of tokens holds. It is written last, so a folder that has one is complete.

The shards of a split, in order of their numbers, are one stream of whole documents. File names follow from (split,
number): none is read from the manifest, so a manifest cannot point elsewhere. docs/data.md says what is in each file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from isograd.errors import DataError, listed
from isograd.io.untrusted import MANIFEST, FileError, Strict, parse_json, read_bytes, typed

NAME = "manifest.json"
TOKENIZER = "tokenizer.json"
FORMAT: Final = "isograd tokens"
VERSION: Final = 1
LARGEST = MANIFEST

Split = Literal["train", "validation"]
Documents = Literal["file", "line", "blank"]
SpecialTokens = Literal["refuse", "keep", "text"]
OnBadLines = Literal["refuse", "skip"]
SPLITS: tuple[Split, ...] = ("train", "validation")
Count = Annotated[int, Field(ge=0, lt=1 << 60)]
Some = Annotated[int, Field(gt=0, lt=1 << 60)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def file_names(split: Split, number: int) -> tuple[str, str, str]:
    """The names of a shard's files: its tokens, where its documents end, and which tokens count."""
    return f"{split}-{number:05d}.bin", f"{split}-{number:05d}.ends", f"{split}-{number:05d}.counted"


@dataclass(frozen=True)
class TokenShard(Strict):
    """One shard of a split: how much is in it, and the hashes of its files."""

    split: Split
    number: Annotated[int, Field(ge=0, lt=1 << 32)]
    tokens: Some
    documents: Some
    tokens_sha256: Hash
    ends_sha256: Hash
    counted_sha256: Hash | None = None  # of conversations alone

    def files(self, vocabulary: Vocabulary) -> dict[str, tuple[int, str]]:
        """Bytes and sha256 of each of its files by name."""
        sizes = self.tokens * int(vocabulary.dtype[-1]), self.documents * 8, self.tokens
        hashes = self.tokens_sha256, self.ends_sha256, self.counted_sha256
        every = zip(file_names(self.split, self.number), sizes, hashes, strict=True)
        return {name: (size, digest) for name, size, digest in every if digest is not None}


@dataclass(frozen=True)
class Vocabulary(Strict):
    """What turned text into numbers. `sha256` is that of tokenizer.json, None for the built-in tokenizer of bytes."""

    name: str
    sha256: Hash | None
    size: Annotated[int, Field(gt=0, le=1 << 32)]
    end_of_document: Count | None

    @property
    def dtype(self) -> Literal["<u2", "<u4"]:
        """The type of a token in the files: two bytes where every id fits, else four."""
        return "<u2" if self.size <= 1 << 16 else "<u4"


@dataclass(frozen=True)
class InputFile(Strict):
    """A file that a build read, as it was when the build began."""

    path: str
    bytes: Count
    modified_ns: int


@dataclass(frozen=True)
class Recipe(Strict):
    """Everything that decides the bytes of a build. The number of workers is not among it."""

    vocabulary: Vocabulary
    documents: Documents
    text_key: str
    validation: Annotated[float, Field(ge=0, lt=1)]
    shard_bytes: Some
    inputs: tuple[InputFile, ...]
    special_tokens: SpecialTokens = "text"  # of manifests that were written before the field existed
    template: Hash | None = None  # of the chat template; None: documents are text
    on_bad_lines: OnBadLines = "refuse"  # what to do with lines that are no conversation to learn from


@dataclass(frozen=True)
class TokenManifest(Strict):
    """What a finished folder holds: how it was built, and its shards."""

    recipe: Recipe
    shards: tuple[TokenShard, ...]
    empty: Count  # documents without text, left out
    markers: dict[str, Count] = field(default_factory=dict)  # of conversations: of the template, as text; their tokens
    left_out: dict[str, Count] = field(default_factory=dict)  # of conversations: lines that were skipped, by reason
    left_out_at: tuple[str, ...] = ()  # where the first of them stand
    format: Literal["isograd tokens"] = FORMAT
    version: Literal[1] = VERSION

    def of(self, split: str) -> list[TokenShard]:
        """The shards of a split, in the order of their numbers."""
        return [shard for shard in self.shards if shard.split == split]

    @property
    def as_text(self) -> str:
        """The template's markers that are no token of their own, in words; empty: none."""
        told = listed([f"{marker} {number}" for marker, number in self.markers.items()], 12)
        return told and f"the template's markers that are text, with their number of tokens: {told}"

    def files(self, split: str | None = None) -> dict[str, tuple[int, str]]:
        """Bytes and sha256 by name of every file, or of those of a split."""
        shards = self.shards if split is None else self.of(split)
        return dict(file for shard in shards for file in shard.files(self.recipe.vocabulary).items())

    def encode(self) -> bytes:
        """The bytes of manifest.json."""
        return encode({"format": self.format, "version": self.version} | asdict(self))


def left_out_text(left_out: dict[str, int], at: Iterable[str] = ()) -> str:
    """The lines that were skipped, in words; empty: none."""
    told = [f"{number:,} {reason}" for reason, number in sorted(left_out.items(), key=lambda one: (-one[1], one[0]))]
    first = f"; the first: {', '.join(at)}" if at else ""
    return f"left out: {sum(left_out.values()):,} lines: {', '.join(told)}{first}" if told else ""


def encode(record: dict[str, Any]) -> bytes:
    """A record as the bytes of a JSON file."""
    return (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()


def read(folder: Path) -> TokenManifest:
    """The manifest of a finished build, checked field by field."""
    path = folder / NAME
    if not os.path.lexists(path):
        seen, fix = f"no {NAME}", f"isograd data build {folder} INPUT..."
        if os.path.lexists(folder / "building.json"):
            seen = "its build is not finished"
            fix = "give the same isograd data build command again: it resumes where it stopped"
        elif os.path.isfile(folder):
            seen, fix = "a file", f"isograd data build TOKENS {folder}, and give the folder TOKENS here"
        elif not os.path.exists(folder):
            seen = "no such folder"
        raise DataError("IG900", seen=seen, fix=fix, folder=folder)
    try:
        raw = read_bytes(path, LARGEST)
        head = parse_json(raw, path)
        kind, version = (head.get("format"), head.get("version")) if isinstance(head, dict) else (None, None)
        if kind != FORMAT or version != VERSION:
            raise _unlike(path, f"format {kind!r:.40}, version {version!r:.40}")
        found = typed(TokenManifest, raw, path)
    except FileError as error:
        raise _unlike(path, error.brief) from error
    if len({(s.split, s.number) for s in found.shards}) != len(found.shards):
        raise _unlike(path, "two shards of one name")
    return found


def _unlike(path: Path, seen: str) -> DataError:
    return DataError("IG901", seen=seen, path=path, format=FORMAT, version=VERSION)
