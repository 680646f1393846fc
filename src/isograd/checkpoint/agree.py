"""All ranks continue, or all raise: one small gather, in which each rank says what went wrong for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from isograd.comm.notes import gather_notes
from isograd.errors import CheckpointError, IsogradError
from isograd.mesh import Mesh

_PARTS = ("code", "what", "seen", "expected", "fix", "where")
_MADE_AGAIN: type[IsogradError] = CheckpointError
T = TypeVar("T")


def told(mine: Any, mesh: Mesh) -> list[Any]:
    """What each rank of the world says, in rank order; all ranks call it."""
    return gather_notes(mine, mesh.group("world"), mesh.device)


def raise_alike(mine: IsogradError | None, mesh: Mesh) -> None:
    """Raise the error of the first rank that has one, on all ranks."""
    note = None if mine is None else [getattr(mine, part) for part in _PARTS]
    spelled = note and [None if value is None else str(value) for value in note]
    first = next((said for said in told(spelled, mesh) if said), None)
    if first is not None and first == spelled:
        assert mine is not None
        raise mine  # with its own traceback
    if first is not None:
        code, what, seen, expected, fix, where = first
        raise _MADE_AGAIN(code, what, seen=seen, expected=expected, fix=fix, where=where)


def all_or_none(run: Callable[[], T], doing: str, mesh: Mesh) -> T:
    """Run something on this rank; when it fails on any, all raise its error."""
    result, error = [], None
    try:
        with as_ours(doing, mesh.where()):
            result.append(run())
    except IsogradError as caught:
        error = caught
    raise_alike(error, mesh)
    return result[0]


@contextmanager
def as_ours(doing: str, where: str) -> Iterator[None]:
    """What the file system refuses, and whatever else goes wrong there, as an error with a code."""
    try:
        yield
    except IsogradError:
        raise
    except Exception as error:
        raise CheckpointError(
            "IG930",
            f"{doing} failed",
            seen=f"{type(error).__name__}: {error}",
            expected="a folder that can be written, with enough space",
            fix="free space or fix permissions; earlier checkpoints are unchanged",
            where=where,
        ) from error
