"""Files from outside, read within bounds: the one place that opens a file that somebody else may have made.

Nothing here blocks, follows a link (unless asked to), or runs what it reads. Every failure is one FileError.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from isograd_verify.errors import IsogradError

MANIFEST: Final = 64 << 20  # bytes of a data manifest, or of a Hugging Face index
CONFIG: Final = 1 << 20  # bytes of a config
HEADER: Final = 100 << 20  # bytes of a safetensors header: the safetensors package's own limit
DEPTH: Final = 64  # of lists and objects inside each other
NESTED: Final = (dict, list)

BITS: Final = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
LFS: Final = b"version https://git-lfs"
KINDS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a symbolic link"),
)
COPY = "copy the file again, or make it again"


class FileError(IsogradError):
    """IG66x: a file from outside that is not what it has to be."""

    @property
    def brief(self) -> str:
        """What is wrong with the file, in one line, for an error that another room raises."""
        return " ".join(f"{self.what}: {self.seen}".split())[:500]


@contextmanager
def open_to_read(path: str | Path, *, follow: bool = False) -> Iterator[BinaryIO]:
    """A regular file, open for reading. `follow`: its last name may be a link, as in Hugging Face's cache."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        seen = error.strerror if isinstance(error, OSError) else str(error)
        linked = isinstance(error, OSError) and error.errno == errno.ELOOP
        raise _no_file(path, "a symbolic link" if linked else seen) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _no_file(path, kind_of(mode))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    except OSError as error:
        raise _no_file(path, error.strerror or str(error)) from error
    finally:
        os.close(descriptor)


def kind_of(mode: int) -> str:
    """'a FIFO', 'a directory', ...: the kind of a file that is not a regular one."""
    return next((name for test, name in KINDS if test(mode)), "no regular file")


def read_bytes(path: str | Path, most: int, *, follow: bool = False, opener: Any = open_to_read) -> bytes:
    """The whole file, which has at most `most` bytes."""
    with opener(path, follow=follow) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        found: bytes = file.read(most + 1) if size <= most else b""  # it may grow
    if max(size, len(found)) > most:
        raise FileError(
            "IG661",
            f"{path} is too large for what it should be",
            seen=f"more than {most:,} bytes",
            expected=f"at most {most:,} bytes",
            fix="is this the right file?",
        )
    return found


def read_text(path: str | Path, most: int, *, follow: bool = False) -> str:
    """The whole file as UTF-8."""
    return _decoded(read_bytes(path, most, follow=follow), path)


def read_json(path: str | Path, most: int, *, nan: bool = False, follow: bool = False) -> Any:
    """The value that a JSON file holds; see parse_json."""
    return parse_json(read_bytes(path, most, follow=follow), path, nan=nan)


def parse_json(raw: bytes | str, path: str | Path, *, nan: bool = False) -> Any:
    """JSON as Python values: no key twice, no infinity, at most DEPTH deep, no half of a surrogate pair. nan: NaN and
    Infinity may stand in it, which Python writes and JSON does not have."""
    text = raw if isinstance(raw, str) else _decoded(raw, path)
    if text.startswith(LFS.decode()):
        raise _pointer(path)
    try:
        found = json.loads(
            text,
            object_pairs_hook=_each_once,
            parse_constant=None if nan else _no_constant,
            parse_float=float if nan else _finite,
        )
        _not_deep(found)
        if "\\ud" in text or "\\uD" in text:
            _no_halves(found, ())
    except (ValueError, RecursionError) as error:
        seen = "too many lists or objects inside each other" if isinstance(error, RecursionError) else error
        raise FileError(
            "IG662", f"{path} cannot be read as JSON", seen=seen, expected="JSON, every key once", fix=COPY
        ) from error
    return found


def parse_line(text: str | bytes) -> Any:
    """The value of one line of JSON; ValueError where it is none, or a key is there twice."""
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos :].strip()
        at = f"at character {error.pos + 1}, {rest[:30]!r}" if rest else "behind the last character: is it cut off?"
        raise ValueError(f"{error.msg} {at}") from error


def _decoded(raw: bytes, path: str | Path) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        seen = f"byte 0x{raw[error.start]:02x} at place {error.start}"
        raise FileError("IG662", f"{path} is not UTF-8 text", seen=seen, expected="UTF-8", fix=COPY) from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        met = set[str]()
        twice = next(name for name, _ in pairs if name in met or met.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:100]!r} is given twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name}, which is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _not_deep(found: Any) -> None:
    level: list[tuple[tuple[object, ...], Any]] = [((), found)] if isinstance(found, NESTED) else []
    for _ in range(DEPTH):
        level = [
            ((*place, key), value)
            for place, values in level
            for key, value in (values.items() if isinstance(values, dict) else enumerate(values))
            if isinstance(value, NESTED)
        ]
        if not level:
            return
    place = ".".join(map(str, level[0][0][:4]))
    raise ValueError(f"lists and objects more than {DEPTH} deep, in {place[:200]}")


def _no_halves(found: Any, place: tuple[object, ...]) -> None:
    for key, value in found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ():
        _no_halves(key, (*place, "a key"))
        _no_halves(value, (*place, key))
    if isinstance(found, str):
        try:
            found.encode()
        except UnicodeEncodeError as error:
            named = ascii(".".join(map(str, place)))[1:-1] or "the whole file"
            raise ValueError(f"{named[:200]}: {found[error.start]!r}, half of a surrogate pair") from error


@dataclass(frozen=True)
class Extent:
    """One tensor of a safetensors file: its bytes are `start` to `stop`, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: str | Path, *, follow: bool = False, opener: Any = open_to_read) -> dict[str, Extent]:
    """The tensors of a safetensors file, by name. Its bytes are those of its tensors, without gap or overlap."""
    with opener(path, follow=follow) as file:
        size, _ = file.seek(0, os.SEEK_END), file.seek(0)
        first = file.read(8)
        if first == LFS[:8]:
            raise _pointer(path)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(HEADER, size - 8):
            raise _lies(path, f"a header of {length:,} bytes in a file of {size:,}", "a header inside the file")
        raw = file.read(length)
        if len(raw) != length:
            raise _lies(path, f"{len(raw):,} bytes of header", f"{length:,}")
    try:
        found = parse_json(raw, path)
    except FileError as error:
        raise _lies(path, error.seen, "a header of JSON") from error
    if not isinstance(found, dict):
        raise _lies(path, f"a header that is a {type(found).__name__}", "an object")
    note = found.pop("__metadata__", {})
    if not isinstance(note, dict) or not all(isinstance(value, str) for value in note.values()):
        raise _lies(path, "__metadata__ that does not map words to words", "strings")
    tensors = {name: _extent(path, name, value) for name, value in found.items()}
    end = 0
    for name, one in sorted(tensors.items(), key=lambda pair: (pair[1].start, pair[1].stop)):
        if one.start != end:
            raise _lies(path, f"{name[:100]!r} begins at byte {one.start}", f"{end}, where the one before it ends")
        end = one.stop
    if end != size - 8 - length:
        raise _lies(path, f"tensors of {end:,} bytes in all, in a file with {size - 8 - length:,}", "equal numbers")
    return tensors


def _extent(path: str | Path, name: str, value: Any) -> Extent:
    named = f"tensor {name[:100]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _lies(path, f"{named}: {repr(value)[:100]}", "its dtype, shape and data_offsets")
    dtype, shape, ends = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _lies(path, f"{named}: dtype {repr(dtype)[:40]}", f"one of {', '.join(BITS)}")
    if not _counts(shape) or len(shape) > DEPTH or math.prod(n for n in shape if n) >= 1 << 60:
        raise _lies(path, f"{named}: shape {repr(shape)[:100]}", "a list of sizes")
    if not _counts(ends) or len(ends) != 2 or ends[0] > ends[1]:
        raise _lies(path, f"{named}: data_offsets {repr(ends)[:100]}", "[start, stop]")
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (ends[1] - ends[0]):
        raise _lies(path, f"{named}: {ends[1] - ends[0]:,} bytes for {shape} of {dtype}", f"{-(-bits // 8):,} bytes")
    return Extent(dtype, tuple(shape), ends[0], ends[1])


def _counts(found: Any) -> bool:
    return isinstance(found, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in found)


def _no_file(path: str | Path, seen: object) -> FileError:
    return FileError(
        "IG660",
        f"{path} cannot be read",
        seen=seen,
        expected="a regular file that may be read",
        fix="check the path and its permissions",
    )


def _lies(path: str | Path, seen: object, expected: object) -> FileError:
    return FileError(
        "IG664",
        f"{path} is no whole safetensors file",
        seen=seen,
        expected=expected,
        fix="the file is damaged or cut short: copy it again",
    )


def _pointer(path: str | Path) -> FileError:
    return FileError(
        "IG665",
        f"{path} is a Git LFS pointer, not the file itself",
        seen="a few lines of text that name where the file is kept",
        expected="the file",
        fix="run 'git lfs pull' in the clone it comes from, and copy the file again",
    )
