"""One line of JSON from outside: a key that stands twice in an object is refused, where Python keeps the last one."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """The value; ValueError where it is none, and where a key is there twice. It speaks of characters: to a reader of
    the file, a line is one of the file."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos :].strip()
        at = f"at character {error.pos + 1}, {rest[:30]!r}" if rest else "behind the last character: is it cut off?"
        raise ValueError(f"{error.msg} {at}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice in one object")
    return found
