"""Files from outside, read within bounds: the readers of isograd_verify/io/untrusted.py, which here read objects of a
store (io/store.py), too; and JSON as typed data.

read_typed, typed        JSON as typed, frozen data
Strict                   what such data inherits that has no other fields, and no values of other types
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, TypeVar

from isograd.io.store import Place, StorePath
from isograd_verify.io import untrusted as _disk
from isograd_verify.io.untrusted import (
    CONFIG,
    COPY,
    MANIFEST,
    Extent,
    FileError,
    kind_of,
    parse_json,
    parse_line,
    read_json,
    read_text,
)

__all__ = [
    "CONFIG", "MANIFEST", "Extent", "FileError", "kind_of", "open_to_read", "parse_json", "parse_line", "read_bytes",
    "read_header", "read_json", "read_text",
]  # fmt: skip

T = TypeVar("T")


class Strict:
    """Of a dataclass: a field that it does not have, or a value of another type, is an error."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}


_adapters: dict[Any, Any] = {}  # by type: making one takes longer than most uses


def open_to_read(path: str | Place, *, follow: bool = False) -> AbstractContextManager[Any]:
    """A regular file or an object, open for reading; see isograd_verify."""
    return path.open_to_read() if isinstance(path, StorePath) else _disk.open_to_read(path, follow=follow)


def read_bytes(path: str | Place, most: int, *, follow: bool = False) -> bytes:
    """The whole file, which has at most `most` bytes."""
    with _found(path):
        return _disk.read_bytes(path, most, follow=follow, opener=open_to_read)  # type: ignore[arg-type]


def read_header(path: str | Place, *, follow: bool = False) -> dict[str, Extent]:
    """The tensors of a safetensors file, by name."""
    with _found(path):
        return _disk.read_header(path, follow=follow, opener=open_to_read)  # type: ignore[arg-type]


@contextmanager
def _found(path: object) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:  # an object's: files of a disk have errors of their own
        raise FileError(
            "IG660", f"{path} cannot be read", seen="no such object", expected="an object that may be read", fix=COPY
        ) from error


def read_typed(kind: type[T], path: str | Place, most: int, *, follow: bool = False) -> T:
    """A JSON file as typed data; see typed."""
    return typed(kind, read_bytes(path, most, follow=follow), path)


def typed(kind: type[T], raw: bytes | str, path: str | Place, *, parsed: bool = False) -> T:
    """JSON text as typed data. `kind`: a dataclass or another type that pydantic knows; `parsed`: by parse_json."""
    from pydantic import TypeAdapter, ValidationError

    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    if not parsed:
        parse_json(raw, str(path))
    try:
        found: T = _adapters[kind].validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole file"
        raise FileError(
            "IG663", seen=f"{place[:200]}: {first['msg']}, not {repr(first['input'])[:80]}", fix=COPY, path=path
        ) from error
    return found
