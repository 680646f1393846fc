"""Attributes that have other values for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def set_attributes(*holders: object, **values: Any) -> Iterator[None]:
    """In here each of these objects has these values for attributes, which it need not have otherwise."""
    before = [(holder, name, getattr(holder, name, _ABSENT)) for holder in holders for name in values]
    try:
        for holder, name, _ in before:
            setattr(holder, name, values[name])
        yield
    finally:
        for holder, name, value in before:
            if value is not _ABSENT:
                setattr(holder, name, value)
            elif hasattr(holder, name):
                delattr(holder, name)
