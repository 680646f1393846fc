"""Documents out of files: text, JSON lines and parquet, by byte ranges that hold whole documents.

A file is cut where documents end, so that any worker can read any range alone. The cuts depend on the files and on
shard_bytes, never on who reads: that is why the number of workers does not change a byte of what is built.

    text       --documents file: the whole file, --documents line: each line, blank: what stands between blank lines
    .jsonl     each line an object, the text under --text-key (.ndjson and .json are read the same way)
    .parquet   each row, the text in the column of --text-key; ranges count row groups
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from isograd.data import objects
from isograd.data.manifest import Input, Recipe
from isograd.errors import DataError

JSON_LINES = (".jsonl", ".ndjson", ".json")
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar")
ROWS = 256  # of parquet, read at once


@dataclass(frozen=True)
class Part:
    """A range of an input: bytes, or row groups of a parquet file. `weight`: its bytes in the file."""

    input: int
    start: int
    stop: int
    weight: int


def find_inputs(given: list[str], out: Path, chats: bool = False) -> tuple[Input, ...]:
    """The files named, and all files in folders named, in the order of their names. None twice, none of the output.
    chats: only files that can hold conversations."""
    files: list[Path] = []
    for name in given:
        path = Path(name)
        if path.is_dir() and out.resolve().is_relative_to(path.resolve()):
            raise _no_input(path, f"the output folder {out} in it", "choose an output folder outside of the inputs")
        inside = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        if not path.is_dir() and not path.is_file():
            raise _no_input(path, "no such file or folder")
        if path.is_dir() and not inside:
            raise _no_input(path, "a folder without files")
        files += inside if path.is_dir() else [path]
    found, met = [], set()
    for path in files:
        if path.resolve() in met:
            raise _no_input(path, "named twice", "name it once; weights of a blend make a source count more")
        met.add(path.resolve())
        if path.suffix in PACKED:
            raise _no_input(path, f"a packed file ({path.suffix})", "unpack it first")
        if chats and path.suffix not in (*JSON_LINES, ".parquet"):
            raise _no_input(path, f"a file {path.suffix!r}", "conversations stand in .jsonl or .parquet files")
        try:
            state = path.stat()
        except OSError as error:
            raise _no_input(path, str(error)) from error
        if not state.st_size:
            raise DataError("IG911", f"{path} is empty", seen="0 bytes", expected="text", fix="leave it out")
        found.append(Input(str(path), state.st_size, state.st_mtime_ns))
    return tuple(found)


def _no_input(path: Path, seen: str, fix: str = "give text files, .jsonl, .parquet, or folders of them") -> DataError:
    return DataError("IG910", f"{path} cannot be read as text", seen=seen, fix=fix)


def cut(recipe: Recipe) -> list[list[Part]]:
    """What each shard is made of: neighbouring parts of about shard_bytes together."""
    shards: list[list[Part]] = []
    filled = recipe.shard_bytes
    for number, one in enumerate(recipe.inputs):
        for part in _parts(number, one, recipe):
            if filled + part.weight > recipe.shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(part)
            filled += part.weight
    return shards


def _parts(number: int, one: Input, recipe: Recipe) -> Iterator[Part]:
    path = Path(one.path)
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            for group in range(file.metadata.num_row_groups):
                yield Part(number, group, group + 1, file.metadata.row_group(group).total_byte_size)
    elif path.suffix not in JSON_LINES and recipe.documents == "file":
        yield Part(number, 0, one.bytes, one.bytes)
    else:
        blank = path.suffix not in JSON_LINES and recipe.documents == "blank"
        start = 0
        with _opened(path) as file:
            while start < one.bytes:
                stop = min(one.bytes, _boundary(file, start + recipe.shard_bytes, blank))
                yield Part(number, start, stop, stop - start)
                start = stop


def _boundary(file: IO[bytes], place: int, blank: bool) -> int:
    """The first place from `place` on where a line begins; with `blank`, one after a blank line."""
    file.seek(place - 1)
    file.readline()
    if blank:
        for line in iter(file.readline, b""):
            if not line.strip():
                break
    return file.tell()


def read(recipe: Recipe, part: Part) -> Iterator[str]:
    """The documents of a part, as they stand; empty ones too."""
    one = recipe.inputs[part.input]
    path = Path(one.path)
    if not path.is_file() or path.stat().st_size != one.bytes or path.stat().st_mtime_ns != one.modified_ns:
        raise changed(one.path)
    if path.suffix == ".parquet":
        yield from _conversations(path, part) if recipe.template else _rows(path, part, recipe.text_key)
        return
    with _opened(path) as file:
        lines = _lines(file, part)
        if recipe.template:
            for start, line in lines:
                if line.strip():
                    yield _utf8(path, start, line)
        elif path.suffix in JSON_LINES:
            for start, line in lines:
                if line.strip():
                    yield _field(path, start, line, recipe.text_key)
        elif recipe.documents == "line":
            for start, line in lines:
                yield _utf8(path, start, line.rstrip(b"\r\n"))
        elif recipe.documents == "blank":
            yield from _paragraphs(path, lines)
        else:
            yield _utf8(path, 0, file.read())


def values(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1, value) of each line that is not empty, or of each row of a parquet file."""
    if path.suffix not in (*JSON_LINES, ".parquet"):
        raise _no_input(path, f"a file {path.suffix!r}", "pairs stand in .jsonl or .parquet files")
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(ROWS))
            yield from enumerate(map(_filled, rows), 1)
        return
    with _opened(path) as file:
        place = 0
        for number, line in enumerate(iter(file.readline, b""), 1):
            place += len(line)
            if line.strip():
                text = _utf8(path, place - len(line), line)
                try:
                    yield number, objects.loads(text)
                except (ValueError, RecursionError) as error:
                    raise DataError(
                        "IG927", f"{path}: line {number} is no JSON", seen=str(error)[:200],
                        expected="one JSON object in each line", fix="fix or remove the line",
                    ) from error  # fmt: skip


def changed(path: str, folder: Path | None = None) -> DataError:
    """The error of an input that has changed since the build in `folder` began."""
    again = "build into a new folder, or remove the unfinished one"
    if folder is not None:
        again = f"restore the file; or remove {folder}, no more than that, and it is built again: a run that resumes "
        again += "refuses other samples"
    return DataError(
        "IG917",
        f"{path} is not the file that this build began with",
        seen="another size or date",
        expected="inputs that stay as they were when their build began",
        fix=again,
    )


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise _no_input(path, str(error)) from error


def _lines(file: IO[bytes], part: Part) -> Iterator[tuple[int, bytes]]:
    """(where it begins, the line with its newline)."""
    file.seek(part.start)
    place = part.start
    while place < part.stop:
        line = file.readline()
        yield place, line
        place += len(line)


def _paragraphs(path: Path, lines: Iterator[tuple[int, bytes]]) -> Iterator[str]:
    begun, held = 0, list[bytes]()
    for start, line in chain(lines, ((0, b""),)):
        if line.strip():
            begun = begun if held else start
            held.append(line)
        elif held:
            yield _utf8(path, begun, b"".join(held).rstrip(b"\r\n"))
            held.clear()


def _utf8(path: Path, start: int, text: bytes) -> str:
    try:
        found = text.decode()
        return found.removeprefix("\ufeff") if start == 0 else found  # how some editors begin a file
    except UnicodeDecodeError as error:
        place = start + error.start
        raise DataError(
            "IG912",
            f"{path}, line {_line(path, place)}: not UTF-8 text",
            seen=f"byte 0x{text[error.start]:02x} at place {place} of the file",
            expected="UTF-8",
            fix="convert it, for example with iconv -t UTF-8",
        ) from error


def _line(path: Path, place: int) -> int:
    """The number of the line that holds a place."""
    with path.open("rb") as file:
        count = 1
        while place > 0 and (block := file.read(min(place, 1 << 20))):
            count, place = count + block.count(b"\n"), place - len(block)
    return count


def _field(path: Path, start: int, line: bytes, key: str) -> str:
    text = _utf8(path, start, line)
    try:
        found = objects.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_field(path, start, f"no JSON: {error}", key) from error
    if not isinstance(found, dict):
        raise _no_field(path, start, f"{type(found).__name__} instead of an object", key)
    if key not in found and "messages" in found:
        raise _no_field(path, start, "a conversation: 'messages'", key, "isograd data build --chat, or task: chat")
    if key not in found:
        raise _no_field(path, start, f"keys: {', '.join(map(repr, list(found)[:10]))}", key)
    return _string(found[key], lambda seen: _no_field(path, start, seen, key))


def _string(value: Any, refusal: Any) -> str:
    """A string that can be written as UTF-8; JSON may spell half of a surrogate pair."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise refusal(f"{type(value).__name__} instead of text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refusal(f"{value[error.start]!r}, half of a surrogate pair") from error
    return value


def _no_field(path: Path, start: int, seen: str, key: str, fix: str | None = None) -> DataError:
    return DataError(
        "IG913",
        f"{path}, line {_line(path, start)}: no text there",
        seen=seen,
        expected=f"an object with the text under {key!r}",
        fix=fix or "fix or remove the line, or name the key: --text-key KEY",
    )


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            "IG919", f"{path} needs the pyarrow package", seen=error, fix="pip install 'isograd[data]'"
        ) from error
    try:
        return parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises several kinds
        raise _no_parquet(path, str(error), "a parquet file") from error


def _rows(path: Path, part: Part, key: str) -> Iterator[str]:
    for row in _read_rows(path, part, key):
        yield _string(row[key], lambda seen: _no_parquet(path, seen, f"text in column {key!r}"))


def _conversations(path: Path, part: Part) -> Iterator[str]:
    """Rows as JSON. Every row of a parquet file has the fields of all rows: those without a value are left out."""
    for row in _read_rows(path, part, "messages", "tools"):
        yield json.dumps(_filled(row), ensure_ascii=False, default=str)


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled(one) for key, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list) else value


def _read_rows(path: Path, part: Part, key: str, *more: str) -> Iterator[dict[str, Any]]:
    with _parquet(path) as file:
        columns = file.schema_arrow.names
        if key not in columns:
            raise _no_parquet(path, f"columns: {', '.join(columns[:10])}", f"a column {key!r}")
        groups, wanted = list(range(part.start, part.stop)), [key, *(name for name in more if name in columns)]
        try:
            for batch in file.iter_batches(ROWS, groups, wanted):
                yield from batch.to_pylist()
        except Exception as error:  # pyarrow raises several kinds
            raise _no_parquet(path, str(error), "a parquet file") from error


def _no_parquet(path: Path, seen: str, expected: str) -> DataError:
    return DataError(
        "IG920", f"{path} cannot be read", seen=seen, expected=expected, fix="--text-key names the column of the text"
    )
