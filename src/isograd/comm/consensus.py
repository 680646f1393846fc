"""Small JSON values from every member of a group, and with them: all ranks continue, or all raise.

For names, findings and errors, at starts, saves and refusals; a step that goes well has none of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from isograd.comm import raw
from isograd.comm.group import Group
from isograd.errors import IsogradError

T = TypeVar("T")
E = TypeVar("E", bound=IsogradError)


class Ranks(Protocol):
    """A mesh, as far as this file needs one."""

    def host_group(self, axes: str) -> Group:
        """The ranks along some axes, for values in host memory; "world" for all."""
        ...


def all_gather_object(value: Any, ranks: Ranks, axes: str = "world") -> list[Any]:
    """The JSON value of every rank of a group, in rank order; all of them call it."""
    group = ranks.host_group(axes)
    if group.size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    longest = int(raw.gather(torch.tensor(len(text)), group).max())
    padded = torch.cat((text, text.new_full((longest - len(text),), ord(" "))))
    return [json.loads(bytes(other)) for other in raw.gather(padded, group).numpy()]


def spell(error: IsogradError) -> list[str | None]:
    """An error's code and texts."""
    parts = error.code, error.what, error.seen, error.expected, error.fix, error.where
    return [None if part is None else str(part) for part in parts]


def spelled_out(parts: Sequence[Any], kind: type[E]) -> E:
    """What `spell` has made of an error."""
    code, what, seen, expected, fix, where = parts
    return kind(code, what, seen=seen, expected=expected, fix=fix, where=where)


def raise_on_all_ranks(mine: IsogradError | None, ranks: Ranks, kind: type[IsogradError]) -> None:
    """Raise the error of the first rank that has one, on all ranks; elsewhere as a `kind`."""
    spelled = [] if mine is None else spell(mine)
    first = next((said for said in all_gather_object(spelled, ranks) if said), None)
    if mine is not None and first == spelled:
        raise mine  # with its own traceback
    if first is not None:
        raise spelled_out(first, kind)


def run_or_raise_on_all_ranks(
    run: Callable[[], T], ranks: Ranks, kind: type[IsogradError], spelled: Callable[[Exception], IsogradError]
) -> T:
    """The result of `run`, which does not communicate. Where it fails on any rank, all raise that rank's error;
    `spelled` makes one of isograd's of any other exception."""
    result, error = [], None
    try:
        try:
            result.append(run())
        except IsogradError:
            raise
        except Exception as caught:
            raise spelled(caught) from caught
    except IsogradError as found:
        error = found
    raise_on_all_ranks(error, ranks, kind)
    return result[0]
