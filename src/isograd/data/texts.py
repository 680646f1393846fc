"""Documents out of files: text, JSON lines and parquet, by byte ranges that hold whole documents.

A file is cut where documents end, so that any worker can read any range alone. The cuts depend on the files and on
shard_bytes, never on who reads: that is why the number of workers does not change a byte of what is built. A JSON array
is read in one piece, as a document is.

No document is larger than a limit, and no parquet file opens to more than RATIO times its size: both are refused before
they are in memory. What is read is held about three times at most: as bytes, as text, and as the value in it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from isograd.data.manifest import InputFile, Recipe
from isograd.errors import DataError, if_not_installed
from isograd.io.no_follow import not_there
from isograd.io.untrusted import parse_line

JSON_LINES = (".jsonl", ".ndjson", ".json")
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar")
FORMS = ("tools", "system", "input", "output", "history")  # what lines of conversations may have beside messages
ROWS = 256  # of parquet, read at once
MIB = 1 << 20
LARGEST = 256 * MIB  # bytes of a document, unless the caller says otherwise
UNPACKED, RATIO = 64 * MIB, 1000  # a parquet file may open to this much, or to so many times its size


@dataclass(frozen=True)
class InputPart:
    """A range of an input: bytes, or row groups of a parquet file. `weight`: its bytes in the file. `largest`: bytes of
    a document."""

    input: int
    start: int
    stop: int
    weight: int
    largest: int = LARGEST


def find_inputs(given: list[str], out: Path, chats: bool = False) -> tuple[InputFile, ...]:
    """The files named, and all files in folders named, in the order of their names. None twice, none of the output.
    chats: only files that can hold conversations."""
    files: list[Path] = []
    for name in given:
        path = Path(name)
        if path.is_dir() and out.resolve().is_relative_to(path.resolve()):
            raise _no_input(path, f"the output folder {out} in it", "choose an output folder outside of the inputs")
        inside = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        if not path.is_dir() and not path.is_file():
            raise _no_input(path, not_there(path, "file or folder"))
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
            str(path).encode()
            state = path.stat()
        except (OSError, UnicodeEncodeError) as error:
            raise _no_input(path, str(error)) from error
        if not state.st_size:
            raise DataError("IG911", seen="0 bytes", path=path)
        found.append(InputFile(str(path), state.st_size, state.st_mtime_ns))
    return tuple(found)


def _no_input(
    path: Path, seen: str, fix: str = "give text files, .jsonl, .parquet, or folders of them",
    expected: str | None = None,
) -> DataError:  # fmt: skip
    return DataError("IG910", seen=seen, expected=expected, fix=fix, path=path)


def _too_large(path: Path, start: int, largest: int) -> DataError:
    return _no_input(
        path, f"a document, or a line, of more than {largest:,} bytes, from byte {start:,} on",
        "cut it into documents (--documents line or blank); or isograd data build --largest-document MIB",
        f"documents of at most {largest:,} bytes",
    )  # fmt: skip


def cut(recipe: Recipe, largest: int = LARGEST) -> list[list[InputPart]]:
    """What each shard is made of: neighbouring parts of about shard_bytes together. largest: bytes of a document."""
    shards: list[list[InputPart]] = []
    filled = 0
    for number, one in enumerate(recipe.inputs):
        for part in _parts(number, one, recipe, largest):
            if not shards or filled + part.weight > recipe.shard_bytes:
                shards.append([])
                filled = 0
            filled += part.weight
            last = shards[-1][-1] if shards[-1] else None
            if last is not None and (last.input, last.stop) == (number, part.start):  # a parquet file is opened once
                shards[-1][-1] = replace(last, stop=part.stop, weight=last.weight + part.weight)
            else:
                shards[-1].append(part)
    return shards


def _parts(number: int, one: InputFile, recipe: Recipe, largest: int) -> Iterator[InputPart]:
    path = Path(one.path)
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            for group in range(file.metadata.num_row_groups):
                yield InputPart(number, group, group + 1, file.metadata.row_group(group).total_byte_size, largest)
    elif _is_array(path) or (path.suffix not in JSON_LINES and recipe.documents == "file"):
        if one.bytes > largest:
            raise _too_large(path, 0, largest)
        yield InputPart(number, 0, one.bytes, one.bytes, largest)
    else:
        blank = path.suffix not in JSON_LINES and recipe.documents == "blank"
        start = 0
        with _opened(path) as file:
            while start < one.bytes:
                stop = min(one.bytes, _boundary(path, file, start + recipe.shard_bytes, blank, largest))
                yield InputPart(number, start, stop, stop - start, largest)
                start = stop


def _boundary(path: Path, file: IO[bytes], place: int, blank: bool, largest: int) -> int:
    """The first place from `place` on where a line begins; with `blank`, one after a blank line."""
    file.seek(place - 1)
    _line_of(path, file, largest)
    if blank:
        while line := _line_of(path, file, largest):
            if line.isspace():
                break
    return file.tell()


def _line_of(path: Path, file: IO[bytes], largest: int) -> bytes:
    """The next line, with its newline; one that is too large is refused before all of it is in memory."""
    line = file.readline(largest + 1)
    if len(line) > largest:
        raise _too_large(path, file.tell() - len(line), largest)
    return line


def read(recipe: Recipe, part: InputPart) -> Iterator[str]:
    """The documents of a part, as they stand; empty ones too."""
    one = recipe.inputs[part.input]
    path = Path(one.path)
    if not path.is_file() or path.stat().st_size != one.bytes or path.stat().st_mtime_ns != one.modified_ns:
        raise changed(one.path)
    if path.suffix == ".parquet":
        yield from _conversations(path, part) if recipe.template else _rows(path, part, recipe.text_key)
        return
    if _is_array(path):
        texts = (json.dumps(item, ensure_ascii=False) for item in _array(path, part.largest))
        yield from texts if recipe.template else (_field(path, 0, text, recipe.text_key) for text in texts)
        return
    with _opened(path) as file:
        if recipe.documents == "file" and path.suffix not in JSON_LINES:
            yield _whole_text(path, file, part.largest)
            return
        if recipe.documents == "blank" and path.suffix not in JSON_LINES:
            yield from _paragraphs(path, _lines(path, file, part), part.largest)
            return
        for start, line in _lines(path, file, part):
            if path.suffix not in JSON_LINES and not recipe.template:
                text = _utf8(path, start, line.rstrip(b"\r\n"))
            elif line.isspace():
                continue
            else:
                text = _utf8(path, start, line)
            del line  # of a large document nothing is held twice while its reader has it
            if path.suffix in JSON_LINES and not recipe.template:
                text = _field(path, start, text, recipe.text_key)
            yield text


def place_of(recipe: Recipe, part: InputPart, index: int) -> str:
    """Where document `index` of a part stands: 'chats.jsonl:17', or its number, by reading what is before it."""
    path = Path(recipe.inputs[part.input].path)
    if path.suffix in JSON_LINES and not _is_array(path):
        with _opened(path) as file:
            starts = (start for start, line in _lines(path, file, part) if not line.isspace())
            return f"{path}:{_line(path, next(islice(starts, index, None)))}"
    before = sum(1 for _ in read(recipe, replace(part, start=0, stop=part.start))) if part.start else 0
    return f"{path}, document {before + index + 1}"


def values(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1, value) of each line that is not empty, or of each row of a parquet file."""
    if path.suffix not in (*JSON_LINES, ".parquet"):
        raise _no_input(path, f"a file {path.suffix!r}", "pairs and prompts stand in .jsonl, .json or .parquet files")
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            yield from enumerate(map(_filled, _unpacked(path, file, None, None)), 1)
        return
    if _is_array(path):
        yield from enumerate(_array(path, LARGEST), 1)
        return
    with _opened(path) as file:
        place = 0
        for number, line in enumerate(iter(lambda: _line_of(path, file, LARGEST), b""), 1):
            place += len(line)
            if not line.isspace():
                text = _utf8(path, place - len(line), line)
                del line
                try:
                    yield number, parse_line(text)
                except (ValueError, RecursionError) as error:
                    raise DataError(
                        "IG927",
                        seen=str(error)[:200],
                        expected="one JSON object in each line",
                        path=path,
                        number=number,
                        kind="JSON",
                    ) from error


def _whole_text(path: Path, file: IO[bytes], largest: int) -> str:
    """The text of a file that is one document; its bytes are not held beside it."""
    whole = file.read(largest + 1)
    if len(whole) > largest:
        raise _too_large(path, 0, largest)
    return _utf8(path, 0, whole)


def _is_array(path: Path) -> bool:
    """Whether a file of JSON is one array, instead of lines of objects."""
    if path.suffix not in JSON_LINES:
        return False
    with _opened(path) as file:
        return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _array(path: Path, largest: int) -> list[Any]:
    with _opened(path) as file:
        text = _whole_text(path, file, largest)
    try:
        found: list[Any] = parse_line(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            "IG927", seen=str(error)[:200], expected="one array of JSON objects", path=path, number=1, kind="JSON"
        ) from error
    return found


def changed(path: str, folder: Path | None = None) -> DataError:
    """The error of an input that has changed since the build in `folder` began."""
    again = "build into a new folder, or remove the unfinished one"
    if folder is not None:
        again = f"restore the file; or remove {folder}, no more than that, and it is built again: a run that resumes "
        again += "refuses other samples"
    return DataError("IG917", seen="another size or date", fix=again, path=path)


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise _no_input(path, str(error)) from error


def _lines(path: Path, file: IO[bytes], part: InputPart) -> Iterator[tuple[int, bytes]]:
    """(where it begins, the line with its newline)."""
    file.seek(part.start)
    while (place := file.tell()) < part.stop:
        yield place, _line_of(path, file, part.largest)


def _paragraphs(path: Path, lines: Iterator[tuple[int, bytes]], largest: int) -> Iterator[str]:
    begun, held = 0, list[bytes]()
    for start, line in chain(lines, ((0, b""),)):
        if line.strip():
            begun = begun if held else start
            held.append(line)
            if start + len(line) - begun > largest:
                raise _too_large(path, begun, largest)
        elif held:
            yield _utf8(path, begun, b"".join(held).rstrip(b"\r\n"))
            held.clear()


def _utf8(path: Path, start: int, text: bytes) -> str:
    try:
        found = text.decode()
        return found.removeprefix("\ufeff") if start == 0 else found  # how some editors begin a file
    except UnicodeDecodeError as error:
        place = start + error.start
        byte, line = text[error.start], _line(path, place)
        raise DataError("IG912", path=path, line=line, byte=byte, place=place) from error


def _line(path: Path, place: int) -> int:
    """The number of the line that holds a place."""
    with path.open("rb") as file:
        count = 1
        while place > 0 and (block := file.read(min(place, 1 << 20))):
            count, place = count + block.count(b"\n"), place - len(block)
    return count


def _field(path: Path, start: int, text: str, key: str) -> str:
    try:
        found = parse_line(text)
    except (ValueError, RecursionError) as error:
        raise _no_field(path, start, f"no JSON: {error}", key) from error
    if not isinstance(found, dict):
        raise _no_field(path, start, f"{type(found).__name__} instead of an object", key)
    if key not in found and (chat := [name for name in ("messages", "conversations", "instruction") if name in found]):
        raise _no_field(path, start, f"a conversation: {chat[0]!r}", key, "isograd data build --chat, or task: chat")
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
        seen=seen,
        fix=fix or "fix or remove the line, or name the key: --text-key KEY",
        path=path,
        line=_line(path, start),
        key=key,
    )


def _parquet(path: Path) -> Any:
    with if_not_installed(lambda error: DataError("IG919", seen=error, path=path)):
        from pyarrow import parquet
    try:
        columns = parquet.read_schema(path)
        texts = [field.name for field in columns if str(field.type) in ("string", "large_string", "binary")]
        return parquet.ParquetFile(path, read_dictionary=texts)
    except Exception as error:  # pyarrow raises several kinds
        raise _no_parquet(path, str(error), "a parquet file") from error


def _rows(path: Path, part: InputPart, key: str) -> Iterator[str]:
    for row in _read_rows(path, part, (key,)):
        yield _string(row[key], lambda seen: _no_parquet(path, seen, f"text in column {key!r}"))


def _conversations(path: Path, part: InputPart) -> Iterator[str]:
    """Rows as JSON. Every row of a parquet file has the fields of all rows: those without a value are left out."""
    for row in _read_rows(path, part, ("messages", "conversations", "instruction"), FORMS):
        yield json.dumps(_filled(row), ensure_ascii=False, default=str)


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled(one) for key, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list) else value


def _unpacked(path: Path, file: Any, groups: list[int] | None, names: list[str] | None) -> Iterator[dict[str, Any]]:
    """The rows of some columns; what pyarrow finds wrong is one error."""
    try:
        yield from _rows_within(path, file, groups, names)
    except DataError:
        raise
    except Exception as error:  # pyarrow raises several kinds
        raise _no_parquet(path, str(error), "a parquet file") from error


def _rows_within(path: Path, file: Any, groups: list[int] | None, names: list[str] | None) -> Iterator[dict[str, Any]]:
    """The rows of some columns. A file that opens to far more than its size is refused: by what it says of itself, and
    by what has come out of it. Texts that are stored once and used often are stretched row by row."""
    most, metadata, found = max(UNPACKED, RATIO * path.stat().st_size), file.metadata, 0
    chosen = list(range(metadata.num_row_groups)) if groups is None else groups
    said, batch = 0, ROWS
    _refuse_contradictions(path, metadata, chosen)
    for group in chosen:
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            if names is None or column.path_in_schema.partition(".")[0] in names:
                said += column.total_uncompressed_size
                if column.has_dictionary_page and "." in column.path_in_schema:
                    batch = min(batch, max(1, UNPACKED // max(1, column.total_uncompressed_size)))
    if said > most:
        raise _no_parquet(path, f"it says that it opens to {said:,} bytes", f"at most {most:,}")
    for part in file.iter_batches(batch, chosen, names):
        for row in range(part.num_rows):
            value = {name: part.column(at)[row].as_py() for at, name in enumerate(part.schema.names)}
            found += _weight(value)
            if found > most:
                raise _no_parquet(path, f"it opens to {found:,} bytes or more", f"at most {most:,}")
            yield value


def _refuse_contradictions(path: Path, metadata: Any, groups: Iterable[int]) -> None:
    """pyarrow ends the whole process where the description of a column contradicts itself (its C++ throws where Python
    expects no exception), so a child of this process looks at the descriptions first."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            for group in groups:
                for number in range(metadata.num_columns):
                    metadata.row_group(group).column(number)
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        raise _no_parquet(path, "the description of a column that contradicts itself", "a parquet file")


def _weight(value: Any) -> int:
    """About how many bytes a value takes."""
    if isinstance(value, dict):
        return 8 + sum(map(_weight, value.values()))
    inside = sum(map(_weight, value)) if isinstance(value, list) else 0
    return 8 + inside + (len(value) if isinstance(value, str | bytes) else 0)


def _read_rows(
    path: Path, part: InputPart, keys: tuple[str, ...], more: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """Rows with the columns of `more` that are there, and one of `keys`, which must be there."""
    with _parquet(path) as file:
        columns = file.schema_arrow.names
        if not set(keys) & set(columns):
            seen = f"columns: {', '.join(columns[:10])}"
            raise _no_parquet(path, seen, f"a column {' or '.join(map(repr, keys))}")
        groups, wanted = list(range(part.start, part.stop)), [n for n in dict.fromkeys((*keys, *more)) if n in columns]
        yield from _unpacked(path, file, groups, wanted)


def _no_parquet(path: Path, seen: str, expected: str) -> DataError:
    return DataError("IG920", seen=seen, expected=expected, path=path)
