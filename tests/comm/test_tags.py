"""Messages with different tags never meet: FAILURES A16 and A8 are what happens when they do."""

from __future__ import annotations

import torch

from isograd.comm import raw
from isograd.comm.group import Group
from isograd.comm.handle import Handle
from isograd.comm.world import TAGS, reserve_tags
from isograd.core.mesh import Mesh


def started(group: Group, value: float, size: int, tag: int) -> tuple[Handle, torch.Tensor]:
    out, into = torch.full((size,), value), torch.empty(size)
    return raw.exchange([[out]] * group.size, [[into]] * group.size, group, tag), into


def crossed() -> tuple[list[float], list[float]]:
    """Two messages of unlike size, which the two ranks send and receive in opposite orders; then unmatched ones."""
    mesh = Mesh("dp2")
    group, me = mesh.group("dp"), mesh.rank
    sizes = {1: 70_000, 2: 3}
    order = (1, 2) if me == 0 else (2, 1)
    under_way = {tag: started(group, 10.0 * me + tag, sizes[tag], tag) for tag in order}
    found = []
    for tag in (2, 1):
        handle, into = under_way[tag]
        handle.wait()
        found += [float(into[0]), float(into[-1])]
    unanswered = reserve_tags(group)  # small ones are those of messages without a tag, by their size
    for attempt in range(3):  # nobody answers these; they are dropped, and later messages arrive
        started(group, -1.0, 70_000, unanswered + 2 * attempt + me)
        handle, into = started(group, 5.0 + me, 4, 7)
        handle.wait_for(1 - me)
        found.append(float(into[3]))
    first = reserve_tags(group)
    return found, [first, reserve_tags(group) - first]


def test_unlike_tags_may_be_sent_in_any_order_and_left_unanswered(worlds) -> None:
    (zero, tags), (one, others) = worlds(2).run(crossed)
    assert zero == [12.0, 12.0, 11.0, 11.0, 6.0, 6.0, 6.0]
    assert one == [2.0, 2.0, 1.0, 1.0, 5.0, 5.0, 5.0]
    assert tags == others
    assert tags[1] == TAGS
