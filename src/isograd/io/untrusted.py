"""Files from outside, read within bounds: the readers of isograd_verify/io/untrusted.py, and JSON as typed data.

read_typed, typed        JSON as typed, frozen data
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from isograd_verify.io.untrusted import (
    CONFIG,
    COPY,
    MANIFEST,
    FileError,
    kind_of,
    open_to_read,
    parse_json,
    parse_line,
    read_bytes,
    read_header,
    read_json,
    read_text,
)

__all__ = [
    "CONFIG", "MANIFEST", "FileError", "kind_of", "open_to_read", "parse_json", "parse_line", "read_bytes",
    "read_header", "read_json", "read_text",
]  # fmt: skip

T = TypeVar("T")

_adapters: dict[Any, Any] = {}  # by type: making one takes longer than most uses


def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def read_typed(kind: type[T], path: str | Path, most: int, *, follow: bool = False) -> T:
    """A JSON file as typed data; see typed."""
    return typed(kind, read_bytes(path, most, follow=follow), path)


def typed(kind: type[T], raw: bytes | str, path: str | Path, *, nan: bool = False) -> T:
    """JSON text as typed data. `kind`: a dataclass or another type that pydantic knows."""
    from pydantic import ValidationError

    parse_json(raw, path, nan=nan)
    try:
        found: T = _adapter(kind).validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole file"
        raise FileError(
            "IG663",
            f"{path} does not hold what it should",
            seen=f"{place[:200]}: {first['msg']}, not {repr(first['input'])[:80]}",
            expected="the fields of its format, each of its type",
            fix=COPY,
        ) from error
    return found
