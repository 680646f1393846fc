"""A folder of tokens for people: what is in it, some samples as training sees them, and whether a bit has flipped."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from isograd.data.files import sha256
from isograd.data.manifest import SPLITS, Manifest, read
from isograd.data.mixture import IGNORE, Mixture, Source
from isograd.data.tokenizer import load_tokenizer
from isograd.data.tokens import check_sizes
from isograd.errors import DataError


def inspect(folder: str | Path, length: int = 128, samples: int = 3, seed: int = 0, split: str = "train") -> str:
    """Counts, then `samples` rows of step 0, decoded, a line for each document in them."""
    manifest = read(Path(folder))
    vocabulary = manifest.recipe.vocabulary
    end = "none" if vocabulary.end_of_document is None else vocabulary.end_of_document
    lines = [f"{folder}: tokenizer {vocabulary.name}, vocabulary {vocabulary.size:,}, end of document {end}"]
    for name in SPLITS:
        shards = manifest.of(name)
        tokens, documents = sum(s.tokens for s in shards), sum(s.documents for s in shards)
        lines.append(f"  {name:<11}{tokens:>16,} tokens {documents:>12,} documents {len(shards):>6,} shards")
    inputs = manifest.recipe.inputs
    lines.append(
        f"  from {len(inputs):,} files, {sum(one.bytes for one in inputs):,} bytes, {manifest.empty:,} empty documents"
    )
    mixture = Mixture([Source(folder)], length=length, batch=samples, seed=seed, split=split)
    decode = load_tokenizer(Path(folder), vocabulary).decode
    rows = mixture.rows(0, range(samples))
    for row in range(samples):
        ids, numbers = rows["tokens"][row].tolist(), rows["documents"][row].tolist()
        counted = int((rows["labels"][row] != IGNORE).sum())
        lines.append(f"\nsample {row} of {split}: {length} tokens, {counted} labels, {numbers[-1] + 1} documents")
        for number, held in groupby(zip(numbers, ids, strict=True), key=lambda pair: pair[0]):
            text = _printable(decode([token for _, token in held]))
            lines.append(f"  [{number}] " + text.replace("\n", "\n      "))
    return "\n".join(lines)


def _printable(text: str) -> str:
    """What a terminal would act on is spelled out."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def verify(folder: str | Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Manifest:
    """Hash every file and compare with the manifest. All that differ are named."""
    home = Path(folder)
    manifest = read(home)
    files = manifest.files()
    check_sizes(home, manifest, list(files))
    total, passed, wrong = sum(size for size, _ in files.values()), 0, []
    for name, (size, expected) in files.items():
        if sha256(home / name) != expected:
            wrong.append(name)
        passed += size
        progress(passed, total)
    if wrong:
        raise DataError(
            "IG903",
            f"{len(wrong)} of {len(files)} files in {folder} hold other bytes than were built",
            seen=f"another sha256: {', '.join(wrong[:10])}",
            expected="the sha256 of the manifest",
            fix="copy those files again, or build the folder again",
        )
    load_tokenizer(home, manifest.recipe.vocabulary)
    return manifest
