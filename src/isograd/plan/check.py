"""Whether records of ranks fit together: every check is made from what was recorded, and compared with contracts.

messages     what one rank sends to another is what that one receives from it, in the same order; no ranks wait for
             each other in a circle, when each does what its record says
reductions   every gradient goes to each owner of its rows once, and is summed once over each group of its contract
norm         each element of a gradient is counted on the rank that stands for its replicas
checkpoint   each element of what a checkpoint holds is written by one rank (plan/saved.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isograd.comm.record import Entry, Message
from isograd.core.layout import Layout
from isograd.plan.rehearse import RehearsedRank
from isograd.plan.saved import holes

GRADIENTS = "gradients"  # the purpose of the connections on which gradients go to the owners of their rows


@dataclass(frozen=True)
class Mismatch:
    """Something that does not fit, named."""

    kind: str  # "messages", "waits", "reductions", "norm" or "checkpoint"
    what: str


Stream = tuple[str, str, int, int, int]  # axes, purpose, tag; the sender and the receiver
Sent = tuple[Message, Entry, int]  # with the place of the entry


def check(ranks: Sequence[RehearsedRank], layout: Layout) -> list[Mismatch]:
    """What does not fit together in the records of these ranks; the first finding of each pair of ranks."""
    sent, received = _streams(ranks)
    found = [*_messages(sent, received), *(f for rank in ranks for f in (*_reductions(rank), *_norm(rank)))]
    found += [Mismatch("checkpoint", what) for what in holes({rank.rank: rank.saves for rank in ranks}, layout)]
    return found or list(_waits(ranks, sent, received))


def _streams(ranks: Sequence[RehearsedRank]) -> tuple[dict[Stream, list[Sent]], dict[Stream, list[Sent]]]:
    """The messages between the ranks that were simulated, in the order in which each end asks for them."""
    sent: dict[Stream, list[Sent]] = {}
    received: dict[Stream, list[Sent]] = {}
    known = [rank.rank for rank in ranks]
    places: dict[int, list[tuple[int, int]]] = {}  # of the known ranks among the members of a group
    for rank in ranks:
        for number, entry in enumerate(rank.entries):
            key = id(entry.ranks)
            if key not in places:
                members = {member: i for i, member in enumerate(entry.ranks)}
                places[key] = [(members[r], r) for r in known if r in members]
            for i, peer in places[key]:
                name = entry.axes, entry.purpose, entry.tag
                for message in entry.sent[i]:
                    sent.setdefault((*name, rank.rank, peer), []).append((message, entry, number))
                for message in entry.received[i]:
                    received.setdefault((*name, peer, rank.rank), []).append((message, entry, number))
    return sent, received


def _messages(sent: dict[Stream, list[Sent]], received: dict[Stream, list[Sent]]) -> Iterator[Mismatch]:
    told = set()
    for stream in dict.fromkeys([*sent, *received]):
        axes, _, _, source, target = stream
        out, into = sent.get(stream, []), received.get(stream, [])
        for number in range(max(len(out), len(into))):
            a, b = (side[number] if number < len(side) else None for side in (out, into))
            if a and b and a[0][:2] == b[0][:2]:
                one, other = a[1], b[1]  # the same collective; sends and receives have different names
                paired = {one.operation, other.operation} <= {"send_start", "receive_start"}
                if paired or (one.operation, one.site) == (other.operation, other.site):
                    continue
            if (source, target) not in told:
                told.add((source, target))
                what = f"message {number} over {axes!r} from rank {source} to rank {target}: "
                yield Mismatch("messages", what + f"sent is {_said(a)}; received is {_said(b)}")
            break


def _said(one: Sent | None) -> str:
    if one is None:
        return "nothing"
    (numel, dtype, _), entry, _ = one
    return f"{numel} elements of {str(dtype)[6:]} by {entry.operation} in {entry.site}"


def _reductions(rank: RehearsedRank) -> Iterator[Mismatch]:
    away: dict[str, Counter[int]] = {name: Counter() for name in rank.expected}  # elements, by the rank they go to
    sums: dict[str, Counter[tuple[int, ...]]] = {name: Counter() for name in rank.expected}
    scattered: set[str] = set()  # by the first half of a large sum, whose second half sends what this rank has added up
    for entry in rank.entries:
        if entry.control:
            continue
        adds = entry.operation.startswith("all_reduce")
        here: set[str] = set()
        for peer, messages in zip(entry.ranks, entry.sent, strict=True):
            for message in messages:
                for name, size in message.content or ():
                    if name in away and entry.purpose == GRADIENTS:
                        away[name][peer] += size
                    elif name in away and adds:
                        here.add(name)
        if entry.operation.endswith("all_gather"):
            here -= scattered
        scattered = here if entry.operation.endswith("reduce_scatter") else set()
        for name in here:
            sums[name][entry.ranks] += 1
    for name, expected in rank.expected.items():
        wrong = sorted(set(away[name]) - set(expected.data))
        total, due = sum(away[name].values()), expected.elements - expected.own
        if wrong or total != due:
            what = f"goes to ranks {wrong[:8]}, which hold no copy" if wrong else _times(total, due)
            yield Mismatch("reductions", f"rank {rank.rank}: the gradient of {name!r} {what} over the data axes")
        beyond = expected.beyond if expected.own else ()  # a rank that owns no row has nothing to sum
        if sums[name] != Counter(beyond):
            seen = ", ".join(f"{n} times over ranks {_short(g)}" for g, n in sums[name].items()) or "over no group"
            right = ", ".join(f"once over {_short(g)}" for g in beyond) or "over none"
            found = f"is summed {seen}; its contract says {right}"
            yield Mismatch("reductions", f"rank {rank.rank}: the gradient of {name!r} {found}")


def _times(total: int, due: int) -> str:
    if not total:
        return "is never sent to the owners of its rows"
    return f"is sent {total / due:g} times" if due else f"is sent ({total} elements) and has no other owner"


def _short(group: Sequence[int]) -> str:
    return str(list(group)) if len(group) <= 6 else f"[{group[0]}, {group[1]}, ... {group[-1]}]"


def _norm(rank: RehearsedRank) -> Iterator[Mismatch]:
    for name, expected in rank.expected.items():
        due, seen = expected.own if expected.counted else 0, rank.normed.get(name, 0)
        if due != seen:
            yield Mismatch("norm", f"rank {rank.rank}: of {name!r} {seen} elements are in the norm, {due} should be")


def _waits(
    ranks: Sequence[RehearsedRank], sent: dict[Stream, list[Sent]], received: dict[Stream, list[Sent]]
) -> Iterator[Mismatch]:
    """Each rank does what its record says, in that order. A message is there when both ends have asked for it."""
    other: dict[tuple[int, int], set[tuple[int, int]]] = {}  # (rank, entry) -> entries of others it meets
    for stream, out in sent.items():
        for (_, _, a), (_, _, b) in zip(out, received.get(stream, []), strict=False):
            source, target = stream[3:]
            other.setdefault((source, a), set()).add((target, b))
            other.setdefault((target, b), set()).add((source, a))
    at = {rank.rank: 0 for rank in ranks}
    started: set[tuple[int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while at[rank.rank] < len(rank.events):
                kind, place = rank.events[at[rank.rank]]
                if kind == "starts":
                    started.add((rank.rank, place))
                elif not other.get((rank.rank, place), set()) <= started:
                    break
                at[rank.rank] += 1
                moved = True
    for rank in ranks:
        if at[rank.rank] < len(rank.events):
            place = rank.events[at[rank.rank]][1]
            missing = sorted({r for r, _ in other[rank.rank, place] - started})
            yield Mismatch("waits", f"rank {rank.rank} waits for ranks {missing} in {rank.entries[place]}, forever")
