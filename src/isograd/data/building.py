"""Files of text into a folder of token shards, resumable at any point, the same bytes whoever builds it.

The same call resumes a build that was killed: a shard that has a record is kept. Another recipe, or inputs that
changed, are refused instead of mixed with what is done.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import get_args

from isograd.data.chats import chat_tokenizer
from isograd.data.files import write_whole, writing
from isograd.data.manifest import (
    LARGEST,
    NAME,
    TOKENIZER,
    Documents,
    OnBadLines,
    Recipe,
    SpecialTokens,
    TokenManifest,
    encode,
    left_out_text,
    read,
)
from isograd.data.shards import SHOWN, ShardRecord, done
from isograd.data.texts import LARGEST as LARGEST_DOCUMENT
from isograd.data.texts import InputPart, changed, cut, find_inputs, place_of
from isograd.data.tokenizer import files_beside, find_tokenizer
from isograd.data.tokens import check_sizes
from isograd.data.workers import Job, work
from isograd.errors import DataError
from isograd.io.atomic import flush_folder
from isograd.io.untrusted import FileError, read_typed

RECIPE = "building.json"
SHARD = 16 << 20  # bytes of text in a shard, more if there would be too many shards
MOST = 4096  # unless shard_bytes says otherwise; then
SHARDS = 1 << 16  # at the very most
RECORD = re.compile(r"building-\d+\.json")
SHARD_FILE = re.compile(r"(train|validation)-\d+\.(bin|ends|counted)")
TEMPORARY = re.compile(r"(building|manifest|tokenizer|special|added|chat|train|validation).*\.\d+\.tmp")

Progress = Callable[[int, int, int], None]  # bytes done, bytes in all, tokens so far


def build(
    out: str | Path,
    inputs: Sequence[str | Path],
    *,
    tokenizer: str = "bytes",
    documents: Documents = "file",
    text_key: str = "text",
    validation: float = 0.01,
    end_of_document: str = "auto",
    special_tokens: SpecialTokens = "refuse",
    chat: bool = False,
    on_bad_lines: OnBadLines = "refuse",
    shard_bytes: int | None = None,
    largest_document: int = LARGEST_DOCUMENT,
    workers: int = 1,
    progress: Progress = lambda done, total, tokens: None,
) -> TokenManifest:
    """The manifest of a finished build; one that was finished before with the same recipe is left as it is.

    special_tokens: what to do with text that spells a special token of the tokenizer: "refuse" it, "keep" it as the
    token's id, or encode it as ordinary "text". Of conversations "text" speaks of what the template spells like a
    special token and the tokenizer splits.

    largest_document: bytes of a document; a larger one is refused before it is in memory.

    chat: inputs are conversations, and `tokenizer` is a folder with a chat template (data/chats.py). on_bad_lines:
    "refuse" a line that is none to learn from, or "skip" it: the manifest counts such lines by reason.

    workers > 1 starts processes: guard a script with `if __name__ == "__main__"`, as for any use of multiprocessing.
    """
    choices = {"documents": documents, "special_tokens": special_tokens, "on_bad_lines": on_bad_lines}
    counts = {"shard_bytes": shard_bytes, "workers": workers, "largest_document": largest_document}
    _check(inputs, validation, choices, counts)
    folder = Path(out)
    template = None
    if chat:
        tools, template = chat_tokenizer(tokenizer, special_tokens)
    else:
        tools = find_tokenizer(tokenizer, end_of_document, special_tokens)
    found = find_inputs([str(path) for path in inputs], folder, chat)
    size = shard_bytes or max(SHARD, -(-sum(one.bytes for one in found) // MOST))
    special = special_tokens if tools.special or chat else "text"  # a choice that makes no difference is not recorded
    recipe = Recipe(
        tools.vocabulary,
        documents,
        text_key,
        float(validation),
        size,
        found,
        special,
        template,
        on_bad_lines if chat else "refuse",
    )
    with _locked(folder):
        if not _begin(folder, recipe):
            return read(folder)
        jobs = list(enumerate(cut(recipe, largest_document)))
        if len(encode(asdict(recipe))) > LARGEST // 2 or len(jobs) > SHARDS:
            seen = f"{len(recipe.inputs)} inputs, {len(jobs)} shards"
            raise DataError("IG909", seen=seen, shards=SHARDS, largest=LARGEST // 2)
        records = {number: record for number, _ in jobs if (record := done(folder, number, recipe))}
        count = _Count(progress, jobs)
        for job in jobs:
            if job[0] in records:
                count.add(job, records[job[0]])
        count.tell()
        open_jobs = [job for job in jobs if job[0] not in records]
        with closing(work(folder, open_jobs, recipe, tools, workers)) as made:
            for job, record in made:
                records[job[0]] = record
                count.add(job, record)
                count.tell()
        manifest = _manifest(recipe, [records[number] for number, _ in jobs])
        if tools.json is not None:
            for name, content in (files_beside(tokenizer) | {TOKENIZER: tools.json.encode()}).items():
                write_whole(folder / name, content)
        write_whole(folder / NAME, manifest.encode())
        _clear(folder)
    return manifest


class _Count:
    """How far a build is; `tell` passes it on."""

    def __init__(self, progress: Progress, jobs: list[Job]) -> None:
        self._progress = progress
        self._total = sum(part.weight for _, parts in jobs for part in parts)
        self._done = self._tokens = 0

    def add(self, job: Job, record: ShardRecord) -> None:
        self._done += sum(part.weight for part in job[1])
        self._tokens += sum(shard.tokens for shard in record.shards)

    def tell(self) -> None:
        self._progress(self._done, self._total, self._tokens)


def _begin(folder: Path, recipe: Recipe) -> bool:
    """Whether there is something to do; what is not ours, or of another recipe, is refused."""
    names = {path.name for path in folder.iterdir()}
    finished = NAME in names
    if finished:
        manifest = read(folder)
        _same(folder, manifest.recipe, recipe)
        check_sizes(folder, manifest.files())
    elif any(RECORD.fullmatch(name) for name in names):
        _resume(folder, _recipe(folder), recipe, names)
    elif foreign := [] if RECIPE in names else sorted(names):
        raise _taken(folder, f"other files: {', '.join(foreign[:5])}", "choose a new folder")
    else:  # nothing is done yet: an input may have been fixed after it was refused
        for name in filter(SHARD_FILE.fullmatch, names):
            (folder / name).unlink()
        write_whole(folder / RECIPE, encode(asdict(recipe)))
    if finished:
        _clear(folder)  # in case the build was killed after its manifest
    return not finished


def _resume(folder: Path, theirs: Recipe, ours: Recipe, names: set[str]) -> None:
    """Refuse an unfinished build of another recipe. One that refused special tokens may be resumed with a decision, and
    one that refused a line with the decision to skip such lines: its finished shards have none.

    Its finished shards hold no text that spells one, so they are equal under "text". Under "keep" they are made again:
    a tokenizer may also match a special token where the text spells it differently, in capitals for example.
    """
    decided = replace(
        theirs,
        special_tokens=ours.special_tokens if theirs.special_tokens == "refuse" else theirs.special_tokens,
        on_bad_lines=ours.on_bad_lines if theirs.on_bad_lines == "refuse" else theirs.on_bad_lines,
    )
    _same(folder, decided, ours)
    if theirs == ours:
        return
    other = ours.special_tokens != theirs.special_tokens
    if other and (ours.special_tokens == "keep" or theirs.on_bad_lines == "skip"):
        with writing(folder):
            for name in filter(RECORD.fullmatch, names):
                (folder / name).unlink()
            flush_folder(folder)
    write_whole(folder / RECIPE, encode(asdict(ours)))


def _recipe(folder: Path) -> Recipe:
    try:
        return read_typed(Recipe, folder / RECIPE, LARGEST)
    except FileError as error:
        raise _taken(folder, f"{RECIPE} cannot be read", "remove the folder and build again") from error


def _same(folder: Path, theirs: Recipe, ours: Recipe) -> None:
    for old, new in zip(theirs.inputs, ours.inputs, strict=False):
        if old.path == new.path and old != new:
            raise changed(new.path, folder)
    unlike = [f.name for f in fields(Recipe) if getattr(theirs, f.name) != getattr(ours, f.name)]
    if unlike:
        shown = [f"{n} {getattr(theirs, n)!r}" for n in unlike if n not in ("inputs", "vocabulary")]
        shown += ["another tokenizer or end of document"] * ("vocabulary" in unlike) + ["other inputs"] * (
            "inputs" in unlike
        )
        raise _taken(
            folder, f"a build with {', '.join(shown)}", "choose a new folder, or give the same options and inputs"
        )


def _taken(folder: Path, seen: str, fix: str) -> DataError:
    return DataError("IG916", seen=seen, fix=fix, folder=folder)


def _manifest(recipe: Recipe, records: Sequence[ShardRecord]) -> TokenManifest:
    shards = [shard for record in records for shard in record.shards]
    left_out = dict(sum((Counter(record.left_out) for record in records), Counter[str]()))
    skipped = [place for record in records for place in record.skipped][:SHOWN]
    sizes = [one.bytes for one in recipe.inputs]
    at = tuple(place_of(recipe, InputPart(n, start, sizes[n], 0, sizes[n]), index) for n, start, index in skipped)
    if not any(shard.split == "train" for shard in shards):
        seen, fix = (
            left_out_text(left_out, at) or "no document with text",
            "give inputs that hold text; into a new folder",
        )
        if held := sum(shard.documents for shard in shards):
            seen = f"{held} documents for validation, none for training"
            fix = "build into a new folder: smaller --validation, or smaller documents (--documents blank)"
        raise DataError("IG923", seen=seen, fix=fix)
    ordered = sorted(shards, key=lambda shard: (shard.split, shard.number))
    markers = {marker: number for record in records for marker, number in record.markers.items()}
    empty = sum(record.empty for record in records)
    return TokenManifest(recipe, tuple(ordered), empty, dict(sorted(markers.items())), left_out, at)


def _clear(folder: Path) -> None:
    """Remove what only an unfinished build needs; its recipe last, without which the rest would be foreign."""
    with writing(folder):
        for path in sorted(folder.glob("building-*.json")):
            path.unlink()
        (folder / RECIPE).unlink(missing_ok=True)
        flush_folder(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, and no other build in it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError("IG922", seen=error.strerror, folder=folder) from error
        _sweep(folder)
        try:
            yield
        finally:
            _sweep(folder)
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove the unfinished files of those who were stopped."""
    for path in folder.iterdir():
        if TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _check(
    inputs: Sequence[object], validation: float, choices: Mapping[str, str], counts: Mapping[str, int | None]
) -> None:
    known = {"documents": Documents, "special_tokens": SpecialTokens, "on_bad_lines": OnBadLines}
    wrong = [] if inputs else ["no inputs"]
    wrong += [f"{name} {word!r}" for name, word in choices.items() if word not in get_args(known[name])]
    wrong += [] if 0 <= validation < 1 else [f"validation {validation}"]
    wrong += [f"{name} {count}" for name, count in counts.items() if count is not None and count < 1]
    if wrong:
        raise DataError("IG924", seen="; ".join(wrong))
