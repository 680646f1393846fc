"""Small corpora, and what a folder of tokens holds by the plainest reading: all of it, into lists."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from isograd.data import build
from isograd.data.manifest import TokenManifest, file_names, read

END = 256


def words(number: int, seed: int = 0) -> list[str]:
    """Documents of 1 to 40 characters, of 1 to 4 bytes each, without line breaks."""
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefg ßé語🐟", k=draw.randint(1, 40))).strip() or "x" for _ in range(number)]


def lines_file(path: Path, number: int = 60, seed: int = 0) -> Path:
    path.write_text("\n".join(words(number, seed)) + "\n")
    return path


def toy(folder: Path, number: int = 60, seed: int = 0, validation: float = 0.2) -> Path:
    """A built folder of several shards."""
    source = lines_file(folder.with_suffix(".txt"), number, seed)
    build(folder, [source], documents="line", validation=validation, shard_bytes=300)
    return folder


def whole(folder: Path, split: str = "train") -> tuple[list[int], list[int]]:
    """(every token of a split, the number of the document it belongs to)."""
    tokens, numbers, document = list[int](), list[int](), 0
    manifest: TokenManifest = read(folder)
    for shard in manifest.of(split):
        tokens_file, ends_file, _ = file_names(shard.split, shard.number)
        here = np.fromfile(folder / tokens_file, manifest.recipe.vocabulary.dtype).tolist()
        start = 0
        for end in np.fromfile(folder / ends_file, "<u8").tolist():
            numbers += [document] * (end - start)
            document, start = document + 1, end
        tokens += here
        assert len(tokens) == len(numbers)
    return tokens, numbers


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
