"""All ranks continue, or all raise: one small gather, in which each rank says what went wrong for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from isograd.comm.notes import gather_notes
from isograd.comm.raw import Group
from isograd.errors import IsogradError

_PARTS = ("code", "what", "seen", "expected", "fix", "where")
T = TypeVar("T")


class Ranks(Protocol):
    """A mesh, as far as this file needs one."""

    device: torch.device

    def group(self, axis: str) -> Group:
        """The ranks of an axis; "world" for all."""
        ...


def told(mine: Any, ranks: Ranks) -> list[Any]:
    """What each rank of the world says, in rank order; all ranks call it."""
    return gather_notes(mine, ranks.group("world"), ranks.device)


def raise_alike(mine: IsogradError | None, ranks: Ranks, kind: type[IsogradError]) -> None:
    """Raise the error of the first rank that has one, on all ranks; elsewhere as a `kind`."""
    note = None if mine is None else [getattr(mine, part) for part in _PARTS]
    spelled = note and [None if value is None else str(value) for value in note]
    first = next((said for said in told(spelled, ranks) if said), None)
    if first is not None and first == spelled:
        assert mine is not None
        raise mine  # with its own traceback
    if first is not None:
        code, what, seen, expected, fix, where = first
        raise kind(code, what, seen=seen, expected=expected, fix=fix, where=where)


def all_or_none(
    run: Callable[[], T], ranks: Ranks, kind: type[IsogradError], spelled: Callable[[Exception], IsogradError]
) -> T:
    """The result of `run`, which does not communicate. Where it fails on any rank, all raise that rank's error;
    `spelled` makes one of isograd's of any other exception."""
    result, error = [], None
    try:
        result.append(run())
    except IsogradError as caught:
        error = caught
    except Exception as caught:
        error = spelled(caught)
        error.__cause__ = caught
    raise_alike(error, ranks, kind)
    return result[0]
